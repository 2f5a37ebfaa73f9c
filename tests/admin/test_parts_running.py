"""Open requests as the page has them, by a gateway whose ranks are played."""

from __future__ import annotations

from typing import Any

import pytest

from mlxtp.admin import parts
from mlxtp.api.access_log import app_of
from mlxtp.api.request_context import RequestContext, answering
from mlxtp.api.request_metrics import RequestMetrics
from mlxtp.errors import Code, GroupError
from mlxtp.wire.messages import Accepted, Generate, Prefilled, Sampling

from ..gateway.test_gateway_several_groups import Stage, play


def shown(stage: Stage) -> list[tuple[Any, ...]]:
    found = parts.running_requests(stage.gateway.deployments)
    return [(each.group, each.phase, each.prompt, each.read, each.cached, each.tokens) for each in found]


def test_a_request_from_the_queue_to_its_answer_and_over_the_end_of_its_group() -> None:
    async def story(stage: Stage) -> None:
        stage.gateway.deployments.meter = RequestMetrics(lambda: 0.0)
        account = RequestContext("id", 0.0)
        account.key, account.key_hash, account.app = "guest", "5eed", "claude-cli"
        with answering(account):
            stage.gateway.generate(Generate(0, tuple(range(100)), 40, Sampling(0.7, seed=5)))
        [sent] = stage.asked("tiny#0")
        assert shown(stage) == [("tiny#0", "waiting", 100, 0, None, 0)]
        stage.gateway.on_event(Accepted(sent.uid))
        stage.gateway.on_event(Prefilled(sent.uid, 80, 64))
        assert shown(stage) == [("tiny#0", "reading", 100, 80, 64, 0)]
        stage.say(sent.uid, [1, 2, 3])
        assert shown(stage) == [("tiny#0", "writing", 100, 100, 64, 3)]
        [before] = parts.running_requests(stage.gateway.deployments)
        stage.lose("tiny#0", GroupError("rank 1 is gone", Code.RANK_LOST))
        assert shown(stage) == [("", "restarting", 100, 0, None, 3)]
        [after] = parts.running_requests(stage.gateway.deployments)
        assert (after.number, after.model, after.here) == (before.number, "tiny", True)
        assert (before.owner, after.owner) == ("5eed", "5eed")
        assert parts.senders(stage.gateway.deployments) == [
            {"number": after.number, "key": "guest", "app": "claude-cli"}
        ]
        assert "guest" not in str(after)
        stage.serve("tiny#0")
        stage.say(stage.asked("tiny#0")[0].uid, [4], start=3)
        assert shown(stage) == [("tiny#0", "writing", 100, 100, 0, 4)]

    play(story, "tiny#0")


def test_what_the_agent_asks_itself_is_not_shown() -> None:
    async def story(stage: Stage) -> None:
        stage.gateway.generate(Generate(0, (1, 2, 3), 40, Sampling(0.7, seed=5)))  # no meter counts it
        assert stage.asked("tiny#0")
        assert shown(stage) == []

    play(story, "tiny#0")


@pytest.mark.parametrize(
    ("sent", "app"),
    [
        (b"OpenAI/Python 1.3", "OpenAI"),
        (b"Mozilla/5.0 (Macintosh)", "a browser"),
        (b"<b>x", ""),
        (b"a" * 99, "a" * 40),
    ],
)
def test_a_program_is_known_by_the_name_it_gives_itself(sent: bytes, app: str) -> None:
    assert app_of([(b"user-agent", sent)]) == app
    assert app_of([]) == ""

"""Two agents form one group over a pretended JACCL: its side channel goes through their control link."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxtp.agent import Agent
from mlxtp.api.backend import Tokens
from mlxtp.groups.boot_record import load
from mlxtp.groups.health import ServingState
from mlxtp.wire.messages import Generate

from ..groups.scenes import in_a_loop, sees
from ..groups.two_agents import owner, two_agents
from ..live_cluster import START_S

pytestmark = [pytest.mark.group, pytest.mark.fault]

DEVICES = ("a=rdma_en5", "b=rdma_en4")


def pretending(folder: Path, *scripts: dict[str, Any]) -> Sequence[str]:
    """The command of a worker whose `init` follows the script of its rank."""
    for rank, script in enumerate(scripts):
        (folder / f"rank-{rank}.json").write_text(json.dumps(script))
    return (sys.executable, "-m", "tests.engine.jaccl_worker", str(folder))


def formed(folder: Path) -> list[Mapping[str, int]]:
    """The counts of both agents."""
    return [load(folder / name).formations for name in "ab"]


async def say(agent: Agent) -> tuple[int, ...]:
    answer = agent.parts.gateway.generate(Generate(0, (5, 6, 7, 8), 4, ignore_eos=True))
    return tuple([token async for event in answer if isinstance(event, Tokens) for token in event.tokens])


@in_a_loop(seconds=START_S)
async def test_a_group_over_two_agents_forms_and_answers(tmp_path: Path) -> None:
    worker = pretending(tmp_path, {"whole": True}, {"whole": True})
    async with two_agents(tmp_path, worker, fabric="jaccl", rdma=DEVICES) as (first, second):
        await first.wait_ready()
        await second.wait_ready()
        group = owner(first, second).supervisor.status.group
        assert (group.backend, group.world_size) == ("jaccl", 2)
        assert group.rdma[0] == group.rdma[3] == ""
        assert {*group.rdma[1:3]} == {"rdma_en4", "rdma_en5"}
        assert await say(first) == await say(second)
        assert formed(tmp_path) == [{"rdma_en5": 1}, {"rdma_en4": 1}]
    assert formed(tmp_path) == [{}, {}], "every rank has given back"
    assert [(tmp_path / f"left-{rank}").read_text() for rank in range(2)] == ["0", "0"], (
        "no layer, graph or cache holds the group"
    )


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"whole": True, "fault": "raise", "at": 3}, "errno 22"),
        pytest.param({"whole": True, "fault": "die", "at": 2}, "rank 1", marks=pytest.mark.chaos),
    ],
)
@in_a_loop(seconds=START_S)
async def test_one_rank_that_fails_to_form_ends_the_epoch_for_both(
    tmp_path: Path, script: dict[str, Any], words: str
) -> None:
    """The rank that waits for the other's bytes learns it at once, and both agents say the same reason."""
    worker = pretending(tmp_path, {"whole": True}, script)
    async with two_agents(tmp_path, worker, fabric="jaccl", rdma=DEVICES) as (first, second):
        await sees(lambda: any(each.parts.groups.shown.scope.owned for each in (first, second)))
        status = owner(first, second).supervisor.status
        await sees(lambda: status.state is ServingState.RESTARTING)
        reason = status.reason
        assert words in reason.detail
        # Only a rank that was killed has given nothing back. The next epoch, which counts, is to come.
        await sees(lambda: sum(map(bool, formed(tmp_path))) == (script["fault"] == "die"))


@pytest.mark.chaos
@in_a_loop(seconds=START_S)
async def test_without_jaccl_anywhere_the_ring_is_used_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The devices are named by hand, so JACCL is tried; MLX on Linux has none."""
    worker = (sys.executable, "-m", "mlxtp.engine.worker")
    async with two_agents(tmp_path, worker, fabric="auto", rdma=DEVICES) as (first, second):
        await first.wait_ready()
        await second.wait_ready()
        group = owner(first, second).supervisor.status.group
        assert (group.backend, group.world_size) == ("ring", 2)
        assert await say(first) == await say(second)
    assert "has no JACCL" in caplog.text
    assert "it is left out for" in caplog.text

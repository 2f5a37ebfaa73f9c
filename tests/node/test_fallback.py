"""Groups that do not form: another plan takes their place, and what serves goes on meanwhile."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from mlxtp.cluster import failed_groups
from mlxtp.node.agent import Agent
from mlxtp.node.epoch import State

from ..cluster import START_S
from .test_jaccl_agents import DEVICES, pretending, say
from .two_agents import two_agents

pytestmark = pytest.mark.group

BROKEN: dict[str, Any] = {"whole": True, "fault": "raise", "at": 3}


class Client:
    """Asks one question after the other, until a group of two has answered, and watches the state."""

    def __init__(self, agent: Agent) -> None:
        self.states: set[State] = set()
        self.answers: list[tuple[int, ...]] = []
        self._agent = agent

    async def run(self) -> None:
        supervisor = self._agent.supervisor
        while not (supervisor.state is State.READY and supervisor.group and supervisor.group.world_size == 2):
            self.states.add(supervisor.state)
            self.answers.append(await say(self._agent))
        self.answers.append(await say(self._agent))


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if words in each.getMessage()]


def test_a_first_group_that_does_not_form_over_jaccl_forms_over_the_ring(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_groups, "ADDRESS_RETRY_S", 600.0)

    async def story() -> None:
        worker = pretending(tmp_path, {"whole": True}, BROKEN)
        async with (
            asyncio.timeout(START_S),
            two_agents(tmp_path, worker, fabric="auto", rdma=DEVICES) as (first, second),
        ):
            await first.wait_ready()
            await second.wait_ready()
            leader = first if first.cluster and first.cluster.coordination.leading else second
            group = leader.supervisor.group
            assert group is not None
            assert (group.backend, group.world_size) == ("ring", 2)
            assert await say(first) == await say(second)
            assert leader.cluster is not None
            [line] = leader.cluster.conductor.left_out_lines()
            assert line.startswith("JACCL mesh on a + b is left out: it did not form: ")

    asyncio.run(story())
    [line] = lines(caplog, "does not form")
    assert "ring within one machine of 2 serves instead" in line


def test_a_newcomer_with_a_bad_device_joins_over_the_ring_and_interrupts_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_groups, "ADDRESS_RETRY_S", 600.0)
    caplog.set_level(logging.INFO)

    async def story() -> None:
        worker = pretending(tmp_path, {"whole": True}, BROKEN)
        client: Client | None = None
        asking: asyncio.Task[None] | None = None

        async def alone(first: Agent) -> None:
            nonlocal client, asking
            await first.wait_ready()
            client = Client(first)
            asking = asyncio.ensure_future(client.run())

        async with (
            asyncio.timeout(2 * START_S),
            two_agents(tmp_path, worker, fabric="auto", rdma=DEVICES, nodes="all", meanwhile=alone) as (
                first,
                second,
            ),
        ):
            assert client is not None
            assert asking is not None
            await asking
            await second.wait_ready()
            group = first.supervisor.group
            assert group is not None
            assert (group.backend, group.world_size) == ("ring", 2)
            assert State.FAILED not in client.states
            assert len(set(client.answers)) == 1
            assert first.cluster is not None
            leader = first if first.cluster.coordination.leading else second
            assert leader.cluster is not None
            ((failed, left_s),) = leader.cluster.conductor.left_out()
            assert "errno 22" in failed.reason
            assert left_s > 0

    asyncio.run(story())
    assert len(lines(caplog, "does not form")) == 1
    assert "Changing queue pair" in lines(caplog, "does not form")[0]
    tried = [each for each in lines(caplog, "trying ") if "beside what serves" in each]
    assert [each.partition("trying ")[2].partition(" on ")[0] for each in tried] == [
        "JACCL mesh of 2", "ring within one machine of 2",
    ]  # fmt: skip

"""Groups that do not form: another plan takes their place, and what serves goes on meanwhile."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxtp.agent import Agent
from mlxtp.errors import Code, MlxtpError
from mlxtp.groups.health import ServingState
from mlxtp.groups.ranks import WORKER
from mlxtp.placement import formation
from mlxtp.wire.messages import Generate

from ..gateway.test_gateway import everything
from ..groups.scenes import in_a_loop, sees
from ..groups.two_agents import owner, two_agents
from ..live_cluster import LIMITS, SLOWNESS, START_S
from .test_jaccl_agents import DEVICES, pretending, say

pytestmark = [pytest.mark.group, pytest.mark.fault]

BROKEN: dict[str, Any] = {"whole": True, "fault": "raise", "at": 3}


BROKEN_LOADER = """
import sys
from mlxtp.engine import executor, worker
from mlxtp.errors import Code, ModelError
def load(*_, **__):
    raise ModelError("model.safetensors ends too early", Code.MODEL_INVALID)
if sys.argv[sys.argv.index("--rank") + 1] == "1":
    executor.load = load
worker.main(sys.argv[1:])
"""


class Client:
    """Asks one question after the other, until a group of two has answered, and watches the state."""

    def __init__(self, agent: Agent) -> None:
        self.states: set[ServingState] = set()
        self.answers: list[tuple[int, ...]] = []
        self.pause_s = 0.0
        self._agent = agent

    async def run(self) -> None:
        status = self._agent.parts.groups.shown.supervisor.status
        while not (status.state is ServingState.READY and status.group and status.group.world_size == 2):
            self.states.add(status.state)
            self.answers.append(await say(self._agent))
            await asyncio.sleep(self.pause_s)
        self.answers.append(await say(self._agent))


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if words in each.getMessage()]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param({}, "errno 22", id="no address"),
        pytest.param(
            {"words": "Creating the queue pair failed with 'Resource busy (16)'."},
            "Resource busy (16)",
            id="no queue pairs left",
            marks=pytest.mark.chaos,
        ),
        pytest.param({"fault": "wait"}, "did not form the group in time", id="hang", marks=pytest.mark.chaos),
    ],
)
@in_a_loop(seconds=2 * START_S)
async def test_a_first_group_that_does_not_form_over_jaccl_forms_over_the_ring(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    broken: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.setattr(formation, "ADDRESS_RETRY_S", 600.0)
    os.mkfifo(tmp_path / "gate")
    limits = replace(LIMITS, form_s=10 * SLOWNESS) if "fault" in broken else LIMITS
    worker = pretending(tmp_path, {"whole": True}, BROKEN | broken)
    async with two_agents(tmp_path, worker, fabric="auto", rdma=DEVICES, limits=limits) as (first, second):
        await first.wait_ready()
        await second.wait_ready()
        owned = owner(first, second)
        group = owned.supervisor.status.group
        assert (group.backend, group.world_size) == ("ring", 2)
        assert await say(first) == await say(second)
        [machines] = [each.parts.machines for each in (first, second) if each.parts.groups.shown is owned]
        [line] = machines.left_out_lines()
        assert line.startswith("JACCL mesh on a + b is left out: it did not form: ")
    [line] = lines(caplog, "it is left out for ")
    assert line.startswith("JACCL mesh of 2 on ")
    assert " did not form: " in line
    assert words in line


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.chaos)])
@in_a_loop(seconds=2 * START_S)
async def test_a_long_prompt_that_ends_jaccl_twice_is_tried_over_the_ring(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, everywhere: bool
) -> None:
    """The ring answers it, and JACCL is left out; or it ends the ring, too, and then JACCL is used again."""
    script = {"whole": True, "crash_tokens": 100, "everywhere": everywhere}
    long = Generate(0, tuple(range(5, 205)), 4, ignore_eos=True)
    worker = pretending(tmp_path, script, script)
    async with two_agents(tmp_path, worker, fabric="auto", rdma=DEVICES) as (first, second):
        await first.wait_ready()
        await second.wait_ready()
        owned = owner(first, second)
        status, before = owned.supervisor.status, await say(first)
        [here, there] = sorted((first, second), key=lambda each: each.parts.groups.shown is not owned)
        assert status.group.backend == "jaccl"
        asked = asyncio.ensure_future(everything(there.parts.gateway.generate(long)))
        if everywhere:
            with pytest.raises(MlxtpError, match="failed twice under this request") as ended:
                await asked
            assert ended.value.code is Code.REQUEST_FATAL
        else:
            await asked
        await here.wait_ready()
        await there.wait_ready()
        assert await say(here) == await say(there) == before
        assert status.group.backend == ("jaccl" if everywhere else "ring")
        lines_out = here.parts.machines.left_out_lines()
        assert len(lines_out) == (not everywhere)
        assert all("in phase prefill. Cause: JACCL crashed at work" in each for each in lines_out)
        assert ServingState.FAILED not in {status.state, there.parts.groups.shown.supervisor.status.state}
        assert len(owned.supervisor._policy.failures) == everywhere
    [line] = lines(caplog, "it is left out for ")
    assert " formed, and failed while it served: " in line
    assert line.count("Cause: ") == 1
    assert len(lines(caplog, "is no longer left out: the same request ended")) == everywhere


@asynccontextmanager
async def joined(
    tmp_path: Path, worker: Sequence[str] = WORKER, **settings: Any
) -> AsyncIterator[tuple[Agent, Agent, Client]]:
    """An agent that serves alone, with a client, and another one that has just joined it."""
    chosen = {"fabric": "ring", "nodes": "all", **settings}
    clients: list[Client] = []
    asking: list[asyncio.Task[None]] = []

    async def alone(first: Agent) -> None:
        await first.wait_ready()
        clients.append(Client(first))
        clients[0].pause_s = 0.2
        asking.append(asyncio.ensure_future(clients[0].run()))

    async with two_agents(tmp_path, worker, meanwhile=alone, **chosen) as (first, second):
        try:
            yield first, second, clients[0]
        finally:
            asking[0].cancel()
            await asyncio.wait(asking)


async def serve_together(first: Agent, second: Agent) -> None:
    await sees(
        lambda: (
            first.parts.groups.shown.supervisor.status.group is not None
            and first.parts.groups.shown.supervisor.status.group.world_size == 2
        )
    )
    await first.wait_ready()
    await second.wait_ready()


@in_a_loop(seconds=2 * START_S)
async def test_a_group_that_is_to_have_all_macs_takes_a_newcomer_along_once_it_is_idle(
    tmp_path: Path,
) -> None:
    async with joined(tmp_path) as (first, second, client):
        await serve_together(first, second)
        assert ServingState.FAILED not in client.states
        assert len(set(client.answers)) == 1
        assert owner(first, second) is first.parts.groups.shown


@in_a_loop(seconds=2 * START_S)
async def test_a_newcomer_that_cannot_load_the_model_is_left_out(tmp_path: Path) -> None:
    async with joined(tmp_path, (sys.executable, "-c", BROKEN_LOADER)) as (first, second, client):
        await sees(first.parts.machines.left_out)
        ((failed, _),) = first.parts.machines.left_out()
        assert failed.reason.startswith("it formed, and failed then: ")
        assert "model.safetensors ends too early" in failed.reason
        await first.wait_ready()
        await second.wait_ready()
        group = first.parts.groups.shown.supervisor.status.group
        assert group.world_size == 1
        assert await say(second) == await say(first) == client.answers[0]
        assert ServingState.FAILED not in client.states

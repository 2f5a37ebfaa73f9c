"""Answers of two agents' clients, while the group that gives them ends, one way and another."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxtp.agent import Agent
from mlxtp.api.backend import Sampling, StreamEnd, Tokens
from mlxtp.errors import Code, GroupError
from mlxtp.wire.messages import Generate

from ..groups.scenes import sees
from ..groups.two_agents import two_agents
from ..live_cluster import START_S
from ..reference import prompt_ids

pytestmark = [pytest.mark.group, pytest.mark.fault]

COUNT = prompt_ids("Count from 1 to 60.")
GREEDY = Generate(0, COUNT, 160)
DRAWN = Generate(0, COUNT, 80, Sampling(temperature=1.2, seed=11), ignore_eos=True)


@dataclass
class Client:
    """Reads one answer."""

    agent: Agent
    request: Generate
    tokens: list[int] = field(default_factory=list)
    end: StreamEnd | None = None

    async def read(self) -> tuple[list[int], StreamEnd | None]:
        async for event in self.agent.parts.gateway.generate(self.request, model="tiny"):
            if isinstance(event, Tokens):
                self.tokens += event.tokens
            else:
                self.end = event
        return self.tokens, self.end


@dataclass
class Pair:
    """`leader` owns the group and has its rank 0, `other` has rank 1."""

    leader: Agent
    other: Agent

    def epoch(self) -> int:
        return self.leader.parts.groups.shown.supervisor.status.epoch

    def kill_rank(self, agent: Agent) -> None:
        """Of the two that are of this process: the rank whose pipe this agent holds."""
        supervisor = agent.parts.groups.shown.supervisor
        if supervisor.status.ranks is not None:
            pid = supervisor.status.ranks.leader.pid
        else:
            [rank] = agent.parts.hosted._alive
            pid = rank.process.pid
        os.kill(pid, signal.SIGKILL)


Fault = Callable[[Pair], None]


def replanned(pair: Pair) -> None:
    pair.leader.parts.groups.shown.supervisor.end_epoch(GroupError("a better group is there", Code.REPLANNED))


def slept(agent: Agent) -> None:
    agent.parts.groups.woke(300.0)


FAULTS: dict[str, Fault] = {
    "rank 1 killed": lambda pair: pair.kill_rank(pair.other),
    "rank 0 killed": lambda pair: pair.kill_rank(pair.leader),
    "replanned": replanned,
    "the Mac of rank 1 slept": lambda pair: slept(pair.other),
    "the Mac of rank 0 slept": lambda pair: slept(pair.leader),
}
ONE = ("rank 0 killed",)


@pytest.mark.parametrize("faults", [ONE, pytest.param(tuple(FAULTS), marks=pytest.mark.chaos)])
def test_answers_go_on_after_any_end_of_their_group(tmp_path: Path, faults: tuple[str, ...]) -> None:
    """At either agent, greedy and drawn, begun and only just asked: as they are without any fault.

    The group is a pipeline of both; the stories of `tests/agents` have groups that share each layer.
    """

    async def story() -> None:
        async with two_agents(tmp_path, parallel="pipeline") as (first, second):
            for agent in (first, second):
                await agent.wait_ready()
            owned = first.parts.groups.shown.scope.owned
            pair = Pair(first, second) if owned else Pair(second, first)
            clients = [(agent, request) for agent in (first, second) for request in (GREEDY, DRAWN)]
            right = [await Client(*client).read() for client in clients]
            texts = [tokens for tokens, _ in right]  # how many were drafts depends on times
            assert texts[:2] == texts[2:]
            assert min(len(tokens) for tokens, _ in right) > 60
            for name in faults:
                await interrupted(pair, FAULTS[name], clients, right, name)
            shown = pair.leader.parts.groups.shown.supervisor.status.group
            assert (shown.world_size, len(shown.split)) == (2, 2)

    async def timed() -> None:
        async with asyncio.timeout(START_S * 3):
            await story()

    asyncio.run(timed())


async def interrupted(
    pair: Pair,
    fault: Fault,
    clients: list[tuple[Agent, Generate]],
    right: list[tuple[list[int], StreamEnd | None]],
    name: str,
) -> None:
    epoch = pair.epoch()
    begun = [Client(*client) for client in clients]
    reading = [asyncio.ensure_future(client.read()) for client in begun]
    await sees(lambda: all(len(client.tokens) > 5 for client in begun))
    late = Client(*clients[-1])
    reading.append(asyncio.ensure_future(late.read()))
    await asyncio.sleep(0)
    park, asked = pair.leader.parts.gateway.park, len(reading)

    def ask_at_once(*args: Any, **how: Any) -> None:
        """At the other agent, which does not know yet that the group is gone."""
        park(*args, **how)
        if len(reading) == asked:
            reading.append(asyncio.ensure_future(Client(pair.other, DRAWN).read()))

    pair.leader.parts.gateway.park = ask_at_once  # type: ignore[method-assign]
    fault(pair)
    await sees(lambda: len(reading) > asked)
    pair.leader.parts.gateway.park = park  # type: ignore[method-assign]
    answers = await asyncio.gather(*reading)
    assert not any(client.end is None for client in begun), name
    for (tokens, end), (expected, expected_end) in zip(answers, [*right, right[-1], right[-1]], strict=True):
        assert tokens == expected, name
        assert (end and end.reason, end and end.generated) == (
            expected_end and expected_end.reason,
            expected_end and expected_end.generated,
        ), name
    assert pair.epoch() > epoch, f"{name}: nothing happened"
    for agent in (pair.leader, pair.other):
        await sees(lambda agent=agent: agent.parts.gateway.open_requests == 0)  # type: ignore[misc]

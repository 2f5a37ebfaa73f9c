"""Rounds of an agent: at intervals, after changes, and only as often as its links need."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import pytest

from mlxtp.admin.parts import AgentParts
from mlxtp.cluster.node import AGAIN_S, LEAST_S, Rounds
from mlxtp.groups.health import ServingState

from ..groups.one_node import GROUP, alone
from ..groups.scenes import run
from ..played import scenes

ran = scenes(lambda story: run(story()), stages=0)


MINUTE = 60.0


def rounds_of(parts: AgentParts, seconds: float) -> int:
    """Count the rounds of so many seconds in which nothing changes."""
    rounds, now, count = parts.node.rounds, time.monotonic(), 0
    end = now + seconds
    while now < end:
        now, count = max(rounds.due(now), now + LEAST_S), count + 1
    return count


@pytest.mark.parametrize("state", [ServingState.READY, ServingState.IDLE])
@ran()
async def test_an_idle_agent_alone_makes_few_rounds_and_no_beats(tmp_path: Path, state: ServingState) -> None:
    parts = alone(tmp_path)
    ready = state is ServingState.READY
    group = parts.groups.known(GROUP) if ready else parts.groups.shown
    status = group.supervisor.status
    status.in_epoch = ready
    try:
        status.state = state
        rounds_of(parts, LEAST_S)
        pulse = parts.node.leadership.beat(healthy=True).pulse
        assert rounds_of(parts, MINUTE) <= MINUTE / 5
        assert parts.node.leadership.beat(healthy=True).pulse == pulse + 1
        assert parts.groups.shown is group
        assert status.state is state
    finally:
        await parts.close()


@ran()
async def test_an_agent_alone_makes_rounds_while_a_group_is_formed(tmp_path: Path) -> None:
    parts = alone(tmp_path)
    status = parts.groups.known(GROUP).supervisor.status
    status.in_epoch = True
    try:
        status.state = ServingState.FORMING
        assert rounds_of(parts, MINUTE) >= MINUTE
    finally:
        await parts.close()


def test_an_interval_begins_no_round_while_it_is_not_needed() -> None:
    async def story() -> None:
        links: list[str] = []
        rounds, ran = Rounds(lambda: 0.0), []
        rounds.every(0.5, ran.append, needed=lambda: links)
        assert rounds.due(9.0) == math.inf
        links.append("a link")
        assert rounds.due(9.1) == pytest.approx(9.6)
        assert ran == [9.1]

    asyncio.run(story())


def test_messages_that_each_begin_a_round_leave_half_of_the_time_to_others() -> None:
    async def story() -> None:
        rounds, began = Rounds(), time.monotonic()
        took: list[float] = []

        def step(now: float) -> None:
            time.sleep(0.02)
            took.append(time.monotonic() - now)

        async def another() -> None:
            rounds.wake()

        rounds.add(step)
        running = asyncio.ensure_future(rounds.run(another))
        await asyncio.sleep(1.0)
        running.cancel()
        assert sum(took) < 0.6 * (time.monotonic() - began)

    asyncio.run(story())


def test_a_change_that_a_round_makes_itself_begins_another_one() -> None:
    async def story() -> None:
        rounds = Rounds(lambda: 0.0)
        rounds.add(lambda now: rounds.wake() if now < 2.0 else None)
        assert rounds.due(1.0) == 1.0 + AGAIN_S
        assert rounds.due(2.0) == math.inf

    asyncio.run(story())

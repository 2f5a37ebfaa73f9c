"""A rank is killed: how long until the next group serves, with processes that wait for it and without."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil

from mlxtp.agent import Agent
from mlxtp.groups.health import ServingState
from mlxtp.groups.status import GroupStatus

from .errors import Unmeasured
from .measures import Row, absolute
from .stage import RANKS, Stage, rank_pids

_SPARES_S = 120.0
_POLL_S = 0.05
_LOOK_S = 0.005


async def measure(stage: Stage) -> list[Row]:
    with_spares, without, memory = [], [], []
    for number in range(stage.pick(full=5, quick=1)):
        stage.say(f"killing a rank, round {number + 1}")
        # Each kill has an agent of its own: after a second one it would pause for longer.
        async with stage.own_agent({}, spares=True) as agent:
            memory.append(await _spare_memory(agent) / 1e6)
            with_spares.append(await _recover(agent))
        async with stage.own_agent({}) as agent:
            without.append(await _recover(agent))
    return [
        absolute("serving again after a rank was killed, with spares", with_spares),
        absolute("serving again after a rank was killed, without spares", without),
        absolute("memory of a spare", memory),
    ]


async def _spare_memory(agent: Agent) -> float:
    """Bytes, once there is a spare for each rank."""
    async with asyncio.timeout(_SPARES_S):
        while len(agent.warm_pool.ready) < RANKS:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
    return float(psutil.Process(agent.warm_pool.ready[0]).memory_full_info().uss)


async def _recover(agent: Agent) -> float:
    """Seconds."""
    supervisor = agent.parts.groups.shown.supervisor
    ranks, (pid, _) = supervisor.status.ranks, rank_pids(agent)[1]
    assert ranks is not None
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    await ranks.failed
    await _reach(supervisor.status, ServingState.RESTARTING)
    if await _reach(supervisor.status, ServingState.READY, ServingState.FAILED) is ServingState.FAILED:
        raise Unmeasured("the group did not come back")
    return time.perf_counter() - began


async def _reach(status: GroupStatus, *states: ServingState) -> ServingState:
    while status.state not in states:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)
    return status.state

"""CPU time of ranks without requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import psutil

from .measures import Row, absolute
from .stage import Stage, rank_pids

_REST_S = 1.0


async def measure(stage: Stage) -> list[Row]:
    agent, server = await stage.agent(speculation="off"), await stage.server()
    long_s, short_s = stage.pick(full=20, quick=5), stage.pick(full=5, quick=2)
    stage.say(f"idle: {long_s} s")
    await asyncio.sleep(_REST_S)
    ours = await _busiest(long_s, [pid for pid, _ in rank_pids(agent)])
    async with server.awake():
        await asyncio.sleep(_REST_S)
        theirs = await _busiest(short_s, server.pids)
    return [
        absolute("idle rank, share of one core", [ours]),
        absolute("idle rank of mlx_lm.server, share of one core", [theirs]),
    ]


async def _busiest(seconds: float, pids: Sequence[int]) -> float:
    """The largest share of one core, in percent, that one of these processes took for the next seconds."""
    processes = [psutil.Process(pid) for pid in pids]
    before, began = [_cpu_s(process) for process in processes], time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began
    return max(_cpu_s(p) - then for p, then in zip(processes, before, strict=True)) / took_s * 100


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system

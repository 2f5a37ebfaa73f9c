"""Strangers flood the port where agents find each other: what becomes of the steps that run meanwhile."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from mlxtp.agent import Agent
from mlxtp.api.backend import Tokens
from mlxtp.wire.messages import Generate

from . import child, prompts
from .errors import Unmeasured
from .measures import Row, absolute, compare
from .ring import free_ports
from .stage import Stage, in_turn, text_of

PER_SECOND = 200
_PART = 0.99


async def measure(stage: Stage) -> list[Row]:
    quiet: list[float] = []
    flooded: list[float] = []
    turned_away: list[float] = []
    length = stage.pick(full=1500, quick=400)
    (port,) = free_ports(1)
    alone = {
        "cluster": True,
        "ranks": 1,
        "control_host": "127.0.0.1",
        "control_port": port,
        "speculation": "off",
    }
    async with stage.own_agent(alone | {"discovery": False}) as agent:
        prompt = prompts.ids(text_of(agent), prompts.count(0))
        request = Generate(0, tuple(prompt), length, ignore_eos=True)
        for number in stage.rounds("strangers", full=5, quick=2):
            for flooding in in_turn(number, False, True):
                if not flooding:
                    gap_ms = await _gap_ms(agent, request)
                else:
                    async with _flood(port) as count:
                        began = time.monotonic()
                        gap_ms = await _gap_ms(agent, request)
                        rate = await count() / (time.monotonic() - began)
                if number:
                    (flooded if flooding else quiet).append(gap_ms)
                    turned_away += [rate] if flooding else []
    return [
        compare("a step beside a flood of strangers, 99th percentile", flooded, quiet),
        absolute("strangers turned away meanwhile", turned_away),
    ]


async def _gap_ms(agent: Agent, request: Generate) -> float:
    """Between two tokens, where they leave the engine."""
    times: list[float] = []
    async for event in agent.parts.groups.shown.supervisor.gateway.generate(request):
        if isinstance(event, Tokens):
            times.append(time.perf_counter())
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    if len(gaps) < 100:
        raise Unmeasured(f"{len(gaps)} steps are too few for a percentile")
    return gaps[int(len(gaps) * _PART)] * 1e3


@asynccontextmanager
async def _flood(port: int) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Call what is yielded for how many were turned away since the last time."""
    process = await child.start(1, "benchmarks.flood", "127.0.0.1", str(port), str(PER_SECOND))

    async def count() -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        return int(await process.stdout.readline())

    try:
        await count()  # it runs
        yield count
    finally:
        await child.end(process)

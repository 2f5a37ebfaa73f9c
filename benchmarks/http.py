"""The share of a core that HTTP and text take, and the delay that streams cause in the decode loop."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from mlxtp.agent import Agent
from mlxtp.diagnostics.failure_store import read_recording
from mlxtp.wire.messages import Generate
from mlxtp.wire.recording import decode

from . import child, prompts
from .errors import Unmeasured
from .http_client import Ask, Client, Endpoint, total_rate, user
from .measures import Row, absolute, compare
from .pinning import pin
from .stage import Stage, endpoint, in_turn, text_of

RATE = 200.0  #: Tokens per second of all streams together.
AT_ONCE = (1, 16)
_KEPT_PACE = 0.8
_STREAMS = 16
_PART = 0.99


async def measure(stage: Stage) -> list[Row]:
    return [*await _shares(stage), await _decode_loop(stage)]


# --- its share of a core ------------------------------------------------------------------------------


async def _shares(stage: Stage) -> list[Row]:
    seconds, client = stage.pick(full=10, quick=4), await stage.client()
    rows = []
    async with _paced() as (server, cpu_s):
        for streams in AT_ONCE:
            ask = Ask(user(prompts.count(0)), int(RATE * seconds / streams))
            shares = []
            for number in stage.rounds(f"HTTP and text, {streams} at once", full=5, quick=2):
                before = await cpu_s()
                answers = await client.ask(server, [ask] * streams)
                took_s = await cpu_s() - before
                if (rate := total_rate(answers)) < _KEPT_PACE * RATE:
                    raise Unmeasured(f"{rate:.0f} tokens came per second, and {RATE:.0f} should have")
                if number:
                    shares.append(took_s / sum(answer.tokens for answer in answers) * RATE * 100)
            name = "1 stream" if streams == 1 else f"{streams} streams"
            rows.append(absolute(f"HTTP and text at 200 tokens/s, {name}", shares))
    return rows


@asynccontextmanager
async def _paced() -> AsyncIterator[tuple[Endpoint, Callable[[], Awaitable[float]]]]:
    """Yield the server, and a function that returns its CPU seconds so far."""
    process = await child.start(None, "benchmarks.http_server", str(RATE))
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def cpu_s() -> float:
        stdin.write(b"\n")
        return float(await stdout.readline())

    try:
        url = (await stdout.readline()).decode().strip()
        if not url:
            raise Unmeasured("the server did not start")
        yield Endpoint("the paced server", url, "default"), cpu_s
    finally:
        await child.end(process)


# --- the delay in the decode loop ---------------------------------------------------------------------


async def _decode_loop(stage: Stage) -> Row:
    """One rank on the first core; agent and client share the second."""
    tokens, batches = stage.pick(full=140, quick=100), 3
    streamed: list[float] = []
    plain: list[float] = []
    asks = [Ask(user(prompts.count(i)), tokens, ignore_eos=True) for i in range(_STREAMS)]
    with _on_core(1):
        client = Client()
        await client.start()
        try:
            async with stage.own_agent({"ranks": 1, "speculation": "off"}) as agent:
                text = text_of(agent)
                requests = [
                    Generate(0, prompts.ids(text, ask.messages[0]["content"]), tokens, ignore_eos=True)
                    for ask in asks
                ]

                async def over_http() -> None:
                    await client.ask(endpoint(agent), asks)

                async def at_the_pipe() -> None:
                    await asyncio.gather(*(_read(agent, request) for request in requests))

                for number in stage.rounds("decode loop", full=5, quick=2):
                    for work, found in in_turn(number, (over_http, streamed), (at_the_pipe, plain)):
                        gap_ms = await _gap_ms(agent, work, batches)
                        if number:
                            found.append(gap_ms)
        finally:
            await client.stop()
    return compare("a step of 16 rows streamed over HTTP, 99th percentile", streamed, plain)


async def _read(agent: Agent, request: Generate) -> None:
    async for _ in agent.parts.groups.shown.supervisor.gateway.generate(request):
        pass


async def _gap_ms(agent: Agent, work: Callable[[], Awaitable[None]], batches: int) -> float:
    """Between the beginnings of two steps with all rows, by the rank's own flight recorder."""
    gaps: list[float] = []
    for _ in range(batches):
        await work()
        steps = _steps(agent)
        gaps += [(late - early) / 1e3 for early, late in itertools.pairwise(steps)]
    if len(gaps) < 100:
        raise Unmeasured(f"{len(gaps)} steps are too few for a percentile")
    return sorted(gaps)[int(len(gaps) * _PART)]


def _steps(agent: Agent) -> list[int]:
    """Return the start of each step of the newest batch with all rows, in microseconds."""
    ranks = agent.parts.groups.shown.supervisor.status.ranks
    if ranks is None:
        raise Unmeasured("the agent has no ranks right now")
    recording = decode(read_recording(ranks.leader.recorder))
    steps = recording.steps if recording is not None else ()
    newest = list(itertools.takewhile(lambda step: step.kind == "step", reversed(steps)))
    return sorted(step.started_us for step in newest if step.rows == _STREAMS)


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Keep this process, and those that it starts meanwhile, on that core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    pin(os.getpid(), core)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

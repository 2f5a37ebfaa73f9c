"""Decode speed on two pinned ranks: the cluster, inside and over HTTP, against the bare loop beside it."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from mlxtp import demo
from mlxtp.api.backend import Tokens
from mlxtp.config import Settings, embedded_model_path
from mlxtp.node.agent import Agent, running_agent

from .bare_loop import BareGroup
from .pinning import pin
from .table import Row

RANKS = 2
TOKENS = 150
PROMPT = "Count from 1 to 60."
STREAMS = 8


@dataclass(slots=True)
class _Rounds:
    bare: list[float] = field(default_factory=list)
    pipe: list[float] = field(default_factory=list)
    http: list[float] = field(default_factory=list)
    many: list[float] = field(default_factory=list)


def measure(rounds: int) -> list[Row]:
    """Medians of `rounds` rounds; in each round all take their turn."""
    with tempfile.TemporaryDirectory() as home:
        return asyncio.run(_measure(Path(home), rounds))


async def _measure(home: Path, rounds: int) -> list[Row]:
    settings = Settings(home, "127.0.0.1", 0, RANKS, "tiny")
    bare = BareGroup(embedded_model_path(), RANKS)
    try:
        await bare.start()
        async with running_agent(settings) as agent:
            await agent.wait_ready()
            assert agent.supervisor.ranks is not None
            for child in agent.supervisor.ranks.processes:
                pin(child.pid, child.rank)
            figures = _Rounds()
            for number in range(rounds + 1):
                await _round(agent, bare, figures if number else _Rounds())  # the first one warms up
    finally:
        await bare.stop()
    return _rows(figures)


async def _round(agent: Agent, bare: BareGroup, figures: _Rounds) -> None:
    text = agent.supervisor.gateway.text()
    assert text is not None
    prompt = text.prompt_ids([{"role": "user", "content": PROMPT}])
    expected, rate = await bare.run(prompt, TOKENS)
    figures.bare.append(rate)
    tokens, rate = await _decode(agent, prompt)
    if tokens != expected:
        raise RuntimeError("the cluster and the bare loop chose different tokens")
    figures.pipe.append(rate)
    answer = await asyncio.to_thread(demo.ask, agent.url, PROMPT, lambda _: None)
    figures.http.append(answer.tokens_per_second)
    began = time.perf_counter()
    answers = await asyncio.gather(*(_decode(agent, prompt) for _ in range(STREAMS)))
    if any(tokens != expected for tokens, _ in answers):
        raise RuntimeError("streams at once chose different tokens than one alone")
    figures.many.append(STREAMS * TOKENS / (time.perf_counter() - began))


async def _decode(agent: Agent, prompt: tuple[int, ...]) -> tuple[list[int], float]:
    """One request at the gateway: its tokens, and tokens per second after the first."""
    tokens: list[int] = []
    times = []
    async for event in agent.supervisor.gateway.generate(prompt, TOKENS):
        if isinstance(event, Tokens):
            tokens += event.tokens
            times.append(time.perf_counter())
    return tokens, (len(tokens) - 1) / (times[-1] - times[0])


def _rows(figures: _Rounds) -> list[Row]:
    bare = statistics.median(figures.bare)

    def row(name: str, values: list[float], goal: str = "") -> Row:
        ratio = statistics.median(v / b for v, b in zip(values, figures.bare, strict=True))
        spread = (max(values) - min(values)) / statistics.median(values)
        return Row(name, statistics.median(values), "tokens/s", "bare generate_step", ratio, spread, goal)

    return [
        Row("bare generate_step, one stream", bare, "tokens/s"),
        row("one stream, gateway", figures.pipe),
        row("one stream, HTTP", figures.http),
        row(f"{STREAMS} streams at once, total", figures.many),
    ]

"""Many streams: 8 and 16 at once, and requests that arrive over time; both servers get the same requests."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable

import psutil

from mlxtp.agent import Agent
from mlxtp.wire.messages import Generate

from . import prompts
from .http_client import Answer, Ask, median_ttft_ms, total_rate, total_s, user
from .measures import Row, absolute, compare
from .stage import RANKS, Stage, decode, endpoint, rank_pids, text_of

AT_ONCE = (8, 16)
GAP_S = 0.1  #: Mean seconds between two arrivals.
_SEED = 7


async def measure(stage: Stage) -> list[Row]:
    return [*await _at_once(stage), *await _arrivals(stage)]


async def _at_once(stage: Stage) -> list[Row]:
    tokens = stage.pick(full=100, quick=64)
    numbers = itertools.count()  # a prompt is asked once at each server: no cache knows it whole
    rows = []
    agent = await stage.agent(speculation="off")
    for streams in AT_ONCE:
        pairs, at_pipe, shares = [], [], list[tuple[float, float]]()
        for number in stage.rounds(f"{streams} streams at once", full=5, quick=2):
            pair = await _both(
                stage, [Ask(user(prompts.count(next(numbers))), tokens) for _ in range(streams)]
            )
            inside = [
                Generate(0, prompts.ids(text_of(agent), prompts.count(next(numbers))), tokens)
                for _ in range(streams)
            ]
            before, began = _busy_s(agent), time.perf_counter()
            rate = await _pipe_rate(agent, inside)
            after, took_s = _busy_s(agent), time.perf_counter() - began
            if number:
                pairs.append(pair)
                at_pipe.append(rate)
                kernels, main = [100 * (then - now) / took_s for now, then in zip(before, after, strict=True)]
                shares.append((kernels, main))
        http, server = _columns(pairs, total_rate)
        rows.append(compare(f"{streams} streams at once, pipe vs mlx_lm.server", at_pipe, server))
        rows.append(compare(f"{streams} streams at once, HTTP vs mlx_lm.server", http, server))
        ttft = f"{streams} streams at once, median time to first token vs mlx_lm.server"
        rows.append(compare(ttft, *_columns(pairs, median_ttft_ms)))
        for column, thread in enumerate(("MLX's threads", "main thread")):
            name = f"{streams} streams at once, {thread} of a rank, share of a core"
            rows.append(absolute(name, [share[column] for share in shares]))
    return rows


def _busy_s(agent: Agent) -> tuple[float, float]:
    """Return the processor time of a rank's other threads and of its main thread, on average."""
    times = [
        (thread.id == pid, thread.user_time + thread.system_time)
        for pid, _ in rank_pids(agent)
        for thread in psutil.Process(pid).threads()
    ]
    others, main = [sum(spent for is_main, spent in times if is_main == which) for which in (False, True)]
    return others / RANKS, main / RANKS


async def _pipe_rate(agent: Agent, requests: list[Generate]) -> float:
    """Return the tokens a second of all requests together, where they leave the engine."""
    began = time.perf_counter()
    done = await asyncio.gather(*(decode(agent, request) for request in requests))
    return sum(len(each.tokens) for each in done) / (time.perf_counter() - began)


async def _arrivals(stage: Stage) -> list[Row]:
    draw = random.Random(_SEED)
    requests, tokens = stage.pick(full=24, quick=16), 64
    pairs = []
    for number in stage.rounds("arrivals over time", full=3, quick=2):
        delays = list(itertools.accumulate(draw.expovariate(1 / GAP_S) for _ in range(requests)))
        numbers = draw.sample(range(140), requests)
        asks = [
            Ask(user(prompts.count(i)), tokens, delay_s=delay)
            for i, delay in zip(numbers, delays, strict=True)
        ]
        pair = await _both(stage, asks)
        if number:
            pairs.append(pair)
    name = "arrivals over time, {} vs mlx_lm.server"
    return [
        compare(name.format("total time"), *_columns(pairs, total_s)),
        compare(name.format("median time to first token"), *_columns(pairs, median_ttft_ms)),
        compare(name.format("p95 time to first token"), *_columns(pairs, _p95_ttft_ms)),
    ]


Pair = tuple[list[Answer], list[Answer]]


async def _both(stage: Stage, asks: list[Ask]) -> Pair:
    agent, server, client = await stage.agent(speculation="off"), await stage.server(), await stage.client()
    ours = await client.ask(endpoint(agent), asks)
    async with server.awake() as there:
        theirs = await client.ask(there, asks)
    return ours, theirs


def _columns(pairs: list[Pair], figure: Callable[[list[Answer]], float]) -> tuple[list[float], list[float]]:
    return [figure(ours) for ours, _ in pairs], [figure(theirs) for _, theirs in pairs]


def _p95_ttft_ms(answers: list[Answer]) -> float:
    times = [answer.ttft_s * 1000 for answer in answers]
    return statistics.quantiles(times, n=20, method="inclusive")[-1]

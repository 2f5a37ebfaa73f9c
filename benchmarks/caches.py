"""KV caches that last: second turns from memory and from disk, steps while blocks are written, a lost rank.

Before a turn that reads from disk, the system is asked to forget the files. macOS has no such call, so that
they may be in memory there.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from contextlib import aclosing
from pathlib import Path

from mlxtp.agent import Agent
from mlxtp.api.backend import Tokens
from mlxtp.diagnostics.failure_store import read_recording
from mlxtp.models.disk_cache import folder_in, layouts
from mlxtp.text.tokenizer import Text
from mlxtp.wire.messages import BLOCK, Generate
from mlxtp.wire.recording import decode

from . import models, prompts
from .errors import Unmeasured
from .http_client import Ask, Client, Endpoint, user
from .measures import Row, compare
from .served import Served
from .stage import RANKS, Stage, in_turn, rank_pids

CONTEXT = 16_384
LONG = 8_000
#: Tokens of the first turn on a large model, a minute on two cores. Shorter prompts do not go to disk.
MIDDLE = 1_560
_DISK_BYTES = 4 << 30
_SPILL_S = 30.0
_POLL_S = 0.05

_STREAM = 400  #: Tokens of the stream beside the prompts, less than the recorder's steps.
_BESIDE = 2_000
_PROMPTS = 2

_SHORT = 16
_BEFORE = 12  #: Tokens of a stream before its rank is killed.
_GOES_ON = 4_000  #: More than come while the last block is written.


async def measure(stage: Stage) -> list[Row]:
    large = stage.folder / "large-caches"
    await asyncio.to_thread(models.write_large, large, max_position_embeddings=CONTEXT)
    thin = models.write_walk(stage.folder / "thin-caches", **models.THIN, max_position_embeddings=CONTEXT)
    documents, turns = stage.pick(full=5, quick=2), stage.pick(full=3, quick=1)
    return [
        *await _second_turns(stage, large, "400 MB", MIDDLE, documents=1, turns=turns),
        *await _second_turns(stage, thin, "thin", LONG, documents=documents, turns=1),
        *await _spilling(stage, thin),
        await _lost_rank(stage, thin),
    ]


# --- second turns -----------------------------------------------------------------------------------------


async def _second_turns(
    stage: Stage, model: Path, size: str, tokens: int, *, documents: int, turns: int
) -> list[Row]:
    client, text = await stage.client(), await asyncio.to_thread(Text.load, model)
    kinds = ("memory", "disk after a restart", "disk after kill -9")
    firsts: list[float] = []
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(documents):
        stage.say(f"a first turn of {tokens:,} tokens, {size} model, {number + 1} of {documents}")
        document, _ = prompts.haystack(number, lambda ask: len(prompts.ids(text, ask)) <= tokens)
        home = stage.folder / f"{model.name}-home-{number}"
        served = Served(home, model, RANKS, speculation="off", cache_disk=_DISK_BYTES)
        chat = _Chat(client, document)
        try:
            there = await served.start()
            first_ms = await chat.first(there)
            for _ in range(turns):
                firsts.append(first_ms)
                for kind in kinds:
                    if kind != kinds[0]:
                        await _on_disk(home, tokens // BLOCK)
                        await (served.kill() if kind == kinds[2] else served.end())
                        _forget_files(home)
                        there = await served.start()
                    seconds[kind].append(await chat.second(there, tokens - 2 * BLOCK))
        finally:
            await served.kill()
    name = f"second turn after {tokens:,} tokens, {size} model"
    return [
        compare(f"{name}, from {kind} vs the first turn", found, firsts) for kind, found in seconds.items()
    ]


class _Chat:
    """A conversation about a document, of which only the first question is ever part of its history."""

    def __init__(self, client: Client, document: str) -> None:
        self._client = client
        self._history = user(document)
        self._asked = 0

    async def first(self, there: Endpoint) -> float:
        """Milliseconds to the first token."""
        (answer,) = await self._client.ask(there, [Ask(self._history, 1, ignore_eos=True)])
        self._history = (*self._history, {"role": "assistant", "content": answer.text})
        return answer.ttft_s * 1e3

    async def second(self, there: Endpoint, cached: int) -> float:
        """The same for a question that is new. Raises Unmeasured when fewer tokens were cached."""
        self._asked += 1
        ask = Ask((*self._history, *user(f"Question {self._asked}?")), 1, ignore_eos=True)
        (answer,) = await self._client.ask(there, [ask])
        if answer.cached < cached:
            raise Unmeasured(f"{answer.cached} tokens were cached, not {cached}")
        return answer.ttft_s * 1e3


async def _on_disk(home: Path, blocks: int) -> None:
    """Wait until every rank has so many blocks on disk."""
    try:
        async with asyncio.timeout(_SPILL_S):
            while True:
                found = layouts(folder_in(home))
                if len(found) == RANKS and all(layout.blocks >= blocks for layout in found):
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        found = layouts(folder_in(home))
        raise Unmeasured(
            f"{[each.blocks for each in found]} blocks of {blocks} were on disk after {_SPILL_S:g} s"
        ) from None


def _forget_files(home: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder_in(home).glob("*/*-*"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


# --- steps beside prompts that go to disk ------------------------------------------------------------------


async def _spilling(stage: Stage, model: Path) -> list[Row]:
    names = ("token of a stream", "median decode step", "95th percentile of decode steps")
    settings = {"ranks": 1, "speculation": "off"}
    found: tuple[list[tuple[float, ...]], list[tuple[float, ...]]] = ([], [])
    async with (
        stage.own_agent({**settings, "cache_disk": _DISK_BYTES}, model=model) as spilling,
        stage.own_agent({**settings, "cache_disk": 0}, model=model) as plain,
    ):
        for number in stage.rounds("a stream beside prompts that go to disk", full=11, quick=4):
            for index in in_turn(number, 0, 1):
                figures = await _beside_prompts((spilling, plain)[index], number)
                if number:
                    found[index].append(figures)
        if not layouts(folder_in(spilling.parts.node.settings.home)):
            raise Unmeasured("nothing went to disk")
    return [
        compare(f"{name} beside prompts that go to disk vs to none", ours, theirs)
        for name, ours, theirs in zip(names, *(zip(*each, strict=True) for each in found), strict=True)
    ]


async def _beside_prompts(agent: Agent, number: int) -> tuple[float, float, float]:
    """Milliseconds a token of a stream, and two percentiles of the steps between which nothing else ran."""
    gateway = agent.parts.groups.shown.supervisor.gateway
    seeds = itertools.count(number * (_PROMPTS + 1))

    async def others() -> None:
        for _ in range(_PROMPTS):
            long = Generate(0, models.walk_tokens(_BESIDE, seed=next(seeds)), 2, ignore_eos=True)
            async with aclosing(gateway.generate(long)) as answer:
                async for _ in answer:
                    pass

    times: list[float] = []
    work: asyncio.Task[None] | None = None
    request = Generate(0, models.walk_tokens(_SHORT, seed=next(seeds)), _STREAM, ignore_eos=True)
    async with aclosing(gateway.generate(request)) as stream:
        async for event in stream:
            times += [time.perf_counter()] * (isinstance(event, Tokens) and len(event.tokens))
            work = work or asyncio.create_task(others())
    assert work is not None
    if not work.done():
        await work
        raise Unmeasured("the stream was over before the prompts")
    await work
    gaps = sorted(_step_gaps_ms(agent))
    return (times[-1] - times[0]) / (len(times) - 1) * 1e3, gaps[len(gaps) // 2], gaps[len(gaps) * 95 // 100]


def _step_gaps_ms(agent: Agent) -> list[float]:
    """Between the ends of a decode step and of the next one, by the rank's own flight recorder."""
    ranks = agent.parts.groups.shown.supervisor.status.ranks
    recording = None if ranks is None else decode(read_recording(ranks.leader.recorder))
    if recording is None:
        raise Unmeasured("the agent has no ranks right now")
    newest = recording.steps[-_STREAM:]
    return [
        (after.finished_us - before.finished_us) / 1e3
        for before, after in itertools.pairwise(newest)
        if before.kind == after.kind == "step" and after.finished_us and before.rows == after.rows == 1
    ]


# --- a lost rank ------------------------------------------------------------------------------------------


async def _lost_rank(stage: Stage, model: Path) -> Row:
    long, short = [], []
    for number in stage.rounds("a lost rank in a long and a short stream", full=5, quick=2):
        for tokens in in_turn(number, LONG, _SHORT):
            settings = {"speculation": "off", "cache_disk": _DISK_BYTES}
            async with stage.own_agent(settings, model=model, spares=True) as agent:
                gap_s = await _gap_s(agent, Generate(0, models.walk_tokens(tokens, number), _GOES_ON))
                if number:
                    (long if tokens == LONG else short).append(gap_s * 1e3)
    return compare("until a stream with 8,000 tokens goes on after a lost rank vs a short one", long, short)


async def _gap_s(agent: Agent, request: Generate) -> float:
    """Seconds from a rank's death until the stream goes on."""
    home, status = agent.parts.node.settings.home, agent.parts.groups.shown.supervisor.status
    while len(agent.warm_pool.ready) < RANKS:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    blocks = len(request.tokens) // BLOCK
    written = asyncio.create_task(_on_disk(home, blocks) if blocks else asyncio.sleep(0))
    came, killed_at, ranks = 0, 0.0, status.ranks
    async with aclosing(agent.parts.groups.shown.supervisor.gateway.generate(request)) as stream:
        async for event in stream:
            came += len(event.tokens) if isinstance(event, Tokens) else 0
            if killed_at and status.ranks not in (None, ranks):
                return time.perf_counter() - killed_at
            if not killed_at and came >= _BEFORE and written.done():
                await written
                pid, _ = rank_pids(agent)[1]
                os.kill(pid, signal.SIGKILL)
                killed_at = time.perf_counter()
    raise Unmeasured("the stream ended before it could go on")

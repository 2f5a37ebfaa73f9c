"""Two replicas beside one: speed, the way of a conversation, and a stream whose replica is killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil

from mlxtp.agent import Agent, running_agent
from mlxtp.api.backend import StreamEnd, Tokens
from mlxtp.config import Settings, embedded_model_path
from mlxtp.gateway.ready_groups import ReadyGroups
from mlxtp.gateway.request import PROVEN_TOKENS, ClientRequest
from mlxtp.groups.group import Group
from mlxtp.groups.health import ServingState
from mlxtp.wire.messages import Generate

from . import models
from .errors import Unmeasured
from .measures import Row, absolute, compare
from .pinning import pin
from .stage import Stage

LAYERS = 12  #: For speed: a step takes milliseconds, so that ranks work and not the agents between them.
STREAMS = 16
CONVERSATIONS = 32
PROMPT = 600  #: Tokens of a first turn: two whole blocks of a prefix summary.
ANSWER = 16
_STREAMED = 400  #: Tokens of a stream whose replica is killed.
_SETTLED_S = 3.0  #: Seconds from a replica's return to the next kill, for its warm process.
_READY_S = 120.0
_POLL_S = 0.02


async def measure(stage: Stage) -> list[Row]:
    rows = []
    deep = models.write_deep(stage.folder / "deep", LAYERS)
    async with _two(stage, deep) as (a, _), _alone(stage, deep) as single:
        rows += await _speed(stage, single, a)
    thin = models.write_walk(stage.folder / "thin", **models.THIN)
    async with _two(stage, thin) as (a, b), _alone(stage, thin) as single:
        rows.append(await _second_turns(stage, single, a))
        rows.append(await _round_robin(stage, single, a))
        rows.append(_routing(a))
        rows.append(await _killed(stage, a, b))
    rows.append(await _idle(stage))
    return rows


# --- what is measured -------------------------------------------------------------------------------------


@asynccontextmanager
async def _two(stage: Stage, model: Path) -> AsyncIterator[tuple[Agent, Agent]]:
    """Two agents of one cluster on this machine, with one replica each: a rank on each core."""

    def settings(name: str, **more: object) -> Settings:
        return Settings(
            stage.folder / f"{model.name}-{name}", "127.0.0.1", 0, 1, str(model), cluster=True, name=name,
            control_host="127.0.0.1", control_port=0, discovery=False,
            nodes="1", model_given=True, speculation="off", **more,  # type: ignore[arg-type]
        )  # fmt: skip

    stage.say("starting two agents with a replica each")
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(running_agent(settings("a"), spares=False))
        await a.wait_ready()
        token, peers = await a.parts.tokens.token(), a.parts.node.introduction.addresses()
        b = await stack.enter_async_context(
            running_agent(settings("b", join=token, peers=peers), spares=False)
        )
        await a.parts.selection.serve(str(model), replicas=2)
        await _until(lambda: len(_owned(a, b)) == 2 and len(_ready(a)) == 2, "two replicas")
        for core, group in enumerate(_owned(a, b)):
            ranks = group.supervisor.status.ranks
            assert ranks is not None
            pin(ranks.processes[0].pid, core)
        yield a, b


@asynccontextmanager
async def _alone(stage: Stage, model: Path) -> AsyncIterator[Agent]:
    async with stage.own_agent({"ranks": 1, "speculation": "off"}, model=model) as agent:
        yield agent


def _owned(*agents: Agent) -> list[Group]:
    """Groups that are ready where their rank 0 is."""
    groups = [group for agent in agents for group in agent.parts.groups.by_id.values()]
    return [each for each in groups if each.supervisor.info is not None]


def _ready(agent: Agent) -> ReadyGroups:
    """The ready groups of the default deployment, as an agent's gateway has them."""
    return agent.parts.gateway.deployments.ready()[0].groups


async def _until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(_READY_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise Unmeasured(f"{what}: not within {_READY_S:g} s") from None


async def _answers(agent: Agent, requests: Iterable[Generate]) -> list[tuple[list[int], StreamEnd]]:
    """The tokens and the end of each of these requests, which are open at once."""

    async def one(request: Generate) -> tuple[list[int], StreamEnd]:
        tokens: list[int] = []
        async for event in agent.parts.gateway.generate(request):
            if isinstance(event, Tokens):
                tokens += event.tokens
            else:
                return tokens, event
        raise Unmeasured("an answer has no end")

    return list(await asyncio.gather(*map(one, requests)))


def _prompt(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(10, 400) for _ in range(length))


# --- rows -------------------------------------------------------------------------------------------------


async def _speed(stage: Stage, single: Agent, a: Agent) -> list[Row]:
    draw, tokens = random.Random(1), stage.pick(full=100, quick=32)
    process = psutil.Process()
    one, two, share = [], [], []
    for number in stage.rounds(f"{STREAMS} streams over one and two replicas", full=5, quick=2):
        requests = [Generate(0, _prompt(draw, 20), tokens, ignore_eos=True) for _ in range(STREAMS)]
        rates = []
        for agent in (single, a):
            began, before = time.perf_counter(), sum(process.cpu_times()[:2])
            await _answers(agent, requests)
            took_s = time.perf_counter() - began
            rates.append(STREAMS * tokens / took_s)
            used = (sum(process.cpu_times()[:2]) - before) / took_s * 100
        if number:
            one.append(rates[0])
            two.append(rates[1])
            share.append(used)
    return [
        compare("16 streams over two replicas vs one", two, one),
        absolute("agents' and client's share of one core meanwhile", share),
    ]


async def _cached(agent: Agent, seed: int) -> float:
    """The share of second turns' prompts that was cached, of conversations that come in random order."""
    draw = random.Random(seed)
    first = [_prompt(draw, PROMPT) for _ in range(CONVERSATIONS)]
    ended = await _answers(agent, (Generate(0, each, ANSWER, ignore_eos=True) for each in first))
    second = [
        Generate(0, (*prompt, *tokens, *_prompt(draw, 40)), ANSWER, ignore_eos=True)
        for prompt, (tokens, _) in zip(first, ended, strict=True)
    ]
    draw.shuffle(second)
    cached = 0
    for request in second:
        cached += (await _answers(agent, [request]))[0][1].cached
    return cached / sum(len(request.tokens) for request in second)


async def _second_turns(stage: Stage, single: Agent, a: Agent) -> Row:
    pairs = []
    for number in stage.rounds("second turns of 32 conversations", full=3, quick=1):
        pair = await _cached(single, number), await _cached(a, number)
        if number:
            pairs.append(pair)
    one, two = zip(*pairs, strict=True)
    return compare("second turns over two replicas, cached share vs one replica", two, one)


async def _round_robin(stage: Stage, single: Agent, a: Agent) -> Row:
    stage.say("second turns, in turn")
    groups, turns = _ready(a), itertools.count()

    def in_turn(_request: object, tried: Sequence[str]) -> str:
        names = sorted(name for name in groups if name not in tried)
        return names[next(turns) % len(names)] if names else ""

    choose, groups.choose = groups.choose, in_turn  # type: ignore[method-assign, assignment]
    try:
        ours = await _cached(a, 101)
    finally:
        groups.choose = choose  # type: ignore[method-assign]
    return compare(
        "the same with groups in turn, cached share vs one replica", [ours], [await _cached(single, 101)]
    )


def _routing(a: Agent) -> Row:
    """The choice alone, for prompts that no gateway has seen."""
    draw, groups = random.Random(5), _ready(a)
    times = []
    for _ in range(50):
        request = ClientRequest(Generate(1, _prompt(draw, 4000), 16), lambda _: None)
        began = time.perf_counter()
        groups.choose(request, ())
        times.append((time.perf_counter() - began) * 1000)
    return absolute("choice of a replica for a prompt of 4,000 tokens", times)


async def _killed(stage: Stage, a: Agent, b: Agent) -> Row:
    gaps: list[float] = []
    for number in range(stage.pick(full=4, quick=1)):
        await _until(lambda: len(_owned(a, b)) == 2 and len(_ready(a)) == 2, "two replicas again")
        stage.say(f"killing a replica, round {number + 1}")
        await asyncio.sleep(_SETTLED_S)
        gaps += await _one_kill(a, _owned(a, b)[number % 2])
    return absolute(
        "gap in a stream whose replica is killed, 95th percentile",
        [statistics.quantiles(gaps, n=20)[18] * 1000],
    )


async def _one_kill(a: Agent, group: Group) -> list[float]:
    """The longest gap, in seconds, of each stream that the group had when it was killed.

    It is killed when each has more tokens than prove a request harmless.
    """
    counts = dict.fromkeys(range(STREAMS), 0)
    moved: list[float] = []

    async def stream(seed: int) -> None:
        request = Generate(0, _prompt(random.Random(seed), 20), _STREAMED, ignore_eos=True)
        answer, last, gap = a.parts.gateway.generate(request), 0.0, 0.0
        home = ""
        async for event in answer:
            now = time.perf_counter()
            if isinstance(event, Tokens):
                counts[seed] += len(event.tokens)
                gap = max(gap, now - last if last else 0.0)
                last, home = now, home or answer.group
        if counts[seed] != _STREAMED:
            raise Unmeasured(f"a stream has {counts[seed]} of {_STREAMED} tokens")
        if home == group.scope.group:
            moved.append(gap)

    streams = [asyncio.create_task(stream(seed)) for seed in range(STREAMS)]
    await _until(lambda: min(counts.values()) > PROVEN_TOKENS, "streams under way")
    if min(counts.values()) >= _STREAMED:
        raise Unmeasured("the streams ended before their replica was killed")
    ranks = group.supervisor.status.ranks
    assert ranks is not None
    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    await asyncio.gather(*streams)
    if not moved:
        raise Unmeasured("no stream ran at the replica that was killed")
    return moved


async def _idle(stage: Stage) -> Row:
    """The CPU time of this process, which does nothing but wait with the agent in it."""
    async with stage.own_agent({"ranks": 1}) as agent:
        for name in ("second", "third"):
            folder = Path(stage.folder / name)
            shutil.copytree(embedded_model_path(), folder, dirs_exist_ok=True)
            await agent.parts.selection.serve(str(folder))
        await _until(
            lambda: (
                len(_owned(agent)) == 3
                and all(each.supervisor.status.state is ServingState.READY for each in _owned(agent))
            ),
            "three deployments",
        )
        await asyncio.sleep(2.0)
        process, seconds = psutil.Process(), stage.pick(full=20, quick=5)
        stage.say(f"three idle deployments: {seconds} s")
        before, began = sum(process.cpu_times()[:2]), time.monotonic()
        await asyncio.sleep(seconds)
        used = sum(process.cpu_times()[:2]) - before
        return absolute(
            "idle agent with three deployments, share of one core", [used / (time.monotonic() - began) * 100]
        )

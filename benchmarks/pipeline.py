"""A pipeline beside one rank, beside one without lanes, and beside tensor parallelism on links of any delay.

The model never says a token twice, and its text is known, so that hidden states of another token would show.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from mlxtp.agent import Agent
from mlxtp.api.backend import Tokens
from mlxtp.wire.messages import Generate

from . import models
from .delay import Delay
from .errors import Unmeasured
from .measures import DELAYS_MS, Row, absolute, compare
from .stage import RANKS, Stage, in_turn, require

LAYERS = 12
WIDER: Mapping[str, int] = {"hidden_size": 256, "intermediate_size": 640}
STREAMS = 8
_PROMPT = 16  #: Tokens of a stream's prompt.
_WORKER = (sys.executable, "-m")

Figure = Callable[[Agent], Awaitable[float]]


async def measure(stage: Stage) -> list[Row]:
    require("parallel", "split")
    model = models.write_walk(stage.folder / "stages", num_hidden_layers=LAYERS, **WIDER)
    async with AsyncExitStack() as stack:

        async def start(ranks: int, *worker: str, stages: bool = True) -> Agent:
            changes: dict[str, object] = {"ranks": ranks, "speculation": "off"}
            if ranks > 1:
                changes["parallel"] = "pipeline" if stages else "tensor"
            if ranks > 1 and stages:
                changes["split"] = even(LAYERS, ranks)
            more = {"worker": (*_WORKER, *worker)} if worker else {}
            return await stack.enter_async_context(stage.own_agent(changes, model=model, **more))

        alone, pipeline, three = await start(1), await start(RANKS), await start(RANKS + 1)
        one_lane = await start(RANKS, "benchmarks.one_lane_worker")
        work = Work(stage)
        rows = await _beside_one_rank(stage, work, alone, pipeline, three, one_lane=one_lane)
        tensor, file = await start(RANKS, stages=False), stage.folder / "link"
        slow = ("benchmarks.delayed_worker", "all", str(file))
        kinds = {
            "pipeline": (pipeline, await start(RANKS, *slow)),
            "tensor": (tensor, await start(RANKS, *slow, stages=False)),
        }
        return [*rows, *await _beside_tensor(stage, work, Delay(file), kinds)]


def even(layers: int, ranks: int) -> str:
    """The split of layers over ranks that divide them."""
    return ",".join([str(layers // ranks)] * ranks)


# --- the work ---------------------------------------------------------------------------------------------


class Work:
    """Requests, each with a prompt that was never asked before, and what they took."""

    def __init__(self, stage: Stage) -> None:
        self._numbers = itertools.count()
        self._long = stage.pick(full=1024, quick=512)
        self._tokens = stage.pick(full=24, quick=12)
        self.figures: Mapping[str, Figure] = {
            "one stream": self.token_ms,
            f"{STREAMS} streams": self.step_ms,
            "long prompt": self.first_token_ms,
        }

    async def first_token_ms(self, agent: Agent) -> float:
        """Milliseconds from a long prompt to its first token."""
        began = time.perf_counter()
        return ((await self._times(agent, self._long, 2))[0] - began) * 1e3

    async def token_ms(self, agent: Agent) -> float:
        """Milliseconds between two tokens of a single stream."""
        return 1e3 / steady_rate([await self._times(agent, _PROMPT, self._tokens)])

    async def rate(self, agent: Agent) -> float:
        """Tokens a second of several streams."""
        work = (self._times(agent, _PROMPT, self._tokens) for _ in range(STREAMS))
        return steady_rate(await asyncio.gather(*work))

    async def step_ms(self, agent: Agent) -> float:
        """Milliseconds between two tokens of one of several streams."""
        return STREAMS * 1e3 / await self.rate(agent)

    async def _times(self, agent: Agent, prompt: int, tokens: int) -> list[float]:
        """Return when each token of a request came. Raises Unmeasured for another text than the walk's."""
        given = models.walk_tokens(prompt, seed=next(self._numbers))
        answer, times = [given[-1]], []
        events = agent.parts.groups.shown.supervisor.gateway.generate(
            Generate(0, given, tokens, ignore_eos=True)
        )
        async for event in events:
            if isinstance(event, Tokens):
                answer += event.tokens
                times += [time.perf_counter()] * len(event.tokens)
        check_walk(answer)
        if len(times) < tokens:
            raise Unmeasured(f"{len(times)} of {tokens} tokens came")
        return times


def check_walk(tokens: Sequence[int]) -> None:
    """Check that each token is the successor of the one before it. Raises Unmeasured."""
    vocabulary = 512
    for before, after in itertools.pairwise(tokens):
        if after != models.successor(before, vocabulary):
            raise Unmeasured(f"token {after} came after {before}")


def steady_rate(streams: Sequence[Sequence[float]]) -> float:
    """Tokens a second of all streams while all ran, by the times of their tokens: from the latest first token
    to the earliest last one. Raises Unmeasured when they did not all run at once.
    """
    begins, ends = max(times[0] for times in streams), min(times[-1] for times in streams)
    if begins >= ends:
        raise Unmeasured("the streams did not run at once")
    return sum(begins < at <= ends for times in streams for at in times) / (ends - begins)


# --- rows -------------------------------------------------------------------------------------------------


async def _beside_one_rank(
    stage: Stage, work: Work, alone: Agent, pipeline: Agent, three: Agent, *, one_lane: Agent
) -> list[Row]:
    agents: tuple[Agent, ...] = (alone, pipeline, three)
    found: dict[tuple[str, Agent], list[float]] = {}
    figures: tuple[tuple[str, Figure, tuple[Agent, ...]], ...] = (
        ("prompt", work.first_token_ms, agents),
        ("stream", work.token_ms, (alone, pipeline)),
        ("streams", work.rate, (*agents, one_lane)),
    )
    for number in stage.rounds("stages", full=4, quick=1):
        for name, figure, measured in figures:
            for agent in in_turn(number, *measured):
                value = await figure(agent)
                if number:
                    found.setdefault((name, agent), []).append(value)

    def row(name: str, what: str, ours: Agent, theirs: Agent) -> Row:
        return compare(name, found[what, ours], found[what, theirs])

    return [
        row("long prompt over two stages vs one rank", "prompt", pipeline, alone),
        row("one stream over two stages vs one rank", "stream", pipeline, alone),
        row("8 streams over two stages, two lanes vs one", "streams", pipeline, one_lane),
        row("8 streams over two stages vs one rank", "streams", pipeline, alone),
        row("long prompt over three stages vs one rank", "prompt", three, alone),
        row("8 streams over three stages vs one rank", "streams", three, alone),
    ]


async def _beside_tensor(
    stage: Stage, work: Work, delay: Delay, kinds: Mapping[str, tuple[Agent, Agent]]
) -> list[Row]:
    """Compare agents of each kind behind the delayed link. The first agent of each pair has no relay."""
    found: dict[tuple[str, float, str], list[float]] = {}
    floors: dict[tuple[str, bool], list[float]] = {}
    for number in stage.rounds("pipeline and tensor", full=3, quick=1):
        for delay_ms in DELAYS_MS if number else DELAYS_MS[:1]:
            delay.set(delay_ms / 1e3)
            for name, figure in work.figures.items():
                for kind in in_turn(number, *kinds):
                    value = await figure(kinds[kind][1])
                    if number:
                        found.setdefault((name, delay_ms, kind), []).append(value)
        delay.set(0)
        for kind, agents in kinds.items():
            for relayed, agent in enumerate(agents):
                value = await work.token_ms(agent)
                if number:
                    floors.setdefault((kind, bool(relayed)), []).append(value)
    rows = []
    for name in work.figures:
        ours, theirs = ([found[name, delay_ms, kind] for delay_ms in DELAYS_MS] for kind in kinds)
        for delay_ms, mine, peers in zip(DELAYS_MS, ours, theirs, strict=True):
            rows.append(compare(f"{name}, pipeline vs tensor, {delay_ms} ms each way", mine, peers))
        turns = [
            turning_ms(DELAYS_MS, mine, peers)
            for mine, peers in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
        ]
        rows.append(absolute(f"delay each way from which on {name} takes no more over a pipeline", turns))
    for kind in kinds:
        rows.append(
            compare(
                f"one stream, {kind}, relay without delay vs none", floors[kind, True], floors[kind, False]
            )
        )
    return rows


def turning_ms(delays: Sequence[float], ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The delay from which on ours take no more, by straight lines between measured ones.

    The first one where they never take more, and the last one where they do even then.
    """
    last = max((at for at in range(len(delays)) if ours[at] > theirs[at]), default=-1)
    if last < 0 or last == len(delays) - 1:
        return delays[last if last > 0 else 0]
    before, after = ours[last] - theirs[last], theirs[last + 1] - ours[last + 1]
    return delays[last] + (delays[last + 1] - delays[last]) * before / (before + after)

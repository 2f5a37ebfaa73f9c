"""Drafts of the embedded model's own MTP head against none; both must give the same tokens."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

from mlxtp.agent import Agent
from mlxtp.wire.messages import GREEDY, Generate, Sampling

from . import prompts
from .decoded import Decoded
from .delay import Delay
from .errors import Unmeasured
from .measures import Row, absolute, compare
from .stage import Stage, decode, in_turn, require, text_of

Task = Callable[[int], str]

STREAMS = 8
COUNTED, _COUNTING = "counting, steps per token with the MTP head", "counting, MTP head vs none"
RIGHT, _DRAWN = "drawn counting, right drafts", "drawn counting, MTP head vs none, 1 ms more a sum"
DELAY_S = 0.0005  #: Each way. Two ranks of a ring sum a few bytes in two steps, so a sum takes 1 ms more.
_TOKENS = 120
MISLED = 2.0  #: Temperature of drawn counting: 0.79 of the drafts were right at 2.0, and 0.56 at 2.1.
_WORDS = ("the", "small", "river", "finds", "a", "green", "door", "under", "old", "stones", "and", "sings")


async def measure(stage: Stage) -> list[Row]:
    require("speculation")
    async with AsyncExitStack() as stack:

        async def pair(**more: object) -> tuple[Agent, Agent]:
            kinds = ({"speculation": each} for each in ("mtp", "off"))
            agents = [await stack.enter_async_context(stage.own_agent(each, **more)) for each in kinds]  # type: ignore[arg-type]
            return agents[0], agents[1]

        agents, file = await pair(), stage.folder / "sums"
        Delay(file).set(DELAY_S)
        slow = await pair(worker=(sys.executable, "-m", "benchmarks.delayed_worker", "all", str(file)))
        tasks: dict[str, Task] = {"counting": prompts.count, "prose-like text": sentences}
        rows: list[Row] = []
        for name, task in tasks.items():
            rows += await _race(stage, agents, f"{name}, MTP head vs none", task)
        rows += await _race(stage, agents, "random text, MTP head vs none", sentences, temperature=2.0)
        rows += await _race(stage, agents, "8 mixed streams, MTP head vs none", mixed, STREAMS)
        rows += await _race(stage, slow, "counting, MTP head vs none, 1 ms more a sum", prompts.count)
        return [*rows, *await _race(stage, slow, _DRAWN, prompts.count, temperature=MISLED)]


def sentences(number: int) -> str:
    """A task whose answer is like prose, random by its number."""
    draw = random.Random(number)
    return f"Repeat exactly: {' '.join(draw.choices(_WORDS, k=18))}."


def mixed(number: int) -> str:
    """Counting, characters and prose in turn: a head is right often, mostly and seldom."""
    return (prompts.count, lambda each: prompts.repeat(each, 95), sentences)[number % 3](number)


async def _race(
    stage: Stage,
    agents: tuple[Agent, Agent],
    name: str,
    task: Task,
    streams: int = 1,
    *,
    temperature: float = 0.0,
) -> list[Row]:
    columns: tuple[list[float], list[float]] = [], []
    steps: list[float] = []
    right: list[float] = []
    for number in stage.rounds(name, full=15, quick=2):
        asked = [
            Generate(
                0,
                prompts.ids(text_of(agents[0]), task(number * streams + i)),
                _TOKENS,
                Sampling(temperature, seed=number + 1) if temperature else GREEDY,
                ignore_eos=temperature > 0,
            )
            for i in range(streams)
        ]
        answers: dict[int, list[Decoded]] = {}
        for which in in_turn(number, 0, 1):
            began = time.perf_counter()
            answers[which] = await asyncio.gather(*(decode(agents[which], each) for each in asked))
            took_s = time.perf_counter() - began
            if number:
                columns[which].append(sum(len(each.tokens) for each in answers[which]) / took_s)
        if [each.tokens for each in answers[0]] != [each.tokens for each in answers[1]]:
            raise Unmeasured(f"{name}: drafts changed the tokens of round {number}")
        steps += [1 - each.accepted / len(each.tokens) for each in answers[0] if number]
        right += [100 * each.accepted / max(each.drafted, 1) for each in answers[0] if number]
    more = [absolute(COUNTED, steps)] if name == _COUNTING else []
    return [compare(name, *columns), *more, *([absolute(RIGHT, right)] if name == _DRAWN else [])]

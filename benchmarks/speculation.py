"""The same requests with speculation and without, at the engine's pipe; both must give the same tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mlxtp.agent import Agent
from mlxtp.wire.messages import Generate

from . import models, prompts
from .errors import Unmeasured
from .measures import Row, compare
from .stage import Stage, decode, in_turn, require, text_of

_COPIED = 95  #: Characters; the embedded model learned to repeat up to 100.


async def measure(stage: Stage) -> list[Row]:
    require("speculation")
    agents = await stage.agent(speculation="auto"), await stage.agent(speculation="off")

    def ask(question: str, tokens: int) -> Generate:
        return Generate(0, prompts.ids(text_of(agents[0]), question), tokens)

    copy = await _race(stage, agents, "copy-heavy text", lambda i: ask(prompts.repeat(i, _COPIED), 160))
    eight = await _race_of_eight(stage, agents, ask)
    count = await _race(stage, agents, "counting", lambda i: ask(prompts.count(20 * i), 150))
    walking = models.write_walk(stage.folder / "walk")
    async with (
        stage.own_agent({"speculation": "auto"}, model=walking) as drafts,
        stage.own_agent({"speculation": "off"}, model=walking) as none,
    ):
        walk = await _race(
            stage,
            (drafts, none),
            "text with nothing to copy",
            lambda i: Generate(0, tuple(models.walk_tokens(8, seed=i)), 150, ignore_eos=True),
        )
    return [copy, eight, count, walk]


async def _race(
    stage: Stage, agents: tuple[Agent, Agent], what: str, request: Callable[[int], Generate]
) -> Row:
    """With speculation (the first agent) against without."""
    columns: tuple[list[float], list[float]] = [], []
    for number in stage.rounds(what, full=9, quick=3):
        wanted = request(number)
        decoded = {i: await decode(agents[i], wanted) for i in in_turn(number, 0, 1)}
        if number:
            for i in range(2):
                columns[i].append(decoded[i].rate)
        if decoded[0].tokens != decoded[1].tokens:
            raise Unmeasured(f"{what}: speculation changed the tokens of round {number}")
    return compare(f"{what}, speculation vs none", *columns)


async def _race_of_eight(
    stage: Stage, agents: tuple[Agent, Agent], ask: Callable[[str, int], Generate]
) -> Row:
    """All tokens of eight streams, prompts included, by the wall clock."""
    name = "8 streams of copy-heavy text"
    columns: tuple[list[float], list[float]] = [], []
    for number in stage.rounds(name, full=9, quick=3):
        wanted = [ask(prompts.repeat(8 * number + i, _COPIED), 160) for i in range(8)]
        tokens = dict[int, list[tuple[int, ...]]]()
        for i in in_turn(number, 0, 1):
            began = time.perf_counter()
            decoded = await asyncio.gather(*[decode(agents[i], request) for request in wanted])
            took_s = time.perf_counter() - began
            tokens[i] = [tuple(each.tokens) for each in decoded]
            if number:
                columns[i].append(sum(map(len, tokens[i])) / took_s)
        if tokens[0] != tokens[1]:
            raise Unmeasured(f"{name}: speculation changed the tokens of round {number}")
    return compare(f"{name}, speculation vs none", *columns)

"""The same requests with speculation and without, at the engine's pipe; both must give the same tokens."""

from __future__ import annotations

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
    return [copy, count, walk]


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

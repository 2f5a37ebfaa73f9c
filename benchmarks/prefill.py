"""Long prompts: a chat's second turn, and the stream that runs while another client's prompt is prefilled."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import aclosing

from mlxtp.agent import Agent
from mlxtp.wire.messages import Generate

from . import models, prompts
from .errors import Unmeasured
from .http_client import Ask, user
from .measures import Row, compare
from .stage import Stage, endpoint, text_of

CHAT_TOKENS = 1_000
LONG_TOKENS = 4_000
_ONE_PIECE = 4_096
_ANSWER_TOKENS = 16
_BEFORE = 12
_RUNNING_TOKENS = 1_000


async def measure(stage: Stage) -> list[Row]:
    return [await _second_turn(stage), await _gap(stage)]


async def _second_turn(stage: Stage) -> Row:
    agent, client = await stage.agent(speculation="off"), await stage.client()
    firsts, seconds = [], []
    for number in stage.rounds("second turn", full=7, quick=3):
        text, question = _text(agent, number, CHAT_TOKENS)
        (first,) = await client.ask(endpoint(agent), [Ask(user(text), _ANSWER_TOKENS)])
        chat = (*user(text), {"role": "assistant", "content": first.text}, *user(question))
        (second,) = await client.ask(endpoint(agent), [Ask(chat, _ANSWER_TOKENS)])
        if number:
            firsts.append(first.ttft_s * 1000)
            seconds.append(second.ttft_s * 1000)
    return compare(
        "second turn after 1,000 cached tokens, time to first token vs the first turn", seconds, firsts
    )


async def _gap(stage: Stage) -> Row:
    thin = models.write_walk(stage.folder / "thin", **models.THIN)
    ours, theirs = [], []
    async with (
        stage.own_agent({"speculation": "off", "prefill_chunk": _ONE_PIECE}, model=thin) as whole,
        stage.own_agent({"speculation": "off"}, model=thin) as chunked,
    ):
        for number in stage.rounds("a long prompt beside a stream", full=7, quick=2):
            running = Generate(0, models.walk_tokens(8, seed=2 * number), _RUNNING_TOKENS, ignore_eos=True)
            long = Generate(0, models.walk_tokens(LONG_TOKENS, seed=2 * number + 1), 2, ignore_eos=True)
            gaps = [await _longest_gap_s(agent, running, long) for agent in (chunked, whole)]
            if number:
                ours.append(gaps[0] * 1000)
                theirs.append(gaps[1] * 1000)
    return compare("longest gap beside a 4,000-token prompt vs without chunks", ours, theirs)


async def _longest_gap_s(agent: Agent, running: Generate, long: Generate) -> float:
    """Start `long` when `running` has had some tokens; stop when `long` has its first one."""
    times: list[float] = []
    first: asyncio.Task[tuple[float, float]] | None = None
    async with aclosing(agent.parts.groups.shown.supervisor.gateway.generate(running)) as answer:
        async for _ in answer:
            times.append(time.perf_counter())
            if len(times) == _BEFORE:
                first = asyncio.create_task(_until_first(agent, long))
            if first is not None and first.done():
                break
    if first is None:
        raise Unmeasured(f"the stream ended after {len(times)} tokens")
    return longest_gap_s(times, *await first)


async def _until_first(agent: Agent, request: Generate) -> tuple[float, float]:
    """Return the times of the request and of its first token."""
    begins_at = time.perf_counter()
    async with aclosing(agent.parts.groups.shown.supervisor.gateway.generate(request)) as answer:
        await anext(answer)
    return begins_at, time.perf_counter()


def longest_gap_s(times: Sequence[float], begins_at: float, ends_at: float) -> float:
    """The longest time between two arrivals of a stream, of those that overlap the time from begin to end.

    Raises Unmeasured when the stream had nothing before it or nothing after its beginning.
    """
    gaps = [
        later - earlier
        for earlier, later in itertools.pairwise(times)
        if later > begins_at and earlier < ends_at
    ]
    if not gaps:
        raise Unmeasured("the stream was over before the long prompt came")
    return max(gaps)


def _text(agent: Agent, number: int, tokens: int) -> tuple[str, str]:
    text = text_of(agent)
    return prompts.haystack(number, lambda candidate: len(prompts.ids(text, candidate)) <= tokens)

"""Embeddings beside a chat on one machine: what becomes of the gaps in its stream, and of a first token.

As a program, `python -m benchmarks.vectors URL MODEL`: a client that has texts embedded, over and over.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import httpx

from mlxtp.agent import Agent

from . import child, models, prompts
from .http_client import Ask, Endpoint, user
from .measures import Row, compare
from .pinning import pin
from .stage import Stage, in_turn

TEXTS, SENTENCES = 256, 7  # some 200 tokens each
_PART = 0.95


async def measure(stage: Stage) -> list[Row]:
    gaps: dict[bool, list[float]] = {False: [], True: []}
    firsts: dict[bool, list[float]] = {False: [], True: []}
    folder = models.write_walk(stage.folder / "vectors", **models.THIN)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    client, tokens = await stage.client(), stage.pick(full=400, quick=200)
    async with stage.own_agent({"ranks": 1, "speculation": "off"}) as agent:
        await agent.parts.selection.serve(str(folder))
        for number in stage.rounds("a stream beside embeddings", full=5, quick=2):
            for beside in in_turn(number, False, True):
                async with embedding(agent, folder.name) if beside else nullcontext():
                    ask = Ask(user(prompts.count(2 * number + beside)), tokens, ignore_eos=True)
                    (answer,) = await client.ask(Endpoint("the agent", agent.url, "tiny"), [ask])
                times = [at for at, _ in answer.arrivals]
                between = sorted(later - earlier for earlier, later in itertools.pairwise(times))
                if number:
                    gaps[beside].append(between[int(len(between) * _PART)] * 1e3)
                    firsts[beside].append(answer.ttft_s * 1e3)
    return [
        compare("a stream beside embeddings, 95th percentile of its gaps", gaps[True], gaps[False]),
        compare("a stream beside embeddings, time to first token", firsts[True], firsts[False]),
    ]


@asynccontextmanager
async def embedding(agent: Agent, model: str) -> AsyncIterator[None]:
    """A client that has texts embedded by a rank with a core of its own."""
    process = await child.start(1, "benchmarks.vectors", agent.url, model)
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        for group in agent.parts.groups.replicas_of(model):
            if ranks := group.supervisor.status.ranks:
                pin(ranks.processes[0].pid, 1)
        yield
    finally:
        await child.end(process)


def _main() -> None:
    url, model = sys.argv[1:]
    texts = [f"{n} {'The mill at the bend of the river stood still. ' * SENTENCES}" for n in range(TEXTS)]
    with httpx.Client(timeout=None) as client:
        for some in itertools.chain([texts[:1]], itertools.repeat(texts)):
            body = {"model": model, "input": some, "encoding_format": "base64"}
            client.post(f"{url}/v1/embeddings", json=body).raise_for_status()
            print(len(some), flush=True)


if __name__ == "__main__":
    _main()

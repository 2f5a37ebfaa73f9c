"""More clients at once than are served at once: each gets its own answer, or is told when to come back."""

from __future__ import annotations

import asyncio
import json
import os
from random import Random

import httpx
import psutil
import pytest

from mlxtp.wire.messages import Generate

from ..live_cluster import SLOWNESS, WAIT_S, Cluster, until
from ..reference import random_text

MAX_ROWS = 64
"""Sequences that ranks decode at once."""


async def ask(client: httpx.AsyncClient, text: str, user: str) -> str:
    """Return the streamed answer, which came to its end, on a connection of its own."""
    messages = [{"role": "user", "content": f"Repeat exactly: {text}"}]
    fields = {"messages": messages, "stream": True, "temperature": 0, "max_tokens": 64, "user": user}
    reply = await client.post("/v1/chat/completions", json=fields, headers={"Connection": "close"})
    assert reply.status_code == 200, reply.text
    *chunks, done = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]", reply.text[-400:]
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert choices[-1]["finish_reason"] == "stop"
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def descriptors(cluster: Cluster) -> list[int]:
    return [psutil.Process(pid).num_fds() for pid in (os.getpid(), *cluster.pids())]


@pytest.mark.parametrize(
    ("clients", "users"),
    [(80, 7), pytest.param(300, 1, marks=pytest.mark.chaos), pytest.param(1000, 50, marks=pytest.mark.chaos)],
)
def test_every_client_of_a_crowd_gets_its_own_string(two_ranks: Cluster, clients: int, users: int) -> None:
    texts = [random_text(Random(number), 8) for number in range(clients)]
    expected = two_ranks.content("Repeat exactly: PANDA-42")
    assert expected == "PANDA-42"
    at_first = descriptors(two_ranks)

    async def crowd() -> list[str]:
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=two_ranks.url, timeout=None, limits=limits) as client:
            async with asyncio.timeout(WAIT_S + SLOWNESS * clients):
                return await asyncio.gather(
                    *(ask(client, text, f"user {number % users}") for number, text in enumerate(texts))
                )

    assert asyncio.run(crowd()) == texts
    until(lambda: two_ranks.health()["open_requests"] == 0, "no request is open")
    two_ranks.idle()
    until(
        lambda: all(now <= then + 2 for now, then in zip(descriptors(two_ranks), at_first, strict=True)),
        "their descriptors are closed",
    )
    for _ in range(3):
        assert two_ranks.content("Repeat exactly: PANDA-42") == expected


def test_a_client_with_many_requests_does_not_starve_one_with_one(two_ranks: Cluster) -> None:
    async def story() -> int:
        gateway = two_ranks.supervisor.gateway
        ended = 0

        async def one(number: int) -> None:
            nonlocal ended
            # Long enough for all to be asked before the first ones end.
            answer = gateway.generate(Generate(0, (5, 6, 7 + number), 24, ignore_eos=True), client="many")
            async for _ in answer:
                pass
            ended += 1

        crowd = [asyncio.create_task(one(number)) for number in range(200)]
        await asyncio.sleep(0)
        async for _ in gateway.generate(Generate(0, (5, 6, 7), 1, ignore_eos=True), client="one"):
            pass
        before = ended
        await asyncio.gather(*crowd)
        return before

    # Behind all the others it would begin when fewer than MAX_ROWS of them are left.
    assert two_ranks.call(story()) < 200 - MAX_ROWS
    two_ranks.idle()


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.chaos)])
def test_a_request_ends_at_its_deadline_and_no_rank_works_on_it_any_more(
    two_ranks: Cluster, stream: bool
) -> None:
    fields = {"ignore_eos": True, "max_tokens": 1500, "deadline_s": 0.5 * SLOWNESS}
    response = two_ranks.post("Repeat exactly: PANDA-42", stream=stream, **fields)
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    error = json.loads(lines[-1].removeprefix("data: ") if stream else response.text)["error"]
    assert response.status_code == (200 if stream else 504)
    assert error["code"] == "deadline_exceeded"
    assert two_ranks.health()["open_requests"] == 0
    two_ranks.idle()
    assert two_ranks.content("Repeat exactly: PANDA-42") == "PANDA-42"

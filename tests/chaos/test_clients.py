"""Clients that leave at any moment, come in crowds, or stop reading. Nothing of them may stay."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import random
import socket
import time

import httpx
import psutil
import pytest

from ..live_cluster import SLOWNESS, WAIT_S, until
from .answers import LONG, SHORT, Answer, read_events
from .harness import FaultyCluster, assert_sound, before

pytestmark = pytest.mark.chaos

PROMPTS = (LONG, SHORT, *(f"Repeat exactly: {text}" for text in ("ABC-123", "DOG-4", "K-9 K-9", "ZEBRA-11")))


def body(prompt: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 400, **fields}


def all_descriptors(cluster: FaultyCluster) -> tuple[int, ...]:
    """Of this process, which holds the agent and its clients, and of each rank."""
    return tuple(psutil.Process(pid).num_fds() for pid in (os.getpid(), *cluster.pids()))


async def one_client(client: httpx.AsyncClient, rng: random.Random, expected: dict[str, str]) -> str:
    """Ask; then stay, or leave after some tokens or some time. Returns what it did."""
    prompt = rng.choice(PROMPTS)
    what = rng.choice(["stay", "leave after tokens", "leave after a while", "leave a plain request"])
    if what in ("leave after a while", "leave a plain request"):
        try:
            async with asyncio.timeout(rng.uniform(0.0, 0.4) * SLOWNESS):
                stream = what == "leave after a while"
                response = await client.post("/v1/chat/completions", json=body(prompt, stream=stream))
                assert response.status_code == 200, response.text
        except TimeoutError:
            return what
        return "stay"
    take = rng.randrange(20) if what == "leave after tokens" else 10_000
    answer = Answer()
    async with client.stream("POST", "/v1/chat/completions", json=body(prompt, stream=True)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            read_events(iter([line]), answer)
            take -= line.startswith("data: ")
            if take <= 0:
                break
    assert expected[prompt].startswith(answer.text)
    if what == "stay":
        assert (answer.text, answer.done) == (expected[prompt], True)
    return what


def test_clients_of_whom_many_leave(cluster: FaultyCluster, seed: int) -> None:
    """Three crowds of 24 with idle time between them."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    expected = {prompt: cluster.right(prompt) for prompt in PROMPTS}
    was = before(cluster)

    async def crowd(count: int) -> list[str]:
        limits = httpx.Limits(max_connections=count, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120 * SLOWNESS, limits=limits) as client:
            return await asyncio.gather(*(one_client(client, rng, expected) for _ in range(count)))

    def turn(count: int) -> tuple[list[str], tuple[int, ...]]:
        done = asyncio.run(crowd(count))
        until(lambda: cluster.health()["open_requests"] == 0, "no request is open", 10 * SLOWNESS)
        cluster.idle()
        return done, all_descriptors(cluster)

    _, at_first = turn(4)
    done: list[str] = []
    for _ in range(3):
        crowd_done, at_last = turn(24)
        done += crowd_done
        time.sleep(rng.uniform(0.0, 0.5))
    print({what: done.count(what) for what in sorted(set(done))})
    assert len(done) == 24 * 3
    assert all(last <= first + 2 for first, last in zip(at_first, at_last, strict=True)), (at_first, at_last)
    assert cluster.epoch == was.epoch
    assert_sound(cluster, was)


def test_a_client_that_stops_reading(cluster: FaultyCluster) -> None:
    """It holds no client up, its own sequence runs to its end, and what it reads later is whole."""
    prompt = "Repeat exactly: " + "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" * 16
    tokens = 300
    expected = cluster.right(prompt, tokens)
    assert cluster.content(SHORT) == cluster.right(SHORT)  # the first answer opens some for good
    was = before(cluster)
    at_first = all_descriptors(cluster)
    host, port = cluster.url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        payload = json.dumps(body(prompt, stream=True, max_tokens=tokens)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        sock.sendall(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        until(lambda: cluster.health()["open_requests"] == 1, "the request is open")
        began = time.monotonic()
        assert cluster.content(SHORT) == cluster.right(SHORT)
        assert time.monotonic() - began < WAIT_S
        until(lambda: cluster.health()["open_requests"] == 0, "its sequence is over")
        cluster.idle()
        received = b""
        while data := sock.recv(65536):
            received += data
            time.sleep(0.001)
    answer = Answer()
    events = received.split(b"\r\n\r\n", 1)[1].decode()
    read_events(iter(events.splitlines()), answer)
    assert (answer.text, answer.done) == (expected, True)
    until(lambda: all(map(operator.le, all_descriptors(cluster), at_first)), "its descriptor is closed")
    assert_sound(cluster, was)

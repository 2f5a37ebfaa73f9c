"""The client of both servers, in a process of its own, so that neither server shares an interpreter with it.

While answers come it only notes when which bytes came; they are parsed afterwards. Every request has a
connection of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from . import child
from .errors import Unmeasured

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, and its name for the model."""

    name: str
    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Ask:
    """One streaming request of a batch.

    It is sent `delay_s` after the batch began or, with `after` = (i, n), when request i has had n reads.
    `leave_after` closes the connection when that many characters have come. `ignore_eos` has our own server
    go on beyond the end of an answer.
    """

    messages: tuple[dict[str, str], ...]
    max_tokens: int
    delay_s: float = 0.0
    after: tuple[int, int] | None = None
    leave_after: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Stream of text: (time, text) pairs by the clock that all processes of a machine share, in seconds."""

    sent_at: float
    ended_at: float
    arrivals: tuple[tuple[float, str], ...]
    tokens: int  #: By the server's own count; 0 when the client left before it came.
    cached: int

    @property
    def text(self) -> str:
        return "".join(piece for _, piece in self.arrivals)

    @property
    def first_at(self) -> float:
        """Time of the first text, or of the end of an answer without text."""
        return self.arrivals[0][0] if self.arrivals else self.ended_at

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.sent_at

    @property
    def rate(self) -> float:
        """Tokens per second from the request to the last text. Raises Unmeasured when there was none."""
        if not self.arrivals or not self.tokens:
            raise Unmeasured(f"an answer of {self.tokens} tokens and {len(self.arrivals)} pieces of text")
        return self.tokens / (self.arrivals[-1][0] - self.sent_at)


def user(text: str) -> tuple[dict[str, str], ...]:
    """The messages of a chat's first turn."""
    return ({"role": "user", "content": text},)


def total_rate(answers: Sequence[Answer]) -> float:
    """Tokens of all answers per second, from the first request to the last end."""
    return sum(answer.tokens for answer in answers) / total_s(answers)


def total_s(answers: Sequence[Answer]) -> float:
    return max(answer.ended_at for answer in answers) - min(answer.sent_at for answer in answers)


def median_ttft_ms(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.ttft_s for answer in answers) * 1000


class Client:
    """The client process, as the benchmark drives it."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await child.start(None, "benchmarks.http_client")

    async def stop(self) -> None:
        if self._process is not None:
            await child.end(self._process)

    async def ask(self, endpoint: Endpoint, asks: Sequence[Ask]) -> list[Answer]:
        """Run a batch to its end; answers in the order of the requests. Raises Unmeasured if one fails."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        batch = [dataclasses.asdict(endpoint), [dataclasses.asdict(ask) for ask in asks]]
        process.stdin.write(json.dumps(batch).encode() + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise Unmeasured("the client process ended")
        reply = json.loads(line)
        if isinstance(reply, str):
            raise Unmeasured(f"{endpoint.name}: {reply}")
        return [Answer(**{**fields, "arrivals": tuple(map(tuple, fields["arrivals"]))}) for fields in reply]


# --- the client process -------------------------------------------------------------------------------


class _Batch:
    def __init__(self, client: httpx.AsyncClient, endpoint: Endpoint, asks: Sequence[Ask]) -> None:
        self._client = client
        self._endpoint = endpoint
        self._asks = asks
        self._reads: list[list[tuple[float, bytes]]] = [[] for _ in asks]
        self._awaited = {ask.after: asyncio.Event() for ask in asks if ask.after is not None}

    async def run(self) -> list[Answer]:
        return list(await asyncio.gather(*(self._one(i) for i in range(len(self._asks)))))

    async def _one(self, index: int) -> Answer:
        ask, reads = self._asks[index], self._reads[index]
        if ask.after is not None:
            await self._awaited[ask.after].wait()
        elif ask.delay_s:
            await asyncio.sleep(ask.delay_s)
        body = {
            "model": self._endpoint.model,
            "messages": ask.messages,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ask.ignore_eos else {}),
        }
        url = f"{self._endpoint.url}/v1/chat/completions"
        sent_at = time.perf_counter()
        try:
            await self._read(url, body, sent_at, index)
        finally:
            for after, event in self._awaited.items():
                if after[0] == index:
                    event.set()  # it ended early: no other request must wait for it
        return dataclasses.replace(parse(sent_at, reads), ended_at=time.perf_counter())

    async def _read(self, url: str, body: dict[str, Any], sent_at: float, index: int) -> None:
        reads, leave_after = self._reads[index], self._asks[index].leave_after
        async with self._client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                raise Unmeasured(f"status {response.status_code}: {(await response.aread()).decode()}")
            async for data in response.aiter_raw():
                reads.append((time.perf_counter(), data))
                if event := self._awaited.get((index, len(reads))):
                    event.set()
                if leave_after is not None and len(parse(sent_at, reads).text) >= leave_after:
                    return


def parse(sent_at: float, reads: Sequence[tuple[float, bytes]]) -> Answer:
    """The answer in a stream of server-sent events. An event came when its last byte did.

    Raises Unmeasured when the stream holds an error.
    """
    arrivals: list[tuple[float, str]] = []
    tokens = cached = 0
    rest = b""
    for at, data in reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            if "error" in chunk:
                raise Unmeasured(f"the stream broke off: {chunk['error']}")
            if usage := chunk.get("usage"):
                tokens = usage["completion_tokens"]
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    arrivals.append((at, piece))
    return Answer(sent_at, reads[-1][0] if reads else sent_at, tuple(arrivals), tokens, cached)


async def _serve() -> None:
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=False, limits=limits) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            endpoint, asks = json.loads(line)
            batch = _Batch(client, Endpoint(**endpoint), [_ask(fields) for fields in asks])
            reply: object
            try:
                reply = [dataclasses.asdict(answer) for answer in await batch.run()]
            except (Unmeasured, httpx.HTTPError) as error:
                reply = f"{type(error).__name__}: {error}"
            print(json.dumps(reply), flush=True)


def _ask(fields: dict[str, Any]) -> Ask:
    after = fields.pop("after")
    return Ask(**fields, after=None if after is None else tuple(after))


if __name__ == "__main__":
    asyncio.run(_serve())

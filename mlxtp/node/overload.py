"""When a request is refused because there is too much already. Pure.

Refusing costs a client seconds; taking too much costs everybody, when memory runs out or nobody's turn comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import Code, RequestError

RESERVED = 8
"""One of so many places is kept for other clients than the one that has all the rest."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one gateway holds at most: open requests, and the tokens of their prompts and answers so far.

    Nothing new is taken while less than `free_bytes` of this machine's memory are free.
    """

    requests: int = 256
    tokens: int = 2_000_000
    free_bytes: int = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class Memory:
    """`critical`: the system itself says that it is about to end processes."""

    available: int
    critical: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Open requests and their tokens: of everybody, and of the client who asks."""

    requests: int
    tokens: int
    own_requests: int
    own_tokens: int


def load_of(client: int, open_: Iterable[tuple[int, int]]) -> Load:
    """`open_`: client and tokens of each open request."""
    requests = tokens = own_requests = own_tokens = 0
    for other, count in open_:
        requests += 1
        tokens += count
        if other == client:
            own_requests += 1
            own_tokens += count
    return Load(requests, tokens, own_requests, own_tokens)


def is_short(bounds: Bounds, memory: Memory) -> bool:
    """Whether a machine has too little memory left for anything new."""
    return memory.critical or memory.available < bounds.free_bytes


def refusal(
    bounds: Bounds, load: Load, prompt: int, memory: Memory, elsewhere: str = ""
) -> RequestError | None:
    """Why a request with `prompt` tokens is not taken now: 429 or 503, with the numbers. None: it is.

    `elsewhere` is the name of another Mac that would work on it and is short of memory.
    A prompt by itself is never too long for an idle gateway; the model's context is checked elsewhere.
    """
    if load.requests >= bounds.requests:
        return _full(f"{load.requests} requests are open, the most this server takes")
    if load.own_requests >= (most := _share(bounds.requests)):
        return _full(
            f"{load.own_requests} requests of this client are open; one client may have {most} of "
            f"{bounds.requests}"
        )
    if load.requests and load.tokens + prompt > bounds.tokens:
        return _full(
            f"open requests hold {load.tokens} tokens; with this prompt of {prompt} that is more than the "
            f"{bounds.tokens} this server takes"
        )
    if load.own_requests and load.own_tokens + prompt > (most := _share(bounds.tokens)):
        return _full(
            f"this client's open requests hold {load.own_tokens} tokens; with this prompt of {prompt} that "
            f"is more than one client may have, {most} of {bounds.tokens}"
        )
    return short_of_memory(bounds, memory, elsewhere)


def client_number(client: str, salt: bytes) -> int:
    """63 bits in the place of a client's name, which no other Mac needs to know; 0 for no name.

    `salt`: up to 64 bytes. Equal names are different clients where the salt differs.
    """
    if not client:
        return 0
    digest = hashlib.blake2b(client.encode(errors="replace"), digest_size=8, key=salt).digest()
    return int.from_bytes(digest, "little") >> 1


def short_of_memory(bounds: Bounds, memory: Memory, elsewhere: str) -> RequestError | None:
    """Return a 503 where this machine, or the one called `elsewhere`, has too little memory."""
    if elsewhere:
        return RequestError(
            f"{elsewhere}, which has a part of the model, is short of memory: requests are taken from "
            f"{bounds.free_bytes >> 20} free MiB on",
            Code.OVERLOADED,
            status=503,
        )
    if is_short(bounds, memory):
        return RequestError(
            f"this machine is short of memory: {memory.available >> 20} MiB are free"
            + (
                ", and the system calls that critical"
                if memory.critical
                else f", and requests are taken from {bounds.free_bytes >> 20} MiB on"
            ),
            Code.OVERLOADED,
            status=503,
        )
    return None


def _share(bound: int) -> int:
    return bound - bound // RESERVED


def _full(detail: str) -> RequestError:
    return RequestError(detail, Code.OVERLOADED, status=429)

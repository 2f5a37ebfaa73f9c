"""Admission of requests, and refusals under overload.

A refusal costs one client seconds. Accepting too much costs all clients, when memory runs out or waits never
end.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..errors import Code, RequestError

RESERVED = 8  #: One token in so many stays free for others if one client has all the rest.


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of one gateway: tokens of open requests' prompts and of the answers so far.

    requests        most open requests; 0 for no bound
    tokens          most tokens of all open requests
    free_bytes      least free memory of this machine to accept a new request
    request_tokens  least tokens that a request counts as, for its connection and place in the queue
    """

    requests: int = 0
    tokens: int = 2_000_000
    free_bytes: int = 256 * 1024**2
    request_tokens: int = 256


@dataclass(frozen=True, slots=True)
class SystemMemory:
    """Available bytes. `critical`: the system is about to end processes."""

    available: int
    critical: bool = False


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """Open requests and tokens of all clients, and of the requesting client (`own_...`)."""

    requests: int
    tokens: int
    own_requests: int
    own_tokens: int


def load_of(client: int, open_: Iterable[tuple[int, int]], least: int = 0) -> OpenLoad:
    """Sum up open requests. `open_`: client and tokens of each. Each counts at least `least` tokens."""
    requests = tokens = own_requests = own_tokens = 0
    for other, length in open_:
        count = max(length, least)
        requests += 1
        tokens += count
        if other == client:
            own_requests += 1
            own_tokens += count
    return OpenLoad(requests, tokens, own_requests, own_tokens)


def is_short(bounds: AdmissionLimits, memory: SystemMemory) -> bool:
    """Return True if a machine has too little memory left for a new request."""
    return memory.critical or memory.available < bounds.free_bytes


def refusal(
    bounds: AdmissionLimits, load: OpenLoad, prompt: int, memory: SystemMemory, elsewhere: str = ""
) -> RequestError | None:
    """Return the 429 or 503 that refuses a request with `prompt` tokens; None to accept it.

    `elsewhere` is the name of another Mac of the group that is short of memory.
    """
    return too_much(bounds, load, prompt) or short_of_memory(bounds, memory, elsewhere)


def too_much(bounds: AdmissionLimits, load: OpenLoad, prompt: int) -> RequestError | None:
    """Return the 429 or 503 for a request with `prompt` tokens if it is too much on top of the open ones.

    An idle gateway never refuses a prompt for its length; the model's context is checked elsewhere.
    """
    if bounds.requests:
        if load.requests >= bounds.requests:
            return _full(f"{load.requests} requests are open, the most this server takes", 503)
        if load.own_requests >= (most := _share(bounds.requests)):
            return _full(
                f"{load.own_requests} requests of this client are open; one client may have {most} of "
                f"{bounds.requests}"
            )
    cost = max(prompt, bounds.request_tokens)
    if load.requests and load.tokens + cost > bounds.tokens:
        return _full(
            f"{load.requests} requests are open, with {load.tokens} tokens; this one has {cost} more, and "
            f"this server takes {bounds.tokens}",
            503,
        )
    if load.own_requests and load.own_tokens + cost > (most := _share(bounds.tokens)):
        return _full(
            f"{load.own_requests} requests of this client are open, with {load.own_tokens} tokens; this one "
            f"has {cost} more, and one client may have {most} of {bounds.tokens}"
        )
    return None


class Admission:
    """Acceptance of new requests by one gateway.

    memory     returns the memory that this machine has left
    elsewhere  returns the name of another Mac that has a part of the model and is short of memory
    """

    def __init__(self, bounds: AdmissionLimits, memory: Callable[[], SystemMemory]) -> None:
        self.memory = memory
        self.elsewhere: Callable[[], str] = lambda: ""
        self._bounds = bounds
        self._held = ""

    def check(self, client: int, prompt: int, open_: Iterable[tuple[int, int]]) -> None:
        """Raise RequestError if a new request of `client` is refused. `open_`: see `load_of`."""
        if self._held:
            raise RequestError(self._held, Code.NOT_READY, status=503)
        load = load_of(client, open_, self._bounds.request_tokens)
        refused = refusal(self._bounds, load, prompt, self.memory(), self.elsewhere())
        if refused is not None:
            raise refused

    def check_bounds(self, client: int, prompt: int, open_: Iterable[tuple[int, int]]) -> None:
        """Do the same for a request that needs no memory of a group yet."""
        if refused := too_much(self._bounds, load_of(client, open_, self._bounds.request_tokens), prompt):
            raise refused

    @contextlib.contextmanager
    def hold(self, why: str) -> Iterator[None]:
        """Refuse new requests with the reason `why` inside this context. Clients may retry soon."""
        self._held = why
        try:
            yield
        finally:
            self._held = ""

    def shortage(self) -> RequestError | None:
        """Return a 503 while new requests are refused for lack of memory."""
        return short_of_memory(self._bounds, self.memory(), self.elsewhere())

    @property
    def short(self) -> bool:
        """True while this machine has less memory left than new requests need."""
        return is_short(self._bounds, self.memory())


def client_number(client: str, salt: bytes) -> int:
    """Return 63 bits to keep a client's name from other Macs; 0 for no name.

    `salt`: up to 64 bytes. With different salts, equal names are different clients.
    """
    if not client:
        return 0
    digest = hashlib.blake2b(client.encode(errors="replace"), digest_size=8, key=salt).digest()
    return int.from_bytes(digest, "little") >> 1


def short_of_memory(bounds: AdmissionLimits, memory: SystemMemory, elsewhere: str) -> RequestError | None:
    """Return a 503 if this machine, or the one called `elsewhere`, has too little memory."""
    if elsewhere:
        return RequestError(
            f"{elsewhere}, which has a part of the model, is short of memory: requests need at least "
            f"{bounds.free_bytes >> 20} MiB free there",
            Code.OVERLOADED,
            status=503,
        )
    if is_short(bounds, memory):
        return RequestError(
            f"this machine is short of memory: {memory.available >> 20} MiB are free"
            + (
                ", and the system calls that critical"
                if memory.critical
                else f", and requests need at least {bounds.free_bytes >> 20} MiB"
            ),
            Code.OVERLOADED,
            status=503,
        )
    return None


def _share(bound: int) -> int:
    return bound - bound // RESERVED


def _full(detail: str, status: int = 429) -> RequestError:
    return RequestError(detail, Code.OVERLOADED, status=status)


# --- free memory of this machine, read when a request arrives --------------------------------------------

FRESH_S = 0.5  #: Seconds to reuse a reading, so that a burst of requests reads once.
#: `kern.memorystatus_vm_pressure_level` is 1 (normal), 2 (warning) or 4, as in <dispatch/source.h>.
CRITICAL = 4


class FreeMemory:
    """A callable that returns the present memory. Tests replace `look` and `clock`."""

    def __init__(
        self, look: Callable[[], SystemMemory] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look = look or look_at_memory
        self._clock = clock
        self._seen = SystemMemory(0)
        self._until = float("-inf")

    def __call__(self) -> SystemMemory:
        if (now := self._clock()) >= self._until:
            self._seen, self._until = self._look(), now + FRESH_S
        return self._seen


def look_at_memory(
    read_bytes: int = 0, system: str = sys.platform, level: Callable[[], int] | None = None
) -> SystemMemory:
    """Return the available memory, and on a Mac whether the kernel calls the pressure critical.

    `read_bytes` is the agent's last reading of free memory, 0 if unknown. A Mac uses it instead of psutil.
    """
    import psutil

    available = (system == "darwin" and read_bytes) or int(psutil.virtual_memory().available)
    return SystemMemory(available, system == "darwin" and (level or _pressure_level)() >= CRITICAL)


def _pressure_level() -> int:
    """Return the kernel's level of memory pressure; 0 if it reports none."""
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    library = ctypes.CDLL(None)
    name = b"kern.memorystatus_vm_pressure_level"
    failed = library.sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else level.value

"""Responses that are kept for later requests of the same client, in memory alone."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...errors import Code, RequestError
from ..adapter import Json, compact
from ..request_body import shown

MOST = 1000
MOST_BYTES = 64 * 1024 * 1024
AGE_S = 6 * 3600.0
#: Python's memory for a response in addition to its JSON, and for an event in addition to its bytes.
OVERHEAD_BYTES, EVENT_BYTES = 1024, 64
#: Background responses of one client at a time.
MOST_RUNNING = 16
MOST_READERS, MOST_READERS_OF_ONE = 64, 16  #: Streams of stored events, of this Mac and of one client.


@dataclass(eq=False, slots=True)
class StoredResponse:
    """A response and its whole input, earlier responses included, as JSON, until a time.

    `key` is its client, and its id or, for what only one WebSocket may continue, that socket's. `events` of a
    background response that was created as a stream; event N has sequence number N. `cancel`, for any thread,
    is there while a background response is not over; `changed` is set, and replaced, when it goes on.
    """

    key: tuple[str, str]
    id: str
    status: str
    input: bytes
    body: bytes
    until: float
    events: list[bytes] | None = None
    background: bool = False
    cancel: Callable[[], object] | None = None
    event_bytes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def size(self) -> int:
        """Memory in bytes, which depends only on the length of the JSON, not on its content."""
        return len(self.input) + len(self.body) + OVERHEAD_BYTES + self.event_bytes


class ResponseStore:
    """Memory-only store of at most `most` responses and `most_bytes`, each for `age_s` s, for any thread.

    The oldest of the client that has most make room, background responses that are not over last: they are
    cancelled. A response belongs to one client: the hash of its key, or "".
    """

    def __init__(
        self,
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
        age_s: float = AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._age_s = age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], StoredResponse] = {}
        self._counts, self._sizes = Counter[str](), Counter[str]()  # of each client
        self.size = 0  # bytes of all stored responses

    def put(self, client: str, id_: str, input_: bytes, response: Json, socket: str = "") -> None:
        """Keep a response with its whole input, a JSON list, unless it is larger than the store.

        `socket`: only this WebSocket may continue it, until it has another such response.
        """
        self._add(self._made((client, socket or id_), id_, input_, response))

    def start(self, client: str, id_: str, input_: bytes, response: Json, *, events: bool) -> StoredResponse:
        """Keep a background response that begins. Raises RequestError 429 if its client has too many."""
        kept = self._made((client, id_), id_, input_, response)
        kept.events, kept.background, kept.cancel = [] if events else None, True, lambda: None
        with self._lock:
            running = sum(each.key[0] == client and each.cancel is not None for each in self._kept.values())
        if running >= MOST_RUNNING:
            words = f"{running} background responses are not over, all that one client may have; wait for one"
            raise RequestError(words, Code.OVERLOADED, status=429)
        if not self._add(kept):
            words = f"the conversation is larger than the {self._most_bytes} bytes kept; leave background out"
            raise RequestError(words, param="background")
        return kept

    def record(
        self, kept: StoredResponse, events: Sequence[bytes] = (), response: Json | None = None
    ) -> None:
        """Add events to a background response, and replace its body."""
        with self._lock:
            there = self._kept.get(kept.key) is kept
            self._count(kept, -there)
            if kept.events is not None:
                kept.events += events
                kept.event_bytes += sum(map(len, events)) + EVENT_BYTES * len(events)
            if response is not None:
                kept.status, kept.body = response["status"], compact(response)
            self._count(kept, there)
            self._make_room()

    def find(self, client: str, id_: str, *, socket: str = "", param: str | None = None) -> StoredResponse:
        """Return a response. Raises RequestError 404, for another client's as for an unknown one."""
        with self._lock:
            self._make_room()
            for key in ((client, id_), (client, socket)):
                if (kept := self._kept.get(key)) is not None and kept.id == id_:
                    return kept
        words = f"the response {shown(id_)} is not known here: {self.bounds}"
        raise RequestError(words, Code.NOT_FOUND, status=404, param=param)

    def items(self, client: str, id_: str, socket: str = "") -> list[Json]:
        """Return the first items of a request that continues a response. Raises RequestError 404, or 400."""
        kept = self.find(client, id_, socket=socket, param="previous_response_id")
        if kept.status not in ("completed", "incomplete"):
            words = f"the response {shown(id_)} is {kept.status}, so nothing continues it"
            raise RequestError(words, param="previous_response_id")
        return [*json.loads(kept.input), *json.loads(kept.body)["output"]]

    def delete(self, client: str, key: str) -> None:
        """Forget a response by its id or WebSocket, if it is there, and cancel it if it is not over."""
        with self._lock:
            if (kept := self._kept.get((client, key))) is not None:
                self._drop(kept)

    @property
    def bounds(self) -> str:
        """The limits of this store and the remedy, for refusals."""
        return (
            f"responses are kept in the memory of the Mac that received the request for "
            f"{self._age_s / 3600:g} hours, at most {self._most} of them and {self._most_bytes >> 20} MiB, "
            "for the same API key, not with store false; send the whole conversation as input"
        )

    def _made(self, key: tuple[str, str], id_: str, input_: bytes, response: Json) -> StoredResponse:
        until = self._clock() + self._age_s
        return StoredResponse(key, id_, response["status"], input_, compact(response), until)

    def _add(self, kept: StoredResponse) -> bool:
        with self._lock:
            if kept.size > self._most_bytes:
                return False
            if (before := self._kept.get(kept.key)) is not None:
                self._drop(before)
            self._kept[kept.key] = kept
            self._count(kept, 1)
            self._make_room()
            return True

    def _count(self, kept: StoredResponse, times: int) -> None:
        client = kept.key[0]
        self.size += times * kept.size
        self._sizes[client] += times * kept.size
        self._counts[client] += times
        if not self._sizes[client]:
            del self._sizes[client], self._counts[client]  # else clients that are gone would take memory

    def _make_room(self) -> None:
        now = self._clock()
        while self._kept:
            oldest, many = next(iter(self._kept.values())), len(self._kept) > self._most
            if oldest.until > now:
                if not many and self.size <= self._most_bytes:
                    return
                used = self._counts if many else self._sizes
                client = max(used, key=used.__getitem__)
                own = [each for each in self._kept.values() if each.key[0] == client]
                oldest = next((each for each in own if each.cancel is None), own[0])
            self._drop(oldest)

    def _drop(self, kept: StoredResponse) -> None:
        del self._kept[kept.key]
        self._count(kept, -1)
        if kept.cancel is not None:
            kept.cancel()
        elif kept.events is not None:
            kept.events = []  # a slow reader would hold what no longer counts

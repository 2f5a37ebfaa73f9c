"""Answers of `/v1/responses` that are kept for a while, so that a later request can continue them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Code, RequestError
from ..schema import shown

Json = dict[str, Any]

MOST = 1000
MOST_BYTES = 64 * 1024 * 1024
AGE_S = 6 * 3600.0
#: Python's memory for an answer, and for each item that can be named, besides their JSON.
OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer as the client received it, and its whole input with earlier answers. As JSON.

    `output` has its items by their ids, once more. `until` on the clock of the store.
    """

    body: bytes
    input: bytes
    output: Mapping[str, bytes]
    until: float

    @property
    def size(self) -> int:
        """Memory in bytes: JSON text takes the same space for any content of a client."""
        texts = (self.body, self.input, *self.output.values())
        return sum(map(len, texts)) + OVERHEAD_BYTES * (1 + len(self.output))

    def items(self) -> list[Json]:
        """Return the first items of a request that continues this answer."""
        return [*json.loads(self.input), *map(json.loads, self.output.values())]


def encoded(items: Sequence[Json], most_bytes: int) -> bytes | None:
    """Return a JSON list; None where it has more than `most_bytes`. The same object is encoded once."""
    found: dict[int, bytes] = {}
    parts: list[bytes] = []
    size = 2
    for item in items:
        part = found.get(id(item)) or json_bytes(item)
        found[id(item)] = part
        parts.append(part)
        size += len(part) + 1
        if size > most_bytes:
            return None
    return b"[" + b",".join(parts) + b"]"


def json_bytes(value: Any) -> bytes:
    """Encode as ASCII, since the text may have half a character."""
    return json.dumps(value, separators=(",", ":")).encode()


class ResponseStore:
    """Memory-only store of at most `most` answers and `most_bytes`, each for `age_s` seconds.

    The oldest make room. Shared parts of answers count for each of them. May be used from any thread.
    """

    def __init__(
        self,
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
        age_s: float = AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self.most_bytes = most_bytes
        self._age_s = age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[str, StoredResponse] = {}
        self._items: dict[str, bytes] = {}
        self.size = 0  # bytes of all stored answers

    def put(self, body: Json, input_: bytes) -> None:
        """Keep an answer with its whole input, a JSON list. One that is too large by itself is not kept."""
        output = {item["id"]: json_bytes(item) for item in body["output"]}
        kept = StoredResponse(json_bytes(body), input_, output, self._clock() + self._age_s)
        with self._lock:
            if kept.size > self.most_bytes:
                return
            self._kept[body["id"]] = kept
            self._items |= output
            self.size += kept.size
            self._make_room()

    def get(self, id_: str, param: str | None = None) -> StoredResponse:
        """Return a stored answer. Raises RequestError 404 that says how long answers are kept."""
        with self._lock:
            self._make_room()
            kept = self._kept.get(id_)
        if kept is None:
            raise self._unknown(f"the response {shown(id_)} is not known here", param)
        return kept

    def item(self, id_: str, param: str) -> Json:
        """Return one output item of a stored answer. Raises RequestError 404 as `get` does."""
        with self._lock:
            self._make_room()
            item = self._items.get(id_)
        if item is None:
            raise self._unknown(f"{param}: the item {shown(id_)} is not known here", param)
        found: Json = json.loads(item)
        return found

    def delete(self, id_: str) -> None:
        """Delete a stored answer. Raises RequestError 404."""
        self.get(id_)
        with self._lock:
            self._drop(id_)

    def _make_room(self) -> None:
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept))
            crowded = len(self._kept) > self._most or self.size > self.most_bytes
            if not crowded and self._kept[oldest].until > now:
                return
            self._drop(oldest)

    def _drop(self, id_: str) -> None:
        kept = self._kept.pop(id_, None)
        if kept is not None:
            self.size -= kept.size
            for item_id in kept.output:
                self._items.pop(item_id, None)

    def _unknown(self, what: str, param: str | None) -> RequestError:
        return RequestError(
            f"{what}: answers are kept in the memory of the Mac that received the request for "
            f"{self._age_s / 3600:g} hours, at most {self._most} of them and {self.most_bytes} bytes, "
            "and not with store false; send the whole conversation as input",
            Code.NOT_FOUND,
            status=404,
            param=param,
        )

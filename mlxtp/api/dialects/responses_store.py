"""Answers of `/v1/responses` that are kept for a while, so that a later request may go on from them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Code, RequestError
from ..schema import shown

Json = dict[str, Any]

MOST = 1000
MOST_BYTES = 64 * 1024 * 1024
AGE_S = 6 * 3600.0
ITEM_BYTES = 1024
"""What Python needs for an item beside its text."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer as the client saw it, and everything that it answered: what went before it, too.

    `size` in bytes; `until` on the clock of the store.
    """

    body: Json
    input: tuple[Json, ...]
    size: int
    until: float

    @property
    def items(self) -> tuple[Json, ...]:
        """What a request that goes on from here begins with."""
        return (*self.input, *self.body["output"])


class ResponseStore:
    """In memory only: at most `most` answers and `most_bytes` (of JSON), each for `age_s` seconds.

    The oldest make room. What answers have in common counts for each of them. May be used from any thread.
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
        self._kept: dict[str, Kept] = {}
        self._items: dict[str, Json] = {}
        self.size = 0
        """Bytes of all that is kept."""

    def put(self, body: Json, input_: Sequence[Json], input_size: int) -> None:
        """Keep an answer with its whole input. One that is too large by itself is not kept."""
        size = input_size + len(json.dumps(body)) + len(body["output"]) * ITEM_BYTES
        with self._lock:
            kept = Kept(body, tuple(input_), size, self._clock() + self._age_s)
            if kept.size > self._most_bytes:
                return
            self._kept[body["id"]] = kept
            self._items |= {item["id"]: item for item in body["output"]}
            self.size += kept.size
            self._make_room()

    def get(self, id_: str, param: str | None = None) -> Kept:
        """Raises RequestError 404 that says how long answers are kept."""
        with self._lock:
            self._make_room()
            kept = self._kept.get(id_)
        if kept is None:
            raise self._unknown(f"the response {shown(id_)} is not known here", param)
        return kept

    def item(self, id_: str, param: str) -> Json:
        """One item of the output of an answer that is kept. Raises RequestError 404 as `get` does."""
        with self._lock:
            self._make_room()
            item = self._items.get(id_)
        if item is None:
            raise self._unknown(f"{param}: the item {shown(id_)} is not known here", param)
        return item

    def delete(self, id_: str) -> None:
        """Raises RequestError 404."""
        self.get(id_)
        with self._lock:
            self._drop(id_)

    def _make_room(self) -> None:
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept))
            crowded = len(self._kept) > self._most or self.size > self._most_bytes
            if not crowded and self._kept[oldest].until > now:
                return
            self._drop(oldest)

    def _drop(self, id_: str) -> None:
        kept = self._kept.pop(id_, None)
        if kept is not None:
            self.size -= kept.size
            for item in kept.body["output"]:
                self._items.pop(item["id"], None)

    def _unknown(self, what: str, param: str | None) -> RequestError:
        return RequestError(
            f"{what}: answers are kept in the memory of the Mac that was asked for "
            f"{self._age_s / 3600:g} hours, at most {self._most} of them and {self._most_bytes} bytes, "
            "and not with store false; send the whole conversation as input",
            Code.NOT_FOUND,
            status=404,
            param=param,
        )

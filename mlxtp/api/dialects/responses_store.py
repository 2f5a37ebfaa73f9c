"""Conversations of `/v1/responses` that are kept for a while, so that a later request can continue them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Code, RequestError
from ..request_body import shown

Json = dict[str, Any]

MOST = 1000
MOST_BYTES = 64 * 1024 * 1024
AGE_S = 6 * 3600.0
#: Python's memory for an answer besides its JSON.
OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The whole input of an answer with earlier answers, and its output, as JSON lists.

    `until` on the clock of the store.
    """

    input: bytes
    output: bytes
    until: float

    @property
    def size(self) -> int:
        """Memory in bytes: JSON text takes the same space for any content of a client."""
        return len(self.input) + len(self.output) + OVERHEAD_BYTES


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
        self._most_bytes = most_bytes
        self._age_s = age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[str, StoredResponse] = {}
        self.size = 0  # bytes of all stored answers

    def put(self, id_: str, input_: bytes, output: Sequence[Json]) -> None:
        """Keep an answer with its whole input, a JSON list. One that is too large by itself is not kept."""
        kept = StoredResponse(input_, json_bytes(output), self._clock() + self._age_s)
        with self._lock:
            if kept.size > self._most_bytes:
                return
            self._kept[id_] = kept
            self.size += kept.size
            self._make_room()

    def items(self, id_: str) -> list[Json]:
        """Return the first items of a request that continues an answer.

        Raises RequestError 404 that says how long answers are kept.
        """
        with self._lock:
            self._make_room()
            kept = self._kept.get(id_)
        if kept is None:
            raise RequestError(
                f"the response {shown(id_)} is not known here: answers are kept in the memory of the Mac "
                f"that received the request for {self._age_s / 3600:g} hours, at most {self._most} of them "
                f"and {self._most_bytes} bytes, not with store false; send the whole conversation as input",
                Code.NOT_FOUND,
                status=404,
                param="previous_response_id",
            )
        return [*json.loads(kept.input), *json.loads(kept.output)]

    def _make_room(self) -> None:
        now = self._clock()
        while self._kept:
            oldest = next(iter(self._kept))
            crowded = len(self._kept) > self._most or self.size > self._most_bytes
            if not crowded and self._kept[oldest].until > now:
                return
            self.size -= self._kept.pop(oldest).size

"""Counter of what is open at one time, in all and of each source, and fair order of what waits.

Pure: its callers accept and refuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable


class AdmissionCounter:
    """Admits at most `most` at one time, and of these at most `most_of_one` of one source."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._open: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._open.total()

    def of(self, source: str) -> int:
        return self._open[source]

    def admit(self, source: str, *, exempt: bool = False) -> str:
        """Count one more, or return why it is refused; an empty text admits it.

        `exempt`: only the bound of all sources applies.
        """
        if not exempt and self._open[source] >= self._most_of_one:
            return "too many from one address"
        if self.total >= self._most:
            return "too many"
        self._open[source] += 1
        return ""

    def release(self, source: str) -> None:
        """Count one less of a source. Call it once for each that was admitted."""
        self._open[source] -= 1
        if not self._open[source]:
            del self._open[source]  # a source that is gone takes no memory


# --- fair order of requests when several clients wait ----------------------------------------------------
# Start-time fair queueing (Goyal, Vin and Cheng, 1996), with every request as large as every other. A
# client's requests get successive start numbers, and a new client gets the number that is being served. If
# one client has 136 requests waiting, at most one of them goes before a new client's.

MAX_CLIENTS = 1024  # clients whose last number is remembered


class FairQueue:
    """Start numbers that order waiting requests: lower ones first, equal ones as they came."""

    def __init__(self) -> None:
        self._now = 0  # the highest number that has begun
        self._begun: dict[Hashable, int] = {}  # by client, its highest number that has begun

    def following(self, client: Hashable, waiting: Iterable[int]) -> int:
        """Return the number of a client's new request. `waiting`: those of its others that wait."""
        own = max(waiting, default=-1)
        return max(self._now, own + 1, self._begun.get(client, -1) + 1)

    def record(self, client: Hashable, turn: int) -> None:
        self._now = max(self._now, turn)
        self._begun[client] = max(turn, self._begun.get(client, 0))
        if len(self._begun) > MAX_CLIENTS:  # from the next number on, none of these is ahead of the others
            self._now += 1
            self._begun.clear()

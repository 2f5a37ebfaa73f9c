"""Count of open requests, in total and by source, and the fair order of waiting ones. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable


class AdmissionCounter:
    """Counter that admits at most `most` at a time, and at most `most_of_one` of them from one source."""

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
        """Count one more and return "", or return why it is refused. `exempt`: only `most` applies."""
        if not exempt and self._open[source] >= self._most_of_one:
            return "too many from one address"
        if self.total >= self._most:
            return "too many"
        self._open[source] += 1
        return ""

    def release(self, source: str) -> None:
        """Count one less. Call it once for each that was admitted."""
        self._open[source] -= 1
        if not self._open[source]:
            del self._open[source]  # a source that is gone must take no memory


# --- fair order of requests when several clients wait ----------------------------------------------------
# Start-time fair queueing (Goyal, Vin and Cheng, 1996) with requests of equal size. A client's requests get
# successive start numbers. A new client gets the number being served, so if another has 136 requests waiting,
# at most one of them goes first.

MAX_CLIENTS = 1024  # clients whose latest number is remembered


class FairQueue:
    """Start numbers for waiting requests: lower ones go first, equal ones in order of arrival."""

    def __init__(self) -> None:
        self._now = 0  # the highest number that has started
        self._begun: dict[Hashable, int] = {}  # each client's highest number that has started

    def following(self, client: Hashable, waiting: Iterable[int]) -> int:
        """Return the number of a client's new request. `waiting`: its other requests' numbers."""
        own = max(waiting, default=-1)
        return max(self._now, own + 1, self._begun.get(client, -1) + 1)

    def record(self, client: Hashable, turn: int) -> None:
        self._now = max(self._now, turn)
        self._begun[client] = max(turn, self._begun.get(client, 0))
        if len(self._begun) > MAX_CLIENTS:  # the next number is ahead of none of them
            self._now += 1
            self._begun.clear()

"""Fair order of requests when several clients wait. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), with every request as large as every other. A
client's requests get successive start numbers, and a new client gets the number that is being served.
If one client has 136 requests waiting, at most one of them goes before a new client's.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_CLIENTS = 1024  # clients whose last number is remembered


class FairQueue:
    """Start numbers that order waiting requests: lower ones first, equal ones as they came."""

    def __init__(self) -> None:
        self._now = 0  # the highest number that has begun
        self._begun: dict[int, int] = {}  # by client, its highest number that has begun

    def following(self, client: int, waiting: Iterable[int]) -> int:
        """Return the number of a client's new request. `waiting`: those of its others that wait."""
        own = max(waiting, default=-1)
        return max(self._now, own + 1, self._begun.get(client, -1) + 1)

    def begin(self, client: int, turn: int) -> None:
        """Record that a client's request has begun."""
        self._now = max(self._now, turn)
        self._begun[client] = max(turn, self._begun.get(client, 0))
        if len(self._begun) > MAX_CLIENTS:  # from the next number on, none of these is ahead of the others
            self._now += 1
            self._begun.clear()

"""Whose request comes next when several clients wait. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), with every request as large as every other: a
client's requests get turns one after the other, and a client who comes new gets the turn that is being
served. So of 136 requests that one client has waiting, one at most goes before a newcomer's.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_CLIENTS = 1024
"""Clients whose last turn is remembered."""


class FairQueue:
    """Numbers that order waiting requests: lower ones first, equal ones as they came."""

    def __init__(self) -> None:
        self._now = 0
        """The highest turn that has begun."""
        self._begun: dict[int, int] = {}
        """By client, the highest of its turns that has begun."""

    def following(self, client: int, waiting: Iterable[int]) -> int:
        """The turn of a client's new request. `waiting`: those of its requests that have not begun."""
        own = max(waiting, default=-1)
        return max(self._now, own + 1, self._begun.get(client, -1) + 1)

    def begin(self, client: int, turn: int) -> None:
        """That request is being worked on."""
        self._now = max(self._now, turn)
        self._begun[client] = max(turn, self._begun.get(client, 0))
        if len(self._begun) > MAX_CLIENTS:  # from the next turn on, none of these is ahead of the others
            self._now += 1
            self._begun.clear()

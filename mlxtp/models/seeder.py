"""From which Mac the others copy a model: decided by the coordinator. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holding:
    """What one present member has of a model: `held` of `total` bytes (0: not known yet) of `revision`.

    `free` is the room on its disk in bytes, `wants` whether it is to have the model, `problem` why it cannot
    get it from the Hub.
    """

    revision: str = ""
    held: int = 0
    total: int = 0
    free: int = 0
    wants: bool = True
    problem: str = ""

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""
        return 0 < self.total <= self.held


def elect_seeder(members: Mapping[str, Holding], now: str) -> str:
    """The node id of the one to copy from: who has all of it, or who is to get it from the Hub.

    Whoever does it `now` goes on, as long as it can. Empty when nobody can.
    """
    able = {
        node: each for node, each in members.items() if each.complete or (each.wants and not each.problem)
    }
    complete = {node: each for node, each in able.items() if each.complete}
    if now in (complete or able):
        return now
    return min(
        complete or able,
        key=lambda node: (-able[node].held, -able[node].free, node),
        default="",
    )

"""Choice of the seeder, the Mac from which the others copy a model. Made by the coordinator. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holding:
    """Progress of one present member: `held` of `total` bytes (0: not known yet) of `revision`.

    `free` is the room on its disk in bytes, `wants` True if it needs the model. `problem` is the reason why
    it cannot get the model from the Hub.
    """

    revision: str = ""
    held: int = 0
    total: int = 0
    free: int = 0
    wants: bool = True
    problem: str = ""

    @property
    def complete(self) -> bool:
        """True if the member has the whole model."""
        return 0 < self.total <= self.held


def elect_seeder(members: Mapping[str, Holding], now: str) -> str:
    """Return the node id of the seeder: a member that has all of it, or one that is to get it from the Hub.

    Keep the current seeder (`now`) while it is able. Returns "" if no member is.
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

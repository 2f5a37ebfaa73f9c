"""Holdings of members: the bytes of a model that each has, their speed, and the seeder among them. Pure.

The seeder is the Mac from which the others copy. The coordinator elects it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .manifest import gigabytes

RATE_S = 10.0  #: Seconds over which speeds are measured.


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


@dataclass(slots=True)
class TransferRate:
    """Speed of a transfer, in bytes per second."""

    seen: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now: float, held: int) -> None:
        """Record the bytes that are there now."""
        self.seen.append((now, held))
        while now - self.seen[0][0] > RATE_S:
            self.seen.popleft()

    @property
    def bytes_per_s(self) -> float:
        """Mean over the last RATE_S; 0 until that is known."""
        (began, had), (now, has) = (self.seen[0], self.seen[-1]) if self.seen else ((0.0, 0), (0.0, 0))
        return max(has - had, 0) / (now - began) if now > began else 0.0


def described(row: dict[str, Any]) -> str:
    """Return the progress for people: `12.3 GB of 40.1 GB, 110 MB/s, 4 min left`."""
    if row["problem"]:
        return str(row["problem"])
    if row["waits"]:
        return "waits for others to come first"
    if not row["total_bytes"]:
        return "its files are looked up"
    words = [f"{gigabytes(row['held_bytes'])} of {gigabytes(row['total_bytes'])}"]
    if row["bytes_per_s"]:
        words.append(f"{row['bytes_per_s'] / 1e6:.0f} MB/s")
    if row["left_s"] is not None:
        words.append(f"{row['left_s'] // 60} min left" if row["left_s"] >= 90 else f"{row['left_s']} s left")
    return ", ".join([*words, *([f"from {row['lender']}"] if row["lender"] else [])])

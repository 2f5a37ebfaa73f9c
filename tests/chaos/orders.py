"""Faults that a test orders of a rank, and notes of the ranks; both through files in one folder.

The test replaces `orders.json` as a whole, ranks look at it at every occasion, so a fault can be ordered
while a group runs. Notes are lines of JSON, each appended by one write.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Order:
    """One fault, on one rank, in one epoch only, so that the epoch after it is sound again."""

    fault: str
    rank: int
    epoch: int = 0
    """0 for every epoch."""
    at: int = 1
    """The first occasion that counts, from 1."""
    times: int = 1
    """The number of occasions from there on; 0 for all of them."""
    on: str = ""
    """The message, or the place, whose occasions count; empty for any."""
    how: str = ""
    seconds: float = 0.0


class OrderBook:
    """The test's end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._orders = folder / "orders.json"
        self._notes = folder / "notes.jsonl"
        self.clear()

    def give(self, *orders: Order) -> None:
        draft = self.folder / "draft.json"
        draft.write_text(json.dumps([dataclasses.asdict(order) for order in orders]))
        draft.replace(self._orders)

    def clear(self) -> None:
        """Nothing is ordered and nothing was noted."""
        self.give()
        self._notes.write_text("")

    def notes(self, what: str) -> list[dict[str, Any]]:
        """Everything that was noted under this name, in order."""
        # A line that is being written has no end yet.
        lines = self._notes.read_text().split("\n")[:-1]
        return [note for line in lines if (note := json.loads(line))["what"] == what]


class Orders:
    """A rank's end."""

    def __init__(self, folder: Path, rank: int, epoch: int) -> None:
        self._file = folder / "orders.json"
        self._notes = os.open(folder / "notes.jsonl", os.O_WRONLY | os.O_APPEND)
        self.rank = rank
        self.epoch = epoch
        self._version = (0, 0)
        self._mine: dict[str, Order] = {}
        self._occasions: dict[str, int] = {}

    def order(self, fault: str) -> Order | None:
        """Return the order that this rank has now."""
        state = self._file.stat()
        if (version := (state.st_mtime_ns, state.st_ino)) != self._version:
            self._version = version
            everything = [Order(**fields) for fields in json.loads(self._file.read_text())]
            here = [o for o in everything if o.rank == self.rank and o.epoch in (0, self.epoch)]
            self._mine = {order.fault: order for order in here}
            self._occasions.clear()
        return self._mine.get(fault)

    def due(self, fault: str, on: str = "") -> Order | None:
        """Ask at every occasion to commit `fault`; the order when this is one of those meant."""
        order = self.order(fault)
        if order is None or order.on not in ("", on):
            return None
        occasion = self._occasions[fault] = self._occasions.get(fault, 0) + 1
        if occasion < order.at or (order.times and occasion >= order.at + order.times):
            return None
        if occasion == order.at:
            self.note("fault", fault=fault, on=on)
        return order

    def note(self, what: str, **fields: Any) -> None:
        line = json.dumps(
            {"what": what, "rank": self.rank, "epoch": self.epoch, "time": time.time(), **fields}
        )
        os.write(self._notes, line.encode() + b"\n")

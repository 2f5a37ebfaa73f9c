"""One row a measurement, and the table of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Row:
    """A median of `value`s in `unit`; `peer` and `ratio` where it was measured beside something else.

    `spread` is the relative distance between the smallest and the largest round, `goal` what is asked for.
    """

    name: str
    value: float
    unit: str
    peer: str = ""
    ratio: float | None = None
    spread: float | None = None
    goal: str = ""


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table()
    for heading, side in (
        ("measure", "left"), ("value", "right"), ("unit", "left"), ("peer", "left"),
        ("ratio", "right"), ("spread", "right"), ("goal", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=side)  # type: ignore[arg-type]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        spread = "" if row.spread is None else f"±{row.spread / 2:.0%}"
        table.add_row(row.name, f"{row.value:.4g}", row.unit, row.peer, ratio, spread, row.goal)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)

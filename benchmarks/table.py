"""The rows as a table in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .measures import Row, met

_WIDTH = 150
VERDICT = {True: "yes", False: "no", None: ""}


def cells(row: Row) -> tuple[str, ...]:
    """Name, value, unit, peer, its value, ratio, spread, goal, whether it was reached."""
    return (
        row.name,
        number(row.value),
        row.unit,
        row.peer,
        "" if row.peer_value is None else number(row.peer_value),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.spread is None else f"±{row.spread / 2:.0%}",
        row.goal,
        VERDICT[met(row)],
    )


HEADINGS = ("measure", "value", "unit", "peer", "peer's", "ratio", "spread", "goal", "reached")
RIGHT = frozenset({"value", "peer's", "ratio", "spread"})


def number(value: float) -> str:
    """Four digits, never in powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table()
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in RIGHT else "left")
    for row in rows:
        colour = {True: "green", False: "red", None: ""}[met(row)]
        *plain, verdict = cells(row)
        table.add_row(*plain, f"[{colour}]{verdict}[/]" if colour else verdict)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)

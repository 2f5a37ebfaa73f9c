"""`mlxtp bench --fabric`: the measurement of a fabric as a table with bars, or in Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..placement.measurements import gather_share, sum_share
from .printing import day_of, table_of

#: Characters of the longest bar.
_BAR = 12
_PARTS = " ▏▎▍▌▋▊▉█"
_LEAST_DECADES = 1.0


def show(answer: Mapping[str, Any]) -> list[Any]:
    """Return the agent's measurement, line by line. Times are of the slowest rank."""
    names = " + ".join(answer["names"])
    fences = "fast fences (--fast-fences)" if answer["fast_fences"] else "default fences"
    return [
        f"[bold]{escape(answer['kind'])}[/], {escape(answer['backend'])}: {escape(names)}; {fences}",
        _table(answer),
        _collective(answer),
        "[dim]yellow: how long, on a logarithmic scale; cyan: bytes over one link, on a linear one[/]",
    ]


def markdown(answer: Mapping[str, Any]) -> str:
    """Return the same without bars, as Markdown."""
    first, _, collective, _ = show(answer)
    count, sizes = len(answer["names"]), answer["sizes"]
    sums, gathers = answer["sums_s"], answer["gathers_s"]
    columns = (
        map(amount, sizes),
        map(duration, sums),
        map(_rate, _speeds(sizes, sums, sum_share(count))),
        map(duration, gathers),
        map(_rate, _speeds(sizes, gathers, gather_share(count))),
    )
    return "\n".join(
        (
            Text.from_markup(first).plain,
            "",
            "| bytes | sum | a link | gather | a link |",
            "|--:|--:|--:|--:|--:|",
            *(f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True)),
            "",
            Text.from_markup(collective).plain,
        )
    )


def _table(answer: Mapping[str, Any]) -> Table:
    names = ("bytes", "sum", "", "a link", "", "gather", "a link")
    table = table_of(*names, right=set(filter(None, names)), wrapped=())
    sums, gathers = answer["sums_s"], answer["gathers_s"]
    count = len(answer["names"])
    summing = _speeds(answer["sizes"], sums, sum_share(count))
    gathering = _speeds(answer["sizes"], gathers, gather_share(count))
    columns = (
        map(amount, answer["sizes"]),
        map(duration, sums),
        [f"[yellow]{bar}[/]" for bar in bars(sums, logarithmic=True)],
        map(_rate, summing),
        [f"[cyan]{bar}[/]" for bar in bars(summing)],
        map(duration, gathers),
        map(_rate, gathering),
    )
    for cells in zip(*columns, strict=True):
        table.add_row(*cells)
    return table


def _speeds(sizes: Sequence[int], times: Sequence[float], share: float) -> list[float]:
    """Return bytes/s on one link."""
    return [size * share / seconds for size, seconds in zip(sizes, times, strict=True)]


def _rate(speed: float) -> str:
    return f"{speed / 1e9:.2f} GB/s" if speed >= 1e9 else f"{speed / 1e6:.0f} MB/s"


def _collective(answer: Mapping[str, Any]) -> str:
    each = f"a collective within a forward: [bold]{duration(answer['collective_s'])}[/]"
    if answer["metal"]:
        return f"{each}, its fence between GPU and CPU included; placement uses it"
    return f"{each}; no GPU computes here, so there are no fences: their cost appears on Metal only"


def summary(result: Mapping[str, Any]) -> str:
    """Return one line about a stored measurement."""
    return f"{duration(result['collective_s'])} a collective, measured {day_of(result['at'])}"


def bars(values: Sequence[float], *, logarithmic: bool = False) -> list[str]:
    """Return a bar for each of these positive values, the largest one full, to an eighth of a character.

    On the logarithmic scale the smallest value has the shortest bar.
    """
    largest, smallest = max(values), min(values)
    if logarithmic:
        decades = max(math.log10(largest / smallest), _LEAST_DECADES)
        shares = [1 + (math.log10(value / largest)) / (decades * 1.1) for value in values]
    else:
        shares = [value / largest for value in values]
    return [_bar(round(share * _BAR * 8)) for share in shares]


def _bar(eighths: int) -> str:
    eighths = max(eighths, 1)
    return (_PARTS[-1] * (eighths // 8) + _PARTS[eighths % 8]).strip()


def duration(seconds: float) -> str:
    """Format a time with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            value = seconds / size
            break
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def amount(size: int) -> str:
    """Format bytes, in powers of 1024 where they fit."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"

"""`RESULTS.md`: the table of a full run between two markers, with the machine it ran on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .measures import MEASURES, Row, better, judged, met
from .table import HEADINGS, RIGHT, cells

PAGE = Path(__file__).parent / "RESULTS.md"
BEGIN = "<!-- table: written by `make bench` -->"
END = "<!-- end of table -->"
BEST = "<!-- best: written by `make bench` -->", "<!-- end of best -->"


def write(rows: Sequence[Row], page: Path = PAGE) -> None:
    """Put machine, table and a sentence a row between the page's markers; and the best figures."""
    text = between_markers(page.read_text(), "\n\n".join((machine(), markdown(rows), sentences(rows))))
    best, here = best_of(text), kind()
    for row in rows:
        known = best.get((here, row.name))
        if met(row) and (known is None or better(row.name, judged(row), known)):
            best[here, row.name] = judged(row)
    lines = ["| machine | measure | best |", "|---|---|---:|"]
    lines += [f"| {on} | {name} | {value:.3g} |" for (on, name), value in sorted(best.items())]
    page.write_text(between_markers(text, "\n".join(lines), *BEST))


def best_of(text: str) -> dict[tuple[str, str], float]:
    """Return the best figures of a page, by kind of machine and measure."""
    table = text.partition(BEST[0])[2].partition(BEST[1])[0]
    cells = (line.strip("| ").split(" | ") for line in table.splitlines())
    return {(row[0], row[1]): float(row[2]) for row in cells if len(row) == 3 and row[1] in MEASURES}


def lost(rows: Sequence[Row], page: Path = PAGE) -> list[str]:
    """Return the measures that met their goals on such a machine once, and miss them now."""
    best = best_of(page.read_text())
    return [
        f"{row.name} ({judged(row):.3g}, was {best[kind(), row.name]:.3g})"
        for row in rows
        if met(row) is False and (kind(), row.name) in best
    ]


def between_markers(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with `text` between its markers. Raises ValueError unless each is there once, in order."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page needs {begin!r} and {end!r}, once each, in this order")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(HEADINGS) + " |"]
    lines.append("|" + "|".join("---:" if heading in RIGHT else "---" for heading in HEADINGS) + "|")
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def sentences(rows: Sequence[Row]) -> str:
    return "\n".join(f"- **{row.name}**: {MEASURES[row.name].says}" for row in rows)


def machine() -> str:
    """One line: what it was measured on, and when."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    return f"Measured on {today}: {kind()}, Python {platform.python_version()}, {versions}."


def kind() -> str:
    """Return the kind of this machine."""
    return f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def cpu_model() -> str:
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"

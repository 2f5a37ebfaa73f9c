"""`RESULTS.md`: the table of a full run between two markers, with the machine it ran on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .measures import MEASURES, Row
from .table import HEADINGS, RIGHT, cells

PAGE = Path(__file__).parent / "RESULTS.md"
BEGIN = "<!-- table: written by `make bench` -->"
END = "<!-- end of table -->"


def write(rows: Sequence[Row], page: Path = PAGE) -> None:
    """Put machine, table and a sentence a row between the page's markers."""
    page.write_text(
        between_markers(page.read_text(), "\n\n".join((machine(), markdown(rows), sentences(rows))))
    )


def between_markers(page: str, text: str) -> str:
    """The page with `text` between its markers. Raises ValueError unless each is there once, in order."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page needs {BEGIN!r} and {END!r}, once each, in this order")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


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
    return (
        f"Measured on {today}: {cpu_model()}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.machine()}, Python {platform.python_version()}, {versions}."
    )


def cpu_model() -> str:
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"

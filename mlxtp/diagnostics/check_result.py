"""Findings of the doctor, by rows of a table, each with a level from good to bad. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .facts import MachineFacts


class Level(StrEnum):
    """Levels from good to bad. Only an error keeps this machine from working, alone or with others."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


ORDER = tuple(Level)


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    `fix` is a command to type or an action to take. `why` replaces the `why` of the row.
    """

    level: Level
    what: str
    fix: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One line of the doctor's table.

    `looks_at`, `why` and `fix` are for people: the thing examined, its importance, and the remedy. `check`
    yields the findings on one of the `systems`.
    """

    id: str
    title: str
    looks_at: str
    why: str
    fix: str
    check: Callable[[MachineFacts], Iterable[Finding]]
    systems: tuple[str, ...] = ("macos", "linux", "other")


@dataclass(frozen=True, slots=True)
class Examined:
    """A row and its findings, at least one."""

    row: CheckRow
    findings: tuple[Finding, ...]

    @property
    def level(self) -> Level:
        """Level of the worst finding."""
        return max((each.level for each in self.findings), key=ORDER.index)


def examine(rows: Iterable[CheckRow], facts: MachineFacts) -> tuple[Examined, ...]:
    """Return this machine's findings in the order of the rows. Rows without a finding are left out."""
    here = (row for row in rows if facts.machine.system in row.systems)
    found = (Examined(row, tuple(row.check(facts))) for row in here)
    return tuple(each for each in found if each.findings)


def to_json(examined: Sequence[Examined], facts: MachineFacts) -> Mapping[str, Any]:
    """Return the JSON that `mlxtp doctor --json` prints. `docs/doctor.md` names the fields."""
    rows = [
        {
            "id": each.row.id,
            "title": each.row.title,
            "level": each.level,
            "findings": [
                {
                    "level": finding.level,
                    "what": finding.what,
                    "why": (finding.why or each.row.why) if finding.fix else "",
                    "fix": finding.fix,
                }
                for finding in each.findings
            ],
        }
        for each in examined
    ]
    worst = max((each.level for each in examined), key=ORDER.index, default=Level.OK)
    return {
        "level": worst,
        "looked": "agent" if facts.agent.runs_here else "command",
        "system": facts.machine.system,
        "name": facts.name,
        "rows": rows,
    }


def ok(what: str) -> Finding:
    """Finding that requires no action."""
    return Finding(Level.OK, what)


def info(what: str, fix: str = "", why: str = "") -> Finding:
    """Finding worth knowing, or something that is not known."""
    return Finding(Level.INFO, what, fix, why)


def warning(what: str, fix: str, why: str = "") -> Finding:
    """Finding about something that works, but badly or not for long."""
    return Finding(Level.WARNING, what, fix, why)


def error(what: str, fix: str, why: str = "") -> Finding:
    """Finding about something that does not work."""
    return Finding(Level.ERROR, what, fix, why)

"""Results of every injected fault, and the table and the file that a run makes of them.

`FOUND` collects them in the order in which they happened, those of tests that fail as well.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Injection:
    """One fault.

    `detect_s`: from the fault to the end of its epoch; `recover_s`: from there until the next group serves;
    None where that is not measured. `tokens_checked`: of answers that were compared with those without the
    fault. `wrong_tokens`: characters of these from the first wrong or missing one on. `hung`: clients without
    an end. `orphans`: processes of an old epoch that live on. `code` and `reason` are what the agent said
    then, `likely` and `words` what the records of the ranks tell.
    """

    group: str
    case: str
    seed: int | None = None
    detect_s: float | None = None
    recover_s: float | None = None
    tokens_checked: int = 0
    wrong_tokens: int = 0
    hung: int = 0
    orphans: int = 0
    code: str = ""
    reason: str = ""
    likely: str = ""
    words: str = ""


FOUND: list[Injection] = []

_SUMS = ("tokens_checked", "wrong_tokens", "hung", "orphans")


def found(case: str, **what: Any) -> None:
    """Keep a finding of the test that runs now."""
    injection = Injection(_group(), case, **what)
    print(json.dumps(asdict(injection)))
    FOUND.append(injection)


def _group() -> str:
    """The story book that the present test is in: `deaths` of `test_deaths.py`."""
    file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    return Path(file).stem.removeprefix("test_")


def wrong(text: str, expected: str, *, whole: bool = True) -> int:
    """Characters of `text` from the first wrong one on; if it must be `whole`, those that miss as well."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, expected, strict=False))
    return max(len(text), len(expected) if whole else 0) - sum(1 for _ in pairs)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * part), 1) - 1]


def summary(injections: Sequence[Injection]) -> dict[str, Any]:
    """Times in seconds, and sums."""
    row: dict[str, Any] = {"injections": len(injections)}
    for name in ("detect_s", "recover_s"):
        values = [value for each in injections if (value := getattr(each, name)) is not None]
        row[name] = (
            {"p50": percentile(values, 0.5), "p95": percentile(values, 0.95), "max": max(values)}
            if values
            else None
        )
    return row | {name: sum(getattr(each, name) for each in injections) for name in _SUMS}


def report(injections: Sequence[Injection]) -> dict[str, Any]:
    """All of it, as the JSON file has it."""
    groups = {each.group: [other for other in injections if other.group == each.group] for each in injections}
    return {
        "all": summary(injections),
        "groups": {name: summary(members) for name, members in groups.items()},
        "injections": [asdict(each) for each in injections],
    }


def table(injections: Sequence[Injection]) -> Table:
    """One line a group and one for all; times in seconds as p50 / p95 / max."""
    shown = Table(title="injected faults (times in s: p50 / p95 / max)")
    for column in ("group", "injections", "detected after", "serving after", *_SUMS):
        shown.add_column(column.replace("_", " "), justify="left" if column == "group" else "right")
    everything = report(injections)
    for name, row in (*everything["groups"].items(), ("all", everything["all"])):
        times = [_times(row[each]) for each in ("detect_s", "recover_s")]
        if name == "all":
            shown.add_section()
        shown.add_row(name, str(row["injections"]), *times, *(str(row[each]) for each in _SUMS))
    return shown


def _times(row: dict[str, float] | None) -> str:
    return " / ".join(f"{value:.2f}" for value in row.values()) if row else "–"

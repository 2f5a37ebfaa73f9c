"""The report of a chaos run counts right: its sums are what is believed of everything else here."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from .findings import Injection, percentile, report, summary, table, wrong


@pytest.mark.parametrize(
    ("text", "expected", "whole", "count"),
    [
        ("ABC", "ABC", True, 0),
        ("AB", "ABC", True, 1),
        ("AB", "ABC", False, 0),
        ("AXC", "ABC", False, 2),
        ("AAB", "ABC", True, 2),
        ("ABCC", "ABC", True, 1),
        ("", "ABC", True, 3),
        ("", "", True, 0),
    ],
)
def test_wrong_is_everything_from_the_first_difference_on(
    text: str, expected: str, whole: bool, count: int
) -> None:
    assert wrong(text, expected, whole=whole) == count


@pytest.mark.parametrize(
    ("part", "value"), [(0.0, 1), (0.5, 50), (0.51, 51), (0.95, 95), (0.951, 96), (1.0, 100)]
)
def test_a_percentile_is_one_of_the_values(part: float, value: int) -> None:
    assert percentile([*range(100, 0, -1)], part) == value
    assert percentile([7.0], part) == 7.0


FOUND = [
    Injection("deaths", "kill", None, 0.1, 2.0, 100),
    Injection("deaths", "kill", 1, 0.3, 4.0, 50, wrong_tokens=2, orphans=1),
    Injection("frames", "garbage", 2, None, None, 7, hung=1),
]


def test_sums_and_times() -> None:
    everything = report(FOUND)["all"]
    assert everything["detect_s"] == {"p50": 0.1, "p95": 0.3, "max": 0.3}
    assert everything["recover_s"] == {"p50": 2.0, "p95": 4.0, "max": 4.0}
    sums = [everything[name] for name in ("injections", "tokens_checked", "wrong_tokens", "hung", "orphans")]
    assert sums == [3, 157, 2, 1, 1]
    assert summary(FOUND[2:])["detect_s"] is None
    assert summary([])["injections"] == 0
    assert {name: row["injections"] for name, row in report(FOUND)["groups"].items()} == {
        "deaths": 2, "frames": 1
    }  # fmt: skip
    lines = {line.split()[1]: line for line in told().splitlines() if " " in line and "│" in line}
    assert "0.10 / 0.30 / 0.30" in lines["deaths"]
    assert "–" in lines["frames"]
    assert "157" in lines["all"]


def told() -> str:
    """The table, as a terminal shows it."""
    out = StringIO()
    Console(file=out, width=120).print(table(FOUND))
    return out.getvalue()

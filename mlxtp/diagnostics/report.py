"""A report in a terminal: one line for each row, and the remedies below. Printing only."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

MARKS = {"ok": "✓", "info": "·", "warning": "!", "error": "✗"}
ASCII_MARKS = {"ok": "+", "info": "-", "warning": "!", "error": "x"}
STYLES = {"ok": "green", "info": "dim", "warning": "yellow", "error": "bold red"}
_TITLE = 15
#: Least number of columns of text, in any terminal.
_LEAST = 40


def show(report: Mapping[str, Any], width: int, *, plain: bool) -> list[Text]:
    """Return lines of at most `width` columns. `plain`: with ASCII marks, for terminals without Unicode."""
    marks = ASCII_MARKS if plain else MARKS
    lines = [_row(row, width, marks) for row in report["rows"]]
    for row in report["rows"]:
        for finding in row["findings"]:
            if finding["fix"]:
                lines += _advice(row["title"], finding, width, marks)
    return [*lines, Text(), _summary(report)]


def _row(row: Mapping[str, Any], width: int, marks: Mapping[str, str]) -> Text:
    """Return a row's worst findings, or all of them if none is bad.

    A bad row has one line, because it appears again below with its remedy.
    """
    level = row["level"]
    bad = level in ("warning", "error")
    worst = [each for each in row["findings"] if each["level"] == level or not bad]
    said, room = "; ".join(each["what"] for each in worst), max(width - _TITLE - 3, _LEAST)
    if bad:
        lines = [textwrap.shorten(said, room, placeholder=" ...")]
    else:
        lines = textwrap.wrap(said, room, break_long_words=False, break_on_hyphens=False)
    words = f"\n{' ' * (_TITLE + 3)}".join(lines)
    return Text.assemble(
        (f"{marks[level]} ", STYLES[level]), f"{row['title']:<{_TITLE}} ", (words, _dimmed(level))
    )


def _dimmed(level: str) -> str:
    return STYLES[level] if level != "ok" else ""


def _advice(title: str, finding: Mapping[str, Any], width: int, marks: Mapping[str, str]) -> Iterator[Text]:
    level = finding["level"]
    yield Text()
    yield Text(_wrapped(f"{marks[level]} {title}: {finding['what']}", "  ", width), STYLES[level])
    if level in ("warning", "error"):
        yield Text(_wrapped(f"  why: {finding['why']}", "    ", width))
    # A command stays on one line, so that the user can copy it.
    yield Text(f"  to do: {finding['fix']}")


def _wrapped(words: str, indent: str, width: int) -> str:
    return "\n".join(
        textwrap.wrap(
            words,
            max(width, _LEAST),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _summary(report: Mapping[str, Any]) -> Text:
    levels = [finding["level"] for row in report["rows"] for finding in row["findings"]]
    errors, warnings = levels.count("error"), levels.count("warning")
    if not errors and not warnings:
        return Text("no problems found", STYLES["ok"])
    counts = [
        f"{number} {word}{'s' if number > 1 else ''}"
        for number, word in ((errors, "error"), (warnings, "warning"))
        if number
    ]
    return Text(" and ".join(counts) + "; mlxtp runs none of these commands itself", STYLES[report["level"]])

"""Output of a command, and the values read from it.

No output is trusted: parsers take any text at all, raise nothing, and return values that are cut to what
`wire/machine.py` allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_NOTE = 300  #: Characters of one sentence in `Machine.notes`.


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a command and, in words, its failure ("" for none)."""

    text: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """Value read from a text, and the names of the values that the text lacks."""

    value: T
    missing: tuple[str, ...] = ()


NOT_RUN = Output(problem="was not run")
NOT_INSTALLED = Output(problem="is not installed")


def note(command: str, output: Output, missing: Iterable[str]) -> tuple[str, ...]:
    """Return one sentence about the values that `command` left unknown, or none when nothing is missing.

    It begins with the command's name and a colon, by which `belongs_to` finds it again.
    """
    unknown = ", ".join(missing)
    if not unknown:
        return ()
    problem = output.problem or "its output cannot be parsed"
    return (f"{command}: {problem}; not known: {unknown}"[:MAX_NOTE],)


def belongs_to(sentence: str, commands: Iterable[str]) -> bool:
    """Return whether `note` made this sentence for one of `commands`."""
    return sentence.partition(": ")[0] in set(commands)


def printable(value: object, max_chars: int) -> str:
    """Return a text on one line, cut and without unprintable characters; "" for any other value."""
    if not isinstance(value, str):
        return ""
    # Far more than any field holds, so that a megabyte in the wrong place costs little.
    words = "".join(c if c.isprintable() else " " for c in value[: 8 * max_chars]).split()
    return " ".join(words)[:max_chars].strip()


_FIRST_NUMBER = re.compile(r"\d{1,19}", re.ASCII)


def count(value: object, high: int) -> int:
    """Return `value`, or the first number in it if it is a text; 0 if there is none up to `high`."""
    if isinstance(value, str) and (found := _FIRST_NUMBER.search(value[:200])):
        value = int(found[0])
    return value if type(value) is int and 0 <= value <= high else 0

"""What a command said, and what could be read from it.

Nothing that a command prints is trusted: parsers take any text at all, raise nothing, and return values
that are cut to what `wire/machine.py` allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_NOTE = 300
"""Characters of one sentence in `Machine.notes`."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a command printed and, in words, what went wrong with it ("" when nothing did)."""

    text: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """What a text says, and the names of what it should have said and does not."""

    value: T
    missing: tuple[str, ...] = ()


NOT_RUN = Output(problem="was not run")
NOT_INSTALLED = Output(problem="is not installed")


def note(command: str, output: Output, missing: Iterable[str]) -> tuple[str, ...]:
    """One sentence about what `command` left unknown, or none when nothing is missing.

    It begins with the command's name and a colon, which is how `belongs_to` finds it again.
    """
    unknown = ", ".join(missing)
    if not unknown:
        return ()
    problem = output.problem or "its answer is not understood"
    return (f"{command}: {problem}; not known: {unknown}"[:MAX_NOTE],)


def belongs_to(sentence: str, commands: Iterable[str]) -> bool:
    """Whether `note` made this sentence for one of `commands`."""
    return sentence.partition(": ")[0] in set(commands)


def printable(value: object, max_chars: int) -> str:
    """`value` if it is a text, without anything that cannot be printed, on one line, cut; else ""."""
    if not isinstance(value, str):
        return ""
    # Far more than any field holds, so that a megabyte in the wrong place costs nothing.
    words = "".join(c if c.isprintable() else " " for c in value[: 8 * max_chars]).split()
    return " ".join(words)[:max_chars].strip()


_FIRST_NUMBER = re.compile(r"\d{1,19}", re.ASCII)


def count(value: object, high: int) -> int:
    """The number `value` is or begins with after other characters, 0 when there is none up to `high`."""
    if isinstance(value, str) and (found := _FIRST_NUMBER.search(value[:200])):
        value = int(found[0])
    return value if type(value) is int and 0 <= value <= high else 0

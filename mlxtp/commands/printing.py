"""What a command prints of an answer, for people or for programs; and whose answer it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config import home_folder
from ..errors import Exit, UserError


def home_of(home: Path | None) -> Path:
    """The folder of the agent that a command is about."""
    return home_folder(home).resolve()


@contextmanager
def typed() -> Iterator[None]:
    """Around the reading of what was typed: what is refused there was typed wrong."""
    try:
        yield
    except UserError as error:
        error.exit_status = Exit.MISTYPED
        raise


def print_json(answer: Mapping[str, Any]) -> None:
    """One object on one line."""
    print(json.dumps(answer, ensure_ascii=False))


def print_answer(answer: Mapping[str, Any], as_json: bool, show: Any) -> None:
    """As one JSON object, or as `show` makes it: a string, or what rich can draw, one or several."""
    if as_json:
        print_json(answer)
        return
    shown = show(answer)
    if isinstance(shown, str):
        print(shown)
        return
    console = Console(highlight=False)
    for part in shown if isinstance(shown, list) else [shown]:
        console.print(part)

"""Output of commands, for people or for programs, and the home they use."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..client import FILE as AGENT_FILE
from ..client import AgentClient, agent_runs
from ..config import home_folder
from ..errors import Exit, UserError

POLL_S = 0.5  # between polls of an agent that is starting


def home_of(home: Path | None) -> Path:
    """Return the folder of the agent that a command uses."""
    return home_folder(home).resolve()


@contextmanager
def typed() -> Iterator[None]:
    """Mark errors of values that the user typed, for the exit status."""
    try:
        yield
    except UserError as error:
        error.exit_status = Exit.MISTYPED
        raise


def when_started(home: Path) -> tuple[AgentClient, dict[str, Any]]:
    """Return the agent of this home and its status. Wait while a model is loading, and show the progress.

    Raises UserError when no agent runs.
    """
    console = Console(stderr=True, highlight=False)
    with console.status("") as shown:

        def waits_for(what: str) -> None:
            if not console.is_terminal and not shown.status:
                console.print(f"mlxtp is starting: {what}", markup=False, soft_wrap=True)
            shown.update(Text(f"mlxtp is starting: {what}", "dim"))
            time.sleep(POLL_S)

        while agent_runs(home) and not (home / AGENT_FILE).exists():
            waits_for("it has no address yet")
        client = AgentClient(home)
        while starting := (status := client.get("status")).get("starting"):
            waits_for(starting)
        return client, status


def table_of(*columns: str, right: Collection[str] = (), wrapped: Collection[str] | None = None) -> Table:
    """Return an empty table; the columns named in `right` are aligned right.

    `wrapped` names the only columns whose cells may take several lines.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, justify=justify, no_wrap=wrapped is not None and column not in wrapped)
    return table


def day_of(at: float) -> str:
    """Return a time in seconds since 1970 as local time, to the minute."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M")


def size_of(count: int) -> str:
    """Return a number of bytes for people, such as 1.5 GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def print_json(answer: Mapping[str, Any]) -> None:
    """Print one object on one line."""
    print(json.dumps(answer, ensure_ascii=False))


def print_answer(answer: Mapping[str, Any], as_json: bool, show: Any) -> None:
    """Print one JSON object, or `show`: a string, or one or several rich renderables, or what it returns."""
    if as_json:
        print_json(answer)
        return
    shown = show(answer) if callable(show) else show
    if isinstance(shown, str):
        print(shown)
        return
    console = Console(highlight=False)
    for part in shown if isinstance(shown, list) else [shown]:
        console.print(part)

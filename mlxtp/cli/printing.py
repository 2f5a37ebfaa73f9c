"""Output of commands, for people or for programs: tables, JSON, errors, log lines; and the home they use."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import typer
from rich import console as rich_console
from rich.highlighter import ReprHighlighter
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typer.completion import completion_init  # type: ignore[attr-defined]
from typer.core import TyperGroup

from ..client import FILE as AGENT_FILE
from ..client import AgentClient, agent_runs
from ..config import home_folder
from ..errors import Code, Exit, MlxtpError, UserError
from ..values import stage_words
from ..verbs import Status

# --- output ---------------------------------------------------------------------------------------------

POLL_S = 0.5  # between polls of an agent that is starting
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_controls(text: str) -> str:
    """Remove the characters that a terminal obeys: C0, DEL and C1, except line feeds and tabs."""
    return _CONTROLS.sub("", text)


class Console(rich_console.Console):
    """Rich console that drops the control characters of its texts."""

    def render(self, *given: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*given, **options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))


def home_of(home: Path | None) -> Path:
    return home_folder(home).resolve()


@contextmanager
def typed() -> Iterator[None]:
    """Give a UserError the exit status of a mistyped value."""
    try:
        yield
    except UserError as error:
        error.exit_status = Exit.MISTYPED
        raise


def when_started(home: Path) -> tuple[AgentClient, dict[str, Any]]:
    """Wait, with progress on stderr, until the agent has started. Raises UserError if none runs."""
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
        while starting := (status := client.send(Status())).get("starting"):
            waits_for(starting)
        return client, status


def table_of(*columns: str, right: Collection[str] = (), wrapped: Collection[str] | None = None) -> Table:
    """Return an empty table. Only cells of the columns in `wrapped` (None: all) may wrap."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, justify=justify, no_wrap=wrapped is not None and column not in wrapped)
    return table


def day_of(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M")


def size_of(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def joined(group: Mapping[str, Any]) -> str:
    """Return in words how a group's ranks share a model, with a comma before each part."""
    return "".join(f", {each}" for each in (group["kind"], stage_words(group["split"])) if each)


def print_json(answer: Mapping[str, Any]) -> None:
    """Print one object on one line, with escapes for control characters that `json` leaves."""
    text = json.dumps(answer, ensure_ascii=False)
    print(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def print_answer(answer: Mapping[str, Any], as_json: bool, show: Any) -> None:
    """Print `answer` as JSON, or `show`: a string, rich renderables, or a function that returns them."""
    if as_json:
        print_json(answer)
        return
    shown = show(answer) if callable(show) else show
    if isinstance(shown, str):
        print(without_controls(shown))
        return
    console = Console(highlight=False)
    for part in shown if isinstance(shown, list) else [shown]:
        console.print(part)


MAX_NAME = 400  #: Characters of a file's name that an error shows.


# --- errors and log lines -------------------------------------------------------------------------------

COMPLETION_VARIABLE = "_MLXTP_COMPLETE"  #: Set by a shell that requests completions; see typer.


class Commands(TyperGroup):
    """The `mlxtp` command. It prints errors as text on stderr.

    With --json it prints {"error": {"code", "message"}} on stdout instead of the result. The exit status
    (`Exit`) is the same.
    """

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        if COMPLETION_VARIABLE in os.environ:
            completion_init()
        as_json = "--json" in given
        extra["standalone_mode"] = extra.get("standalone_mode", True) and not as_json
        try:
            status = super().main(given, *rest, **extra)
        except MlxtpError as error:
            _refuse(error.code, error.detail, as_json=as_json)
            sys.exit(error.exit_status)
        except OSError as error:
            if not error.filename:  # not about a file: standard output may be at fault, or a bug here
                raise
            name = str(error.filename)
            name = name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}…"
            _refuse(Code.CONFIG, f"{name}: {error.strerror}", as_json=as_json)
            sys.exit(Exit.REFUSED)
        except typer.TyperException as mistyped:
            _refuse(Code.CONFIG, mistyped.format_message(), as_json=True)
            sys.exit(mistyped.exit_code)
        sys.exit(status)


class TerminalLog(logging.Handler):
    """Log in color to standard error, one line per record, so that a command in it can be copied."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._colour = ReprHighlighter()
        self._last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record; omit the time if the line before shows the same."""
        try:
            now = datetime.fromtimestamp(record.created).strftime("[%x %X]")
            shown = " " * len(now) if now == self._last else now
            self._last = now
            level = (record.levelname.ljust(8), f"logging.level.{record.levelname.lower()}")
            begin = Text.assemble((shown, "log.time"), " ", level, " ")
            self._console.print(begin + self._colour(Text(self.format(record))))
        except Exception:  # noqa: BLE001 - as in every handler of `logging`, a failed write ends nothing
            self.handleError(record)


def _refuse(code: Code, message: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"error": {"code": code, "message": message}})
    else:
        complain(message)


def complain(message: str) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]mlxtp:[/] {escape(message)}")

"""Errors and log lines in a terminal: red lines for people, or one JSON object for programs."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import typer
from rich.console import Console
from rich.highlighter import ReprHighlighter
from rich.markup import escape
from rich.text import Text
from typer.completion import completion_init  # type: ignore[attr-defined]
from typer.core import TyperGroup

from .errors import Code, Exit, MlxtpError

#: Characters of a file's name that an error shows.
MAX_NAME = 400

VARIABLE = "_MLXTP_COMPLETE"


class Commands(TyperGroup):
    """The `mlxtp` command, whose errors go to stderr as text.

    With --json they go to stdout, in place of the result: {"error": {"code", "message"}}, and nothing else.
    The exit status (`Exit`) is the same.
    """

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run the command of `args` and end the process."""
        given = sys.argv[1:] if args is None else list(args)
        if VARIABLE in os.environ:  # a shell requests completions
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
            _refuse(Code.CONFIG, f"{_short(str(error.filename))}: {error.strerror}", as_json=as_json)
            sys.exit(Exit.REFUSED)
        except typer.TyperException as mistyped:
            _refuse(Code.CONFIG, mistyped.format_message(), as_json=True)
            sys.exit(mistyped.exit_code)
        sys.exit(status)


class TerminalLog(logging.Handler):
    """Log lines on standard error with time, level and colours.

    A log line is one line of the terminal, of any length. Copied text has no line breaks, so that a command
    in it still works.
    """

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._colour = ReprHighlighter()
        self._last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, with the time only if it differs from that of the line before."""
        try:
            now = datetime.fromtimestamp(record.created).strftime("[%x %X]")
            shown = " " * len(now) if now == self._last else now
            self._last = now
            level = (record.levelname.ljust(8), f"logging.level.{record.levelname.lower()}")
            begin = Text.assemble((shown, "log.time"), " ", level, " ")
            self._console.print(begin + self._colour(Text(self.format(record))))
        except Exception:  # noqa: BLE001 - as every handler of `logging`: a failed write ends nothing
            self.handleError(record)


def _refuse(code: Code, message: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"error": {"code": code, "message": message}}, ensure_ascii=False))
    else:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[bold red]mlxtp:[/] {escape(message)}")


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}…"

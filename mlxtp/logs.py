"""Formats of log lines: text for people, or one JSON object each for programs.

A caller may add what a line is about: `extra={"epoch": 3, "rank": 1}`. The id of the present request is added
automatically (`api/request_context.py`). Prompts and replies are never logged.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from .api.request_context import current
from .errors import ConfigError
from .settings import KEPT_LOGS, MAX_LOG_BYTES
from .wire.codecs import printable

_ABOUT = ("epoch", "rank")
MAX_STDERR_BYTES = 1024**2


class RotatingLog(RotatingFileHandler):
    """A log file that starts again at `MAX_LOG_BYTES`; the last `KEPT_LOGS` stay beside it, from FILE.1 on.

    When writing fails, it reports that on standard error, once until a write succeeds again.
    """

    def __init__(self, path: str) -> None:
        try:
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            super().__init__(
                path,
                maxBytes=MAX_LOG_BYTES,
                backupCount=KEPT_LOGS,
                encoding="utf-8",
                errors="backslashreplace",
            )
        except OSError as error:
            raise ConfigError(f"--log-file {path}: {error.strerror or error}") from None
        self._failed = self._fails = False

    def _open(self) -> TextIOWrapper:
        """Open the file.

        A new one is for its user alone, as the agent's folder is; an existing one keeps its mode.
        """
        return open(
            self.baseFilename, "a", encoding=self.encoding, errors=self.errors,
            opener=lambda path, flags: os.open(path, flags, 0o600),
        )  # fmt: skip

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, if possible."""
        self._fails = False
        super().emit(record)
        self._failed = self._fails

    def handleError(self, record: logging.LogRecord) -> None:
        """Report the first failure on standard error."""
        self._fails = True
        if not self._failed:
            sys.stderr.write(f"mlxtp: the log {self.baseFilename} cannot be written: {sys.exc_info()[1]}\n")


def shorten_stderr() -> None:
    """Empty standard error if it is a file that has grown: launchd appends to it without limit."""
    try:
        found = os.fstat(sys.stderr.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_size > MAX_STDERR_BYTES:
            os.ftruncate(sys.stderr.fileno(), 0)
    except (OSError, ValueError):  # it is closed, or not a file of the system
        return


def log_formatter(name: str) -> logging.Formatter:
    """Return the formatter of that name in `config.LOG_FORMATS`."""
    return JsonLines() if name == "json" else TextLines("%(asctime)s %(levelname)s %(message)s")


class JsonLines(logging.Formatter):
    """One JSON object a line.

    `time` (RFC 3339, UTC, milliseconds), `level`, `logger` and `message` are always there. `request_id`,
    `key` (the name of the client's key), `epoch`, `rank` and `exception` appear where there is one. `fields`
    of a record are added.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record on one line."""
        line: dict[str, object] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (account := current()) is not None:
            line["request_id"] = account.id
            if account.key:
                line["key"] = account.key
        line |= {name: value for name in _ABOUT if (value := getattr(record, name, None)) is not None}
        for name, value in getattr(record, "fields", {}).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


class PrintableLines(logging.Formatter):
    """Lines as `logging` writes them, without terminal escapes, because they quote foreign text."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without the traceback: one line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return the traceback, line by line."""
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


class TextLines(PrintableLines):
    """Printable lines with the id of the present request."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without the traceback."""
        line = super().formatMessage(record)
        return line if (account := current()) is None else f"{line} [{account.id}]"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

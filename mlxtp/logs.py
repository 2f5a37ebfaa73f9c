"""How lines of the log are written: for people, or one JSON object each for programs.

Whoever logs may say what a line is about: `extra={"epoch": 3, "rank": 1}`. The request that is being answered
is known by itself (`api/account.py`). Neither prompts nor answers are ever logged.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from .api.account import current

_ABOUT = ("epoch", "rank")


def log_formatter(name: str) -> logging.Formatter:
    """Of `config.LOG_FORMATS`."""
    return JsonLines() if name == "json" else TextLines("%(asctime)s %(levelname)s %(message)s")


class JsonLines(logging.Formatter):
    """One JSON object a line.

    `time` (RFC 3339, UTC, milliseconds), `level`, `logger` and `message` are always there; `request_id`,
    `key` (the name of the client's key), `epoch`, `rank` and `exception` where there is one; and `fields`,
    a record's own, besides.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record on one line."""
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


class TextLines(logging.Formatter):
    """As `logging` writes them, with the id of the request that is being answered."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without the traceback."""
        line = super().formatMessage(record)
        return line if (account := current()) is None else f"{line} [{account.id}]"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

"""Log files, and formats of their lines: text for people, or one JSON object each for programs.

A caller may name the subject of a line: `extra={"epoch": 3, "rank": 1}`. The id of the present request is
added (`api/request_context.py`). Prompts and replies are never logged.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from . import audit
from .api.key_limits import TokenBucket
from .api.request_context import current
from .errors import ConfigError, in_words
from .settings import AUDIT_LOG, KEPT_LOGS, MAX_LOG_BYTES
from .wire.codecs import printable

_ABOUT = ("epoch", "rank")
MAX_STDERR_BYTES = 1024**2


class RotatingLog(RotatingFileHandler):
    """A log file that starts over at `MAX_LOG_BYTES`. The last `KEPT_LOGS` files stay, as FILE.1 and so on.

    A failed write is reported on standard error, once until a write succeeds again.
    """

    def __init__(self, path: str, words: str = "") -> None:
        with in_words(ConfigError, words or f"--log-file {path}"):
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            super().__init__(
                path,
                maxBytes=MAX_LOG_BYTES,
                backupCount=KEPT_LOGS,
                encoding="utf-8",
                errors="backslashreplace",
            )
        self._failed = self._fails = False

    def _open(self) -> TextIOWrapper:
        # An existing file keeps its mode.
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=_private)

    def emit(self, record: logging.LogRecord) -> None:
        self._fails = False
        super().emit(record)
        self._failed = self._fails

    def handleError(self, record: logging.LogRecord) -> None:
        self._fails = True
        if not self._failed:
            sys.stderr.write(f"mlxtp: the log {self.baseFilename} cannot be written: {sys.exc_info()[1]}\n")


_AUDIT_LOCK = "audit.lock"
FOREIGN_PER_MINUTE = 10  #: Audit lines that strangers may cause. The next such line counts the omitted ones.
#: Audit lines kept while another process holds the lock. A later line counts those dropped.
MOST_WAITING = 1000
LAST_WAIT_S = 0.8  #: Seconds that a process's end waits for that lock; an agent has `THREADS_S` then.


class AuditLog(RotatingLog):
    """The audit log of a home, for its user alone. An agent and commands may write it at the same time.

    If another process holds the lock, a thread waits for it, since that process may be stopped.
    """

    def __init__(self, home: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(str(home / AUDIT_LOG), f"--home {home}: {AUDIT_LOG} cannot be written")
        self._home = home
        self._foreign = TokenBucket(FOREIGN_PER_MINUTE, clock())
        self._clock = clock
        self._left_out = self._lost = 0
        self._lines = AuditLines()
        self._waiting: deque[logging.LogRecord] = deque()  # their messages are lines
        self._late = False  # A thread waits for the lock, and will write all lines that wait by then.
        self._later: threading.Thread | None = None  # the latest such thread

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        os.fchmod(stream.fileno(), 0o600)
        return stream

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop strangers' events beyond the limit, and count them in the next one."""
        if not getattr(record, "foreign", False):
            return True
        if self._foreign.take(self._clock()):
            self._left_out += 1
            return False
        record.__dict__["left_out"], self._left_out = self._left_out, 0
        return True

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._lost += 1
            return
        record.__dict__["left_out"] = getattr(record, "left_out", 0) + self._lost
        self._lost = 0
        self._waiting.append(logging.makeLogRecord({"msg": self._lines.format(record)}))
        if not self._late and not self._write(fcntl.LOCK_NB):
            self._late = True
            self._later = threading.Thread(target=self._write, daemon=True)
            self._later.start()

    def flush(self) -> None:
        """Flush without the handler's lock: `close` holds it while it waits at the process's end."""
        if self.stream is not None:
            self.stream.flush()

    def close(self) -> None:
        """Wait a little for the lock. Report on standard error how many lines are left."""
        if self._later is not None:
            self._later.join(LAST_WAIT_S)
        if left := len(self._waiting) + self._lost:
            path = self._home / _AUDIT_LOCK
            sys.stderr.write(f"mlxtp: another process holds {path}; audit lines not written: {left}\n")
        super().close()

    def _write(self, how: int = 0) -> bool:
        """Open the file again, since another process may have rotated it; write all lines; close it."""
        try:
            with open(self._home / _AUDIT_LOCK, "a", opener=_private) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | how)
                self._late = False  # a line from now on gets its own `_write`
                while self._waiting:
                    super().emit(self._waiting.popleft())
                if self.stream is not None:
                    self.stream.close()
                    self.stream = None  # so that it is opened again
        except BlockingIOError:
            return False
        except OSError:
            self._late = False
            self.handleError(logging.makeLogRecord({}))
        return True


def keep_audit(home: Path) -> None:
    """Write this process's audit events to the home's file. Raises ConfigError if that fails."""
    audit.log.handlers[:] = [AuditLog(home)]
    audit.log.setLevel(logging.INFO)


def shorten_stderr() -> None:
    """Empty standard error if it is a large file, because launchd appends to it without limit."""
    try:
        found = os.fstat(sys.stderr.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_size > MAX_STDERR_BYTES:
            os.ftruncate(sys.stderr.fileno(), 0)
    except (OSError, ValueError):  # it is closed, or no file of the system
        return


def log_formatter(name: str) -> logging.Formatter:
    return JsonLines() if name == "json" else TextLines("%(asctime)s %(levelname)s %(message)s")


class JsonLines(logging.Formatter):
    """One JSON object per line.

    `time` (RFC 3339, UTC, milliseconds), `level`, `logger` and `message` are always there; `request_id`,
    `key` (name of the client's key), `epoch`, `rank` and `exception` if known. A record's `fields` are added.
    """

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.line(record), default=str)

    def line(self, record: logging.LogRecord) -> dict[str, object]:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
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
        return line


class AuditLines(JsonLines):
    """`time`, `event`, `message`, the event's fields, and `by`, by default the request's client."""

    def line(self, record: logging.LogRecord) -> dict[str, object]:
        line = super().line(record)
        del line["level"], line["logger"]
        account = current()
        by = "this agent" if account is None else f"key {account.key}" if account.key else account.origin
        line.setdefault("by", by)
        if left_out := getattr(record, "left_out", 0):
            line["left_out"] = left_out
        return line


class PrintableLines(logging.Formatter):
    """Lines as `logging` writes them, without terminal escapes, because they quote foreign text."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


class TextLines(PrintableLines):
    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return line if (account := current()) is None else f"{line} [{account.id}]"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

"""Output of rank processes (standard output and error), as lines of the agent's own log.

A rank reports important things in frames. Its output is that of libraries, and Python's last traceback. In a
JSON log these lines must not break up its own, and a log file must have them. Otherwise they go to the
agent's standard error.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping

log = logging.getLogger("mlxtp.rank")

MAX_LINE = 16 * 1024  #: Bytes; a longer line is cut into several.
_READ = 64 * 1024

#: Gets a line, and its epoch and rank; a warm process has neither.
Heard = Callable[[str, Mapping[str, int]], None]


def log_lines(line: str, about: Mapping[str, int]) -> None:
    """Log a line of a rank process as a warning: something is wrong, or a library warns."""
    log.warning("%s", line, extra=dict(about))


class WorkerOutput:
    """Pipe for one process, which writes to `descriptor`. Used within a running loop.

    The system's buffer holds the output while the agent is busy; a rank that writes more than that waits.
    """

    def __init__(self, heard: Heard) -> None:
        self.about: Mapping[str, int] = {}  #: Epoch and rank, once the process has them.
        self._heard = heard
        self._ours, self.descriptor = os.pipe()
        os.set_blocking(self._ours, False)
        self._rest = b""
        self.open = True  #: True while output may still come.

    def started(self) -> None:
        """Begin reading: the process has its end. Ends when it and all that it started are gone."""
        os.close(self.descriptor)
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def drop(self) -> None:
        """Close the pipe: no process was started."""
        os.close(self.descriptor)
        self._close()

    def close(self) -> None:
        """Read the remaining output, and close."""
        while self.open and self._read():
            pass
        if self.open:
            asyncio.get_running_loop().remove_reader(self._ours)
            self._log(self._rest)
            self._close()

    def _close(self) -> None:
        os.close(self._ours)
        self.open = False

    def _read(self) -> bool:
        """Read once. Return True if there was output."""
        try:
            data = os.read(self._ours, _READ)
        except BlockingIOError:
            return False
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self._log(line)
        if len(self._rest) > MAX_LINE:
            self._log(self._rest)
            self._rest = b""
        if not data:
            self._log(self._rest)
            asyncio.get_running_loop().remove_reader(self._ours)
            self._close()
        return bool(data)

    def _log(self, line: bytes) -> None:
        for start in range(0, len(line), MAX_LINE):
            if text := line[start : start + MAX_LINE].decode(errors="replace").rstrip():
                self._heard(text, self.about)

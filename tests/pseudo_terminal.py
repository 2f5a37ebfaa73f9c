"""A command in a terminal of its own: what it shows is read, and what a person types is written."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .live_cluster import START_S, WAIT_S

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()=>][0-9A-B]?")
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


class Terminal:
    """The user's side."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self._descriptor = descriptor
        self._process = process
        self._raw = b""
        self._seen = 0

    @property
    def shown(self) -> str:
        """All that came so far, without colours and movements of the cursor."""
        return _ESCAPES.sub("", self._raw.decode(errors="replace")).replace("\r", "")

    def see(self, text: str, within_s: float = START_S) -> str:
        """Wait until `text` is shown behind what was seen before; returns what was shown up to its end."""
        until = time.monotonic() + within_s
        while (found := self.shown.find(text, self._seen)) < 0:
            if time.monotonic() > until:
                raise TimeoutError(f"{text!r} is not in {self.shown[self._seen :]!r}")
            assert self._read(), f"it ended without {text!r}: {self.shown[self._seen :]!r}"
        before, self._seen = self._seen, found + len(text)
        return self.shown[before : self._seen]

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._descriptor, text.encode())

    def end(self) -> int:
        """Wait for the end; returns the exit status."""
        until = time.monotonic() + START_S
        while self._read():
            assert time.monotonic() < until, f"it does not end: {self.shown[self._seen :]!r}"
        return self._process.wait(WAIT_S)

    def _read(self) -> bool:
        if not select.select([self._descriptor], [], [], 0.2)[0]:
            return self._process.poll() is None
        try:
            part = os.read(self._descriptor, 65_536)
        except OSError:  # as Linux says that the other side is closed
            return False
        self._raw += part
        return bool(part)


@contextmanager
def terminal(*words: str, **environment: str) -> Iterator[Terminal]:
    """`mlxtp` with these words, as the one program of a terminal with 30 lines of 100 characters."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", _OWN_TERMINAL, *words],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(WAIT_S)
        os.close(ours)


_OWN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv = ["mlxtp", *sys.argv[1:]]
from mlxtp.__main__ import main
main()
"""

"""A delay on links, which processes share: seconds in a file that is memory of each of them."""

from __future__ import annotations

import mmap
import struct
from collections import deque
from pathlib import Path

_SECONDS = struct.Struct("=d")


class Delay:
    """Seconds by which data comes later. 0 in a file that is made now."""

    def __init__(self, path: Path) -> None:
        with path.open("ab") as file:
            file.truncate(_SECONDS.size)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SECONDS.size)

    @property
    def seconds(self) -> float:
        seconds: float = _SECONDS.unpack_from(self._memory)[0]
        return seconds

    def set(self, seconds: float) -> None:
        _SECONDS.pack_into(self._memory, 0, seconds)


class Underway:
    """Data on its way, which arrives in order even when the delay becomes shorter. Pure."""

    def __init__(self) -> None:
        self._due: deque[tuple[float, bytes]] = deque()

    def push(self, data: bytes, at: float) -> None:
        """Add data that is due at a time, or with what is before it."""
        self._due.append((max(at, self._due[-1][0] if self._due else at), data))

    def arrived(self, now: float) -> bytes:
        """Take what is due."""
        data = b""
        while self._due and self._due[0][0] <= now:
            data += self._due.popleft()[1]
        return data

    def next_at(self) -> float | None:
        """Return when the next data is due; None without any."""
        return self._due[0][0] if self._due else None

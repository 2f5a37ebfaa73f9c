"""Memory that macOS has wired before an epoch and after it: a killed rank may leave some."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable

log = logging.getLogger(__name__)

GB = 10**9
LITTLE_BYTES = GB  #: bytes that other programs wire and release meanwhile
LOOK_S = 0.2  #: seconds from one reading to the next
LOOKS = 25  #: readings: macOS may take some seconds after the end of a process


def wired_bytes(system: str = sys.platform) -> int | None:
    """Return the bytes that all processes and the kernel have wired now; None if this is not macOS."""
    import psutil

    return int(getattr(psutil.virtual_memory(), "wired", 0)) if system == "darwin" else None


def left_bytes(before: int, after: int, held: int) -> int:
    """Return how many of the `held` bytes are still wired; 0 if the difference may be other programs'."""
    left = min(after - before, held)
    return left if left > max(LITTLE_BYTES, held // 10) else 0


class WiredMemory:
    """Compares wired memory on this machine. Tests replace `look`."""

    def __init__(self, look: Callable[[], int | None] = wired_bytes) -> None:
        self.look = look
        self._left = 0
        self._ranks = 0
        self._before: int | None = None
        self._held = 0

    def began(self) -> None:
        """Note that a rank process has started and holds nothing yet."""
        if not self._ranks:
            self._before, self._held = self.look(), 0
        self._ranks += 1

    async def ended(self, epoch: int, held: int) -> None:
        """Note that a rank process that held so many bytes is gone. After the last one, log what is left."""
        self._ranks -= 1
        self._held += held
        before = self._before
        if self._ranks or before is None or self._held <= LITTLE_BYTES:
            return
        for _ in range(LOOKS):
            if not (left := left_bytes(before, self.look() or 0, self._held)):
                return
            await asyncio.sleep(LOOK_S)
        self._left = min(self._left + left, self.look() or 0)
        log.warning("epoch %d: %s", epoch, self.summary(), extra={"epoch": epoch})

    def summary(self) -> str:
        """Return the memory that ended epochs left wired, for users; empty for none."""
        if not self._left or self._left > (self.look() or 0):
            return ""
        return (
            f"{self._left / GB:.1f} GB stayed wired after ranks of this Mac ended; only a restart of the Mac "
            "gives them back"
        )


HERE = WiredMemory()  #: Wired memory of this machine.

"""The Mac below the ranks: whether it may sleep, when it slept, and memory that ended ranks left wired.

While a Mac sleeps its agent stands still and the others go on without it. Its own timers do not notice: they
run on a clock that stands still as well. A second clock, which goes on, shows how long it slept. An idle Mac
may sleep by its own settings. A serving one stays awake, unless a setting allows sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

TICK_S = 1.0
NAP_S = 2.0  #: Seconds; a shorter sleep has no effect on other Macs.

#: Keeps a Mac from sleeping by itself for as long as the command runs; a closed lid still makes it sleep.
CAFFEINATE = ("/usr/bin/caffeinate", "-i")

#: Names of two clocks of this system: one that stands still while it sleeps, and one that goes on.
_MACS, _LINUX = ("CLOCK_UPTIME_RAW", "CLOCK_MONOTONIC"), ("CLOCK_MONOTONIC", "CLOCK_BOOTTIME")


@dataclass(frozen=True, slots=True)
class Clocks:
    """Readings of two clocks, in seconds: one stands still while the machine sleeps, one goes on."""

    awake: float
    all: float


def clocks() -> Clocks:
    pair = _MACS if sys.platform == "darwin" else _LINUX
    return Clocks(*(time.clock_gettime(getattr(time, name)) for name in pair))


def slept_s(before: Clocks, after: Clocks) -> float:
    """Return the seconds that the machine slept between two readings; 0 for less than NAP_S."""
    slept = (after.all - before.all) - (after.awake - before.awake)
    return slept if slept >= NAP_S else 0.0


class KeepAwake:
    """Process that keeps this Mac awake while it is needed."""

    def __init__(self, command: Sequence[str] = CAFFEINATE) -> None:
        self._command = (*command, "-w", str(os.getpid()))  # it ends with this agent, however that ends
        self._process: asyncio.subprocess.Process | None = None
        self._failed = False

    async def hold(self, wanted: bool) -> None:
        """Start the process or end it, as needed. A failure is logged once."""
        process = self._process
        if process is not None and process.returncode is not None:
            log.warning("%s ended with %d: this Mac may fall asleep", self._command[0], process.returncode)
            self._process, self._failed = None, True
        if wanted and self._process is None and not self._failed:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
                )
            except OSError as error:
                self._failed = True
                log.warning("this Mac may fall asleep while it serves: %s: %s", self._command[0], error)
        elif not wanted:
            self._failed = False
            await self.close()

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def watch_sleep(
    woke: Callable[[float], None],
    serves: Callable[[], bool],
    keep_awake: KeepAwake | None,
    read: Callable[[], Clocks] = clocks,
) -> None:
    """Watch for sleep until cancelled.

    `woke` is called with the seconds that this Mac slept. `keep_awake` keeps it from sleeping while `serves`
    returns True.
    """
    before = read()
    try:
        while True:
            await asyncio.sleep(TICK_S)
            now = read()
            if slept := slept_s(before, now):
                log.warning("this Mac slept for %.0f s", slept)
                woke(slept)
            before = now
            if keep_awake is not None:
                await keep_awake.hold(serves())
    finally:
        if keep_awake is not None:
            await keep_awake.close()


# --- wired memory ----------------------------------------------------------------------------------------


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
    """Memory of this machine that ranks may wire, and that they left wired. Tests replace `look`.

    gpu_bytes  what Metal recommends for the GPU, as a rank has reported; 0 until one has
    left       what ended ranks left wired since the machine started; None until that is known
    """

    def __init__(self, look: Callable[[], int | None] = wired_bytes) -> None:
        self.look = look
        self.gpu_bytes = 0
        self.left: int | None = None
        self._seen = 0  #: Bytes that were wired when `stranded_bytes` last looked, every few seconds.
        self._floor = 0  #: Bytes that were wired without what is left; 0 if that is not known.
        self._assumed = 0  #: Bytes of ranks that were killed in a collective, until they can be measured.
        self._ranks = 0
        self._before: int | None = None
        self._held = 0

    def began(self) -> None:
        """Note that a rank process has started and holds nothing yet."""
        if not self._ranks:
            self._before, self._held = self.look(), 0
        self._ranks += 1

    async def ended(self, epoch: int, held: int, *, stuck: bool = False) -> int:
        """Note that a rank process that held so many bytes is gone. After the last one, log what is left.

        `stuck`: it was killed in a collective of JACCL, which is said to strand what it holds. While others
        run, that is assumed, but for what came back since the last look; then only what is measured counts.
        Returns the bytes that may be stranded.
        """
        self._ranks -= 1
        self._held += held
        before = self._before
        if before is None:
            return 0
        if self._ranks:
            came_back = max(self._seen - (self.look() or 0), 0)
            assumed = held - came_back if stuck and held - came_back > LITTLE_BYTES else 0
            self._assumed += assumed
            return assumed
        self._assumed = 0
        if (held := self._held) <= LITTLE_BYTES:
            return 0
        for _ in range(LOOKS):
            if not (left := left_bytes(before, self.look() or 0, held)):
                return 0
            if self._held != held:  # others have begun, and wire memory, too
                break
            await asyncio.sleep(LOOK_S)
        left_before = self.left or 0
        self.left = min(left_before + left, self.look() or 0)
        self._floor = max(before - left_before, 0)
        log.warning("epoch %d: %s", epoch, self.summary(), extra={"epoch": epoch})
        return left

    def stranded_bytes(self) -> int:
        """Return the bytes that only a restart gives back. Forget them once less is wired: they came back."""
        stranded, wired = (self.left or 0) + self._assumed, self.look()
        self._seen = wired or 0
        if wired is not None and wired < (self._floor + stranded // 2 if self._floor else stranded):
            self.left = self._assumed = stranded = 0
        return stranded

    def summary(self) -> str:
        """Return the memory that ended epochs left wired, for users; empty for none."""
        stranded = self.stranded_bytes()
        if not stranded:
            return ""
        stayed = "may have stayed" if self._assumed else "stayed"
        return (
            f"{stranded / GB:.1f} GB {stayed} wired after ranks of this Mac ended; only a restart of the Mac "
            "gives them back"
        )


HERE = WiredMemory()  #: Wired memory of this machine.

"""Sleep of this Mac. Its agent's timers use a clock that stops meanwhile; a second clock shows how long.

A Mac that serves stays awake, unless a setting allows sleep.
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

#: Prevents idle sleep while it runs. A Mac still sleeps when its lid is closed.
CAFFEINATE = ("/usr/bin/caffeinate", "-i")

_MACS, _LINUX = ("CLOCK_UPTIME_RAW", "CLOCK_MONOTONIC"), ("CLOCK_MONOTONIC", "CLOCK_BOOTTIME")


@dataclass(frozen=True, slots=True)
class Clocks:
    """Readings in seconds: `awake` stops while the machine sleeps, `all` does not."""

    awake: float
    all: float


def clocks() -> Clocks:
    pair = _MACS if sys.platform == "darwin" else _LINUX
    return Clocks(*(time.clock_gettime(getattr(time, name)) for name in pair))


def slept_s(before: Clocks, after: Clocks) -> float:
    """Return the seconds of sleep between two readings; 0 for less than NAP_S."""
    slept = (after.all - before.all) - (after.awake - before.awake)
    return slept if slept >= NAP_S else 0.0


class KeepAwake:
    """A process that keeps this Mac awake."""

    def __init__(self, command: Sequence[str] = CAFFEINATE) -> None:
        self._command = (*command, "-w", str(os.getpid()))  # it ends with this agent, however that ends
        self._process: asyncio.subprocess.Process | None = None
        self._failed = False

    async def hold(self, wanted: bool) -> None:
        """Start or end the process, as needed. Logs a failure once."""
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
    """Call `woke` with the seconds of each sleep. Hold `keep_awake` while this Mac `serves`."""
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

"""A Mac's sleep: noticed when it is over, and held off while this Mac serves.

While a Mac sleeps its agent stands still and the others go on without it. Its own timers do not know: they
run on a clock that stands still as well. A second clock, which goes on, tells how long it was. When nothing
is served a Mac may sleep as its owner wishes; what is served keeps it awake, unless it was told otherwise.
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
NAP_S = 2.0
"""Less than this, and nobody has missed this Mac."""

CAFFEINATE = ("/usr/bin/caffeinate", "-i")
"""Keeps a Mac from sleeping by itself for as long as the command runs; a closed lid still makes it sleep."""


_PAIRS = {
    "darwin": ("CLOCK_UPTIME_RAW", "CLOCK_MONOTONIC"),
    "linux": ("CLOCK_MONOTONIC", "CLOCK_BOOTTIME"),
}
"""On each system a clock that stands still while it sleeps, and one that goes on."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Two clocks at one moment, in seconds: one stands still while the machine sleeps, one goes on."""

    awake: float
    all: float


def clocks() -> Clocks:
    """This machine's. Where there is no such pair, nothing ever sleeps."""
    pair = _PAIRS.get(sys.platform)
    if pair is None:
        return Clocks(time.monotonic(), time.monotonic())
    awake, all_ = (time.clock_gettime(getattr(time, name)) for name in pair)
    return Clocks(awake, all_)


def slept_s(before: Clocks, after: Clocks) -> float:
    """How long the machine slept between two moments; 0 for what nobody has missed."""
    slept = (after.all - before.all) - (after.awake - before.awake)
    return slept if slept >= NAP_S else 0.0


class KeepAwake:
    """A process that keeps this Mac awake, while there is reason to."""

    def __init__(self, command: Sequence[str] = CAFFEINATE) -> None:
        self._command = (*command, "-w", str(os.getpid()))  # it ends with this agent, however that ends
        self._process: asyncio.subprocess.Process | None = None
        self._failed = False

    async def hold(self, wanted: bool) -> None:
        """Start the process or end it, as is needed. That there is none is said once."""
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
        """Let the Mac sleep as it likes."""
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
    """Until cancelled. `woke` is called with the seconds that this Mac slept; `serves` says whether it is
    needed, and `keep_awake` then keeps it from sleeping."""
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

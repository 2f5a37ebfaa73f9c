"""Watchdog that ends an agent whose event loop hangs, so that launchd or systemd starts another one.

Such an agent sends no heartbeat and no reply, while its process looks alive. A thread counts its own periods
without a sign of the loop. It needs no clock: a Mac that sleeps, or a stopped process, counts none. A call
into C that keeps the interpreter's lock stops this thread, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import tempfile
import threading
from collections.abc import Iterator

from ..errors import WEDGED_STATUS

log = logging.getLogger(__name__)

TURN_S = 1.0
TURNS = 30  # periods without any sign of the loop
REPORT_S = 5.0  # seconds for the log, which the loop itself may hold


@contextlib.contextmanager
def watched_loop() -> Iterator[None]:
    """Watch the running loop until the context ends. Ends the process with WEDGED_STATUS."""
    over, signs = threading.Event(), threading.Event()
    turn_s, turns = TURN_S, TURNS

    async def give_signs() -> None:
        while True:
            signs.set()
            await asyncio.sleep(turn_s)

    def watch() -> None:
        silent = 0
        while not over.wait(turn_s):
            silent = 0 if signs.is_set() else silent + 1
            signs.clear()
            if silent >= turns:
                end()

    signing = asyncio.ensure_future(give_signs())
    threading.Thread(target=watch, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signing.cancel()


def end() -> None:
    """Log the stack of each thread, and end the process."""
    report = threading.Thread(target=_report, daemon=True)
    report.start()
    report.join(REPORT_S)
    os._exit(WEDGED_STATUS)


def _report() -> None:
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().splitlines()
    log.critical("the event loop stood still for %g s, so this agent ends; its threads:", TURNS * TURN_S)
    for line in lines:
        log.critical("%s", line)

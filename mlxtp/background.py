"""Work of an event loop beside its owner: tasks that are kept until they end, pauses, and a watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import WEDGED_STATUS

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Called with a task that ended in an error, and the error.
Failed = Callable[[asyncio.Task[Any], BaseException], None]


def log_failure(task: asyncio.Task[Any], error: BaseException) -> None:
    """Log the error of a task under the task's name."""
    log.error("%s failed", task.get_name(), exc_info=error)


def failure_of(act: Callable[..., object], *given: object) -> Exception | None:
    """Call a function with what another Mac sent. Return the error that it raised, of any type."""
    try:
        act(*given)
    except Exception as error:  # noqa: BLE001 - a boundary: the caller logs it and ends the link
        return error
    return None


class Background:
    """Tasks of one owner. `failed` gets the error of each task at once, so that no error is lost."""

    def __init__(self, failed: Failed = log_failure) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def tasks(self) -> frozenset[asyncio.Task[Any]]:
        """Tasks that have not ended."""
        return frozenset(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` in a task. `name` begins the line of the log about its failure."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(task, error)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double with each failure, from `first_s` to `most_s`. Pure."""

    first_s: float
    most_s: float

    def after(self, failures: int) -> float:
        """Return the seconds to wait after so many failures before the last one."""
        return min(self.first_s * 2.0 ** min(failures, 64), self.most_s)


# --- watchdog of an event loop --------------------------------------------------------------------------

TURN_S = 1.0
TURNS = 30  # periods without any sign of the loop
REPORT_S = 5.0  # seconds for the log, which the loop itself may hold


@contextlib.contextmanager
def watched_loop() -> Iterator[None]:
    """Watch the running loop until the context ends. Ends the process with WEDGED_STATUS if the loop hangs.

    Such an agent sends no heartbeat and no reply, while its process looks alive; launchd or systemd starts
    another one. A thread counts its own periods without a sign of the loop. It needs no clock: a Mac that
    sleeps, or a stopped process, counts none. A call into C that keeps the interpreter's lock stops this
    thread, too.
    """
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
                end_process()

    signing = asyncio.ensure_future(give_signs())
    threading.Thread(target=watch, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signing.cancel()


def end_process() -> None:
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

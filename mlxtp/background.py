"""Background work of an event loop: tasks that are kept until they end, pauses, and a watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Called with a failed task and its error.
Failed = Callable[[asyncio.Task[Any], BaseException], None]
_MOST_LINES = 64


def log_failure(task: asyncio.Task[Any], error: BaseException) -> None:
    log.error("%s failed", task.get_name(), exc_info=error)


def failure_of(act: Callable[..., object], *given: object) -> Exception | None:
    """Call a function with input from another Mac. Return the error it raised, of any type."""
    try:
        act(*given)
    except Exception as error:  # noqa: BLE001 - a boundary: the caller logs it and ends the link
        return error
    return None


class RepeatFilter:
    """Filter of log lines: it passes none again within `seconds`, and at most 64 in that time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._logged: dict[str, float] = {}

    def passes(self, line: str) -> bool:
        now = time.monotonic()
        self._logged = {each: at for each, at in self._logged.items() if now - at < self._seconds}
        passes = line not in self._logged and len(self._logged) < _MOST_LINES
        self._logged |= {line: now} if passes else {}
        return passes


class Background:
    """Tasks of one owner. `failed` gets each task's error at once, so that none is lost."""

    def __init__(self, failed: Failed = log_failure) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def tasks(self) -> frozenset[asyncio.Task[Any]]:
        return frozenset(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` in a task. Its failure is logged under `name`."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
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
        return min(self.first_s * 2.0 ** min(failures, 64), self.most_s)


# --- watchdog of an event loop --------------------------------------------------------------------------

# A process of its own counts periods without a sign of the loop: a call into C that holds the interpreter's
# lock stops every thread here. It uses no clock, so a sleeping Mac counts nothing.
#
# `python -m mlxtp.background BEATS STACKS PID TURNS TURN_S REPORT_S FORMAT FILE` reads the loop's signs from
# the pipe BEATS, and ends when that closes. At SIGUSR1 the agent writes its stacks to the pipe STACKS, and
# needs no disk.

TURN_S = 1.0
TURNS = 30  # periods without a sign until the agent is killed
REPORT_S = 5.0  # seconds for the agent's stacks
_QUIET_S = 0.2  # seconds without more stacks until they count as complete
_MOST_BYTES = 1 << 20  # of stacks, in case another process requests them endlessly
_JSON = {"time": "%(asctime)s", "level": "critical", "logger": "%(name)s", "message": "%(message)s"}


@contextlib.contextmanager
def watched_loop(log_format: str = "text", log_file: str = "") -> Iterator[None]:
    """Watch the running loop until the context ends. Kills this process (137) if the loop hangs.

    A hung agent looks alive but sends nothing; once it is dead, launchd or systemd starts another. The log
    gets its threads' stacks, which `faulthandler` writes without the interpreter's lock.
    """
    turn_s, (beats, beating), (stacks, writing) = TURN_S, os.pipe(), os.pipe()
    os.set_blocking(beating, False)
    faulthandler.register(signal.SIGUSR1, writing)
    numbers = (beats, stacks, os.getpid(), TURNS, turn_s, REPORT_S)
    command = [sys.executable, "-m", "mlxtp.background", *map(str, numbers), log_format, log_file]
    nothing = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=nothing, stdout=nothing, pass_fds=(beats, stacks)) as watcher:
        os.close(beats)
        os.close(stacks)  # so that a write fails, instead of hanging, once the watcher is gone

        async def give_signs() -> None:
            while True:
                with contextlib.suppress(OSError):  # the watcher was stopped or killed
                    os.write(beating, b".")
                await asyncio.sleep(turn_s)

        signing = asyncio.ensure_future(give_signs())
        try:
            yield
        finally:
            signing.cancel()
            watcher.kill()
            os.close(beating)
            faulthandler.unregister(signal.SIGUSR1)
            os.close(writing)


def main(arguments: Sequence[str]) -> None:
    """Watch an agent from outside until it has ended, or end it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the agent
        signal.signal(number, signal.SIG_IGN)
    beats, stacks, pid, turns = map(int, arguments[:4])
    turn_s, report_s = map(float, arguments[4:6])
    silent = 0
    while silent < turns:
        ready = select.select([beats, stacks], [], [], turn_s)[0]
        if stacks in ready:  # another process sent SIGUSR1; a full pipe would block the agent
            os.read(stacks, 65536)
        if beats in ready:
            if not os.read(beats, 4096):
                return
            silent = 0
        if not ready and not _is_stopped(pid):
            silent += 1
    with contextlib.suppress(ProcessLookupError):
        stacks_there = _stacks_of(pid, stacks, report_s)
        threading.Timer(report_s, os.kill, [pid, signal.SIGKILL]).start()  # writing the log may hang too
        said = f"the event loop stood still for {turns * turn_s:g} s, so this agent ends; its threads:"
        _log(arguments[6], arguments[7], [said, *stacks_there])
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _stacks_of(pid: int, stacks: int, report_s: float) -> list[str]:
    """Return the stacks that `faulthandler` writes in a process; none after `report_s`."""
    os.kill(pid, signal.SIGUSR1)
    found, wait_s = b"", report_s
    while len(found) < _MOST_BYTES and select.select([stacks], [], [], wait_s)[0]:
        if not (more := os.read(stacks, 65536)):
            break
        found, wait_s = found + more, _QUIET_S
    return found.decode(errors="replace").splitlines()


def _is_stopped(pid: int) -> bool:
    """Return True for a process that a signal or debugger has stopped, or that is gone."""
    import psutil  # late, because it is rarely needed

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return True


def _log(log_format: str, log_file: str, lines: Sequence[str]) -> None:
    """Append lines to the agent's log: its file, else standard error."""
    plain = "%(asctime)s %(levelname)s %(message)s"
    where: dict[str, Any] = {"filename": log_file} if log_file else {"stream": sys.stderr}
    if log_format == "json":
        logging.Formatter.converter = time.gmtime
        plain, where["datefmt"] = json.dumps(_JSON), "%Y-%m-%dT%H:%M:%SZ"
        lines = [json.dumps(line)[1:-1] for line in lines]
    logging.basicConfig(format=plain, **where)
    for line in lines:
        log.critical("%s", line)


# --- the end of a process ---------------------------------------------------------------------------------

CLOSE_S = 13.0  #: Seconds for an agent to end: 10 s for ranks, the rest for clients.
LEAVE_S = 4.0  #: Seconds from the end of a drain to the end of an agent whose ranks have ended.
THREADS_S = 1.5  #: Seconds for its threads after that; some may never end.
_SAID_S = 0.5  # seconds before the end for a log line, which must not delay it


def end_within(seconds: float) -> None:
    """End this process with status 0 after `seconds`, even if its threads still work."""
    said = f"threads still work {seconds:.1f} s after the end was due; the agent ends without them"
    for timer in (threading.Timer(seconds - _SAID_S, log.warning, [said]), threading.Timer(seconds, _end)):
        timer.daemon = True
        timer.start()


def _end() -> None:
    import psutil

    try:
        for each in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if "mlxtp.text.renderer" in each.cmdline():  # it could work for minutes before it noticed
                    each.kill()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])

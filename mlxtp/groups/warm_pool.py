"""Source of this machine's rank processes: new ones, or warm ones that were started ahead.

Imports take nearly all of the time until a rank process sends its Hello. A warm process has done them, blocks
on its socket, and has no epoch, group or model until the agent hands it over (`wire/rank_process.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..background import Background, Backoff
from ..wire.messages import Pong
from ..wire.rank_process import READY, TAKEN, hand_over, without_secrets

log = logging.getLogger(__name__)

#: Seconds that a rank with its model must have been idle before a warm process's imports may disturb it.
QUIET_S = 1.0
BUSY_S = 30.0  #: Seconds after it got its model until a rank that is never idle gets its warm process.
MAX_AGE_S = 86_400.0  #: Seconds; an older one has perhaps been swapped out, and is replaced.
UNUSED_S = 600.0  #: Seconds without any rank on this machine after which warm processes are ended.
IMPORT_S = 60.0
END_S = 0.5
ANSWER_S = 1.0  #: Seconds; a waiting warm process replies at once, unless it is stopped, or its machine is.
RETRY = Backoff(1.0, 600.0)  #: Pauses after warm processes that ended unused.
#: Bytes that a pipe holds each way: minutes of tokens while the agent stands still. macOS has 8 KiB.
PIPE_BYTES = 1 << 20
_STDERR_FD = 2


class WarmPoolPolicy:
    """Decision on when to start a warm process. Pure."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._loaded_at: float | None = None
        self._failures = 0
        self._not_before = 0.0

    def received_pong(self, pong: Pong, now: float, *, spares: int, importing: int) -> bool:
        """Take in a Pong of a rank of this machine. Return True to start one warm process now."""
        if not pong.model:
            self._loaded_at = None
            return False
        if self._loaded_at is None:
            self._loaded_at = now
        quiet = pong.phase == "idle" and not pong.in_flight and pong.phase_s >= QUIET_S
        due = quiet or now - self._loaded_at >= BUSY_S
        return due and now >= self._not_before and spares < self._wanted and not importing

    def lost(self, now: float) -> None:
        """Note that one ended unused: the next one is started later each time."""
        self._not_before = now + RETRY.after(self._failures)
        self._failures += 1

    def used(self) -> None:
        self._failures = 0


@dataclass(frozen=True, slots=True)
class Started:
    """Rank process that will send its Hello, and the agent's end of its pipe."""

    process: asyncio.subprocess.Process
    pipe: socket.socket
    lines: WorkerOutput | None = None  #: Its output, unless that goes to the agent's own standard error.


@dataclass(slots=True, eq=False)
class _WarmRank:
    """Warm process. `fd` is its end of its pipe, as the process numbers it."""

    process: asyncio.subprocess.Process
    pipe: socket.socket
    fd: int
    born_at: float
    lines: WorkerOutput | None = None
    ready: bool = False
    watch: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"warm process {self.process.pid}"


class WarmPool:
    """Keeps `wanted` warm processes and hands them out.

    `command` starts a worker in `folder`, that of all epochs.

    `heard` gets the output of rank processes, line by line. Without it they write to the agent's standard
    error.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path = Path(),
        wanted: int = 0,
        heard: Heard | None = None,
    ) -> None:
        self._command = tuple(command)
        self._folder = folder
        self._heard = heard
        self._lines: list[WorkerOutput] = []
        self._policy = WarmPoolPolicy(wanted)
        self._warm: list[_WarmRank] = []
        self._starting = False
        self._closed = False
        self._unused: asyncio.TimerHandle | None = None
        self._background = Background()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all processes that became no rank."""
        self._closed = True
        if self._unused is not None:
            self._unused.cancel()
        self._drop(self._warm)
        while tasks := self._background.tasks:
            await asyncio.wait(tasks)
        for lines in self._lines:
            lines.close()

    @property
    def ready(self) -> tuple[int, ...]:
        return tuple(spare.process.pid for spare in self._warm if spare.ready)

    # --- handing out ---------------------------------------------------------------------------------

    async def start(self, arguments: Sequence[str], listener: socket.socket | None = None) -> Started:
        """Return a rank process with these arguments, and `listener` for its decode links. Raises OSError."""
        while waiting := [spare for spare in self._warm if spare.ready]:
            if started := await self._hand_over(waiting[0], arguments, listener):
                return started
        ours, theirs = new_pipe()
        with contextlib.closing(theirs):
            fds = [theirs.fileno()]
            arguments = [*arguments, "--pipe-fd", str(theirs.fileno())]
            if listener is not None:
                fds.append(listener.fileno())
                arguments += ["--listen-fd", str(listener.fileno())]
            return await self._spawn(arguments, fds, ours)

    async def _hand_over(
        self, spare: _WarmRank, arguments: Sequence[str], listener: socket.socket | None
    ) -> Started | None:
        """Turn a warm process into a rank. Return None, and end the process, when it does not reply."""
        self._warm.remove(spare)
        assert spare.watch is not None
        spare.watch.cancel()
        answer = b""
        try:
            hand_over(spare.pipe, [*arguments, "--pipe-fd", str(spare.fd)], listener)
            async with asyncio.timeout(ANSWER_S):
                answer = await asyncio.get_running_loop().sock_recv(spare.pipe, 1)
        except (OSError, TimeoutError) as error:
            log.warning("%s does not reply: %s", spare, error or "it is late")
        finally:
            if answer != TAKEN:  # also when the agent stops meanwhile
                self._policy.lost(time.monotonic())
                self._background.start(_end(spare), f"ending {spare}")
        if answer != TAKEN:
            return None
        self._policy.used()
        return Started(spare.process, spare.pipe, spare.lines)

    # --- keeping some --------------------------------------------------------------------------------

    def received_pong(self, pong: Pong) -> None:
        """Take in a Pong of a rank of this machine. They come about twice a second, so no timer is needed."""
        if self._closed:
            return
        now = time.monotonic()
        self._drop([spare for spare in self._warm if now - spare.born_at > MAX_AGE_S])
        importing = self._starting + sum(not spare.ready for spare in self._warm)
        if self._policy.received_pong(pong, now, spares=len(self._warm), importing=importing):
            self._starting = True
            self._background.start(self._start_one(), "starting a warm process")
        if self._warm or self._starting:
            if self._unused is not None:
                self._unused.cancel()
            self._unused = asyncio.get_running_loop().call_later(UNUSED_S, self._drop, self._warm)

    async def _start_one(self) -> None:
        try:
            ours, theirs = new_pipe()
            with contextlib.closing(theirs):
                ours.setblocking(False)
                fd = theirs.fileno()
                arguments = ["--spare-fd", str(fd), "--folder", str(self._folder)]
                started = await self._spawn(arguments, [fd], ours)
        except OSError as error:
            log.warning("no warm process could be started: %s", error)
            self._policy.lost(time.monotonic())
            return
        finally:
            self._starting = False
        spare = _WarmRank(started.process, ours, fd, time.monotonic(), started.lines)
        if self._closed:
            await _end(spare)
            return
        self._warm.append(spare)
        spare.watch = self._background.start(self._watch(spare), f"watching {spare}")

    async def _spawn(self, arguments: Sequence[str], fds: Sequence[int], ours: socket.socket) -> Started:
        """Start a process that inherits `fds`. Closes `ours` when it cannot. Raises OSError."""
        lines: WorkerOutput | None = None
        try:
            lines = WorkerOutput(self._heard) if self._heard is not None else None
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *arguments,
                pass_fds=fds,
                env=without_secrets(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                # stdout is the command's own: its JSON must stay JSON
                stdout=_STDERR_FD if lines is None else lines.descriptor,
                stderr=None if lines is None else lines.descriptor,
                # A terminal sends Ctrl-C to the whole group; the agent ends its processes in order.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            if lines is not None:
                lines.drop()
            raise
        if lines is not None:
            lines.started()
            self._lines = [each for each in self._lines if each.open] + [lines]
        return Started(process, ours, lines)

    async def _watch(self, spare: _WarmRank) -> None:
        """Watch a warm process until it ends or becomes a rank."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(IMPORT_S):
                spare.ready = await asyncio.get_running_loop().sock_recv(spare.pipe, 1) == READY
            if spare.ready:
                await spare.process.wait()
        self._warm.remove(spare)
        self._policy.lost(time.monotonic())
        await _end(spare)
        log.warning("%s ended with %s", spare, spare.process.returncode)

    def _drop(self, spares: Sequence[_WarmRank]) -> None:
        for spare in list(spares):
            self._warm.remove(spare)
            assert spare.watch is not None
            spare.watch.cancel()
            self._background.start(_end(spare), f"ending {spare}")


def new_pipe() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a pipe to a rank, with buffers of PIPE_BYTES as far as the system allows."""
    ends = socket.socketpair()
    for end in ends:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):  # more than kern.ipc.maxsockbuf
                end.setsockopt(socket.SOL_SOCKET, buffer, PIPE_BYTES)
    return ends


async def _end(spare: _WarmRank) -> None:
    """End a warm process: it holds nothing that needs an orderly end."""
    spare.pipe.close()  # this ends it, if it runs at all
    waiting = asyncio.ensure_future(spare.process.wait())
    await asyncio.wait({waiting}, timeout=END_S)
    if spare.process.returncode is None:  # a signal to an ending process would take its status along
        with contextlib.suppress(ProcessLookupError):
            spare.process.kill()
        await waiting


# --- output of rank processes ----------------------------------------------------------------------------

# A rank reports important things in frames. Its output is that of libraries, and Python's last traceback.
# In a JSON log these lines must not break up its own, and a log file must have them. Otherwise they go to the
# agent's standard error.

rank_log = logging.getLogger("mlxtp.rank")

MAX_LINE = 16 * 1024  #: Bytes; a longer line is cut into several.
_READ_BYTES = 64 * 1024

#: Gets a line, and its epoch and rank; a warm process has neither.
Heard = Callable[[str, Mapping[str, int]], None]


def log_lines(line: str, about: Mapping[str, int]) -> None:
    """Log a line of a rank process as a warning: something is wrong, or a library warns."""
    rank_log.warning("%s", line, extra=dict(about))


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
        try:
            data = os.read(self._ours, _READ_BYTES)
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

"""Source of this machine's rank processes: new processes, or warm processes that were started ahead.

Imports take nearly all of the time until a rank process sends its Hello. A warm process has done them, and
waits without epoch, group or model until the agent makes it a rank (`wire/rank_process.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ..background import Background, Backoff
from ..wire.messages import Pong
from ..wire.rank_process import READY, TAKEN, hand_over, without_secrets

log = logging.getLogger(__name__)

QUIET_S = 1.0  #: Seconds that a rank must be idle before a warm process's imports may disturb it.
BUSY_S = 30.0  #: Seconds that a busy rank with its model delays its warm process at most.
MAX_AGE_S = 86_400.0  #: Seconds until a warm process is replaced: it may have been swapped out.
UNUSED_S = 600.0  #: Seconds without any rank on this machine until warm processes end.
IMPORT_S = 60.0
END_S = 0.5
ANSWER_S = 1.0  #: Seconds for a warm process to reply; it does so at once unless it is stopped.
RETRY = Backoff(1.0, 600.0)  #: Pauses after warm processes that ended unused.
PIPE_BYTES = 1 << 20  #: Bytes that a pipe holds: minutes of tokens for a busy agent. macOS has 8 KiB.
_STDERR_FD = 2


class WarmPoolPolicy:
    """Decision on when to start a warm process: pure."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._loaded_at: float | None = None
        self._failures = 0
        self._not_before = 0.0

    def received_pong(self, pong: Pong, now: float, *, spares: int, importing: int) -> bool:
        """Return True to start a warm process now, at a Pong of a rank of this machine."""
        if not pong.model:
            self._loaded_at = None
            return False
        if self._loaded_at is None:
            self._loaded_at = now
        quiet = pong.phase == "idle" and not pong.in_flight and pong.phase_s >= QUIET_S
        due = quiet or now - self._loaded_at >= BUSY_S
        return due and now >= self._not_before and spares < self._wanted and not importing

    def lost(self, now: float) -> None:
        """Note that a warm process ended unused: the pause before the next grows."""
        self._not_before = now + RETRY.after(self._failures)
        self._failures += 1

    def used(self) -> None:
        self._failures = 0


@dataclass(slots=True, eq=False)
class Started:
    """Rank process that will send its Hello or, when warm, wait for an epoch once it is `ready`."""

    process: asyncio.subprocess.Process
    pipe: socket.socket  #: The agent's end.
    fd: int  #: The process's end, as it numbers it.
    lines: WorkerOutput | None  #: Its output; None: the agent's standard error.
    born_at: float = field(default_factory=time.monotonic)
    ready: bool = False
    watch: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"warm process {self.process.pid}"


class WarmPool:
    """Keeps `wanted` warm processes, which `command` starts in `folder` (for all epochs), and hands them out.
    `heard` gets each line of rank processes' output, by default the agent's standard error.
    """

    def __init__(
        self, command: Sequence[str], folder: Path = Path(), wanted: int = 0, heard: Heard | None = None
    ) -> None:
        self._command = tuple(command)
        self._folder = folder
        self._heard = heard
        self._lines: list[WorkerOutput] = []
        self._policy = WarmPoolPolicy(wanted)
        self._warm: list[Started] = []
        self._starting = False
        self._closed = False
        self._unused: asyncio.TimerHandle | None = None
        self._background = Background()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the processes that have not become ranks."""
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
        """Start a rank process with these arguments, and `listener` for decode links. Raises OSError."""
        while waiting := [spare for spare in self._warm if spare.ready]:
            if await self._hand_over(waiting[0], arguments, listener):
                return waiting[0]
        return await self._spawn("--pipe-fd", arguments, listener)

    async def _hand_over(
        self, spare: Started, arguments: Sequence[str], listener: socket.socket | None
    ) -> bool:
        """Turn a warm process into a rank. If it does not reply, end it and return False."""
        self._take(spare)
        answer = b""
        try:
            hand_over(spare.pipe, [*arguments, "--pipe-fd", str(spare.fd)], listener)
            async with asyncio.timeout(ANSWER_S):
                answer = await asyncio.get_running_loop().sock_recv(spare.pipe, 1)
        except (OSError, TimeoutError) as error:
            log.warning("%s does not reply: %s", spare, str(error) or "it is late")
        finally:
            if answer == TAKEN:
                self._policy.used()
            else:  # also if the agent stops meanwhile
                self._policy.lost(time.monotonic())
                self._background.start(_end(spare), f"ending {spare}")
        return answer == TAKEN

    async def _spawn(
        self, option: str, arguments: Sequence[str], listener: socket.socket | None = None
    ) -> Started:
        """Start a process, with its end of a new pipe in `option`. Raises OSError."""
        ours, theirs = new_pipe()
        with theirs:
            given = [option, str(theirs.fileno())]
            if listener is not None:
                given += ["--listen-fd", str(listener.fileno())]
            lines = WorkerOutput(self._heard) if self._heard is not None else None
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    *given,
                    *arguments,
                    pass_fds=[*map(int, given[1::2])],
                    env=without_secrets(os.environ),
                    stdin=asyncio.subprocess.DEVNULL,
                    # stdout is the command's own: its JSON must stay JSON
                    stdout=_STDERR_FD if lines is None else lines.descriptor,
                    stderr=None if lines is None else lines.descriptor,
                    # Ctrl-C in a terminal reaches the agent alone, which ends its processes in order.
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
            finally:
                if lines is not None:
                    os.close(lines.descriptor)
            if lines is not None:
                self._lines = [each for each in self._lines if each.open] + [lines]
            return Started(process, ours, theirs.fileno(), lines)

    # --- keeping some --------------------------------------------------------------------------------

    def received_pong(self, pong: Pong) -> None:
        """Take in a Pong of a rank of this machine; they arrive twice a second, so no timer is needed."""
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
            spare = await self._spawn("--spare-fd", ["--folder", str(self._folder)])
        except OSError as error:
            log.warning("no warm process could be started: %s", error)
            self._policy.lost(time.monotonic())
            return
        finally:
            self._starting = False
        spare.pipe.setblocking(False)
        self._warm.append(spare)
        spare.watch = self._background.start(self._watch(spare), f"watching {spare}")
        if self._closed:
            self._drop([spare])

    async def _watch(self, spare: Started) -> None:
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

    def _drop(self, spares: Sequence[Started]) -> None:
        for spare in list(spares):
            self._take(spare)
            self._background.start(_end(spare), f"ending {spare}")

    def _take(self, spare: Started) -> None:
        self._warm.remove(spare)
        assert spare.watch is not None
        spare.watch.cancel()


def new_pipe() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a pipe to a rank, with buffers of PIPE_BYTES if the system allows."""
    ends = socket.socketpair()
    for end in ends:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):  # more than kern.ipc.maxsockbuf
                end.setsockopt(socket.SOL_SOCKET, buffer, PIPE_BYTES)
    return ends


async def _end(spare: Started) -> None:
    """End a warm process: it holds nothing that needs an orderly end."""
    spare.pipe.close()  # this ends it, if it runs at all
    waiting = asyncio.ensure_future(spare.process.wait())
    await asyncio.wait({waiting}, timeout=END_S)
    if spare.process.returncode is None:  # a signal to an ending process would lose its status
        with contextlib.suppress(ProcessLookupError):
            spare.process.kill()
        await waiting


# --- output of rank processes ----------------------------------------------------------------------------

# A rank reports in frames; its output is libraries' text, and Python's last traceback. These lines go to the
# log, so that a log file has them, and a JSON log stays JSON.

rank_log = logging.getLogger("mlxtp.rank")

MAX_LINE = 16 * 1024  #: Bytes; longer lines are split.
_READ_BYTES = 64 * 1024

Heard = Callable[[str, Mapping[str, int]], None]  #: Gets a line, and its epoch and rank, if any.


def log_lines(line: str, about: Mapping[str, int]) -> None:
    """Log a line of a rank process as a warning."""
    rank_log.warning("%s", line, extra=dict(about))


class WorkerOutput:
    """Pipe for the output of one process, which writes to `descriptor`. Needs a running loop. If the agent is
    busy and the system's buffer is full, the rank waits.
    """

    def __init__(self, heard: Heard) -> None:
        self.about: Mapping[str, int] = {}  #: Epoch and rank, once the process has them.
        self.open = True  #: True while output may still come.
        self._heard = heard
        self._rest = b""
        self._ours, self.descriptor = os.pipe()
        os.set_blocking(self._ours, False)
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def close(self) -> None:
        """Read the remaining output, and close."""
        while self.open and self._read():
            pass
        self._end()

    def _read(self) -> bool:
        """Return True if there was output. Close once the process and all its children are gone."""
        try:
            data = os.read(self._ours, _READ_BYTES)
        except BlockingIOError:
            return False
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            whole.append(self._rest)
            self._rest = b""
        for line in whole:
            self._log(line)
        if not data:
            self._end()
        return bool(data)

    def _end(self) -> None:
        if self.open:
            self.open = False
            asyncio.get_running_loop().remove_reader(self._ours)
            self._log(self._rest)
            os.close(self._ours)

    def _log(self, line: bytes) -> None:
        for start in range(0, len(line), MAX_LINE):
            if text := line[start : start + MAX_LINE].decode(errors="replace").rstrip():
                self._heard(text, self.about)

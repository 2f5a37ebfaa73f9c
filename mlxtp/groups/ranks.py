"""A rank of a group, driven by its agent: a process of this Mac, or one on another Mac."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from ..background import Background
from ..config import Settings
from ..diagnostics import failure_store
from ..diagnostics.failure_store import FailedEpoch, RankEnd, read_recording, recorder_memory
from ..errors import (
    Code,
    FailureReport,
    GroupError,
    LinkError,
    MlxtpError,
    ModelError,
    code_of_exit,
    is_disk_full,
    why_not_written,
)
from ..models.disk_cache import room_in
from ..wire.cluster_messages import (
    EndEpoch,
    EpochEnded,
    Prepare,
    Prepared,
    RankGathered,
    RankPong,
    RankSide,
    RankStarted,
    RankTrouble,
    StartRank,
)
from ..wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Bootstrap,
    Delta,
    Done,
    Error,
    Finished,
    Gathered,
    Hello,
    Message,
    Ping,
    Pong,
    Prefilled,
    RequestEvent,
    ScoredDelta,
    SessionEnd,
    Shutdown,
    SideChannel,
    Vectors,
    Welcome,
)
from ..wire.rank_process import ANSWER_S, FREE_S, patience_s
from ..wire.recording import decode, gave_back
from ..wire.session import LinkKind, LinkState, Side
from ..wire.session import Session as LinkProtocol
from ..wire.streams import StreamLink
from .boot_record import HERE, count_formation
from .health import exit_report, rank_in
from .warm_pool import WarmPool

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-m", "mlxtp.engine.worker")
END_GRACE_S = 4.0  #: Seconds to wait for another agent to end its rank.
EXIT_S = 1.0  #: seconds from the end of a pipe to its process's exit
_CLOSED = -1
MAX_REPORTS = 8  #: Reports kept of each rank: the first reports name the cause.

Worker = Sequence[str] | WarmPool  #: Source of rank processes: a command, or a pool of warm processes.

R = TypeVar("R", bound=Message)
#: Another agent's reports about a rank that it runs for this agent.
RankWord = Prepared | RankStarted | RankPong | RankTrouble | EpochEnded | RankSide


class Watcher(Protocol):
    """Receiver of a rank's messages and failures: rank 0's events in `emitted`, bytes for a round of JACCL's
    all-gather in `side`.
    """

    def received_pong(self, rank: int, pong: Pong) -> None: ...
    def report(self, report: FailureReport) -> None: ...
    def emitted(self, event: RequestEvent) -> None: ...
    def side(self, rank: int, message: SideChannel) -> None: ...


class RankProcess:
    """One rank process, from spawn to exit. `folder` is for the epoch's files."""

    def __init__(
        self,
        rank: int,
        epoch: int,
        folder: Path,
        watcher: Watcher,
        settings: Settings,
        *,
        worker: Worker = WORKER,
    ) -> None:
        self.rank = rank
        self._epoch = epoch
        self._watcher = watcher
        self._settings = settings
        self._warm_pool = worker if isinstance(worker, WarmPool) else WarmPool(worker)
        self._process: asyncio.subprocess.Process | None = None
        self._connection: StreamLink | None = None
        self._replies: asyncio.Queue[Message] = asyncio.Queue()
        self._background = Background(self._bug)
        self._ending = False
        self._leaves = asyncio.Event()  #: Set at its last message, or its exit.
        self._recording = folder / f"rank-{rank}.recording"
        self.recorder = _CLOSED  #: Descriptor of its recorder's memory.
        self._port: socket.socket | None = None  #: Bound to its port on MLX's ring; does not listen.
        self._end = RankEnd(rank)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def prepare(
        self, fabric: str, listener: socket.socket | None = None, *, secure: bool = True
    ) -> Prepared:
        """Start the process, and greet it. Raises OSError, and GroupError (NOT_AUTHENTIC).

        `fabric` is its address on MLX's ring, or empty. `listener` is for decode links, which use TLS if
        `secure`.
        """
        prepared = Prepared(self._epoch, self._hold_port(fabric) if fabric else "", "")
        folder = self._recording.parent
        args = ["--rank", str(self.rank), "--epoch", str(self._epoch), "--folder", str(folder)]
        if memory := recorder_memory(self._recording):
            self.recorder, self._recording = memory
            args += ["--recorder", str(self._recording)]
        args += ["--identity", str(self._settings.home / "identity")] * secure
        args += ["--keep-warm"] * self._settings.keep_warm
        started = await self._warm_pool.start(args, listener)
        self._process = started.process
        HERE.began()
        if started.lines is not None:
            started.lines.about = {"epoch": self._epoch, "rank": self.rank}
        kind = LinkKind.PIPE_LEADER if self.rank == 0 else LinkKind.PIPE
        protocol = LinkProtocol(kind, Side.UPPER, self._epoch)
        self._connection = await StreamLink.from_socket(started.pipe, protocol)
        self._background.start(self._read(self._connection), f"messages of rank {self.rank}")
        self._background.start(self._await_exit(self._process), f"end of rank {self.rank}")

        hello = await self.reply(Hello)
        self._remove_recording()  # it has the file open
        if hello.rank != self.rank or hello.version != PROTOCOL_VERSION:
            raise GroupError(f"rank {self.rank} greeted with {hello}", Code.NOT_AUTHENTIC)
        self.send(Welcome(PROTOCOL_VERSION, b""))
        return prepared

    def _hold_port(self, host: str) -> str:
        """Reserve a free port of `host` for MLX's ring (whose socket also has SO_REUSEPORT), and return its
        address. Raises OSError.
        """
        self._port = socket.socket()
        try:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                self._port.setsockopt(socket.SOL_SOCKET, option, 1)
            self._port.bind((host, 0))
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: {host}") from None
        return f"{host}:{self._port.getsockname()[1]}"

    async def join(self, bootstrap: Bootstrap) -> bool:
        """Send it its group and this Mac's folder for caches, and wait for its decode links. Return True if
        its MLX has JACCL.
        """
        disk = room_in(self._settings.home, self._settings.cache_disk)
        self._end.key, self._end.jaccl = bootstrap.epoch_key, bootstrap.backend == "jaccl"
        self.send(replace(bootstrap, disk_folder=disk.folder, disk_bytes=disk.bytes))
        done = await self.reply(Done)
        HERE.gpu_bytes = done.gpu_bytes or HERE.gpu_bytes
        return done.jaccl

    def forms(self, bootstrap: Bootstrap) -> None:
        """Count the RDMA domains that it is about to take, until it gives them back."""
        self._end.formed = self._settings.home, bootstrap
        count_formation(*self._end.formed)

    def send(self, message: Message) -> None:
        """Send a message. Raises LinkError if the process is gone."""
        assert self._connection is not None
        self._connection.send(message)

    async def reply(self, expected: type[R]) -> R:
        """Return the reply to a command. Raises the error that the rank reports instead."""
        reply = await self._replies.get()
        if isinstance(reply, Error):
            raise _error(reply.code, reply.detail)
        if not isinstance(reply, expected):
            raise GroupError(f"rank {self.rank} replied with {type(reply).__name__}", Code.OUT_OF_ORDER)
        return reply

    def tell(self, message: Ping | Gathered) -> None:
        with contextlib.suppress(MlxtpError):  # its reader reports it
            self.send(message)

    def beat(self) -> None:
        self._background.start(self._beat(), f"heartbeats of rank {self.rank}")

    async def _beat(self) -> None:
        while not self._ending:
            self.tell(Ping())
            await asyncio.sleep(self._settings.limits.heartbeat_s)

    async def shut_down(self) -> None:
        """End it in order, and wait for its last message. `kill` waits for its exit."""
        self._ending = True
        self.send(Shutdown())
        await self._leaves.wait()

    async def kill(self) -> RankEnd:
        """End the process: SIGTERM, then SIGKILL. Return how it ended. May be called again.

        A rank that replies to SIGTERM gets time to exit and free its memory. Otherwise it is wedged.
        """
        self._ending = True
        process, end = self._process, self._end
        if process is not None and process.returncode is None:
            waiting = asyncio.ensure_future(process.wait())
            if not self._leaves.is_set():
                end.asked_at = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    # process.terminate() may reap the process, and asyncio would lose its status.
                    os.kill(process.pid, signal.SIGTERM)
                if self._connection is not None:
                    self.tell(Ping())
                await asyncio.wait({waiting}, timeout=ANSWER_S)
            if self._leaves.is_set():
                step_us = max(end.pong.stats.step_us, end.pong.expected_us) if end.pong is not None else 0
                await asyncio.wait({waiting}, timeout=patience_s(step_us / 1e6) + FREE_S)
            if process.returncode is None:
                end.deaf = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                await process.wait()
        await self._background.close()
        for each in (self._connection, self._port):
            if each is not None:
                each.close()
        if self._connection is not None:
            await self._connection.wait_closed()  # reads the error of a pipe that broke
        if self.recorder != _CLOSED:
            end.ended_at = end.ended_at or time.monotonic()
            end.memory = read_recording(self.recorder)
            if end.formed and gave_back(end.memory):
                count_formation(*end.formed, by=-1)
            os.close(self.recorder)
            self.recorder = _CLOSED
            self._remove_recording()
        if process is not None and not end.pid:
            end.pid, end.status = process.pid, process.returncode
            held = end.pong.stats.memory_bytes if end.pong is not None else 0
            end.stranded_bytes = await HERE.ended(self._epoch, held, stuck=end.stuck)
        return end

    def _remove_recording(self) -> None:
        with contextlib.suppress(OSError):
            self._recording.unlink()

    # --- its messages --------------------------------------------------------------------------------

    async def _read(self, connection: StreamLink) -> None:
        try:
            while batch := await connection.receive():
                for received in batch:
                    self._dispatch(connection, received.message)
        except MlxtpError as error:
            code = Code.RANK_LOST if isinstance(error, LinkError) else error.code
            if code is Code.RANK_LOST:  # its process also ends, and its exit status reveals more
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EXIT_S):
                        await self._leaves.wait()
            self._report(FailureReport(self.rank, GroupError(f"rank {self.rank}: {error.detail}", code)))

    def _dispatch(self, connection: StreamLink, message: Message) -> None:
        match message:
            case Pong():
                self._warm_pool.received_pong(message)
                if not self._ending:  # a Pong after SIGTERM would hide how long it was silent
                    self._end.pong, self._end.pong_at = message, time.monotonic()
                elif self._end.asked_at:
                    self._leaves.set()
                self._watcher.received_pong(self.rank, message)
            case Delta() | ScoredDelta() | Vectors() | Accepted() | Prefilled() | Finished():
                self._watcher.emitted(message)
            case Error() if message.uid:
                self._watcher.emitted(message)
            case Error() if connection.protocol.state is LinkState.FAILED:
                self._end.error = message
                self._leaves.set()
                self._report(FailureReport(self.rank, GroupError(message.detail, Code(message.code))))
            case SideChannel():
                self._watcher.side(self.rank, message)
            case SessionEnd():
                self._leaves.set()
            case _:
                self._replies.put_nowait(message)

    async def _await_exit(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        try:
            self._end.ended_at = time.monotonic()
            # Its last heartbeat is up to a beat old; its recording has the last phase.
            recording = decode(read_recording(self.recorder)) if self.recorder != _CLOSED else None
            phase = self._end.pong.phase if self._end.pong is not None else ""
            words, phase = (recording.detail, recording.phase or phase) if recording else ("", phase)
            self._report(exit_report(self.rank, status, code_of_exit(status), words, phase))
        finally:
            self._leaves.set()
            # Fail a pending reply; the report has the reason.
            self._replies.put_nowait(Error(Code.RANK_LOST, f"rank {self.rank} is gone", 0))

    def _report(self, report: FailureReport) -> None:
        if not self._ending:
            self._watcher.report(report)

    def _bug(self, _task: asyncio.Task[None], error: BaseException) -> None:
        """Report a bug in a task here: it must not leave a rank unwatched."""
        about = {"epoch": self._epoch, "rank": self.rank}
        log.error("rank %d of epoch %d", self.rank, self._epoch, exc_info=error, extra=about)
        bug = GroupError(f"{type(error).__name__}: {error}", Code.INTERNAL)
        self._watcher.report(FailureReport(self.rank, bug))


class RemoteRank:
    """A rank on another Mac, called `name`. `received` takes its agent's reports. `send` sends to that agent,
    and raises LinkError if it is gone.
    """

    def __init__(self, send: Callable[[Message], None], name: str, order: Prepare, watcher: Watcher) -> None:
        self.rank = order.rank
        self.epoch = order.epoch
        self._send = send
        self.name = name
        self._order = order
        self._watcher = watcher
        self._answer: asyncio.Future[Message] | None = None
        self._ended = asyncio.Event()
        self._asked = False

    async def prepare(self) -> Prepared:
        """Have its process started. A reported failure ends the epoch and this wait."""
        self._asked = True
        return await self._ask(self._order, Prepared)

    async def join(self, bootstrap: Bootstrap) -> bool:
        return (await self._ask(StartRank(self.epoch, bootstrap), RankStarted)).jaccl

    def tell(self, message: Gathered) -> None:
        with contextlib.suppress(MlxtpError):
            self._send(RankGathered(self.epoch, self.rank, message))

    async def shut_down(self) -> None:
        await self._end(in_order=True)

    async def kill(self) -> None:
        """End it at once, but do not wait longer than END_GRACE_S. May be called again."""
        with contextlib.suppress(TimeoutError):  # it ends with its agent's link
            async with asyncio.timeout(END_GRACE_S):
                await self._end(in_order=False)

    async def _end(self, *, in_order: bool) -> None:
        if not self._asked or self._ended.is_set():
            return
        try:
            self._send(EndEpoch(self.epoch, in_order))
        except MlxtpError:
            return  # without a link, the other agent ends it
        await self._ended.wait()

    async def _ask(self, order: Message, expected: type[R]) -> R:
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._send(order)
            answer = await self._answer
        finally:
            self._answer = None
        if not isinstance(answer, expected):
            raise self._unexpected(answer)
        return answer

    def _unexpected(self, message: Message) -> GroupError:
        return GroupError(f"{self.name} sent an unexpected {type(message).__name__}", Code.OUT_OF_ORDER)

    def received(self, message: RankWord) -> None:
        match message:
            case RankSide():
                self._watcher.side(self.rank, message.side)
            case RankPong():
                self._watcher.received_pong(self.rank, message.pong)
            case RankTrouble():
                detail = message.detail
                if rank_in(detail) in (None, self.rank):  # `with_name` names other ranks' Macs
                    detail = f"{self.name}: {detail}"
                error = _error(message.code, detail)
                self._watcher.report(FailureReport(self.rank, error, message.outside))
            case EpochEnded():
                self._ended.set()
            case _ if self._answer is None or self._answer.done():
                self._watcher.report(FailureReport(self.rank, self._unexpected(message)))
            case _:
                self._answer.set_result(message)

    def lost(self, detail: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            error = GroupError(detail, Code.RANK_LOST)
            self._watcher.report(FailureReport(self.rank, error, seen_from_outside=True))


def _error(code: str, detail: str) -> MlxtpError:
    kind = ModelError if code.startswith("model_") else GroupError
    return kind(detail, Code(code))


def epoch_folder(home: Path, epoch: int, host: str = "") -> Path:
    """Return the folder of an epoch's files; the agent removes it, because a killed rank would not. `host` is
    the node id of an owner on another machine, whose epochs have their own numbers.
    """
    return home / "run" / "-".join(filter(None, ("epoch", str(epoch), host[:8])))


def make_epoch_folder(folder: Path, *, needed: bool) -> None:
    """Create the folder. Raises GroupError (FORM_FAILED). Several ranks need it, for MLX's file of hosts; a
    single rank can run without it on a full disk.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = why_not_written(error, folder)
        if needed or not is_disk_full(error):
            raise GroupError(why, Code.FORM_FAILED) from None
        log.warning("%s; one rank alone goes on without", why)


def with_stranded(cause: MlxtpError, ends: Iterable[RankEnd]) -> MlxtpError:
    """Return the cause of a failure with the memory that ended ranks may have stranded, if any."""
    if stranded := sum(end.stranded_bytes for end in ends):
        words = f"{stranded / 1e9:.0f} GB may be stranded until this Mac restarts"
        return type(cause)(f"{cause.detail.rstrip('.')}; {words}", cause.code)
    return cause


async def keep_failure(home: Path, failed: FailedEpoch, ends: Iterable[RankEnd]) -> None:
    """Keep the records of a failed epoch, and log if that fails."""
    about = {"epoch": failed.epoch}
    try:
        folder = await asyncio.to_thread(failure_store.keep, home, failed, ends)
    except MlxtpError as error:
        words = "epoch %d: nothing of its failure is kept: %s"
        log.warning(words, failed.epoch, error.detail, extra=about)
    else:
        words = "epoch %d: what led to it: mlxtp doctor --postmortem '%s'"
        log.warning(words, failed.epoch, folder, extra=about)

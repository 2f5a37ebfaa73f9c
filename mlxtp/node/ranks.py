"""The rank processes of one epoch on this machine: spawn, bootstrap, commands, watch, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..config import Settings
from ..errors import Code, GroupError, LinkError, MlxtpError, ModelError, code_of_exit
from ..wire.connection import Connection
from ..wire.link import listen
from ..wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Bootstrap,
    Delta,
    Done,
    Error,
    Finished,
    Hello,
    Init,
    InitDone,
    Loaded,
    LoadShard,
    Message,
    Ping,
    Pong,
    SanityCheck,
    SanityDone,
    ScoredDelta,
    SessionEnd,
    Shutdown,
    Welcome,
)
from ..wire.protocol import LinkKind, Protocol, Side
from ..wire.protocol import State as ProtocolState
from .epoch import Report, Watch, exit_report, is_consequence, pick_cause

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-m", "mlxtp.engine.worker")
CAUSE_GRACE_S = 0.1
"""After the first sign of an end, how long to wait for a rank that can say why."""
TERM_GRACE_S = 2.0
_STDERR_FD = 2

RequestEvent = Accepted | Delta | ScoredDelta | Finished | Error
Stage = Callable[[str], None]
R = TypeVar("R", bound=Message)
T = TypeVar("T")


@dataclass(slots=True)
class RankProcess:
    """One child process and the agent's end of its pipe."""

    rank: int
    process: asyncio.subprocess.Process
    connection: Connection
    replies: asyncio.Queue[Message]

    @property
    def pid(self) -> int:
        return self.process.pid


class Ranks:
    """One epoch. `failed` resolves to why it ended by itself; `on_event` gets what rank 0 emits."""

    def __init__(
        self,
        settings: Settings,
        epoch: int,
        on_event: Callable[[RequestEvent], None],
        on_stage: Stage = lambda _: None,
        worker: Sequence[str] = WORKER,
    ) -> None:
        self.epoch = epoch
        self.failed: asyncio.Future[MlxtpError] = asyncio.get_running_loop().create_future()
        self.processes: list[RankProcess] = []
        self._folder = settings.home / "run" / f"epoch-{epoch}"  # a killed rank cleans up nothing
        self._settings = settings
        self._limits = settings.limits
        self._on_event = on_event
        self._on_stage = on_stage
        self._worker = tuple(worker)
        self._tasks: list[asyncio.Task[None]] = []
        self._reports: list[Report] = []
        self._ending = False
        self._watch: Watch | None = None

    # --- from spawn to a proven group ----------------------------------------------------------------

    async def start(self) -> None:
        """Spawn the ranks and bring them to a proven group. When it raises MlxtpError, call `kill`."""
        world = self._settings.ranks
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        listener = listen("127.0.0.1") if world > 1 else None
        try:
            for rank in range(world):
                await self._spawn(rank, listener if rank == 0 else None)
            address = "" if listener is None else "{}:{}".format(*listener.getsockname()[:2])
        finally:
            if listener is not None:
                listener.close()
        await self._all(self._greet, self._limits.spawn_s, "say hello")
        self._on_stage("spawned")
        await self._bootstrap(address)
        self._on_stage("linked")
        await self._ask(Init(), InitDone, self._limits.form_s + 5)
        self._on_stage("formed")
        await self._ask(SanityCheck(), SanityDone, self._limits.form_s)
        self._on_stage("proven")
        self._watch = Watch(world, self._limits, time.monotonic())
        self._start(self._heartbeat())

    async def _spawn(self, rank: int, listener: socket.socket | None) -> None:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno()]
        args = ["--rank", str(rank), "--epoch", str(self.epoch), "--pipe-fd", str(theirs.fileno())]
        args += ["--folder", str(self._folder)]
        if listener is not None:
            fds.append(listener.fileno())
            args += ["--listen-fd", str(listener.fileno())]
        try:
            process = await asyncio.create_subprocess_exec(
                *self._worker,
                *args,
                pass_fds=fds,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=_STDERR_FD,  # stdout is the command's own: its JSON must stay JSON
            )
        finally:
            theirs.close()
        kind = LinkKind.PIPE_LEADER if rank == 0 else LinkKind.PIPE
        connection = await Connection.from_socket(ours, Protocol(kind, Side.UPPER, self.epoch))
        child = RankProcess(rank, process, connection, asyncio.Queue())
        self.processes.append(child)
        self._start(self._read(child))
        self._start(self._await_exit(child))

    async def _greet(self, child: RankProcess) -> None:
        hello = await child.replies.get()
        if not isinstance(hello, Hello) or hello.rank != child.rank or hello.version != PROTOCOL_VERSION:
            raise GroupError(f"rank {child.rank} greeted with {hello}", Code.NOT_AUTHENTIC)
        child.connection.send(Welcome(PROTOCOL_VERSION, b""))

    async def _bootstrap(self, decode_address: str) -> None:
        world = self._settings.ranks
        hosts = tuple(f"127.0.0.1:{port}" for port in _free_ports(world)) if world > 1 else ()
        key = os.urandom(32)

        async def bootstrap(child: RankProcess) -> None:
            child.connection.send(
                Bootstrap(
                    rank=child.rank,
                    world_size=world,
                    backend=self._settings.backend,
                    hosts=hosts,
                    decode_address=decode_address,
                    epoch_key=key,
                    deadline_s=self._limits.form_s,
                    ack_deadline_s=self._limits.ack_s,
                    run_ahead=self._settings.run_ahead,
                    queue_s=self._limits.queue_s,
                    canary_s=self._limits.canary_s,
                    agreement=self._settings.agreement,
                    compiled=self._settings.compiled,
                    speculation=self._settings.speculation,
                    prefix_cache=self._settings.prefix_cache,
                )
            )
            await self._reply(child, Done)

        await self._all(bootstrap, self._limits.form_s + 5, "join the others")

    # --- commands ------------------------------------------------------------------------------------

    @property
    def leader(self) -> RankProcess:
        return self.processes[0]

    def send(self, message: Message) -> None:
        """Send to rank 0. Raises LinkError when it is gone."""
        self.leader.connection.send(message)

    async def load(self, path: str, eos: tuple[int, ...], draft_path: str = "") -> Loaded:
        """Load a model on every rank. Raises ModelError with every rank's words; the group stays usable."""
        settings = self._settings
        command = LoadShard(
            path,
            settings.prefill_chunk,
            eos,
            settings.max_context,
            settings.kv_bits,
            settings.kv_bytes,
            draft_path,
        )
        return await self._ask(command, Loaded, None)

    async def do(self, command: Message) -> None:
        """Abort, Unload or ClearCache on every rank."""
        await self._ask(command, Done, self._limits.shutdown_s)

    async def _ask(self, command: Message, expected: type[R], deadline_s: float | None) -> R:
        """One command to rank 0 and its one reply, or the epoch's failure, whichever comes first."""
        self.send(command)
        what = f"answer {type(command).__name__}"
        return await self.unless_failed(self._reply(self.leader, expected), deadline_s, what)

    async def _reply(self, child: RankProcess, expected: type[R]) -> R:
        reply = await child.replies.get()
        if isinstance(reply, Error):
            code = Code(reply.code)
            raise (ModelError if code.startswith("model_") else GroupError)(reply.detail, code)
        if not isinstance(reply, expected):
            raise GroupError(f"rank {child.rank} answered with {type(reply).__name__}", Code.OUT_OF_ORDER)
        return reply

    async def _all(
        self, act: Callable[[RankProcess], Coroutine[Any, Any, None]], deadline_s: float, what: str
    ) -> None:
        async def everybody() -> None:
            await asyncio.gather(*(act(child) for child in self.processes))

        await self.unless_failed(everybody(), deadline_s, what)

    async def unless_failed(self, work: Coroutine[Any, Any, T], deadline_s: float | None, what: str) -> T:
        """The result of `work`. Raises the epoch's failure if that comes first, GroupError if it is late."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self.failed}
        try:
            await asyncio.wait(either, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()  # unless it is done; also when the agent stops meanwhile
        if task.done():
            error = task.exception()
            if not (isinstance(error, MlxtpError) and is_consequence(error)):
                return task.result()
            self._report(Report(0, error))
            await asyncio.wait({self.failed}, timeout=2 * CAUSE_GRACE_S)
            raise self.failed.result() if self.failed.done() else error
        if self.failed.done():
            raise self.failed.result()
        raise GroupError(f"the ranks did not {what} within {deadline_s:g} s", Code.LINK_TIMEOUT)

    def give_up(self, error: GroupError) -> None:
        """End the epoch: these ranks are not to be trusted with another request."""
        self._report(Report(0, error))

    # --- watching ------------------------------------------------------------------------------------

    @property
    def pongs(self) -> dict[int, Pong]:
        """The newest heartbeat of each rank."""
        return self._watch.pongs if self._watch is not None else {}

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Meanwhile forwards may take as long as warming up may."""
        if self._watch is None:
            yield
            return
        self._watch.warming_up = True
        try:
            yield
        finally:
            self._watch.warming_up = False

    async def _read(self, child: RankProcess) -> None:
        try:
            while batch := await child.connection.receive():
                for received in batch:
                    self._dispatch(child, received.message)
        except MlxtpError as error:
            code = Code.RANK_LOST if isinstance(error, LinkError) else error.code
            self._report(Report(child.rank, GroupError(f"rank {child.rank}: {error.detail}", code)))

    def _dispatch(self, child: RankProcess, message: Message) -> None:
        match message:
            case Pong():
                if self._watch is not None:
                    self._watch.heard(child.rank, message, time.monotonic())
            case Delta() | ScoredDelta() | Accepted() | Finished():
                self._on_event(message)
            case Error() if message.uid:
                self._on_event(message)
            case Error() if child.connection.protocol.state is ProtocolState.FAILED:
                self._report(Report(child.rank, GroupError(message.detail, Code(message.code))))
            case SessionEnd():
                pass
            case _:
                child.replies.put_nowait(message)

    async def _await_exit(self, child: RankProcess) -> None:
        status = await child.process.wait()
        if not self._ending:
            self._report(exit_report(child.rank, status, code_of_exit(status)))

    async def _heartbeat(self) -> None:
        while not self._ending:
            for child in self.processes:
                with contextlib.suppress(MlxtpError):  # its reader reports it
                    child.connection.send(Ping())
            await asyncio.sleep(self._limits.heartbeat_s)
            assert self._watch is not None
            if error := self._watch.tick(time.monotonic()):
                self._report(Report(0, error))

    def _report(self, report: Report) -> None:
        if self._ending:
            return
        self._reports.append(report)
        if len(self._reports) == 1:
            asyncio.get_running_loop().call_later(CAUSE_GRACE_S, self._conclude)

    def _conclude(self) -> None:
        if not self.failed.done():
            self.failed.set_result(pick_cause(self._reports))

    # --- ending --------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End in order: rank 0 ends the others' loops, then every process leaves by itself. Then `kill`."""
        self._ending = True
        with contextlib.suppress(MlxtpError, TimeoutError):
            async with asyncio.timeout(self._limits.shutdown_s):
                for child in self.processes:
                    child.connection.send(Shutdown())
                    await self._reply(child, Done)
                await asyncio.gather(*(child.process.wait() for child in self.processes))
        await self.kill()

    async def kill(self) -> None:
        """End what is left: close the pipes, ask with SIGTERM, then SIGKILL; reap every process."""
        self._ending = True
        living = [child for child in self.processes if child.process.returncode is None]
        for child in living:
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
        if living:
            await asyncio.wait(
                [asyncio.ensure_future(c.process.wait()) for c in living], timeout=TERM_GRACE_S
            )
        for child in living:
            if child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()
                await child.process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in self.processes:
            child.connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._check_ended)
        self._tasks.append(task)

    def _check_ended(self, task: asyncio.Task[None]) -> None:
        """A bug in a task of ours must not leave an epoch that nobody watches."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("epoch %d", self.epoch, exc_info=error)
            self._report(Report(0, GroupError(f"{type(error).__name__}: {error}", Code.INTERNAL)))


def _free_ports(count: int) -> list[int]:
    """Ports nobody listens on now. Somebody may take one before the ring does; then the epoch fails and the
    next one has others."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()

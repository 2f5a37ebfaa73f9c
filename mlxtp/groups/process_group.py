"""The ranks of one epoch, on this Mac and others: start, bootstrap, commands, watch, end.

Over two Macs, agents use their control link, an agent and its rank a pipe, the ranks the decode link:

agent A, the owner            rank 0                  agent B                        rank 1
│ spawn ────────────────────────►│                       │                              │
│ Prepare ──────────────────────────────────────────────►│ spawn ──────────────────────►│
│◄─────────────────────── Hello ─│                       │◄───────────────────── Hello ─│
│◄──────────────────────────────────────────── Prepared ─│                              │
│ Bootstrap ────────────────────►│                       │                              │
│ StartRank (Bootstrap) ────────────────────────────────►│ Bootstrap ──────────────────►│
│                                │◄─────── TLS, Hello and Welcome with proofs ─────────►│
│◄──────────────────────── Done ─│                       │◄────────────────────── Done ─│
│◄───────────────────────────────────────── RankStarted ─│                              │
│ Init ─────────────────────────►│ Init ───────────────────────────────────────────────►│  one reply to each,
│ SanityCheck ──────────────────►│ SanityCheck ────────────────────────────────────────►│  the same way back
│ LoadShard ────────────────────►│ LoadShard ──────────────────────────────────────────►│
│ Serving ──────────────────────────────────────────────►│                              │  twice a second,
│ Ping ─────────────────────────►│                       │ Ping ───────────────────────►│  Serving to all
│◄──────────────────────── Pong ─│                       │◄────────────────────── Pong ─│
│◄──────────────────────────────────────────── RankPong ─│                              │
│ Shutdown ─────────────────────►│ Shutdown ───────────────────────────────────────────►│
│ EndEpoch ─────────────────────────────────────────────►│ Shutdown ───────────────────►│
│◄────────────────────────────────────────── EpochEnded ─│                              │
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..background import Background
from ..config import Settings
from ..diagnostics import failure_store
from ..errors import Code, FailureReport, GroupError, MlxtpError, is_consequence
from ..placement.faults import explain, explain_crash
from ..wire.blocking import listen
from ..wire.cluster_messages import Prepared
from ..wire.messages import (
    Bootstrap,
    CollectivesTimed,
    CountedShare,
    Done,
    Gathered,
    Init,
    InitDone,
    KvBudget,
    Loaded,
    LoadShard,
    Message,
    Pong,
    RequestEvent,
    SanityCheck,
    SanityDone,
    SideChannel,
    TimeCollectives,
)
from ..wire.rank_process import FREE_S
from .health import RankHealth, RoundReplies, SideChannelHub, pick_cause, with_name
from .ranks import (
    MAX_REPORTS,
    WORKER,
    RankProcess,
    RemoteRank,
    Watcher,
    Worker,
    epoch_folder,
    keep_failure,
    make_epoch_folder,
    with_stranded,
)

log = logging.getLogger(__name__)

CAUSE_GRACE_S = 0.1  #: Seconds to wait for the cause after the first report of a failure.

#: Most idle seconds of a group over JACCL between two proofs: after a minute the next sum may crash.
JACCL_CANARY_S = 20.0

_WISHED = (Code.REPLANNED, Code.SHUTTING_DOWN)  #: Codes of an intended end, which is no failure.

Stage = Callable[[str], None]
R = TypeVar("R", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpochGroup:
    """Ranks of an epoch; tuples are in rank order."""

    local: int  #: Ranks of this machine; rank 0 is one of them.
    world_size: int
    backend: str
    fabric: str = "127.0.0.1"  #: This machine's address for MLX's sockets.
    #: Makes the ranks of other machines.
    endpoints: Callable[[Watcher], tuple[RemoteRank, ...]] = lambda _watcher: ()
    decode_hosts: tuple[str, ...] = ()  #: Addresses of rank 0's machine for each rank.
    pins: tuple[str, ...] = ()  #: Fingerprints of the agents' keys.
    kind: str = ""  #: How they are joined, in words.
    rdma: tuple[str, ...] = ()  #: As in Bootstrap, like the next.
    jaccl_ring: bool = False
    machines: tuple[str, ...] = ()  #: Chip and system build of each rank's Mac, if known.
    nodes: tuple[str, ...] = ()  #: Node ids of the agents; one for all ranks of one machine.
    split: tuple[int, ...] = ()  #: As in Bootstrap's LoadShard: layers of each rank of a pipeline.

    @property
    def fabric_kind(self) -> str:
        return self.backend if self.backend != "jaccl" else "jaccl ring" if self.jaccl_ring else "jaccl mesh"

    @property
    def about(self) -> dict[str, object]:
        """Properties that may change a model's answers."""
        found = {"fabric": self.fabric_kind, "machines": self.machines, "world_size": self.world_size}
        return found | ({"split": self.split} if self.split else {})

    @property
    def varies(self) -> bool:
        """True if large sums differ each time, because they are added in order of arrival."""
        return self.fabric_kind == "jaccl mesh" and self.world_size > 2 and not self.split


def agreement(machines: Sequence[str]) -> str:
    """Return how ranks agree: different chips or systems may round a draw differently, so rank 0 draws."""
    return "broadcast-draws" if len(set(machines)) > 1 else "auto"


class EpochWatch:
    """Receiver of the reports of one epoch's ranks, which finds the cause of its failure.

    `failed` resolves to that cause, worded by `explain`. `on_event` gets the events of rank 0. Groups over
    JACCL have a `hub`; `tell` sends its replies to the ranks.
    """

    def __init__(
        self,
        epoch: int,
        on_event: Callable[[RequestEvent], None],
        explain: Callable[[MlxtpError], MlxtpError],
        *,
        grace_s: float,
        hub: SideChannelHub | None,
        tell: Callable[[int, Gathered], None],
    ) -> None:
        self.failed: asyncio.Future[MlxtpError] = asyncio.get_running_loop().create_future()
        self.reports: list[FailureReport] = []
        self.health: RankHealth | None = None  #: None until the group is proven.
        self.emitted = on_event
        self._epoch = epoch
        self._explain = explain
        self._grace_s = grace_s
        self._hub = hub
        self._tell = tell
        self._late: asyncio.TimerHandle | None = None  #: Ends an incomplete round of the side channel.
        self._background = Background(self._bug)
        self._closed = False

    def start(self, health: RankHealth, every_s: float) -> None:
        self.health = health
        self._background.start(self._judge(health, every_s), "heartbeat")

    def formed(self) -> None:
        """End the side channel."""
        self._hub = None
        if self._late is not None:
            self._late.cancel()

    def close(self) -> None:
        """Ignore all later failures: the epoch is about to end."""
        self._closed = True
        self.formed()
        for task in self._background.tasks:
            task.cancel()

    @property
    def pongs(self) -> dict[int, Pong]:
        return self.health.pongs if self.health is not None else {}

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Allow forwards the time for warming up. The group must be proven."""
        assert self.health is not None
        self.health.warming_up = True
        try:
            yield
        finally:
            self.health.warming_up = False

    def received_pong(self, rank: int, pong: Pong) -> None:
        if self.health is not None:
            self.health.received_pong(rank, pong, time.monotonic())

    def report(self, report: FailureReport) -> None:
        """Take in a failure of a rank. The epoch fails `grace_s` later, so ranks can report the cause."""
        theirs = sum(each.rank == report.rank for each in self.reports)
        if self._closed or self.failed.done() or theirs >= MAX_REPORTS:
            return
        self.reports.append(report)
        if self._hub is not None:
            self._reply(self._hub.abort(report.error.detail))
        if len(self.reports) == 1:
            asyncio.get_running_loop().call_later(self._grace_s, self._conclude)

    def side(self, rank: int, message: SideChannel) -> None:
        if (hub := self._hub) is None:
            return
        self._reply(hub.receive(rank, message))
        if hub.has_begun:
            if self._late is not None:
                self._late.cancel()
            loop = asyncio.get_running_loop()
            self._late = loop.call_later(hub.ROUND_S, lambda: self._reply(hub.late()))

    def _reply(self, replies: RoundReplies) -> None:
        for rank, gathered in replies:
            self._tell(rank, gathered)

    def _conclude(self) -> None:
        if not self.failed.done():
            self.failed.set_result(self._explain(pick_cause(self.reports)))

    async def _judge(self, health: RankHealth, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            if error := health.tick(time.monotonic()):
                self.report(FailureReport(0, error))

    def _bug(self, _task: asyncio.Task[None], error: BaseException) -> None:
        """Report a bug here: it must not leave an epoch unwatched."""
        log.error("epoch %d", self._epoch, exc_info=error, extra={"epoch": self._epoch})
        self.report(FailureReport(0, GroupError(f"{type(error).__name__}: {error}", Code.INTERNAL)))


class ProcessGroup:
    """One epoch. `failed` resolves to the cause of its failure; `on_event` gets the events of rank 0."""

    def __init__(
        self,
        settings: Settings,
        epoch: int,
        on_event: Callable[[RequestEvent], None],
        on_stage: Stage = lambda _: None,
        *,
        worker: Worker = WORKER,
        group: EpochGroup | None = None,
    ) -> None:
        self.epoch = epoch
        self.group = group or EpochGroup(settings.ranks, settings.ranks, settings.local_backend)
        self._settings = settings
        self._limits = settings.limits
        self._on_stage = on_stage
        self._folder = epoch_folder(settings.home, epoch)
        self.watch = EpochWatch(
            epoch,
            on_event,
            self._explained,
            grace_s=CAUSE_GRACE_S if self.group.world_size > 1 else 0.0,  # one rank has no witness
            hub=SideChannelHub(self.group.world_size) if self.group.backend == "jaccl" else None,
            tell=lambda rank, gathered: self._ranks[rank].tell(gathered),
        )
        self.failed = self.watch.failed
        self.processes = [
            RankProcess(rank, epoch, self._folder, self.watch, settings, worker=worker)
            for rank in range(self.group.local)
        ]
        self.endpoints = self.group.endpoints(self.watch)
        self._ranks: tuple[RankProcess | RemoteRank, ...] = (*self.processes, *self.endpoints)
        self.kv_bytes = 0  #: Limit of KV caches on each rank, in addition to the setting's; 0 for none.
        self._prepared: list[Prepared] = []  #: Replies of all ranks, in rank order.
        self.at_ring = False  #: True while MLX's ring forms or proves itself: a stranger may be in it.
        self._over = False

    # --- from spawn to a proven group ----------------------------------------------------------------

    async def start(self) -> None:
        """Spawn the ranks and bring them to a proven group. If it raises MlxtpError, call `kill`."""
        try:
            make_epoch_folder(self._folder, needed=self.group.world_size > 1)
            addresses = await self._spawn()
        except OSError as error:  # such as for the address of an unplugged cable
            detail = f"ranks cannot be started on this Mac: {error}"
            raise GroupError(detail, Code.FORM_FAILED) from None
        self._on_stage("spawned")
        await self._bootstrap(addresses)
        self._on_stage("linked")
        self.at_ring = self.group.backend == "ring"
        await self._ask(Init(), InitDone, self._limits.form_s + 5)
        self.watch.formed()
        self._on_stage("formed")
        await self._ask(SanityCheck(), SanityDone, self._limits.proof_s)
        self.at_ring = False
        self._on_stage("proven")
        judge = RankHealth(self.group.world_size, self._limits, time.monotonic())
        self.watch.start(judge, self._limits.heartbeat_s)
        for process in self.processes:
            process.beat()

    async def _spawn(self) -> tuple[str, ...]:
        """Start every rank process; return each rank's addresses for rank 0 ("ip:port,ip:port")."""
        hosts = self.group.decode_hosts or ("127.0.0.1",) * self.group.world_size
        here = {address for host in hosts[1:] or hosts for address in host.split(",")}
        # If other Macs use several addresses of this one, rank 0 listens on all.
        several, secure = self.group.world_size > 1, bool(self.group.pins)
        fabric = self.group.fabric if several else ""
        listener = listen(here.pop() if len(here) == 1 else "0.0.0.0") if several else None
        own = [
            process.prepare(fabric, None if process.rank else listener, secure=secure)
            for process in self.processes
        ]
        preparing = _all(*own, *(each.prepare() for each in self.endpoints))
        try:
            self._prepared = await self.unless_failed(preparing, self._limits.spawn_s, "say hello")
            port = listener.getsockname()[1] if listener is not None else 0
        finally:
            if listener is not None:
                listener.close()
        return tuple(
            ",".join(f"{address}:{port}" for address in host.split(",")) if port else "" for host in hosts
        )

    async def _bootstrap(self, decode_addresses: tuple[str, ...]) -> None:
        settings, world = self._settings, self.group.world_size
        key = os.urandom(32)

        def bootstrap(rank: int) -> Bootstrap:
            return Bootstrap(
                rank=rank,
                world_size=world,
                backend=self.group.backend,
                hosts=tuple(each.ring for each in self._prepared) if world > 1 else (),
                decode_address=decode_addresses[rank],
                epoch_key=key,
                deadline_s=self._limits.form_s,
                ack_deadline_s=self._limits.ack_s,
                run_ahead=settings.run_ahead,
                queue_s=self._limits.queue_s,
                canary_s=canary_s(self._limits.canary_s, self.group.backend),
                agreement=agreement(self.group.machines),
                speculation=settings.speculation,
                pins=self.group.pins,
                rdma=self.group.rdma,
                jaccl_ring=self.group.jaccl_ring,
                fast_fences=settings.fast_fences,
                repeatable=settings.repeatable,
                large_buffers=settings.large_buffers,
            )

        joined = _all(*(each.join(bootstrap(each.rank)) for each in self._ranks))
        jaccl = await self.unless_failed(joined, self._limits.form_s + 5, "join the others")
        if self.group.backend == "jaccl" and not all(jaccl):
            names = " and ".join(self._names[rank] for rank, has in enumerate(jaccl) if not has)
            needs = "it needs macOS 26.2 or newer and librdma"
            raise GroupError(f"MLX on {names} has no JACCL; {needs}", Code.FORM_FAILED)
        for process in self.processes:
            process.forms(bootstrap(process.rank))

    @property
    def _names(self) -> tuple[str, ...]:
        here = (self._settings.name or "here",) * len(self.processes)
        return (*here, *(endpoint.name for endpoint in self.endpoints))

    # --- commands ------------------------------------------------------------------------------------

    @property
    def leader(self) -> RankProcess:
        return self.processes[0]

    def send(self, message: Message) -> None:
        """Send a message to rank 0. Raises LinkError if it is gone."""
        self.leader.send(message)

    async def load(
        self, path: str, eos: tuple[int, ...], draft_path: str = "", counted: tuple[CountedShare, ...] = ()
    ) -> Loaded:
        """Load a model on every rank, as in LoadShard. Raises ModelError with the texts of ranks that refused
        it, or GroupError if one has too little memory; the group stays usable.
        """
        settings = self._settings
        paths = tuple(each.path or path for each in self._prepared) if self.endpoints else ()
        command = LoadShard(
            path,
            settings.prefill_chunk,
            eos,
            settings.max_context,
            settings.kv_bits,
            _least(settings.kv_bytes, self.kv_bytes),
            draft_path,
            paths,
            self.group.split,
            counted,
        )
        try:
            return await self._ask(command, Loaded, None)
        except GroupError as error:
            raise self._explained(error) from error

    async def budget(self, kv_bytes: int, *, clear: bool = False) -> Loaded:
        """Change `kv_bytes` of a loaded model and `clear` kept caches, as in KvBudget. One call at a time."""
        self.kv_bytes = kv_bytes
        return await self._ask(KvBudget(_least(self._settings.kv_bytes, kv_bytes), clear), Loaded, None)

    async def do(self, command: Message) -> None:
        await self._ask(command, Done, self._limits.shutdown_s + FREE_S)

    async def time(self, kind: str, size: int, rounds: int) -> CollectivesTimed:
        """Time collectives on all ranks, which must be idle; see `TimeCollectives`."""
        return await self._ask(TimeCollectives(kind, size, rounds), CollectivesTimed, None)

    async def _ask(self, command: Message, expected: type[R], deadline_s: float | None) -> R:
        """Send a command to rank 0. Return its reply; raises as `unless_failed`."""
        self.send(command)
        what = f"reply to {type(command).__name__}"
        return await self.unless_failed(self.leader.reply(expected), deadline_s, what)

    async def unless_failed(self, work: Coroutine[Any, Any, T], deadline_s: float | None, what: str) -> T:
        """Return the result of `work`. Raises the epoch's failure if that is earlier, GroupError if late."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self.failed}
        try:
            await asyncio.wait(either, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()  # also if the agent stops meanwhile
        if task.done():
            error = task.exception()
            if not (isinstance(error, MlxtpError) and is_consequence(error.code, error.detail)):
                return task.result()
            self.watch.report(FailureReport(0, error))
            await asyncio.wait({self.failed}, timeout=2 * CAUSE_GRACE_S)
            raise self.failed.result() if self.failed.done() else error
        if self.failed.done():
            raise self.failed.result()
        raise GroupError(f"the ranks did not {what} within {deadline_s:g} s", Code.LINK_TIMEOUT)

    def give_up(self, error: MlxtpError) -> None:
        self.watch.report(FailureReport(0, error))

    def lost(self, node_id: str, detail: str) -> None:
        for endpoint in self.endpoints:
            if self.group.nodes[endpoint.rank] == node_id:
                endpoint.lost(detail)

    def _explained(self, cause: MlxtpError) -> MlxtpError:
        """Add the name of the rank's Mac, and the meaning of JACCL's text."""
        detail = with_name(cause.detail, self._names if self.endpoints else ())
        why = explain_crash(detail) if self.group.backend == "jaccl" else None
        if cause.code is Code.FORM_FAILED:
            why = explain(detail, {item.partition("=")[2] for item in self._settings.rdma}) or why
        if why is not None and "Cause: " not in detail:
            detail = f"{detail.rstrip('.')}. Cause: {why}"
        return cause if detail == cause.detail else type(cause)(detail, cause.code)

    # --- ending --------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End in order: rank 0 ends the other ranks' loops, and every process exits. Then `kill`."""
        if self._over:
            return
        self.watch.close()
        try:
            async with asyncio.timeout(self._limits.shutdown_s):
                for process in self.processes:
                    await process.shut_down()
                await _all(*(endpoint.shut_down() for endpoint in self.endpoints))
        except (MlxtpError, TimeoutError) as error:
            log.debug("epoch %d did not end in order: %s", self.epoch, error)
        ends, self._over = await self._end(), True
        if wedged := [end.rank for end in ends if end.deaf]:
            words = f"ranks {wedged} did not end, not even at SIGTERM"
            cause = with_stranded(GroupError(words, Code.RANK_STALLED), ends)
            if self.watch.health is not None:  # while MLX forms a group, no rank reads its messages
                await self._keep(ends, cause)

    async def kill(self, cause: MlxtpError | None = None) -> MlxtpError | None:
        """End all remaining ranks, and keep the records of a failure.

        `cause` is the reason if no rank reported it: a refused model, a golden proof, a bug. Returns it with
        the memory that killed ranks may have stranded.
        """
        ends = await self._end()
        if not self._over:
            self._over = True
            found = self.failed.result() if self.failed.done() else cause
            if found is None or found.code not in _WISHED:
                found = found or GroupError("the agent ended it", Code.INTERNAL)
                await self._keep(ends, with_stranded(found, ends))
        return with_stranded(cause, ends) if cause is not None else None

    async def _end(self) -> list[failure_store.RankEnd]:
        self.watch.close()
        endpoints = asyncio.gather(*(endpoint.kill() for endpoint in self.endpoints))
        ends = await asyncio.gather(*(process.kill() for process in self.processes))
        await endpoints
        shutil.rmtree(self._folder, ignore_errors=True)
        return ends

    async def _keep(self, ends: list[failure_store.RankEnd], cause: MlxtpError) -> None:
        failed = failure_store.FailedEpoch(
            self.epoch, self._names[0], cause, self._names, tuple(self.watch.reports), self.watch.pongs
        )
        await keep_failure(self._settings.home, failed, ends)


def canary_s(limit_s: float, backend: str) -> float:
    return min(limit_s, JACCL_CANARY_S) if backend == "jaccl" else limit_s


def _least(*bounds: int) -> int:
    """Return the smallest of `bounds` that is not 0; 0 if all are."""
    return min((bound for bound in bounds if bound), default=0)


async def _all(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Return the results of all `work`. If one raises, cancel the rest."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()

"""The rank that this machine runs for a coordinator on another one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Settings
from ..diagnostics import failure_store
from ..errors import Code, GroupError, MlxtpError
from ..wire.base import Message
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
from ..wire.messages import Pong, SideChannel
from .health import FailureReport
from .local_rank import WORKER, RankProcess, RequestEvent, Worker, epoch_folder, free_port, make_epoch_folder

log = logging.getLogger(__name__)

MAX_ORDERS = 64
"""Orders that are carried out at one time. Two or three are usual; what is more is not heard."""

ModelFolder = Callable[[int], Path]
"""The folder of the model of a version of the desired state. Raises ModelError when it is not here."""


@dataclass(slots=True, eq=False)
class _HostedProcess:
    """One epoch's rank here, from the order to have one. There is no process yet while others end."""

    order: Prepare
    host: str
    process: RankProcess | None = None
    folder: Path | None = None
    model: Path | None = None
    """What it loads, or has loaded."""
    heart: asyncio.Task[None] | None = None
    silenced: bool = False
    failure: str = ""
    """Why it ended, unless it was in order."""
    reports: list[FailureReport] = field(default_factory=list)


class HostedRank:
    """At most one rank at a time. Lives and dies by the control link to the coordinator that asked for it."""

    def __init__(
        self,
        settings: Settings,
        model: ModelFolder,
        send: Callable[[str, Message], None],
        worker: Worker = WORKER,
    ) -> None:
        self.last_epoch = 0
        """The number of the last epoch this machine had a rank in for somebody else."""
        self._settings = settings
        self._send = send
        self._model = model
        self._worker = worker
        self._stay: _HostedProcess | None = None
        self._alive: set[_HostedProcess] = set()
        """Those that may have a process."""
        self._closed = False
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def epoch(self) -> int:
        """The epoch whose rank runs here; 0 for none."""
        return self._stay.order.epoch if self._stay is not None else 0

    @property
    def host(self) -> str:
        """The node id of the coordinator whose rank runs here; empty for none."""
        return self._stay.host if self._stay is not None else ""

    @property
    def model(self) -> Path | None:
        """The folder of the model that the rank here has open, or is about to."""
        return self._stay.model if self._stay is not None else None

    def received(self, host: str, message: Prepare | StartRank | EndEpoch | RankGathered) -> None:
        """An order of coordinator `host`. Carried out in turn, in the background; which epoch counts is
        settled here and now."""
        if self._closed or len(self._tasks) >= MAX_ORDERS:
            return
        match message:
            case RankGathered():
                stay = self._of(message.epoch)
                if stay is not None and stay.host == host and stay.process is not None:
                    with contextlib.suppress(MlxtpError):  # it is gone, which its reader reports
                        stay.process.send(message.gathered)
            case Prepare():
                before, self._stay = self._stay, _HostedProcess(message, host)
                self.last_epoch = message.epoch
                self._background(self._prepare(self._stay, before))
            case StartRank():
                self._background(self._start(host, message))
            case EndEpoch():
                self._background(self._end(host, message))

    def lost(self, host: str) -> None:
        """The last control link to a node is gone: if it is the coordinator, its rank goes too."""
        if self._stay is not None and self._stay.host == host:
            self.clear("the coordinator's link is gone")

    def clear(self, why: str) -> None:
        """End the rank, in the background, and say so to whoever wanted it."""
        if (stay := self._stay) is not None:
            stay.failure = why
            error = GroupError(f"its agent ended it: {why}", Code.RANK_LOST)
            self._report(stay, FailureReport(stay.order.rank, error, seen_from_outside=True))
            self._background(self._leave(stay, why))

    async def close(self) -> None:
        """End whatever runs; no order counts from now on."""
        self._closed = True
        if self._stay is not None:
            await self._leave(self._stay, "the agent ends")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stay in list(self._alive):  # whose end was cut short
            await self._remove(stay)

    # --- orders --------------------------------------------------------------------------------------

    async def _prepare(self, stay: _HostedProcess, before: _HostedProcess | None) -> None:
        order = stay.order
        if before is not None:
            await self._leave(before, f"epoch {order.epoch} comes")
        async with self._turn:
            if self._stay is not stay:
                return
            try:
                path = stay.model = self._model(order.desired)
                async with asyncio.timeout(self._settings.limits.spawn_s):
                    await self._spawn(stay)
                ring = f"{order.fabric}:{free_port(order.fabric)}" if order.fabric else ""
            except (MlxtpError, OSError, TimeoutError) as error:
                self._report(stay, FailureReport(order.rank, _named(error)))
                return
            finally:
                if self._stay is not stay:  # it was ended before there was a process to end
                    await self._remove(stay)
            if self._stay is stay:
                self._tell(stay.host, Prepared(order.epoch, ring, str(path)))

    async def _spawn(self, stay: _HostedProcess) -> None:
        order, home = stay.order, self._settings.home
        self._alive.add(stay)
        stay.folder = epoch_folder(home, order.epoch)
        make_epoch_folder(stay.folder, needed=True)
        stay.process = process = RankProcess(
            order.rank,
            order.epoch,
            stay.folder,
            _Watcher(self, order.epoch),
            self._settings.limits,
            worker=self._worker,
        )
        await process.spawn(identity=home / "identity")
        await process.greet()

    async def _start(self, host: str, order: StartRank) -> None:
        async with self._turn:
            stay = self._stay
            if stay is None or (stay.order.epoch, stay.host) != (order.epoch, host) or stay.process is None:
                return  # it has ended meanwhile, and that was said
            try:
                async with asyncio.timeout(self._settings.limits.form_s):
                    jaccl = await stay.process.join(order.bootstrap)
            except (MlxtpError, TimeoutError) as error:
                self._report(stay, FailureReport(stay.order.rank, _named(error)))
                return
            if self._stay is stay and stay.heart is None:
                stay.heart = asyncio.ensure_future(self._beat(stay.process))
                self._tell(host, RankStarted(order.epoch, jaccl))

    async def _end(self, host: str, order: EndEpoch) -> None:
        stay = self._stay
        if stay is not None and (stay.order.epoch, stay.host) == (order.epoch, host):
            if not stay.silenced:  # a host that does not wait for an end in order has no failure to keep
                stay.failure = "" if order.in_order else f"epoch {order.epoch} failed: its host knows why"
            stay.silenced = True
            if order.in_order and stay.heart is not None and stay.process is not None:
                with contextlib.suppress(MlxtpError, TimeoutError):
                    async with asyncio.timeout(self._settings.limits.shutdown_s):
                        await stay.process.shut_down()
            await self._leave(stay, "its epoch ended")
        self._tell(host, EpochEnded(order.epoch))

    async def _leave(self, stay: _HostedProcess, why: str) -> None:
        """Have this one ended; who came after it stays."""
        if self._stay is stay:
            self._stay = None
        about = {"epoch": stay.order.epoch, "rank": stay.order.rank}
        log.info("rank %d of epoch %d ends: %s", stay.order.rank, stay.order.epoch, why, extra=about)
        await self._remove(stay)

    async def _remove(self, stay: _HostedProcess) -> None:
        stay.silenced = True
        if stay.heart is not None:
            stay.heart.cancel()
        if stay.process is not None:
            await self._keep(stay, await stay.process.kill())
        if stay.folder is not None:
            shutil.rmtree(stay.folder, ignore_errors=True)
        self._alive.discard(stay)

    async def _keep(self, stay: _HostedProcess, end: failure_store.RankEnd) -> None:
        """What is known of a rank that failed, or whose epoch did, stays; not of one that never started."""
        if not stay.failure or (stay.heart is None and end.by_agent):
            return
        cause = GroupError(stay.failure, Code.RANK_LOST)
        failed = failure_store.FailedEpoch(
            stay.order.epoch, self._settings.name, cause, reports=tuple(stay.reports)
        )
        stay.failure = ""
        try:
            folder = await asyncio.to_thread(failure_store.keep, self._settings.home, failed, (end,))
        except MlxtpError as error:
            words = "epoch %d: nothing of its failure is kept: %s"
            log.warning(words, failed.epoch, error.detail, extra={"epoch": failed.epoch})
        else:
            words = "epoch %d: what led to it: mlxtp doctor --postmortem '%s'"
            log.warning(words, failed.epoch, folder, extra={"epoch": failed.epoch})

    # --- what the rank says --------------------------------------------------------------------------

    def heard(self, epoch: int, pong: Pong) -> None:
        if (stay := self._of(epoch)) is not None:
            self._tell(stay.host, RankPong(epoch, stay.order.rank, pong))

    def reported(self, epoch: int, report: FailureReport) -> None:
        if (stay := self._of(epoch)) is not None:
            self._report(stay, report)

    def _report(self, stay: _HostedProcess, report: FailureReport) -> None:
        if not stay.silenced:
            stay.reports.append(report)
            error, outside = report.error, report.seen_from_outside
            trouble = RankTrouble(stay.order.epoch, stay.order.rank, error.code, error.detail, outside)
            self._tell(stay.host, trouble)

    def side(self, epoch: int, message: SideChannel) -> None:
        if (stay := self._of(epoch)) is not None:
            self._tell(stay.host, RankSide(epoch, stay.order.rank, message))

    def _of(self, epoch: int) -> _HostedProcess | None:
        stay = self._stay
        return stay if stay is not None and stay.order.epoch == epoch and not stay.silenced else None

    async def _beat(self, process: RankProcess) -> None:
        while True:
            process.ping()
            await asyncio.sleep(self._settings.limits.heartbeat_s)

    def _tell(self, host: str, message: Message) -> None:
        with contextlib.suppress(MlxtpError):  # its link is gone, and `lost` does the rest
            self._send(host, message)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an order of the coordinator failed", exc_info=error)


class _Watcher:
    """Tells the guest which epoch's rank spoke."""

    def __init__(self, guest: HostedRank, epoch: int) -> None:
        self._guest = guest
        self._epoch = epoch

    def heard(self, rank: int, pong: Pong) -> None:
        self._guest.heard(self._epoch, pong)

    def report(self, report: FailureReport) -> None:
        self._guest.reported(self._epoch, report)

    def emitted(self, event: RequestEvent) -> None:
        """Only rank 0 has a voice, and that is never a guest."""

    def side(self, rank: int, message: SideChannel) -> None:
        self._guest.side(self._epoch, message)


def _named(error: Exception) -> MlxtpError:
    if isinstance(error, MlxtpError):
        return error
    if isinstance(error, TimeoutError):
        return GroupError("its rank process did not answer in time", Code.LINK_TIMEOUT)
    return GroupError(str(error), Code.FORM_FAILED)

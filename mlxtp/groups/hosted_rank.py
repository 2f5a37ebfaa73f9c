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

from ..cluster.links import ControlLink
from ..cluster.node import ClusterNode
from ..config import Settings
from ..diagnostics import failure_store
from ..errors import Code, FailureReport, GroupError, MlxtpError
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
from ..wire.codecs import Message
from ..wire.messages import Pong, SideChannel
from .local_rank import WORKER, RankProcess, RequestEvent, Worker, epoch_folder, free_port, make_epoch_folder

log = logging.getLogger(__name__)

MAX_ORDERS = 64  #: Orders carried out at one time. Two or three are usual; further ones are dropped.

#: Returns the folder of the model of a version of the desired state. Raises ModelError when it is not here.
ModelFolder = Callable[[int], Path]


@dataclass(slots=True, eq=False)
class _HostedProcess:
    """One epoch's rank here, from its Prepare on. There is no process yet while earlier ones end."""

    order: Prepare
    host: str
    process: RankProcess | None = None
    folder: Path | None = None
    model: Path | None = None  #: The model that it loads, or has loaded.
    heart: asyncio.Task[None] | None = None
    silenced: bool = False
    failure: str = ""  #: Reason of its end, unless it ended in order.
    reports: list[FailureReport] = field(default_factory=list)


class HostedRank:
    """At most one rank at a time. It lives and dies by the control link to its coordinator."""

    def __init__(
        self,
        settings: Settings,
        model: ModelFolder,
        send: Callable[[str, Message], None],
        worker: Worker,
    ) -> None:
        self.last_epoch = 0  #: Number of the last epoch for which this machine hosted a rank.
        self._settings = settings
        self._send = send
        self._model = model
        self._worker = worker
        self._hosted: _HostedProcess | None = None
        self._alive: set[_HostedProcess] = set()  #: Ranks that may have a process.
        self._closed = False
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def epoch(self) -> int:
        """Epoch of the rank that runs here; 0 for none."""
        return self._hosted.order.epoch if self._hosted is not None else 0

    @property
    def host(self) -> str:
        """Node id of the coordinator whose rank runs here; empty for none."""
        return self._hosted.host if self._hosted is not None else ""

    @property
    def model(self) -> Path | None:
        """Folder of the model that the rank here has open, or is about to open."""
        return self._hosted.model if self._hosted is not None else None

    def received(self, host: str, message: Prepare | StartRank | EndEpoch | RankGathered) -> None:
        """Take an order of coordinator `host`, and carry it out in sequence, in the background.

        The epoch that counts is set before this returns.
        """
        if self._closed or len(self._tasks) >= MAX_ORDERS:
            return
        match message:
            case RankGathered():
                hosted = self._of(message.epoch)
                if hosted is not None and hosted.host == host and hosted.process is not None:
                    with contextlib.suppress(MlxtpError):  # it is gone, which its reader reports
                        hosted.process.send(message.gathered)
            case Prepare():
                before, self._hosted = self._hosted, _HostedProcess(message, host)
                self.last_epoch = message.epoch
                self._background(self._prepare(self._hosted, before))
            case StartRank():
                self._background(self._start(host, message))
            case EndEpoch():
                self._background(self._end(host, message))

    def lost(self, host: str) -> None:
        """Clear the rank of a node whose last control link is gone."""
        if self._hosted is not None and self._hosted.host == host:
            self.clear("the coordinator's link is gone")

    def clear(self, why: str) -> None:
        """End the rank in the background, and report it to its coordinator."""
        if (hosted := self._hosted) is not None:
            hosted.failure = why
            error = GroupError(f"its agent ended it: {why}", Code.RANK_LOST)
            self._report(hosted, FailureReport(hosted.order.rank, error, seen_from_outside=True))
            self._background(self._leave(hosted, why))

    async def close(self) -> None:
        """End the running rank; no order counts from now on."""
        self._closed = True
        if self._hosted is not None:
            await self._leave(self._hosted, "the agent ends")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for hosted in list(self._alive):  # their end was cut short
            await self._remove(hosted)

    # --- orders --------------------------------------------------------------------------------------

    async def _prepare(self, hosted: _HostedProcess, before: _HostedProcess | None) -> None:
        order = hosted.order
        if before is not None:
            await self._leave(before, f"epoch {order.epoch} comes")
        async with self._turn:
            if self._hosted is not hosted:
                return
            try:
                path = hosted.model = self._model(order.desired)
                async with asyncio.timeout(self._settings.limits.spawn_s):
                    await self._spawn(hosted)
                ring = f"{order.fabric}:{free_port(order.fabric)}" if order.fabric else ""
            except (MlxtpError, OSError, TimeoutError) as error:
                self._report(hosted, FailureReport(order.rank, _named(error)))
                return
            finally:
                if self._hosted is not hosted:  # it was ended before there was a process to end
                    await self._remove(hosted)
            if self._hosted is hosted:
                self._reply_to(hosted.host, Prepared(order.epoch, ring, str(path)))

    async def _spawn(self, hosted: _HostedProcess) -> None:
        order, home = hosted.order, self._settings.home
        self._alive.add(hosted)
        hosted.folder = epoch_folder(home, order.epoch)
        make_epoch_folder(hosted.folder, needed=True)
        hosted.process = process = RankProcess(
            order.rank,
            order.epoch,
            hosted.folder,
            _Watcher(self, order.epoch),
            self._settings.limits,
            worker=self._worker,
        )
        await process.spawn(identity=home / "identity")
        await process.greet()

    async def _start(self, host: str, order: StartRank) -> None:
        async with self._turn:
            hosted = self._hosted
            if (
                hosted is None
                or (hosted.order.epoch, hosted.host) != (order.epoch, host)
                or hosted.process is None
            ):
                return  # it has ended meanwhile, which was reported
            try:
                async with asyncio.timeout(self._settings.limits.form_s):
                    jaccl = await hosted.process.join(order.bootstrap)
            except (MlxtpError, TimeoutError) as error:
                self._report(hosted, FailureReport(hosted.order.rank, _named(error)))
                return
            if self._hosted is hosted and hosted.heart is None:
                hosted.heart = asyncio.ensure_future(self._beat(hosted.process))
                self._reply_to(host, RankStarted(order.epoch, jaccl))

    async def _end(self, host: str, order: EndEpoch) -> None:
        hosted = self._hosted
        if hosted is not None and (hosted.order.epoch, hosted.host) == (order.epoch, host):
            if not hosted.silenced:  # a host that does not wait for an end in order has no failure to keep
                hosted.failure = "" if order.in_order else f"epoch {order.epoch} failed: its host knows why"
            hosted.silenced = True
            if order.in_order and hosted.heart is not None and hosted.process is not None:
                with contextlib.suppress(MlxtpError, TimeoutError):
                    async with asyncio.timeout(self._settings.limits.shutdown_s):
                        await hosted.process.shut_down()
            await self._leave(hosted, "its epoch ended")
        self._reply_to(host, EpochEnded(order.epoch))

    async def _leave(self, hosted: _HostedProcess, why: str) -> None:
        """End this rank; a later one stays."""
        if self._hosted is hosted:
            self._hosted = None
        about = {"epoch": hosted.order.epoch, "rank": hosted.order.rank}
        log.info("rank %d of epoch %d ends: %s", hosted.order.rank, hosted.order.epoch, why, extra=about)
        await self._remove(hosted)

    async def _remove(self, hosted: _HostedProcess) -> None:
        hosted.silenced = True
        if hosted.heart is not None:
            hosted.heart.cancel()
        if hosted.process is not None:
            await self._keep(hosted, await hosted.process.kill())
        if hosted.folder is not None:
            shutil.rmtree(hosted.folder, ignore_errors=True)
        self._alive.discard(hosted)

    async def _keep(self, hosted: _HostedProcess, end: failure_store.RankEnd) -> None:
        """Keep the records of a rank that failed, or whose epoch failed, unless it never started."""
        if not hosted.failure or (hosted.heart is None and end.by_agent):
            return
        cause = GroupError(hosted.failure, Code.RANK_LOST)
        failed = failure_store.FailedEpoch(
            hosted.order.epoch, self._settings.name, cause, reports=tuple(hosted.reports)
        )
        hosted.failure = ""
        try:
            folder = await asyncio.to_thread(failure_store.keep, self._settings.home, failed, (end,))
        except MlxtpError as error:
            words = "epoch %d: nothing of its failure is kept: %s"
            log.warning(words, failed.epoch, error.detail, extra={"epoch": failed.epoch})
        else:
            words = "epoch %d: what led to it: mlxtp doctor --postmortem '%s'"
            log.warning(words, failed.epoch, folder, extra={"epoch": failed.epoch})

    # --- reports of the rank -------------------------------------------------------------------------

    def received_pong(self, epoch: int, pong: Pong) -> None:
        if (hosted := self._of(epoch)) is not None:
            self._reply_to(hosted.host, RankPong(epoch, hosted.order.rank, pong))

    def reported(self, epoch: int, report: FailureReport) -> None:
        if (hosted := self._of(epoch)) is not None:
            self._report(hosted, report)

    def _report(self, hosted: _HostedProcess, report: FailureReport) -> None:
        if not hosted.silenced:
            hosted.reports.append(report)
            error, outside = report.error, report.seen_from_outside
            trouble = RankTrouble(hosted.order.epoch, hosted.order.rank, error.code, error.detail, outside)
            self._reply_to(hosted.host, trouble)

    def side(self, epoch: int, message: SideChannel) -> None:
        if (hosted := self._of(epoch)) is not None:
            self._reply_to(hosted.host, RankSide(epoch, hosted.order.rank, message))

    def _of(self, epoch: int) -> _HostedProcess | None:
        hosted = self._hosted
        return hosted if hosted is not None and hosted.order.epoch == epoch and not hosted.silenced else None

    async def _beat(self, process: RankProcess) -> None:
        while True:
            process.ping()
            await asyncio.sleep(self._settings.limits.heartbeat_s)

    def _reply_to(self, host: str, message: Message) -> None:
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
    """Adds the epoch to the reports of a hosted rank."""

    def __init__(self, hosted_rank: HostedRank, epoch: int) -> None:
        self._hosted_rank = hosted_rank
        self._epoch = epoch

    def received_pong(self, rank: int, pong: Pong) -> None:
        self._hosted_rank.received_pong(self._epoch, pong)

    def report(self, report: FailureReport) -> None:
        self._hosted_rank.reported(self._epoch, report)

    def emitted(self, event: RequestEvent) -> None:
        """Ignore it: only rank 0 emits, and rank 0 is never hosted."""

    def side(self, rank: int, message: SideChannel) -> None:
        self._hosted_rank.side(self._epoch, message)


def _named(error: Exception) -> MlxtpError:
    if isinstance(error, MlxtpError):
        return error
    if isinstance(error, TimeoutError):
        return GroupError("its rank process did not reply in time", Code.LINK_TIMEOUT)
    return GroupError(str(error), Code.FORM_FAILED)


class HostedRanks:
    """The rank that serves in a coordinator's group, and the one of a group that it tries beside."""

    def __init__(
        self, node: ClusterNode, model: ModelFolder, kept_epoch: int, worker: Worker = WORKER
    ) -> None:
        self.serving = HostedRank(node.settings, model, node.links.send, worker)
        self.trial = HostedRank(node.settings, model, node.links.send, worker)
        self.serving.last_epoch = kept_epoch
        node.links.on(self._received, StartRank, EndEpoch, RankGathered)
        node.links.on_lost(self._lost)

    @property
    def last_epoch(self) -> int:
        """Number of the last epoch for which this machine hosted a rank."""
        return max(self.serving.last_epoch, self.trial.last_epoch)

    def prepare(self, host: str, order: Prepare) -> None:
        """Take in a coordinator's order to prepare a rank."""
        self.trial.clear(f"epoch {order.epoch} comes")
        (self.trial if order.trial else self.serving).received(host, order)

    def serves(self, host: str, epoch: int) -> bool:
        """Note that the group of a trial's coordinator serves. Return True if it is the trial's."""
        if (host, epoch) != (self.trial.host, self.trial.epoch):
            return False
        self.serving, self.trial = self.trial, self.serving
        return True

    def clear(self, why: str) -> None:
        """End both ranks in the background, and report that to their coordinators."""
        self.serving.clear(why)
        self.trial.clear(why)

    async def close(self) -> None:
        """End both ranks; no order counts from now on."""
        await self.serving.close()
        await self.trial.close()

    def _received(self, link: ControlLink, message: StartRank | EndEpoch | RankGathered) -> None:
        of_trial = message.epoch == self.trial.epoch
        (self.trial if of_trial else self.serving).received(link.node_id, message)

    def _lost(self, node_id: str, _why: str) -> None:
        self.serving.lost(node_id)
        self.trial.lost(node_id)

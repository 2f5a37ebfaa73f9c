"""Ranks on this machine for owners of groups on other machines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..background import Background
from ..cluster.node import ClusterNode
from ..config import Settings
from ..diagnostics import failure_store
from ..errors import Code, FailureReport, GroupError, MlxtpError
from ..wire.cluster_messages import (
    EndEpoch,
    EpochEnded,
    Prepare,
    RankGathered,
    RankPong,
    RankSide,
    RankStarted,
    RankTrouble,
    StartRank,
)
from ..wire.codecs import Message
from ..wire.messages import Pong, RequestEvent, SideChannel
from .ranks import (
    MAX_REPORTS,
    WORKER,
    RankProcess,
    Worker,
    epoch_folder,
    keep_failure,
    make_epoch_folder,
    with_stranded,
)

log = logging.getLogger(__name__)

MAX_OF_HOST = 16  #: Ranks here for all groups of one host.
MAX_ORDERS = 64  #: Waiting orders of one host for new ranks, and for each rank; further orders are dropped.
_ORDERS = (StartRank, EndEpoch, RankGathered)  #: `OtherOwners` receives `Prepare`, and may refuse it.

ModelFolder = Callable[[str], Path]  #: Folder of a wanted model by its name. Raises ModelError.


class HostedRank:
    """One epoch's rank here, and `Watcher` of its process. Reports to its owner, `host`, until `silenced`."""

    def __init__(
        self, order: Prepare, host: str, settings: Settings, send: Callable[[str, Message], None]
    ) -> None:
        self.order = order
        self.host = host
        self.host_boot = ""  #: Boot id of its host at its Prepare.
        self.process: RankProcess | None = None
        self.model: Path | None = None  #: Folder of its model, once looked up.
        self.silenced = False
        self.awaited = False  #: True once its host waits for its end.
        self.life: asyncio.Task[None] | None = None  #: Task of `live`, until that ends.
        self._settings = settings
        self._send = send
        self._orders: asyncio.Queue[StartRank | EndEpoch] = asyncio.Queue(MAX_ORDERS)
        self._joined = False
        self._failure = ""  #: Reason of an end that was not orderly.
        self._folder = epoch_folder(settings.home, order.epoch, host)
        self._reports: list[FailureReport] = []

    @property
    def key(self) -> tuple[str, int]:
        return self.host, self.order.epoch

    @property
    def pid(self) -> int:
        """Its process; 0 until it serves."""
        return self.process.pid if self.process is not None and self._joined else 0

    # --- its life ------------------------------------------------------------------------------------

    async def live(self, before: list[asyncio.Task[None]], model: ModelFolder, worker: Worker) -> None:
        """After the ranks `before` end, run its process until its host ends it, or this task is cancelled.
        Only records of a failure remain.
        """
        try:
            if before:
                await asyncio.wait(before)
            step = self._spawn(model, worker)
            while True:
                try:
                    await step
                except (MlxtpError, OSError) as error:
                    self.report(FailureReport(self.order.rank, _named(error)))
                order = await self._orders.get()
                if isinstance(order, EndEpoch):
                    return await self._shut_down()
                step = self._start(order)
        finally:
            self.life, self.silenced = None, True
            if self.process is not None:
                await self._keep(await self.process.kill())
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _spawn(self, model: ModelFolder, worker: Worker) -> None:
        order, self.model = self.order, model(self.order.model)
        make_epoch_folder(self._folder, needed=True)
        self.process = RankProcess(order.rank, order.epoch, self._folder, self, self._settings, worker=worker)
        async with asyncio.timeout(self._settings.limits.spawn_s):
            prepared = await self.process.prepare(order.fabric)
        self.reply(replace(prepared, path=str(self.model)))

    async def _start(self, order: StartRank) -> None:
        if self.process is None:
            return  # `_spawn` failed, and was reported
        async with asyncio.timeout(self._settings.limits.form_s):
            jaccl = await self.process.join(order.bootstrap)
        if jaccl:
            self.process.forms(order.bootstrap)
        if not self._joined:
            self._joined = True
            self.process.beat()
            self.reply(RankStarted(order.epoch, jaccl))

    async def _shut_down(self) -> None:
        assert self.process is not None
        with contextlib.suppress(MlxtpError, TimeoutError):
            async with asyncio.timeout(self._settings.limits.shutdown_s):
                await self.process.shut_down()

    async def _keep(self, end: failure_store.RankEnd) -> None:
        """Keep the records of a failure, unless the rank never started."""
        if self._failure and (self._joined or not end.by_agent):
            cause = with_stranded(GroupError(self._failure, Code.RANK_LOST), (end,))
            failed = failure_store.FailedEpoch(
                self.order.epoch, self._settings.name, cause, reports=tuple(self._reports)
            )
            await keep_failure(self._settings.home, failed, (end,))

    # --- orders --------------------------------------------------------------------------------------

    def received(self, order: StartRank | EndEpoch | RankGathered) -> None:
        match order:
            case RankGathered():
                if self.process is not None and not self.silenced:
                    self.process.tell(order.gathered)
            case EndEpoch(in_order=True) if self._joined and not self._orders.full():
                self.awaited = self.silenced = True
                self._orders.put_nowait(order)
            case EndEpoch():
                self.awaited = True
                failed = not (order.in_order or self.silenced)  # its host may have waited in vain for order
                self.end("its epoch ended", f"epoch {order.epoch} failed: its host knows why" * failed)
            case StartRank() if not self._orders.full():
                self._orders.put_nowait(order)

    def end(self, why: str, failure: str = "") -> None:
        """End it at once. With a `failure` as reason, keep its records."""
        if self.life is not None:
            about = {"epoch": self.order.epoch, "rank": self.order.rank}
            log.info("rank %d of epoch %d ends: %s", self.order.rank, self.order.epoch, why, extra=about)
            self.life.cancel()
            self.life, self.silenced, self._failure = None, True, failure

    # --- reports of the process ----------------------------------------------------------------------

    def received_pong(self, _rank: int, pong: Pong) -> None:
        if not self.silenced:
            self.reply(RankPong(self.order.epoch, self.order.rank, pong))

    def report(self, report: FailureReport) -> None:
        if not self.silenced and len(self._reports) < MAX_REPORTS:
            self._reports.append(report)
            error, outside = report.error, report.seen_from_outside
            self.reply(RankTrouble(self.order.epoch, self.order.rank, error.code, error.detail, outside))

    def emitted(self, event: RequestEvent) -> None:
        """Ignore it: only rank 0 emits, and rank 0 is never hosted."""

    def side(self, _rank: int, message: SideChannel) -> None:
        if not self.silenced:
            self.reply(RankSide(self.order.epoch, self.order.rank, message))

    def reply(self, message: Message) -> None:
        """Send a message to its host; if the link is gone, `HostedRanks.lost` does the rest."""
        with contextlib.suppress(MlxtpError):
            self._send(self.host, message)


class HostedRanks:
    """Ranks here of other agents' groups. A rank ends with its owner's link, or its owner's next epoch."""

    def __init__(
        self, node: ClusterNode, model: ModelFolder, kept_epoch: int, worker: Worker = WORKER
    ) -> None:
        self._node = node
        self._model = model
        self._kept_epoch = kept_epoch
        self._worker = worker
        self._alive: dict[HostedRank, asyncio.Task[None]] = {}  #: Also ranks that are ending.
        self._last_epochs: dict[str, int] = {}  #: By host.
        self._background = Background()
        self._closed = False
        node.links.on(lambda link, message: self.received(link.node_id, message), *_ORDERS)
        node.links.on_lost(lambda host, _why: self.lost(host))
        node.enrolment.on_gone(lambda host: self._last_epochs.pop(host, None))

    @property
    def models(self) -> set[Path]:
        return {rank.model for rank in self._alive if rank.model is not None}

    def last_epoch(self, host: str) -> int:
        """Return the last epoch of that owner with a rank on this machine."""
        return self._last_epochs.get(host, self._kept_epoch)

    @property
    def ranks(self) -> list[HostedRank]:
        return [rank for rank in self._alive if not rank.silenced]

    def received(self, host: str, message: Prepare | StartRank | EndEpoch | RankGathered) -> None:
        """Take an owner's order. `ranks` is up to date when this returns."""
        if self._closed:
            return
        if isinstance(message, Prepare):
            self._prepare(host, message)
        elif found := [rank for rank in self._alive if rank.key == (host, message.epoch)]:
            found[0].received(message)
        elif isinstance(message, EndEpoch):
            with contextlib.suppress(MlxtpError):  # its link is gone, and it knows
                self._node.links.send(host, EpochEnded(message.epoch))

    def _prepare(self, host: str, order: Prepare) -> None:
        theirs = [rank for rank in self._alive if rank.host == host]
        if len(theirs) >= MAX_ORDERS:
            return
        before = [rank for rank in theirs if rank.order.group == order.group]
        for each in before:
            each.end(f"epoch {order.epoch} comes")
        rank = HostedRank(order, host, self._node.settings, self._node.links.send)
        rank.host_boot = self._node.membership.status_of(host).boot_id
        if sum(not each.silenced for each in theirs) >= MAX_OF_HOST:
            words = f"{MAX_OF_HOST} ranks of that Mac run here, the most for one"
            rank.report(FailureReport(order.rank, GroupError(words, Code.OVERLOADED)))
            return
        self._last_epochs[host] = order.epoch
        life = rank.live([self._alive[each] for each in before], self._model, self._worker)
        rank.life = self._alive[rank] = self._background.start(life, "a hosted rank")
        rank.life.add_done_callback(lambda _life: self._gone(rank))

    def _gone(self, rank: HostedRank) -> None:
        del self._alive[rank]
        if rank.awaited:
            rank.reply(EpochEnded(rank.order.epoch))

    def serves(self, host: str, group: str, epoch: int) -> None:
        why = f"its host is at epoch {epoch}"
        ours = (host, group)
        self.clear(why, lambda each: (each.host, each.order.group) == ours and each.order.epoch < epoch)

    def lost(self, host: str) -> None:
        self.clear("its host's link is gone", lambda rank: rank.host == host)

    def clear(self, why: str, chosen: Callable[[HostedRank], bool] = lambda _: True) -> None:
        """End the chosen ranks, and report it to their owners."""
        for rank in list(filter(chosen, self._alive)):
            error = GroupError(f"its agent ended it: {why}", Code.RANK_LOST)
            rank.report(FailureReport(rank.order.rank, error, seen_from_outside=True))
            rank.end(why, why)

    async def close(self) -> None:
        self._closed = True
        for rank in self._alive:
            rank.end("the agent ends")
        while self._alive:
            await asyncio.wait(self._alive.values())


def _named(error: Exception) -> MlxtpError:
    if isinstance(error, MlxtpError):
        return error
    if isinstance(error, TimeoutError):
        return GroupError("its rank process did not reply in time", Code.LINK_TIMEOUT)
    return GroupError(str(error), Code.FORM_FAILED)

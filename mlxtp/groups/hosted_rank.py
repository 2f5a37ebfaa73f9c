"""The ranks that this machine runs for the owners of groups on other machines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from ..background import Background
from ..cluster.node import ClusterNode
from ..config import Settings
from ..diagnostics import failure_store
from ..errors import Code, FailureReport, GroupError, MlxtpError
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
from ..wire.codecs import Message
from ..wire.messages import Pong, RequestEvent, SideChannel
from .ranks import (
    WORKER,
    RankProcess,
    RankReady,
    Worker,
    epoch_folder,
    keep_failure,
    make_epoch_folder,
    with_stranded,
)

log = logging.getLogger(__name__)

MAX_ORDERS = 64  #: Orders of one host carried out at one time. Some are usual; further ones are dropped.
MAX_OF_HOST = 16  #: Ranks of one host that run here, of all its groups.
_ORDERS = (StartRank, EndEpoch, RankGathered)  #: `Prepare` comes through `Reconciler`, which may refuse it.
_ORDER = "an order of a group's owner"

#: Returns the folder of a wanted model by its name. Raises ModelError when it is not here.
ModelFolder = Callable[[str], Path]


class HostedRank:
    """One epoch's rank here, from its Prepare on; implements `Watcher` of its process.

    There is no process yet while earlier ones end. Its reports go to its host, which is the node id of the
    group's owner, until it is `silenced`.
    """

    def __init__(
        self, order: Prepare, host: str, settings: Settings, send: Callable[[str, Message], None]
    ) -> None:
        self.order = order
        self.host = host
        self.host_boot = ""  #: Boot id of its host when it came.
        #: Held while a process is started or joins. Its group shares it: one that ends on its way up is gone.
        self.turn = asyncio.Lock()
        self.process: RankProcess | None = None
        self.model: Path | None = None  #: The model that it loads, or has loaded.
        self.silenced = False
        self.failure = ""  #: Reason of its end, unless it ended in order.
        self._settings = settings
        self._send = send
        self._folder: Path | None = None
        self._ready = RankReady()
        self._heart: asyncio.Task[None] | None = None
        self._reports: list[FailureReport] = []

    @property
    def key(self) -> tuple[str, int]:
        return self.host, self.order.epoch

    @property
    def pid(self) -> int:
        """Its process; 0 until it serves."""
        return self.process.pid if self.process is not None and self._heart is not None else 0

    @property
    def group(self) -> tuple[str, str]:
        return self.host, self.order.group

    async def spawn(self, model: Path, worker: Worker) -> None:
        """Start the process. Raises MlxtpError, OSError or TimeoutError."""
        order, home = self.order, self._settings.home
        self.model, self._folder = model, epoch_folder(home, order.epoch, self.host)
        async with asyncio.timeout(self._settings.limits.spawn_s):
            make_epoch_folder(self._folder, needed=True)
            self.process = RankProcess(order.rank, order.epoch, self._folder, self, worker=worker)
            await self.process.spawn(identity=home / "identity", keep_warm=self._settings.keep_warm)
            await self.process.greet()
        self._ready = RankReady.with_port(order.fabric)
        if not self.silenced:
            self.reply(Prepared(order.epoch, self._ready.ring, str(model)))

    async def start(self, order: StartRank) -> None:
        """Have the process join its group. Raises MlxtpError or TimeoutError."""
        assert self.process is not None
        disk = room_in(self._settings.home, self._settings.cache_disk)
        async with asyncio.timeout(self._settings.limits.form_s):
            jaccl = await self.process.join(order.bootstrap, disk)
        if jaccl:
            self.process.forms(order.bootstrap, self._settings.home)
        if not self.silenced and self._heart is None:
            self._heart = asyncio.create_task(self._beat(self.process))
            self.reply(RankStarted(order.epoch, jaccl))

    async def _beat(self, process: RankProcess) -> None:
        while True:
            process.ping()
            await asyncio.sleep(self._settings.limits.heartbeat_s)

    def gathered(self, message: RankGathered) -> None:
        if self.process is not None and not self.silenced:
            with contextlib.suppress(MlxtpError):  # it is gone, which its reader reports
                self.process.send(message.gathered)

    async def shut_down(self, order: EndEpoch) -> None:
        """Take its host's order to end. A rank that ends in order gets time to do so."""
        if not self.silenced:  # a host that does not wait for an end in order has no failure to keep
            self.failure = "" if order.in_order else f"epoch {order.epoch} failed: its host knows why"
        self.silenced = True
        if order.in_order and self._heart is not None and self.process is not None:
            with contextlib.suppress(MlxtpError, TimeoutError):
                async with asyncio.timeout(self._settings.limits.shutdown_s):
                    await self.process.shut_down()

    async def remove(self) -> None:
        """End the process, and remove all that it has left but the records of a failure."""
        self.silenced = True
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.wait({self._heart})
        if self.process is not None:
            await self._keep(await self.process.kill())
        self._ready.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep(self, end: failure_store.RankEnd) -> None:
        """Keep the records of a rank that failed, or whose epoch failed, unless it never started."""
        if not self.failure or (self._heart is None and end.by_agent):
            return
        epoch, home = self.order.epoch, self._settings.home
        cause = with_stranded(GroupError(self.failure, Code.RANK_LOST), (end,))
        failed = failure_store.FailedEpoch(epoch, self._settings.name, cause, reports=tuple(self._reports))
        self.failure = ""
        await keep_failure(home, failed, (end,))

    # --- reports of the process ----------------------------------------------------------------------

    def received_pong(self, _rank: int, pong: Pong) -> None:
        if not self.silenced:
            self.reply(RankPong(self.order.epoch, self.order.rank, pong))

    def report(self, report: FailureReport) -> None:
        if not self.silenced:
            self._reports.append(report)
            error, outside = report.error, report.seen_from_outside
            self.reply(RankTrouble(self.order.epoch, self.order.rank, error.code, error.detail, outside))

    def emitted(self, event: RequestEvent) -> None:
        """Ignore it: only rank 0 emits, and rank 0 is never hosted."""

    def side(self, _rank: int, message: SideChannel) -> None:
        if not self.silenced:
            self.reply(RankSide(self.order.epoch, self.order.rank, message))

    def reply(self, message: Message) -> None:
        """Send a message to its host, unless the link is gone: `HostedRanks.lost` does the rest."""
        with contextlib.suppress(MlxtpError):
            self._send(self.host, message)


class HostedRanks:
    """Ranks here of groups whose owners are other agents, each known by its owner's node id and its epoch.

    A rank lives and dies by the control link to its owner. It ends when its owner orders or reports a later
    epoch of its group. No rank waits for another group's.
    """

    def __init__(
        self, node: ClusterNode, model: ModelFolder, kept_epoch: int, worker: Worker = WORKER
    ) -> None:
        self._node = node
        self._model = model
        self._kept_epoch = kept_epoch
        self._worker = worker
        self._ranks: dict[tuple[str, int], HostedRank] = {}  #: By host and epoch.
        self._alive: set[HostedRank] = set()  #: Ranks that may have a process.
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._last_epochs: dict[str, int] = {}  #: By host.
        self._orders: defaultdict[str, Background] = defaultdict(Background)  #: Work by host.
        self._closed = False
        node.links.on(lambda link, message: self.received(link.node_id, message), *_ORDERS)
        node.links.on_lost(lambda host, _why: self.lost(host))
        node.enrolment.on_gone(self._forget)

    @property
    def models(self) -> set[Path]:
        """Folders of the models that ranks here have open, or are about to open."""
        return {rank.model for rank in self._alive if rank.model is not None}

    def last_epoch(self, host: str) -> int:
        """Return the number of the last epoch in which this machine ran a rank for that owner."""
        return self._last_epochs.get(host, self._kept_epoch)

    @property
    def ranks(self) -> list[HostedRank]:
        return list(self._ranks.values())

    def received(self, host: str, message: Prepare | StartRank | EndEpoch | RankGathered) -> None:
        """Take an order of an owner, and carry it out in the background, after earlier ones for that rank.

        The ranks that count are set before this returns.
        """
        background, key = self._orders[host], (host, message.epoch)
        if self._closed or len(background.tasks) >= MAX_ORDERS:
            return
        rank = self._ranks.get(key)
        match message:
            case RankGathered():
                if rank is not None:
                    rank.gathered(message)
            case Prepare():
                before = [each for each in self._ranks.values() if each.group == (host, message.group)]
                for each in before:
                    each.silenced = True
                    del self._ranks[each.key]
                rank = HostedRank(message, host, self._node.settings, self._node.links.send)
                rank.turn = self._turns.setdefault((host, message.group), rank.turn)
                rank.host_boot = self._node.membership.status_of(host).boot_id
                if sum(owner == host for owner, _ in self._ranks) >= MAX_OF_HOST:
                    words = f"{MAX_OF_HOST} ranks of that Mac run here, the most for one"
                    rank.report(FailureReport(message.rank, GroupError(words, Code.OVERLOADED)))
                    return
                self._ranks[key], self._last_epochs[host] = rank, message.epoch
                background.start(self._prepare(rank, before), _ORDER)
            case StartRank():
                if rank is not None:  # else it has ended meanwhile, which was reported
                    background.start(self._start(rank, message), _ORDER)
            case EndEpoch():
                background.start(self._end(host, message), _ORDER)

    def serves(self, host: str, group: str, epoch: int) -> None:
        """Note that an owner's group is at that epoch: earlier ranks of it end."""
        why = f"its host is at epoch {epoch}"
        self.clear(why, lambda each: each.group == (host, group) and each.order.epoch < epoch)

    def lost(self, host: str) -> None:
        self.clear("its host's link is gone", lambda rank: rank.host == host)

    def _forget(self, host: str) -> None:
        """Forget a node that is no member any longer, once its ranks have ended."""
        self._last_epochs.pop(host, None)
        for idle in [each for each, work in self._orders.items() if not work.tasks]:
            del self._orders[idle]

    def clear(self, why: str, chosen: Callable[[HostedRank], bool] = lambda _: True) -> None:
        """End the chosen ranks in the background, and report that to their owners."""
        for rank in list(filter(chosen, self._ranks.values())):
            rank.failure = why
            error = GroupError(f"its agent ended it: {why}", Code.RANK_LOST)
            rank.report(FailureReport(rank.order.rank, error, seen_from_outside=True))
            self._orders[rank.host].start(self._leave(rank, why), "the end of a hosted rank")

    async def close(self) -> None:
        """End all ranks; no order counts from now on."""
        self._closed = True
        await asyncio.gather(*(self._leave(rank, "the agent ends") for rank in list(self._ranks.values())))
        for background in list(self._orders.values()):
            await background.close()
        for rank in list(self._alive):  # their end was cut short
            await self._remove(rank)

    # --- orders --------------------------------------------------------------------------------------

    async def _prepare(self, rank: HostedRank, before: Sequence[HostedRank]) -> None:
        for each in before:
            await self._leave(each, f"epoch {rank.order.epoch} comes")
        async with rank.turn:
            if self._ranks.get(rank.key) is not rank:
                return
            self._alive.add(rank)
            try:
                await rank.spawn(self._model(rank.order.model), self._worker)
            except (MlxtpError, OSError, TimeoutError) as error:
                rank.report(FailureReport(rank.order.rank, _named(error)))
            finally:
                if self._ranks.get(rank.key) is not rank:  # it was ended before there was a process to end
                    await self._remove(rank)

    async def _start(self, rank: HostedRank, order: StartRank) -> None:
        async with rank.turn:
            if self._ranks.get(rank.key) is not rank or rank.process is None:
                return  # it has ended meanwhile, which was reported
            try:
                await rank.start(order)
            except (MlxtpError, TimeoutError) as error:
                rank.report(FailureReport(rank.order.rank, _named(error)))

    async def _end(self, host: str, order: EndEpoch) -> None:
        if (rank := self._ranks.get((host, order.epoch))) is not None:
            await rank.shut_down(order)
            await self._leave(rank, "its epoch ended")
        with contextlib.suppress(MlxtpError):  # its link is gone, and it knows
            self._node.links.send(host, EpochEnded(order.epoch))

    async def _leave(self, rank: HostedRank, why: str) -> None:
        if self._ranks.get(rank.key) is rank:
            del self._ranks[rank.key]
        about = {"epoch": rank.order.epoch, "rank": rank.order.rank}
        log.info("rank %d of epoch %d ends: %s", rank.order.rank, rank.order.epoch, why, extra=about)
        await self._remove(rank)

    async def _remove(self, rank: HostedRank) -> None:
        await rank.remove()
        self._alive.discard(rank)


def _named(error: Exception) -> MlxtpError:
    if isinstance(error, MlxtpError):
        return error
    if isinstance(error, TimeoutError):
        return GroupError("its rank process did not reply in time", Code.LINK_TIMEOUT)
    return GroupError(str(error), Code.FORM_FAILED)

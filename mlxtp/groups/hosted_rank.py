"""The rank that this machine runs for a coordinator on another one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from ..background import Background
from ..cluster.links import ControlLink
from ..cluster.node import ClusterNode
from ..cluster.reconcile import RunningEpoch
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
from ..wire.messages import Pong, RequestEvent, SideChannel
from .ranks import (
    WORKER,
    RankProcess,
    Worker,
    epoch_folder,
    free_port,
    keep_failure,
    make_epoch_folder,
)

log = logging.getLogger(__name__)

MAX_ORDERS = 64  #: Orders carried out at one time. Two or three are usual; further ones are dropped.

#: Returns the folder of the model of a version of the desired state. Raises ModelError when it is not here.
ModelFolder = Callable[[int], Path]


class _HostedProcess:
    """One epoch's rank here, from its Prepare on; implements `Watcher` of its process.

    There is no process yet while earlier ones end. Its reports go to its coordinator until it is `silenced`.
    """

    def __init__(
        self, order: Prepare, host: str, settings: Settings, send: Callable[[str, Message], None]
    ) -> None:
        self.order = order
        self.host = host
        self.process: RankProcess | None = None
        self.model: Path | None = None  #: The model that it loads, or has loaded.
        self.silenced = False
        self.failure = ""  #: Reason of its end, unless it ended in order.
        self._settings = settings
        self._send = send
        self._folder: Path | None = None
        self._heart: asyncio.Task[None] | None = None
        self._reports: list[FailureReport] = []

    def is_of(self, host: str, epoch: int) -> bool:
        """Return True for the coordinator and the epoch of this rank."""
        return (self.order.epoch, self.host) == (epoch, host)

    async def spawn(self, model: Path, worker: Worker) -> None:
        """Start the process. Raises MlxtpError, OSError or TimeoutError."""
        order, home = self.order, self._settings.home
        self.model, self._folder = model, epoch_folder(home, order.epoch)
        async with asyncio.timeout(self._settings.limits.spawn_s):
            make_epoch_folder(self._folder, needed=True)
            self.process = RankProcess(order.rank, order.epoch, self._folder, self, worker=worker)
            await self.process.spawn(identity=home / "identity")
            await self.process.greet()
        ring = f"{order.fabric}:{free_port(order.fabric)}" if order.fabric else ""
        if not self.silenced:
            self.reply(Prepared(order.epoch, ring, str(model)))

    async def start(self, order: StartRank) -> None:
        """Have the process join its group. Raises MlxtpError or TimeoutError."""
        assert self.process is not None
        async with asyncio.timeout(self._settings.limits.form_s):
            jaccl = await self.process.join(order.bootstrap)
        if not self.silenced and self._heart is None:
            self._heart = asyncio.create_task(self._beat(self.process))
            self.reply(RankStarted(order.epoch, jaccl))

    async def _beat(self, process: RankProcess) -> None:
        while True:
            process.ping()
            await asyncio.sleep(self._settings.limits.heartbeat_s)

    def gathered(self, message: RankGathered) -> None:
        """Pass the reply of a round of JACCL's side channel on to the process."""
        if self.process is not None and not self.silenced:
            with contextlib.suppress(MlxtpError):  # it is gone, which its reader reports
                self.process.send(message.gathered)

    async def shut_down(self, order: EndEpoch) -> None:
        """Take its coordinator's order to end. A rank that ends in order gets time to do so."""
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
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep(self, end: failure_store.RankEnd) -> None:
        """Keep the records of a rank that failed, or whose epoch failed, unless it never started."""
        if not self.failure or (self._heart is None and end.by_agent):
            return
        epoch, home, cause = self.order.epoch, self._settings.home, GroupError(self.failure, Code.RANK_LOST)
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
        """Send a message to its coordinator, unless the link is gone: `HostedRank.lost` does the rest."""
        with contextlib.suppress(MlxtpError):
            self._send(self.host, message)


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
        self._background = Background()

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
        if self._closed or len(self._background.tasks) >= MAX_ORDERS:
            return
        hosted, order = self._hosted, "an order of the coordinator"
        match message:
            case RankGathered():
                if hosted is not None and hosted.is_of(host, message.epoch):
                    hosted.gathered(message)
            case Prepare():
                if hosted is not None:
                    hosted.silenced = True
                self._hosted = _HostedProcess(message, host, self._settings, self._send)
                self.last_epoch = message.epoch
                self._background.start(self._prepare(self._hosted, hosted), order)
            case StartRank():
                self._background.start(self._start(host, message), order)
            case EndEpoch():
                self._background.start(self._end(host, message), order)

    def lost(self, host: str) -> None:
        """Clear the rank of a node whose last control link is gone."""
        if self._hosted is not None and self._hosted.host == host:
            self.clear("the coordinator's link is gone")

    def clear(self, why: str) -> None:
        """End the rank in the background, and report it to its coordinator."""
        if (hosted := self._hosted) is not None:
            hosted.failure = why
            error = GroupError(f"its agent ended it: {why}", Code.RANK_LOST)
            hosted.report(FailureReport(hosted.order.rank, error, seen_from_outside=True))
            self._background.start(self._leave(hosted, why), "the end of a hosted rank")

    async def close(self) -> None:
        """End the running rank; no order counts from now on."""
        self._closed = True
        if self._hosted is not None:
            await self._leave(self._hosted, "the agent ends")
        await self._background.close()
        for hosted in list(self._alive):  # their end was cut short
            await self._remove(hosted)

    # --- orders --------------------------------------------------------------------------------------

    async def _prepare(self, hosted: _HostedProcess, before: _HostedProcess | None) -> None:
        if before is not None:
            await self._leave(before, f"epoch {hosted.order.epoch} comes")
        async with self._turn:
            if self._hosted is not hosted:
                return
            self._alive.add(hosted)
            try:
                await hosted.spawn(self._model(hosted.order.desired), self._worker)
            except (MlxtpError, OSError, TimeoutError) as error:
                hosted.report(FailureReport(hosted.order.rank, _named(error)))
            finally:
                if self._hosted is not hosted:  # it was ended before there was a process to end
                    await self._remove(hosted)

    async def _start(self, host: str, order: StartRank) -> None:
        async with self._turn:
            hosted = self._hosted
            if hosted is None or not hosted.is_of(host, order.epoch) or hosted.process is None:
                return  # it has ended meanwhile, which was reported
            try:
                await hosted.start(order)
            except (MlxtpError, TimeoutError) as error:
                hosted.report(FailureReport(hosted.order.rank, _named(error)))

    async def _end(self, host: str, order: EndEpoch) -> None:
        hosted = self._hosted
        if hosted is not None and hosted.is_of(host, order.epoch):
            await hosted.shut_down(order)
            await self._leave(hosted, "its epoch ended")
        with contextlib.suppress(MlxtpError):  # its link is gone, and it knows
            self._send(host, EpochEnded(order.epoch))

    async def _leave(self, hosted: _HostedProcess, why: str) -> None:
        """End this rank; a later one stays."""
        if self._hosted is hosted:
            self._hosted = None
        about = {"epoch": hosted.order.epoch, "rank": hosted.order.rank}
        log.info("rank %d of epoch %d ends: %s", hosted.order.rank, hosted.order.epoch, why, extra=about)
        await self._remove(hosted)

    async def _remove(self, hosted: _HostedProcess) -> None:
        await hosted.remove()
        self._alive.discard(hosted)


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
        self._node = node
        #: The epoch of the rank that serves, and the boot id that its host had when it came.
        self._host_boot = (0, "")
        self.serving = HostedRank(node.settings, model, node.links.send, worker)
        self.trial = HostedRank(node.settings, model, node.links.send, worker)
        self.serving.last_epoch = kept_epoch
        node.links.on(self._received, StartRank, EndEpoch, RankGathered)
        node.links.on_lost(self._lost)

    @property
    def last_epoch(self) -> int:
        """Number of the last epoch for which this machine hosted a rank."""
        return max(self.serving.last_epoch, self.trial.last_epoch)

    def running(self) -> RunningEpoch | None:
        """Return the epoch of the rank that serves, for decisions: of its group two nodes are known here."""
        hosted, node = self.serving, self._node
        if not hosted.epoch:
            self._host_boot = (0, "")
            return None
        if self._host_boot[0] != hosted.epoch:
            self._host_boot = (hosted.epoch, node.membership.status_of(hosted.host).boot_id)
        ranks, boots = (hosted.host, node.node_id), (self._host_boot[1], node.boot_id)
        return RunningEpoch(hosted.epoch, ranks, boots, (), "", 0, False)

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

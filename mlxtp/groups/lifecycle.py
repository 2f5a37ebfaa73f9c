"""Life of one group of ranks: starts an epoch, watches it, ends it, starts the next."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from ..api.backend import ModelInfo
from ..cluster.reconcile import FormEpoch
from ..config import Settings
from ..errors import Code, GroupError, MlxtpError
from ..gateway.gateway import Gateway
from ..models.inspect import ModelSource, weight_bytes
from ..placement.candidates import Candidate
from .health import RestartPolicy, ServingState
from .loading import KvRoom, LoadedModel, ModelLoader
from .process_group import EpochGroup, ProcessGroup
from .ranks import WORKER, Worker
from .status import GroupStatus

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S = 2.0  #: Seconds for the coordinator to find another place for a group that failed for good.

StageListener = Callable[[str, float], None]  #: Gets a reached stage, and seconds since the epoch began.


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Order, model and ranks of an epoch, and the ranks' links when it was planned.

    `left_out`: it is formed although it had failed, for lack of another place.
    """

    order: FormEpoch
    model: ModelSource
    group: EpochGroup
    wired: Candidate
    left_out: bool = False


class EpochOwner(Protocol):
    """Plans epochs, and learns how they end. `controller.GroupController` has the contracts."""

    async def next_plan(self) -> EpochPlan: ...
    async def changed(self) -> None: ...
    def failed(self, error: MlxtpError, formed: bool) -> bool: ...
    def died(self, error: MlxtpError, served_s: float, strikes: int, *, last: bool) -> bool: ...


class Supervisor:
    """Life of one group here: forms, loads, serves, drains and ends its epochs, one by one."""

    def __init__(
        self,
        settings: Settings,
        gateway: Gateway,
        group: str,
        on_stage: StageListener = lambda _stage, _seconds: None,
        worker: Worker = WORKER,
    ) -> None:
        self.gateway = gateway
        self.group = group
        self.deployment = group.rpartition("#")[0]
        self.status = GroupStatus(gateway)
        self.loader = ModelLoader(settings, partial(gateway.self_test, self.deployment))
        self._make_ranks = partial(ProcessGroup, settings, on_event=gateway.on_event, worker=worker)
        self.source: ModelSource | None = None  #: Model of the present epoch, or of the last one.
        self.kv = KvRoom(self._serve)
        self.info: ModelInfo | None = None  #: The model that this agent's ranks serve; may be None.
        self._current: ProcessGroup | None = None
        self._policy = RestartPolicy()
        self._on_stage = on_stage

    async def run(self, owner: EpochOwner) -> None:
        """Run the epochs that `owner` plans until cancelled. That ends the ranks in order; no process is left
        when this returns.
        """
        status = self.status
        try:
            while True:
                await self._live(await owner.next_plan(), owner)
        except asyncio.CancelledError:
            status.ranks = None
            status.enter(ServingState.STOPPED)
            self.gateway.park(self.group, GroupError("the group has ended here", Code.REPLANNED))
            if self._current is not None:
                await _to_its_end(self._current.stop())
            raise
        finally:
            self._current, status.in_epoch = None, False

    async def _live(self, plan: EpochPlan, owner: EpochOwner) -> None:
        """Run one epoch: form, load, serve, end; and rest after a failure."""
        status, gateway, model, number = self.status, self.gateway, plan.model, plan.order.number
        status.in_epoch = True
        # This group will finish requests that another Mac has served so far.
        gateway.park(self.group, GroupError("another group is formed", Code.REPLANNED))
        self.source = model
        status.began(number, plan.group, model.id)
        reached = partial(self._reached, time.monotonic())
        ranks = self._current = self._make_ranks(number, on_stage=reached, group=plan.group)
        ranks.kv_bytes = self.kv.limit_bytes
        formed = served = False
        try:
            await ranks.start()  # they form a group, which proves itself
            status.ranks, formed = ranks, True

            status.weight_bytes = await asyncio.to_thread(weight_bytes, model.path)
            status.enter(ServingState.LOADING)
            loaded = await self.loader.bring_up(ranks, model, reached)

            self._serve(ranks, loaded)
            status.ready()
            served = True
            await self.kv.serve(ranks, loaded)
            error = await asyncio.shield(ranks.failed)  # a fault, a lost Mac, or another plan
        except MlxtpError as failure:
            error = failure
        except Exception as bug:  # the process boundary of the ranks: they must not outlive a bug here
            log.exception("epoch %d", number, extra={"epoch": number})
            error = GroupError(f"{type(bug).__name__}: {bug}", Code.INTERNAL)

        strikes, now = gateway.deployments.blamed(self.group, error.code), time.monotonic()
        # Before the state changes: the next plan counts these ranks' memory as free.
        served_s, last = status.history.served_s(now), self._policy.is_last(now)
        replaced = served and owner.died(error, served_s, strikes, last=last)
        self.kv.close()
        self.info = None
        status.failed(error)
        gateway.park(self.group, error, spare=replaced)
        if error.code is Code.REPLANNED:
            await _to_its_end(ranks.stop())
            self._current, status.in_epoch = None, False
            log.info("epoch %d ended: %s", number, error.detail, extra={"epoch": number})
            return
        known = await _to_its_end(ranks.kill(error))  # with memory that may be stranded
        error = known or error
        status.reason, self._current, status.in_epoch = error, None, False

        status.resting = True
        instead = replaced or (not served and owner.failed(error, formed))
        delay_s: float | None = (
            self._policy.replaced()
            if replaced
            else self._policy.delay_s(
                time.monotonic(), error, served, at_ring=ranks.at_ring, jaccl=plan.group.backend == "jaccl"
            )
        )
        await self._rest(owner, delay_s, error, instead=instead)
        status.resting = False

    async def _rest(
        self, owner: EpochOwner, delay_s: float | None, error: MlxtpError, *, instead: bool
    ) -> None:
        """Wait for a while after a failed epoch, or give up and wait for the owner to change. `instead`:
        another plan may take its place, and the reason was logged.
        """
        number, about = self.status.epoch, {"epoch": self.status.epoch}
        if delay_s is not None:
            level, why = (logging.INFO, "") if instead else (logging.WARNING, f": {error.detail}")
            log.log(level, "epoch %d ended%s; next one in %g s", number, why, delay_s, extra=about)
            await _within(delay_s, owner.changed())
        elif not (instead and await _within(ANSWER_S, owner.changed())):
            log.error("epoch %d: %s; giving up", number, error.detail, extra=about)
            self.status.enter(ServingState.FAILED)
            self.gateway.fail(self.deployment, error, unless_ready=True)
            await owner.changed()
            self._policy = RestartPolicy()

    def _serve(self, ranks: ProcessGroup, loaded: LoadedModel) -> None:
        """Send requests to `ranks`: they now have a model, or other room for KV caches."""
        assert self.source is not None
        self.info, text = loaded.info, self.source.text
        load_s, room = loaded.load_s, loaded.kv_room
        self.gateway.serve(self.group, self.deployment, ranks, loaded.info, text, load_s=load_s, room=room)

    @property
    def has_ranks(self) -> bool:
        return self._current is not None

    def end_epoch(self, error: MlxtpError, lost: str = "") -> None:
        """End the present epoch; if node `lost` is gone, through the failure of its ranks."""
        if self._current is None:
            return
        if lost:
            self._current.lost(lost, error.detail)
            return
        if error.code is Code.REPLANNED:  # new requests are for the next epoch
            self.gateway.detach(self.group, error)
        self._current.give_up(error)

    def woke(self, slept_s: float) -> None:
        """End an epoch with ranks elsewhere, which went on or gave up while this machine slept."""
        group = self.status.group
        if group is not None and group.world_size > group.local:
            self.end_epoch(GroupError(f"this Mac slept for {slept_s:.0f} s", Code.REPLANNED))

    def _reached(self, began: float, stage: str) -> None:
        seconds = time.monotonic() - began
        self.status.history.reached(stage, seconds)
        try:
            self._on_stage(stage, seconds)
        except Exception:  # a listener must not end the epoch
            log.debug("the listener failed at %r", stage, exc_info=True)


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> bool:
    """Return True if `work` ended within so many seconds; else cancel it."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Wait for `work` in spite of cancellations; return its result, or then raise CancelledError."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()

"""The step from the cluster's state to this node's group, and the agent's orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import Callable

from ..api.admin import Json
from ..cluster.deployments import DesiredState
from ..cluster.links import ControlLink
from ..cluster.node import BEAT_S, ClusterNode
from ..cluster.reconcile import (
    Action,
    ClusterView,
    FormEpoch,
    HandOver,
    Situation,
    StopEpoch,
    TryGroup,
    Wait,
    drained_by,
    may_leave,
    refusal,
)
from ..errors import Code, GroupError, MlxtpError
from ..models.local_model import LocalModels
from ..wire.cluster_messages import Prepare, RankTrouble, Serving
from .controller import GroupController
from .health import ServingState
from .hosted_rank import HostedRanks
from .lifecycle import ABOUT_TO_STOP, Supervisor
from .owned_epoch import ServingReports

log = logging.getLogger(__name__)

LOOK_S = 0.1  #: Seconds between checks for open requests of a drain.
NEWS_S = 1.0  #: Seconds after which a client that watches a drain gets a reply even without news.


class Reconciler:
    """Decides in each round of the node, and takes in the orders and reports that concern its group."""

    may_leave = False  #: True once the others can do without this node, which is about to stop.
    unplanned = ""  #: Reason why there can be no group for the desired model, even after waiting.
    #: Last (model, reason) logged, digits stripped so that memory changes do not repeat the line.
    _logged_reason: tuple[str, str] = ("", "")
    _announced = (0, False)

    def __init__(
        self,
        node: ClusterNode,
        supervisor: Supervisor,
        models: LocalModels,
        controller: GroupController,
        *,
        reports: ServingReports,
        hosted: HostedRanks,
    ) -> None:
        self._node = node
        self._supervisor = supervisor
        self._models = models
        self._controller = controller
        self._reports = reports
        self._hosted = hosted
        supervisor.gateway.admission.elsewhere = self.short
        node.links.on(self._prepare, Prepare)
        node.links.on(self._serving, Serving)
        node.desired.on_change(self._desired)
        node.desired.retry_if(lambda: supervisor.status.state is ServingState.FAILED)
        node.rounds.add(self.decide)

    def short(self) -> str:
        """Return a Mac that runs a rank of a ready group and is short of memory; empty for none."""
        groups = [each.participants for each in self._reports.all() if each.state == ServingState.READY]
        short = [node for nodes in groups for node in nodes if node in self._node.peer_info.short]
        return self._node.name_of(short[0]) if short else ""

    def drain(self) -> None:
        """Broadcast that this node is about to stop. `may_leave` says when it may."""
        self.may_leave = False
        self._node.drain()

    def woke(self, slept_s: float) -> None:
        """Recover from sleep: the others have given this machine up, and links report that only later."""
        self._supervisor.woke(slept_s)
        self._hosted.clear(f"{self._node.name} slept for {slept_s:.0f} s")
        for link in self._node.links.links():
            link.close()
        self._node.changed()

    # --- decisions -----------------------------------------------------------------------------------

    def decide(self, now: float) -> float:
        """Decide and act. Return the time of the next decision, if nothing changes before."""
        node, leadership = self._node, self._node.leadership
        situation = self._controller.situation(self._hosted.running())
        view = leadership.view(node.membership, situation, now)
        self.may_leave = may_leave(view)
        action = leadership.decide(node.membership, situation, now)
        self.unplanned = self._why_unplanned(situation, action, now)
        prevented = self._models.desired.problem or self.unplanned
        self._supervisor.status.wanted = "" if prevented else node.replica.desired.model
        self._log_reason()
        self._act(action, now)
        self._supervisor.status.drain(self._why_draining(view))
        self._announce()
        until = action.until if isinstance(action, Wait) else math.inf
        return until if self._idle else min(until, now + BEAT_S)

    @property
    def _idle(self) -> bool:
        """True while only a change, which begins a round, calls for a decision: no member can fall silent."""
        settled = self._supervisor.status.state in (ServingState.READY, ServingState.IDLE)
        return self._node.alone and settled and not self.unplanned

    def _act(self, action: Action, now: float) -> None:
        match action:
            case FormEpoch():
                self._controller.form(action)
            case TryGroup():
                self._controller.try_out(action)
            case StopEpoch(reason, lost):
                hosted = self._hosted.running()
                if hosted is not None and not self._supervisor.status.in_epoch:
                    self._hosted.clear(reason, lambda rank: rank.host == hosted.owner)
                elif lost:
                    self._supervisor.lost(lost, reason)
                else:
                    self._supervisor.end_epoch(GroupError(reason, Code.REPLANNED))
            case HandOver(node_id):
                log.info("handing the coordination to %s", self._node.name_of(node_id))
                self._node.leadership.hand_over(node_id, now)
                self._node.gossip.beat()

    def _why_unplanned(self, situation: Situation, action: Action, now: float) -> str:
        """Return the reason why there is no group for the desired model after every member's report."""
        model = self._models.desired
        looked = (model.problem or model.source is not None) and now >= situation.hold_until
        waits = isinstance(action, Wait) and situation.plan is None and action.reason == situation.refusal
        return situation.refusal if waits and looked and self._node.replica.desired.model else ""

    def _log_reason(self) -> None:
        """Log each reason for not serving once. A model that is not here has had its own line."""
        found = (self._node.replica.desired.model, re.sub(r"\d+", "", self.unplanned))
        if self._supervisor.status.in_epoch:
            self._logged_reason = ("", "")
        elif self.unplanned and not self._models.desired.problem and found != self._logged_reason:
            self._logged_reason = found
            log.warning("%s is not served: %s", found[0], self.unplanned)

    def _why_draining(self, view: ClusterView) -> str:
        """Return why this node takes no new requests: it, or a node of its group, is about to stop."""
        if self._node.node_id in view.draining:
            return ABOUT_TO_STOP
        if who := drained_by(view):
            return f"{' and '.join(map(self._node.name_of, who))} is about to stop, and the group needs it"
        return ""

    def _announce(self) -> None:
        """Log one line for each group that becomes ready here."""
        status = self._supervisor.status
        ready = (status.epoch, status.state is ServingState.READY)
        if ready != self._announced and ready[1]:
            model = next(iter(self._supervisor.gateway.models()), None)
            size = status.group.world_size if status.group is not None else 0
            at = self._node.introduction.http
            log.info("ready: %s, world size %d, at %s/v1", model.id if model else "-", size, at)
        self._announced = ready

    # --- messages ------------------------------------------------------------------------------------

    def _desired(self, before: DesiredState, desired: DesiredState) -> None:
        if (desired.model, desired.nodes) == (before.model, before.nodes):
            self._controller.still_wanted(before, desired)
        if desired.model != before.model:
            why = f"{desired.model} is wanted now" if desired.model else f"{before.model} was unloaded"
            gateway, deployment = self._supervisor.gateway, self._supervisor.deployment
            gateway.fail(deployment, GroupError(why, Code.SHUTTING_DOWN))
        if not desired.model:
            self._supervisor.status.recoveries.rested()

    def _serving(self, link: ControlLink, serving: Serving) -> None:
        node, node_id = self._node, link.node_id
        node.peer_info.serves(node_id, serving)
        node.replica.saw_epoch(serving.epoch)
        if self._hosted.serves(node_id, serving.group, serving.epoch):
            why = f"{node.name_of(node_id)} serves as epoch {serving.epoch}"
            self._end_elsewhere(node_id, serving.group, why)
            self._supervisor.end_epoch(GroupError(why, Code.REPLANNED))
        node.changed()

    def _end_elsewhere(self, owner: str, group: str, why: str) -> None:
        """End ranks of a group that another node owned before: it has this owner now."""
        self._hosted.clear(why, lambda rank: rank.order.group == group and rank.host != owner)

    def _prepare(self, link: ControlLink, order: Prepare) -> None:
        node, node_id = self._node, link.node_id
        no = refusal(node_id, order.epoch, node.leadership.claim, self._hosted.last_epoch(node_id))
        if no is None and node.node_id in node.leadership.draining:
            no = f"{node.name} is about to stop"
        if no is None and self._supervisor.status.in_epoch and not order.trial:
            no = f"{node.name} still ends an epoch of its own"
            # The coordinator waited for that epoch's requests. Its order holds, or neither would give in.
            self._supervisor.end_epoch(
                GroupError(f"{node.name_of(node_id)} coordinates and forms a group", Code.REPLANNED)
            )
        if no is not None:
            with contextlib.suppress(MlxtpError):
                trouble = RankTrouble(order.epoch, order.rank, Code.NOT_READY, no, outside=False)
                link.send(trouble)
            return
        node.replica.saw_epoch(order.epoch)
        if not order.trial:
            self._end_elsewhere(node_id, order.group, f"{node.name_of(node_id)} forms epoch {order.epoch}")
        self._hosted.received(node_id, order)


class Drain:
    """Orderly end of one agent: it takes no new requests, finishes those it has, and leaves when it can.

    `over` is set once it may end, or has to.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        reconciler: Reconciler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.over = asyncio.Event()
        self._supervisor = supervisor
        self._reconciler = reconciler
        self._clock = clock
        self._until: float | None = None
        self._looking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    @property
    def begun(self) -> bool:
        """True once a drain has begun."""
        return self._looking is not None

    @property
    def left_s(self) -> float | None:
        """Seconds that open requests may still take; None for as long as they need."""
        return None if self._until is None else max(self._until - self._clock(), 0.0)

    def start(self, within_s: float | None = None) -> None:
        """Take no new requests, and end within this time even with open ones. The earliest time holds."""
        if within_s is not None:
            until = self._clock() + within_s
            self._until = until if self._until is None else min(until, self._until)
        limit = "" if self._until is None else f", {self.left_s:.0f} s at most"
        log.info("draining: open requests: %d%s", self._supervisor.gateway.open_requests, limit)
        if self._looking is not None:
            return
        self._reconciler.drain()
        self._supervisor.status.drain(ABOUT_TO_STOP)
        self._looking = asyncio.ensure_future(self._check())

    async def _check(self) -> None:
        before = None
        while not self._finished():
            if before != (before := self._supervisor.gateway.open_requests):
                self._announce()
            await asyncio.sleep(LOOK_S)
        self.over.set()
        self._announce()

    def _finished(self) -> bool:
        left = self._supervisor.gateway.open_requests
        if self.left_s == 0.0:
            log.info("the time to drain is over; open requests: %d", left)
            return True
        if left or not self._reconciler.may_leave:
            return False
        log.info("drained")
        return True

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def drain_progress(self) -> Json:
        """Return the open requests once they changed, or after NEWS_S."""
        if not self.over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEWS_S):
                    await self._news.wait()
        return self.now()

    def now(self) -> Json:
        """Return the open requests and the state of the drain."""
        return {
            "draining": self.begun,
            "over": self.over.is_set(),
            "open_requests": self._supervisor.gateway.open_requests,
            "left_s": self.left_s,
        }

    def close(self) -> None:
        """Stop checking."""
        if self._looking is not None:
            self._looking.cancel()

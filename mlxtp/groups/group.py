"""One group as an agent knows it: its parts, and the decision about it in each round of the node."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from dataclasses import dataclass

from ..background import Background
from ..cluster.node import BEAT_S, ClusterNode
from ..cluster.peer_reports import MachineReports
from ..cluster.reconcile import (
    Action,
    FormEpoch,
    GroupView,
    Situation,
    StopEpoch,
    Wait,
    decide,
    drained_by,
)
from ..errors import Code, GroupError
from ..gateway.gateway import Gateway
from ..models.local_model import LocalModels
from ..values import stage_words
from ..wire.tls import Credentials
from .controller import GroupController
from .forwarding import ForwardingBackend
from .health import ServingState
from .lifecycle import StageListener, Supervisor
from .machines import Machines
from .owned_epoch import MIB, RemoteRanks, ServingReports
from .ranks import Worker
from .scope import GroupScope

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Group:
    """A group that this agent owns, or follows where another agent owns it.

    `unplanned` is the reason why there can be no epoch, even after waiting; empty while there may be one.
    """

    node: ClusterNode
    scope: GroupScope
    supervisor: Supervisor
    reports: ServingReports
    controller: GroupController
    forwarding: ForwardingBackend
    background: Background
    unplanned: str = ""
    _waiting_since: float | None = None
    #: Last reason that was logged, without digits: changes of memory do not repeat the line.
    _logged: str = ""
    _announced: tuple[int, bool] = (0, False)
    _running: asyncio.Task[None] | None = None
    _kv_mib: int = 0  #: The bound that was applied last.

    def start(self) -> None:
        self._running = self.background.start(self.supervisor.run(self.controller), self.scope.group)

    @property
    def over(self) -> bool:
        """True while nothing of the group is here, or known to be elsewhere."""
        here = self.supervisor.status.in_epoch
        return self.scope.in_excess and not here and not self.reports.reports()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self.reports.broadcast()
        await self.forwarding.close()

    @property
    def waiting(self) -> str:
        """Reason why the group has no epoch yet, for users; empty where there is none."""
        if not self.scope.assignment.owner:
            return self.scope.why_not
        return self.reports.waiting

    # --- decisions -----------------------------------------------------------------------------------

    def decide(self, now: float) -> float:
        """Decide and act. Return the time of the next decision, if nothing changes before."""
        node, status = self.node, self.supervisor.status
        situation = self.controller.situation(self._waiting_since)
        view = node.leadership.view(node.membership, situation, now)
        action = decide(view)
        self._note(action, situation, now)
        self.controller.lacks(action.lacks if isinstance(action, Wait) else "", now)
        row = self.scope.row
        prevented = row is None or self.scope.model.problem or self.unplanned
        status.wanted = "" if prevented or row is None else row.model
        self._log_reason()
        self._bound_caches()
        self._act(action)
        status.drain(self._why_draining(view))
        if status.leaving and not isinstance(action, StopEpoch):  # requests wait for a group in its place
            self.supervisor.gateway.detach(self.scope.group)
        self.forwarding.follow()
        self._announce()
        until = action.until if isinstance(action, Wait) else math.inf
        return until if self._idle else min(until, now + BEAT_S)

    @property
    def _idle(self) -> bool:
        """True while only a change, which begins a round, calls for a decision: no member can fall silent.

        It is false while an epoch waits for requests to end, as their end begins no round.
        """
        settled = self.supervisor.status.state in (ServingState.READY, ServingState.IDLE)
        return self.node.alone and settled and not self.unplanned and self._waiting_since is None

    def _note(self, action: Action, situation: Situation, now: float) -> None:
        """Keep what an action says about the wait for an epoch, or for requests."""
        waits = isinstance(action, Wait)
        if not (isinstance(action, Wait) and action.for_requests):
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        self.reports.waiting = action.reason if isinstance(action, Wait) else ""
        model = self.scope.model
        looked = (model.problem or model.source is not None) and now >= situation.hold_until
        if not looked or self.scope.row is None:
            self.unplanned = ""
        elif not self.scope.assignment.owner:
            self.unplanned = self.scope.assignment.why
        else:
            waits = waits and situation.form is None and self.reports.waiting == situation.refusal
            self.unplanned = situation.refusal if waits else ""

    def _act(self, action: Action) -> None:
        match action:
            case FormEpoch():
                self.reports.waiting = self.controller.begin(action)
            case StopEpoch(reason, lost):
                if lost:
                    self.supervisor.lost(lost, reason)
                else:
                    self.supervisor.end_epoch(GroupError(reason, Code.REPLANNED))

    def _bound_caches(self) -> None:
        """Apply the assigned bound of KV caches, in the background; each later load keeps to it, too."""
        bound = self.scope.assignment.kv_mib
        if self.scope.owned and bound != self._kv_mib:
            self._kv_mib = bound
            limiting = self.supervisor.kv.limit(bound * MIB)
            self.background.start(limiting, f"the bound of KV caches of {self.scope.group}")

    def _log_reason(self) -> None:
        """Log each reason for not serving once. A model that is not here has had its own line."""
        found = re.sub(r"\d+", "", self.unplanned)
        if self.supervisor.status.in_epoch:
            self._logged = ""
        elif self.unplanned and not self.scope.model.problem and found != self._logged:
            self._logged = found
            log.warning("%s is not served: %s", self.scope.model.name, self.unplanned)

    def _why_draining(self, view: GroupView) -> str:
        """Return why the group takes no new requests: a node of it is about to stop."""
        if who := drained_by(view):
            return f"{' and '.join(map(self.node.name_of, who))} is about to stop, and the group needs it"
        return ""

    def _announce(self) -> None:
        """Log one line for each time that the group becomes ready here."""
        status = self.supervisor.status
        ready = (status.epoch, status.state is ServingState.READY)
        if ready != self._announced and ready[1]:
            group = status.group
            size, split = (group.world_size, group.split) if group is not None else (0, ())
            ranks = ", ".join(filter(None, (f"world size {size}", stage_words(split))))
            at = self.node.introduction.http
            source = self.scope.model.source
            log.info("ready: %s, %s, at %s/v1", source.id if source else "-", ranks, at)
        self._announced = ready


# --- making of groups -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupMaker:
    node: ClusterNode
    gateway: Gateway
    models: LocalModels
    machines: Machines
    remote: RemoteRanks
    readings: MachineReports
    credentials: Credentials
    worker: Worker
    on_stage: StageListener
    background: Background

    def make(self, name: str) -> Group:
        """Return the group of this id, which runs no epochs yet."""
        node, machines = self.node, self.machines
        scope = GroupScope(name, node, self.models)
        supervisor = Supervisor(
            node.settings, self.gateway, self.on_stage, self.worker, deployment=scope.deployment, group=name
        )
        reports = ServingReports(node, scope, supervisor)
        controller = GroupController(
            node,
            scope,
            supervisor,
            reports=reports,
            machines=machines,
            remote=self.remote,
            readings=self.readings,
        )
        forwarding = ForwardingBackend(node, scope, supervisor, reports, self.credentials)
        return Group(node, scope, supervisor, reports, controller, forwarding, self.background)

"""One group: its parts, which act on its `scope`, and its decision in each round of the node."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from dataclasses import dataclass

from ..background import Background
from ..cluster.node import BEAT_S, ClusterNode
from ..cluster.peer_reports import MachineReports
from ..cluster.reconcile import Action, FormEpoch, Situation, StopEpoch, Wait, decide, drained_by
from ..errors import Code, GroupError
from ..gateway.gateway import Gateway
from ..models.local_model import LocalModels
from ..values import stage_words
from ..wire.tls import Credentials
from .controller import GroupController, RemoteRanks
from .forwarding import ForwardingBackend
from .health import ServingState
from .lifecycle import StageListener, Supervisor
from .machines import Machines
from .ranks import Worker
from .scope import MIB, GroupScope

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedParts:
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


class Group:
    """A group that this agent owns, or follows if another agent owns it. `start` begins its epochs."""

    def __init__(self, name: str, shared: SharedParts) -> None:
        self.node = node = shared.node
        self.supervisor = Supervisor(node.settings, shared.gateway, name, shared.on_stage, shared.worker)
        self.scope = GroupScope(name, node, shared.models, self.supervisor)
        self.controller = GroupController(self.scope, shared.machines, shared.remote, shared.readings)
        self.forwarding = ForwardingBackend(self.scope, shared.credentials)
        self.unplanned = ""  #: Why there can be no epoch, even after waiting; empty while there may be one.
        self._background = shared.background
        self._waiting_since: float | None = None
        self._logged = ""  #: Last logged reason, without digits: changes of memory do not repeat it.
        self._announced = (0, False)
        self._running: asyncio.Task[None] | None = None
        self._kv_mib = 0  #: The last applied limit.

    def start(self) -> None:
        self._running = self._background.start(self.supervisor.run(self.controller), self.scope.group)

    @property
    def over(self) -> bool:
        """True once no Mac runs it or is assigned to, and its deployment has enough other groups."""
        scope, row = self.scope, self.scope.row
        wanted = row is not None and scope.index < self.node.replica.shown_groups(row)
        assigned = row is not None and scope.assignment.owner
        return not (wanted or assigned or self.supervisor.status.in_epoch or scope.reports())

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self.scope.broadcast()
        await self.forwarding.close()

    @property
    def waiting(self) -> str:
        """Reason why the group has no epoch yet, for users; may be empty."""
        return self.scope.waiting if self.scope.assignment.owner else self.scope.why_not

    # --- decisions -----------------------------------------------------------------------------------

    def decide(self, now: float) -> float:
        """Decide and act. Return the time of the next decision, if nothing changes."""
        node, scope, supervisor = self.node, self.scope, self.supervisor
        situation = self.controller.situation(self._waiting_since)
        view = node.leadership.view(node.membership, situation, now)
        action = decide(view)
        wait = action if isinstance(action, Wait) else None
        self._note(wait, situation, now)
        self.controller.lacks(wait.lacks if wait is not None else "", now)
        row = scope.row
        prevented = row is None or scope.model.problem or self.unplanned
        supervisor.status.wanted = "" if prevented or row is None else row.model
        self._log_reason()
        self._bound_caches()
        self._act(action)
        leaving = " and ".join(map(node.name_of, drained_by(view)))
        supervisor.status.drain(f"{leaving} is about to stop, and the group needs it" if leaving else "")
        if leaving and not isinstance(action, StopEpoch):  # requests wait for its successor
            supervisor.gateway.detach(scope.group)
        self.forwarding.follow()
        self._announce()
        until = wait.until if wait is not None else math.inf
        return until if self._idle else min(until, now + BEAT_S)

    @property
    def _idle(self) -> bool:
        """True if only a change requires a decision: no other member can fall silent, and no open requests
        are awaited (their end starts no round).
        """
        settled = self.supervisor.status.state in (ServingState.READY, ServingState.IDLE)
        return self.node.alone and settled and not self.unplanned and self._waiting_since is None

    def _note(self, wait: Wait | None, situation: Situation, now: float) -> None:
        since = now if self._waiting_since is None else self._waiting_since
        self._waiting_since = since if wait is not None and wait.for_requests else None
        scope, model = self.scope, self.scope.model
        scope.waiting = wait.reason if wait is not None else ""
        looked = (model.problem or model.source is not None) and now >= self.controller.reported_by
        if not looked or scope.row is None:
            self.unplanned = ""
        elif not scope.assignment.owner:
            self.unplanned = scope.assignment.why
        else:
            refused = wait is not None and situation.form is None and wait.reason == situation.refusal
            self.unplanned = situation.refusal if refused else ""

    def _act(self, action: Action) -> None:
        match action:
            case FormEpoch():
                self.scope.waiting = self.controller.begin(action)
            case StopEpoch(reason, lost):
                self.supervisor.end_epoch(GroupError(reason, Code.REPLANNED), lost)

    def _bound_caches(self) -> None:
        """Apply the assigned limit of KV caches in the background, also to later loads."""
        bound = self.scope.assignment.kv_mib
        if self.scope.owned and bound != self._kv_mib:
            self._kv_mib = bound
            limiting = self.supervisor.kv.limit(bound * MIB)
            self._background.start(limiting, f"the bound of KV caches of {self.scope.group}")

    def _log_reason(self) -> None:
        """Log each reason for not serving once; missing models are logged elsewhere."""
        found = re.sub(r"\d+", "", self.unplanned)
        if self.supervisor.status.in_epoch:
            self._logged = ""
        elif self.unplanned and not self.scope.model.problem and found != self._logged:
            self._logged = found
            log.warning("%s is not served: %s", self.scope.model.name, self.unplanned)

    def _announce(self) -> None:
        status = self.supervisor.status
        ready = (status.epoch, status.state is ServingState.READY)
        if ready != self._announced and ready[1]:
            group = status.group
            size, split = (group.world_size, group.split) if group is not None else (0, ())
            ranks = ", ".join(filter(None, (f"world size {size}", stage_words(split))))
            source = self.scope.model.source
            url = f"{self.node.introduction.http}/v1"
            log.info("ready: %s, %s, at %s", source.id if source else "-", ranks, url)
        self._announced = ready

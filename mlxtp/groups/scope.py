"""Facts of one group: its purpose, its epoch here, its reports. The parts in `group` act on them."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from ..cluster.cluster_state import NO_CLAIM
from ..cluster.node import ClusterNode
from ..cluster.reconcile import FormEpoch
from ..models.local_model import LocalModel, LocalModels
from ..wire.cluster_messages import Deployment, GroupAssignment, Serving
from .health import SERVES, ServingState, of_the_model
from .history import RateMeter
from .lifecycle import EpochPlan, Supervisor
from .machines import in_steps

NOTHING_WANTED = "no model is configured; run `mlxtp serve MODEL`"
MIB = 1 << 20


class GroupScope:
    """Facts about one group. `plan` is the plan of its epoch, if this node forms or runs one."""

    def __init__(self, group: str, node: ClusterNode, models: LocalModels, supervisor: Supervisor) -> None:
        self.group = group
        self.deployment, _, index = group.rpartition("#")
        self.index = int(index or 0)
        self.assignment = GroupAssignment(group, self.deployment)
        #: Claim of the assigning coordinator: two coordinators may have had the same term.
        self.assigned_in = NO_CLAIM
        self.plan: EpochPlan | None = None
        self.waiting = ""  #: Reason why this owner has no epoch.
        self.node = node
        self.supervisor = supervisor
        self._models = models
        self._meter = RateMeter()

    # --- purpose -------------------------------------------------------------------------------------

    @property
    def row(self) -> Deployment | None:
        return self.node.desired.table.get(self.deployment)

    @property
    def model(self) -> LocalModel:
        row = self.row
        return self._models.of(row.model if row is not None else "")

    @property
    def unreported(self) -> dict[str, float]:
        row = self.row
        return self._models.unreported(row.model) if row is not None else {}

    @property
    def owned(self) -> bool:
        return self.assignment.owner == self.node.node_id

    @property
    def why_not(self) -> str:
        if self.row is None:
            if self.group:
                return f"{self.deployment} was unloaded"
            return self.node.introduction.problem or NOTHING_WANTED
        if not self.assignment.number:
            return "it has yet to be assigned to a Mac"
        return self.assignment.why or f"{self.deployment} has enough other groups"

    # --- reports -------------------------------------------------------------------------------------

    def broadcast(self) -> None:
        """Publish this node's report of the group, or that it has none."""
        table, serving = self.node.links.reports, self.serving()
        rest = [each for each in table.by(self.node.node_id, Serving) if each.group != self.group]
        table.publish(Serving, *rest, *([serving] if serving is not None else []))

    def serving(self) -> Serving | None:
        """Return this node's report of the group; None if another node owns it."""
        plan, supervisor, status = self.plan, self.supervisor, self.supervisor.status
        if plan is None:
            return self._without_epoch() if self.owned and self.row is not None else None
        served, now = supervisor.gateway.deployments, time.monotonic()
        work, form = served.work_of(self.group), plan.order.form
        state, requests, info = status.state, served.open_at(self.group), supervisor.info
        if not supervisor.has_ranks:  # the epoch is about to begin, or is over
            state, requests, info = ServingState.RESTARTING, 0, None
        reason = status.reason.detail if status.reason is not None else ""
        if state is ServingState.LOADING:
            reason = status.progress
        held = [-(-self._held_here(node) // MIB) for node in form.ranks]
        return replace(
            self._report(state, status.closing or reason),
            epoch=plan.order.number,
            backend=status.group.backend if status.group is not None else "none",
            kind=form.kind if self.node.settings.ranks == 1 else "",
            participants=form.ranks,
            open_requests=requests,
            model=form.model,
            context=info.context if info is not None else 0,
            vocabulary=info.vocabulary if info is not None else 0,
            eos=info.eos if info is not None else (),
            load_s=math.ceil(served.named(self.deployment).load_s),
            held_mib=tuple(held) if state in SERVES else (),
            running=work.running,
            speed=round(self._meter.rate(work.tokens, now) or 0),
            cached=work.cached,
            idle_s=served.unused_s(self.group) if state in SERVES else 0,
            checkpoints=info is not None and info.checkpoints,
            split=form.split,
            ready_s=int(status.history.served_s(now)),
            used=work.tokens > 0,
        )

    def _without_epoch(self) -> Serving:
        status = self.supervisor.status
        error = status.reason if status.resting else None
        if error is None or status.state is not ServingState.FAILED:
            return self._report(
                ServingState.IDLE, self.waiting or (error.detail if error is not None else "")
            )
        return replace(self._report(status.state, error.detail), broken=of_the_model(error))

    def _report(self, state: ServingState, why: str) -> Serving:
        row, epoch = self.row, self.supervisor.status.epoch
        ends = (row.version if row is not None else 0, 0, 0, (), 0, (), self.group, self.deployment)
        return Serving(epoch, str(state), why, "none", "", (), 0, "", *ends)

    def held_bytes(self, node_id: str) -> int:
        """Return the memory of this group's ranks on a Mac, in bytes: its next epoch may use it."""
        told = sum(held_by(each).get(node_id, 0) for _, each in self.reports())
        return in_steps(self._held_here(node_id) + told)

    def _held_here(self, node_id: str) -> int:
        ranks = self.supervisor.status.ranks
        if ranks is None or node_id not in ranks.group.nodes:
            return 0
        pong = ranks.watch.pongs.get(ranks.group.nodes.index(node_id))
        return pong.stats.memory_bytes if pong is not None else 0

    def reports(self) -> list[tuple[str, Serving]]:
        told = self.node.links.reports.others(Serving)
        return [(owner, serving) for owner, serving in told if serving.group == self.group]

    # --- epochs, for decisions -----------------------------------------------------------------------

    def running(self) -> FormEpoch | None:
        """Return the epoch that this node owns, if any."""
        return self.plan.order if self.plan is not None and self.supervisor.status.in_epoch else None

    def others(self) -> dict[str, int]:
        """Return the open requests of ready epochs elsewhere, by owner."""
        return {
            owner: each.open_requests
            for owner, each in self.reports()
            if each.participants[:1] == (owner,) and each.state == ServingState.READY
        }


def held_by(serving: Serving) -> dict[str, int]:
    """Return the memory of a reported group's ranks in bytes, by node id."""
    held = zip(serving.participants, serving.held_mib, strict=False)  # empty before all have loaded
    return {node_id: mib * MIB for node_id, mib in held}

"""An epoch of a group whose rank 0 is here: its making, and the reports by which other nodes know of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..cluster.links import ControlLink
from ..cluster.node import ClusterNode
from ..cluster.reconcile import FormEpoch, GroupForm, RunningEpoch
from ..placement.candidates import Candidate
from ..wire.cluster_messages import (
    EpochEnded,
    Prepared,
    RankPong,
    RankSide,
    RankStarted,
    RankTrouble,
    Serving,
)
from .health import SERVES, ServingState, of_the_model
from .history import RateMeter
from .lifecycle import Supervisor
from .machines import in_steps
from .ranks import RankWord, RemoteRank
from .scope import GroupScope

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class OwnedEpoch:
    """An epoch that this node forms or runs, with the links of its ranks as they were then.

    `left_out`: it was formed although it had failed, for want of another place.
    """

    order: FormEpoch
    wired: Candidate
    left_out: bool = False

    @property
    def ranks(self) -> tuple[str, ...]:
        return self.order.form.ranks


class ServingReports:
    """Reports of one group: that of its `owned` epoch for all members, and those of other owners."""

    def __init__(self, node: ClusterNode, scope: GroupScope, supervisor: Supervisor) -> None:
        self.owned: OwnedEpoch | None = None
        self.waiting = ""  #: Reason why this owner has no epoch.
        self._meter = RateMeter()  #: Of tokens of the group.
        self._node = node
        self._scope = scope
        self._supervisor = supervisor

    def broadcast(self) -> None:
        """Have all members know the present report, or that this node has no such group."""
        table, serving = self._node.links.reports, self.serving()
        rest = [each for each in table.by(self._node.node_id, Serving) if each.group != self._scope.group]
        table.publish(Serving, *rest, *([serving] if serving is not None else []))

    def serving(self) -> Serving | None:
        """Return this node's report of the group; None if it is of another node."""
        mine, supervisor = self.owned, self._supervisor
        if mine is None:
            return self._nothing() if self._scope.owned and self._scope.row is not None else None
        if supervisor.has_ranks:
            state, requests = supervisor.status.state, supervisor.open_requests
            info = supervisor.info
        else:  # it is about to begin, or is over
            state, requests, info = ServingState.RESTARTING, 0, None
        work = supervisor.gateway.deployments.work_of(self._scope.group)
        speed = self._meter.rate(work.tokens, time.monotonic())
        group, error = supervisor.status.group, supervisor.status.reason
        reason = error.detail if error is not None else ""
        if state is ServingState.LOADING:
            reason = supervisor.status.progress
        loaded = state in SERVES
        return Serving(
            mine.order.number,
            str(state),
            supervisor.status.closing or reason,
            group.backend if group is not None else "none",
            mine.order.form.kind if self._node.settings.ranks == 1 else "",
            mine.ranks,
            requests,
            mine.order.form.model,
            self._scope.version,
            info.context if info is not None else 0,
            info.vocabulary if info is not None else 0,
            info.eos if info is not None else (),
            math.ceil(supervisor.gateway.deployments.named(supervisor.deployment).load_s),
            tuple(-(-self._held_here(node) // MIB) for node in mine.ranks) if loaded else (),
            self._scope.group,
            self._scope.deployment,
            work.running,
            round(speed or 0),
            work.cached,
            supervisor.gateway.deployments.unused_s(self._scope.group) if loaded else 0,
            checkpoints=info is not None and info.checkpoints,
            split=mine.order.form.split,
            ready_s=int(supervisor.status.history.served_s(time.monotonic())),
            used=work.tokens > 0,
        )

    def _nothing(self) -> Serving:
        status = self._supervisor.status
        if status.resting and status.state is ServingState.FAILED:
            error = status.reason
            broken = error is not None and of_the_model(error)
            return self._report(status.state, error.detail if error is not None else "", broken=broken)
        return self._report(ServingState.IDLE, self.waiting)

    def _report(self, state: ServingState, why: str, *, broken: bool = False) -> Serving:
        scope, epoch = self._scope, self._supervisor.status.epoch
        ends = (scope.group, scope.deployment)
        return Serving(
            epoch, str(state), why, "none", "", (), 0, "", scope.version, 0, 0, (), 0, (), *ends,
            broken=broken,
        )  # fmt: skip

    def held_bytes(self, node_id: str) -> int:
        """Return the bytes of that Mac's memory that ranks of this group hold: free for its next epoch."""
        told = [dict(zip(each.participants, each.held_mib, strict=False)) for _, each in self.reports()]
        return in_steps(self._held_here(node_id) + sum(held.get(node_id, 0) * MIB for held in told))

    def _held_here(self, node_id: str) -> int:
        ranks = self._supervisor.status.ranks
        if ranks is None or node_id not in ranks.group.nodes:
            return 0
        pong = ranks.watch.pongs.get(ranks.group.nodes.index(node_id))
        return pong.stats.memory_bytes if pong is not None else 0

    def running(self) -> RunningEpoch | None:
        """Return the epoch that this node owns, for decisions; None while it has none."""
        mine, state = self.owned, self._supervisor.status.state
        if mine is None or not self._supervisor.status.in_epoch:
            return None
        return RunningEpoch(
            mine.order.number,
            mine.order.form,
            mine.order.boots,
            state in SERVES,
            self._supervisor.open_requests,
            state is ServingState.DRAINING,
        )

    def reports(self) -> list[tuple[str, Serving]]:
        told = self._node.links.reports.others(Serving)
        return [(owner, serving) for owner, serving in told if serving.group == self._scope.group]

    def others(self) -> tuple[RunningEpoch, ...]:
        return tuple(filter(None, [_running(owner, serving) for owner, serving in self.reports()]))


def _running(owner: str, serving: Serving) -> RunningEpoch | None:
    if serving.participants[:1] != (owner,):
        return None  # only the node of rank 0 reports a group
    if serving.state not in (ServingState.READY, ServingState.LOADING, ServingState.DRAINING):
        return None
    return RunningEpoch(
        serving.epoch,
        GroupForm(serving.model, serving.participants, serving.kind, serving.split),
        ready=serving.state == ServingState.READY,
        open_requests=serving.open_requests,
        draining=serving.state == ServingState.DRAINING,
    )


class RemoteRanks:
    """Ranks on other Macs of this node's epochs, by node id and epoch. Their agents' reports reach them."""

    def __init__(self, node: ClusterNode) -> None:
        self._ranks: dict[tuple[str, int], RemoteRank] = {}
        node.links.on(self._reported, Prepared, RankStarted, RankPong, RankTrouble, EpochEnded, RankSide)

    def add(self, ranks: Mapping[tuple[str, int], RemoteRank]) -> None:
        self._ranks |= ranks

    def release(self, number: int) -> None:
        self._ranks = {key: rank for key, rank in self._ranks.items() if key[1] != number}

    def _reported(self, link: ControlLink, message: RankWord) -> None:
        if rank := self._ranks.get((link.node_id, message.epoch)):
            rank.received(message)

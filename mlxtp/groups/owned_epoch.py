"""An epoch of a group whose rank 0 is here: its making, and the reports by which other nodes know of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from ..cluster.links import ControlLink
from ..cluster.node import ClusterNode
from ..cluster.reconcile import FormEpoch, RunningEpoch, Wanted
from ..placement.candidates import Candidate
from ..placement.planner import Placement
from ..wire.cluster_messages import (
    EpochEnded,
    Prepare,
    Prepared,
    RankPong,
    RankSide,
    RankStarted,
    RankTrouble,
    Serving,
)
from ..wire.rdma import flat
from .health import SERVES, ServingState, of_the_model
from .history import RateMeter
from .lifecycle import Supervisor
from .machines import Machines, in_steps, local_split
from .placer import GroupScope, matrix
from .process_group import EpochGroup
from .ranks import RankWord, RemoteRank, Watcher

MIB = 1 << 20
KEY_NUMBERS = 2  #: Length of the key by which plans are compared, see `Placer.key`.


@dataclass(frozen=True, slots=True)
class OwnedEpoch:
    """An epoch that this node forms or runs, and what it was formed for."""

    form: FormEpoch
    placement: Placement
    wanted: Wanted


class ServingReports:
    """Reports of one group: that of its `owned` epoch for all members, and those of other owners."""

    def __init__(self, node: ClusterNode, scope: GroupScope, supervisor: Supervisor) -> None:
        self.owned: OwnedEpoch | None = None
        self.waiting = ""  #: Reason why this owner has no epoch.
        self.last_ranks: tuple[str, ...] = ()  #: Node ids of this owner's last epoch, in rank order.
        self._meter = RateMeter()  #: Of tokens of the group.
        self._reported = False  #: True while other nodes have a report of this one.
        self._node = node
        self._scope = scope
        self._supervisor = supervisor

    def broadcast(self) -> None:
        """Send the present report to all members. The last one says that this node has no such group."""
        serving = self.serving()
        if serving is not None or self._reported:
            self._node.links.broadcast(serving or self._report(ServingState.STOPPED, ""))
        self._reported = serving is not None

    def serving(self) -> Serving | None:
        """Return this node's report of the group; None if it is of another node."""
        mine, supervisor = self.owned, self._supervisor
        if mine is None:
            return self._nothing() if self._scope.owned and self._scope.row is not None else None
        self.last_ranks = mine.form.plan.ranks
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
            mine.form.number,
            str(state),
            supervisor.closing or reason,
            group.backend if group is not None else "none",
            group.kind if group is not None else "",
            mine.form.plan.ranks,
            mine.form.plan.key,
            requests,
            mine.wanted.model,
            self._scope.version,
            info.context if info is not None else 0,
            info.vocabulary if info is not None else 0,
            info.eos if info is not None else (),
            math.ceil(supervisor.gateway.deployments.named(supervisor.deployment).load_s),
            tuple(-(-self._held_here(node) // MIB) for node in mine.form.plan.ranks) if loaded else (),
            self._scope.group,
            self._scope.deployment,
            work.running,
            round(speed or 0),
            work.cached,
            supervisor.gateway.deployments.unused_s(self._scope.group) if loaded else 0,
            checkpoints=info is not None and info.checkpoints,
            split=group.split if group is not None else (),
            ready_s=int(supervisor.status.history.served_s(time.monotonic())),
        )

    def _nothing(self) -> Serving:
        """Return the report of an owner without an epoch, with the reason."""
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
            epoch, str(state), why, "none", "", (), (), 0, "", scope.version, 0, 0, (), 0, (), *ends,
            broken=broken,
        )  # fmt: skip

    def held_bytes(self, node_id: str) -> int:
        """Return the bytes of that Mac's memory that ranks of this group hold: free for its next epoch."""
        told = [dict(zip(each.participants, each.held_mib, strict=False)) for _, each in self.reports()]
        return in_steps(self._held_here(node_id) + sum(held.get(node_id, 0) * MIB for held in told))

    def _held_here(self, node_id: str) -> int:
        """Return the bytes that ranks of this node's epochs hold of that Mac's memory."""
        pongs = [
            ranks.watch.pongs.get(ranks.group.nodes.index(node_id))
            for ranks in (self._supervisor.status.ranks, self._supervisor.beside.ranks)
            if ranks is not None and node_id in ranks.group.nodes
        ]
        return sum(pong.stats.memory_bytes for pong in pongs if pong is not None)

    def running(self) -> RunningEpoch | None:
        """Return the epoch that this node owns, for decisions; None while it has none."""
        mine, state = self.owned, self._supervisor.status.state
        if mine is None or not self._supervisor.status.in_epoch:
            return None
        return RunningEpoch(
            mine.form.number,
            mine.form.plan.ranks,
            mine.form.boots,
            mine.form.plan.key,
            mine.wanted,
            state in SERVES,
            self._supervisor.open_requests,
            state is ServingState.DRAINING,
            mine.form.plan.backend,
        )

    def reports(self) -> list[tuple[str, Serving]]:
        """Return the owners other than this node, and the report of each."""
        group, servings = self._scope.group, self._node.peer_info.servings
        return [(owner, serving) for (owner, each), serving in servings.items() if each == group]

    def others(self) -> tuple[RunningEpoch, ...]:
        """Return the epochs of other owners, for decisions."""
        return tuple(filter(None, [_running(owner, serving) for owner, serving in self.reports()]))


def _running(owner: str, serving: Serving) -> RunningEpoch | None:
    if serving.participants[:1] != (owner,) or len(serving.key) != KEY_NUMBERS:
        return None  # only the node of rank 0 reports a group
    if serving.state not in (ServingState.READY, ServingState.LOADING, ServingState.DRAINING):
        return None
    return RunningEpoch(
        serving.epoch,
        serving.participants,
        (),
        serving.key,
        Wanted(serving.model, ""),
        serving.state == ServingState.READY,
        serving.open_requests,
        serving.state == ServingState.DRAINING,
        serving.backend,
    )


class RemoteRanks:
    """Ranks on other Macs of this node's epochs, by node id and epoch. Their agents' reports reach them."""

    def __init__(self, node: ClusterNode) -> None:
        self._ranks: dict[tuple[str, int], RemoteRank] = {}
        node.links.on(self._reported, Prepared, RankStarted, RankPong, RankTrouble, EpochEnded, RankSide)
        node.links.on_lost(self._lost)

    def add(self, ranks: Mapping[tuple[str, int], RemoteRank]) -> None:
        """Have reports of these ranks reach them."""
        self._ranks |= ranks

    def release(self, number: int) -> None:
        """Drop the ranks of epoch `number`, which has ended."""
        self._ranks = {key: rank for key, rank in self._ranks.items() if key[1] != number}

    def _reported(self, link: ControlLink, message: RankWord) -> None:
        """Pass an agent's report on to the rank that it runs for this node."""
        if rank := self._ranks.get((link.node_id, message.epoch)):
            rank.received(message)

    def _lost(self, node_id: str, why: str) -> None:
        """Note that the last link to an agent has ended."""
        for (host, _), rank in list(self._ranks.items()):
            if host == node_id:
                rank.link_lost(why)


class GroupBuilder:
    """Maker of the ranks of one group's epochs."""

    def __init__(self, node: ClusterNode, scope: GroupScope, machines: Machines, remote: RemoteRanks) -> None:
        self._node = node
        self._scope = scope
        self._machines = machines
        self._remote = remote

    def group(self, number: int, chosen: Candidate, *, trial: bool = False) -> EpochGroup:
        """Return the ranks of epoch `number`. `trial`: they run beside those that serve."""
        node = self._node
        here, world, group = node.settings.ranks, len(chosen.ranks), self._scope.group
        row = self._scope.row
        model = row.model if row is not None else ""
        if here > 1:
            split = local_split(node.settings, row, self._scope.model.shape) if row is not None else ()
            return EpochGroup(here, here, node.settings.local_backend, nodes=chosen.ranks, split=split)
        known = node.peer_info.machines
        machines = tuple(f"{known[each].chip} {known[each].build}" for each in chosen.ranks)
        if world == 1:
            return EpochGroup(1, 1, "none", kind=chosen.kind, machines=machines, nodes=chosen.ranks)
        fabric = chosen.ring_addresses or ("",) * world
        members = node.replica.roster.members()

        def endpoints(watcher: Watcher) -> tuple[RemoteRank, ...]:
            made = {}
            for rank, node_id in enumerate(chosen.ranks[1:], 1):
                order = Prepare(number, rank, fabric[rank], model, trial, group)
                made[node_id, number] = RemoteRank(
                    partial(node.links.send, node_id), node.name_of(node_id), order, watcher
                )
            self._remote.add(made)
            return tuple(made.values())

        return EpochGroup(
            1,
            world,
            chosen.backend,
            fabric=fabric[0],
            endpoints=endpoints,
            decode_hosts=("127.0.0.1", *map(self._addresses_for, chosen.ranks[1:])),
            pins=tuple(members[node_id].fingerprint for node_id in chosen.ranks),
            kind=chosen.kind,
            rdma=flat(matrix(chosen)) if chosen.backend == "jaccl" else (),
            jaccl_ring=chosen.jaccl_ring,
            machines=machines,
            nodes=chosen.ranks,
            split=chosen.split,
            without_jaccl=lambda ranks: self._machines.without_jaccl([chosen.ranks[rank] for rank in ranks]),
        )

    def release(self, number: int) -> None:
        """Drop the ranks on other Macs of epoch `number`, which has ended."""
        self._remote.release(number)

    def _addresses_for(self, node_id: str) -> str:
        """Return this node's addresses for a member: on the fastest network, then on the control link."""
        me, link = self._node.node_id, self._node.links.to(node_id)
        faster = [each.addresses[me] for each in self._machines.topology().fastest(me, node_id)[:1]]
        return ",".join(dict.fromkeys([*faster, *([link.local] if link is not None else [])]))

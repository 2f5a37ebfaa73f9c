"""Sums over all groups that an agent knows: health, work of replicas, memory of each Mac."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..api.backend import COMING, DeploymentHealth, Health
from ..cluster.cluster_state import left_s
from ..cluster.node import BEAT_S, ClusterNode
from ..gateway.gateway import Gateway
from ..gateway.routing import MAX_HASHES, GroupLoad
from ..placement.cost_model import usable_bytes
from ..wire.cluster_messages import Deployment, MemoryShortage, Serving
from ..wire.codecs import U32, U63, NodeRow, binary, group_id, holding, integer
from ..wire.messages import DIGEST_BYTES, MAX_GROUP_ID, digests_in
from .group import Group
from .groups import Groups, best, unused_s
from .health import ServingState
from .machines import Machines
from .status import GroupStatus

log = logging.getLogger(__name__)


# --- health ---------------------------------------------------------------------------------------------


def health(node: ClusterNode, groups: Groups, gateway: Gateway, model: str = "") -> Health:
    """Return the health of a deployment (by its name or its model's), or of the agent. The agent is ready
    once each pinned deployment, or without any the first deployment, has a ready group.
    """
    rows = [(row, of) for row in node.desired.table.live() if (of := groups.replicas_of(row.name))]
    reports = groups.reports() if any(not row.pinned for row, _ in rows) else []
    deployments = tuple(deployment_health(row, of, unused_s(reports, row.name) or 0) for row, of in rows)
    named = [of for (_, of), each in zip(rows, deployments, strict=True) if model in (each.name, each.model)]
    group = best(named[0]) if model and named else groups.shown
    status = group.supervisor.status
    closing = status.closing
    ready = status.state is ServingState.READY and not closing
    if not model and len(deployments) > 1:
        needed = [each for each in deployments if each.pinned] or deployments[:1]
        ready = not closing and all(each.ready for each in needed)
    waits = next((each for each in deployments if each.pinned and not each.ready), None)
    reason = status.reason.detail if status.reason is not None else None
    if not model and waits is not None and status.state is ServingState.READY:
        reason = f"{waits.name} is {waits.state}" + (f": {waits.reason}" if waits.reason else "")
    served = gateway.deployments.by_name.get(group.scope.deployment)
    info = served.model if served is not None else None
    return Health(
        state=str(ServingState.DRAINING if closing else status.state),
        epoch=status.epoch,
        world_size=status.group.world_size if status.group is not None else node.settings.ranks,
        backend=status.group.backend if status.group is not None else node.settings.local_backend,
        model=info.id if info is not None else None,
        reason=closing or reason,
        ready=ready,
        open_requests=gateway.open_requests,
        ranks=status.rows(),
        starting="" if closing else status.starting,
        deployments=deployments,
    )


def deployment_health(row: Deployment, groups: list[Group], unused: float = 0.0) -> DeploymentHealth:
    """Return the health of a deployment with its `groups`, `unused` for so many seconds."""
    states = [group.supervisor.status for group in groups]
    ready = sum(_ready(status) for status in states)
    shown = min(states, key=lambda status: (not _ready(status), status.state not in COMING))
    source = groups[0].scope.model.source
    reason = shown.reason.detail if shown.reason is not None else None
    if ready == 0 and not reason:
        reason = groups[0].scope.assignment.why or None
    return DeploymentHealth(
        row.name,
        source.id if source is not None else "",
        str(shown.state),
        pinned=row.pinned,
        ready=ready > 0,
        reason=reason,
        groups_ready=ready,
        groups_wanted=row.replicas,
        expires_s=max(left, 0.0) if (left := left_s(row, unused)) < math.inf else None,
    )


def _ready(status: GroupStatus) -> bool:
    return status.state is ServingState.READY and not status.closing


# --- reports of replicas' work, so that each agent can choose a replica for a request -------------------


class ReplicaLoad(NodeRow, number=0x56):
    """Work and caches of a replica, for the choice between replicas."""

    KEYS = ("group",)
    MOST = 64
    group: str = holding(group_id(MAX_GROUP_ID))
    queued: int = holding(integer(0, U63))  #: prompt tokens of its `requests` still to compute
    requests: int = holding(integer(0, U63))
    speed: int = holding(integer(0, U32))  #: prompt tokens per second; 0 while unknown
    prefixes: bytes = holding(binary(0, DIGEST_BYTES * MAX_HASHES))  #: its caches' digests, oldest first


class ReplicaLoads:
    """Reports ready groups, except the only group of a deployment, and a shortage of memory."""

    def __init__(self, node: ClusterNode, gateway: Gateway, groups: Groups) -> None:
        self._node = node
        self._gateway = gateway
        self._groups = groups
        node.links.reports.on(self._received, ReplicaLoad)
        node.rounds.every(BEAT_S, lambda _now: self._report(), needed=node.links.nodes)

    def _report(self) -> None:
        ready = [(name, each.groups) for name, each in self._gateway.deployments.by_name.items()]
        present = [
            packed(name, groups.load_of(name))
            for deployment, groups in ready
            for name, group in groups.items()
            if group.here and len(self._groups.replicas_of(deployment)) > 1
        ]
        self._node.links.reports.publish(ReplicaLoad, *present)
        self._node.links.reports.publish(MemoryShortage, *[MemoryShortage()] * self._gateway.admission.short)

    def _received(self, node_id: str, load: ReplicaLoad) -> None:
        if node_id in self._node.links.reports.of(Serving, load.group):
            self._gateway.load(load.group, unpacked(load))


def packed(group: str, load: GroupLoad) -> ReplicaLoad:
    return ReplicaLoad(group, load.queued, load.requests, round(load.speed), b"".join(load.prefixes))


def unpacked(load: ReplicaLoad) -> GroupLoad:
    return GroupLoad(load.queued, load.requests, float(load.speed), digests_in(load.prefixes))


# --- account of each Mac's memory: budgets of the ranks of all groups, and their reports ----------------

MIB = 1024**2
#: A rank may use so many bytes for forwards and buffers, or its weights' bytes / WORK_SHARE if that is more.
WORK_BYTES, WORK_SHARE = 1024 * MIB, 8


@dataclass(frozen=True, slots=True)
class RankAccount:
    """Memory of one rank, in bytes: its budget, and the usage in its newest heartbeat."""

    group: str
    node_id: str
    weight_bytes: int
    kv_budget: int  #: 0 for no limit
    memory_bytes: int  #: without what MLX keeps for reuse
    kv_bytes: int

    @property
    def promised(self) -> int:
        return self.weight_bytes + self.kv_budget


def findings(ranks: Iterable[RankAccount], room: Mapping[str, int]) -> dict[tuple[str, str], str]:
    """Return in words which budgets are exceeded, by node id and group; the group is "" for a whole Mac.
    `room`: bytes for ranks of all groups together, by node id of the Macs to judge.
    """
    found: dict[tuple[str, str], str] = {}
    promised: dict[str, int] = {}
    for rank in ranks:
        promised[rank.node_id] = promised.get(rank.node_id, 0) + rank.promised
        most, held = rank.promised + max(WORK_BYTES, rank.weight_bytes // WORK_SHARE), rank.memory_bytes
        if rank.kv_budget and rank.kv_bytes > rank.kv_budget:
            words = f"its KV caches have {_mib(rank.kv_bytes)}, and may have {_mib(rank.kv_budget)}"
            found[rank.node_id, rank.group] = words
        elif rank.kv_budget and held > most:
            words = f"it has {_mib(held)}, and weights, KV caches and forwards may have {_mib(most)}"
            found[rank.node_id, rank.group] = words
    for node_id, total in promised.items():
        if total > room.get(node_id, total):
            found[node_id, ""] = (
                f"its groups may have {_mib(total)} together, and this Mac has {_mib(room[node_id])} for them"
            )
    return found


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"


CHECK_S = 10.0  #: Seconds between two checks.


class MemoryCheck:
    """Logs each of the `findings` once until it is over."""

    def __init__(self, node: ClusterNode, machines: Machines, groups: Groups) -> None:
        self._node = node
        self._machines = machines
        self._groups = groups
        self._logged: frozenset[tuple[str, str]] = frozenset()
        node.rounds.every(CHECK_S, self.check, needed=lambda: groups.in_epoch)

    def check(self, _now: float) -> None:
        members = self._machines.members(held_bytes=self._groups.held_bytes)
        found = findings(self._ranks(), {each.node_id: usable_bytes(each) for each in members})
        for node_id, group in sorted(found.keys() - self._logged):
            about = f"{group} on {self._node.name_of(node_id)}" if group else self._node.name_of(node_id)
            log.warning("memory of %s: %s", about, found[node_id, group])
        self._logged = frozenset(found)

    def _ranks(self) -> Iterator[RankAccount]:
        for name, group in self._groups.by_id.items():
            ranks, kv = group.supervisor.status.ranks, group.supervisor.kv
            if ranks is None or kv.loaded is None:
                continue
            # Without a limit there is no budget: a rank gets one once other groups share the Mac.
            budget = kv.loaded.kv_bytes if kv.limit_bytes else 0
            for rank, node_id in enumerate(ranks.group.nodes):
                if (pong := ranks.watch.pongs.get(rank)) is not None:
                    held = pong.stats.memory_bytes - pong.stats.pool_bytes, pong.stats.kv_bytes
                    yield RankAccount(name, node_id, pong.stats.weight_bytes, budget, *held)

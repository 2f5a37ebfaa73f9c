"""Snapshot of an agent and its cluster, gathered once and rendered in every form. Unknown facts are None.

`gather` reads the parts of an agent; everything else is a pure function of its result. `metrics.py` and
`checkup.py` have two more renderings. `/health` renders only `AgentSnapshot.health`, which costs little.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import combinations

from ..api.admin import Json
from ..api.backend import Health, ModelInfo
from ..cluster.cluster_state import LeaderClaim, is_holder
from ..cluster.introduction import versions_here
from ..gateway.dispatcher import OpenRequests
from ..groups import boot_record
from ..groups.health import SERVES, ServingState
from ..groups.history import MOST, EpochStory, RateMeter
from ..groups.process_group import EpochGroup
from ..placement.cost_model import JACCL_MESH, RING_LOOPBACK
from ..placement.faults import REPLUG
from ..placement.probe_macos import UNKNOWN
from ..placement.topology import THUNDERBOLT, Topology
from ..wire.cluster_messages import FabricResult, Machine, ModelStatus, RosterEntry, Serving
from ..wire.messages import Pong
from ..wire.rank_stats import figures, shown
from .parts import (
    AgentParts,
    DeploymentSnapshot,
    RunningRequest,
    caches_of,
    deployments_of,
    deployments_rendered,
    drafts,
    running_requests,
)

# --- the snapshot ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentSnapshot:
    """One agent's requests, epoch and ranks. `in_epoch`, `proof` and `slow_link` are the supervisor's."""

    health: Health
    state: ServingState
    model: ModelInfo | None
    group: EpochGroup | None
    pongs: Mapping[int, Pong] | None  #: newest heartbeats by rank; None if rank 0 is on another Mac
    pids: Mapping[int, int]  #: of local ranks
    processes: Mapping[str, Sequence[int]]  #: of all groups' ranks here, by group
    requests: tuple[OpenRequests, ...]
    phases: Mapping[str, int]  #: counts of open requests, as in `dispatcher.PHASES`
    tokens: int  #: all that were ever confirmed
    kv_room: int
    in_epoch: bool
    proof: str
    slow_link: str = ""
    running: tuple[RunningRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """One member."""

    node_id: str
    name: str
    here: bool
    state: str
    coordinator: bool
    draining: bool
    rank: int | None  #: in a ready group
    address: str  #: its link's; "" without a link
    called: bool  #: It opened a link to this Mac.
    http: str
    machine: Machine | None
    model: ModelStatus | None
    model_progress: str
    entry: RosterEntry
    admitted_by: str  #: name of a member
    held_bytes: int = 0  #: memory that its ranks hold
    refused: str = ""  #: why one of the two refused the other last; "" with a link


@dataclass(frozen=True, slots=True)
class NodeLink:
    """The best link between two nodes: RDMA on a cable, else the fastest network."""

    a: str
    b: str
    trip_us: int | None  #: round trip of the agents' messages, perhaps over another network
    network: str
    rdma: bool
    mbps: int | None  #: as the slower end reports it


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The cluster as one member sees it."""

    alone: bool
    cluster_id: str
    claim: LeaderClaim
    coordinator: str  #: name of the node in `claim`
    deployments: tuple[DeploymentSnapshot, ...]
    coming: tuple[str, ...]
    problem: str
    waiting: str
    left_out: tuple[str, ...]
    members: tuple[MemberSnapshot, ...]
    links: tuple[NodeLink, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All facts of one moment."""

    node_id: str
    name: str
    agent: AgentSnapshot
    cluster: ClusterSnapshot
    shown: str  #: id of the group that this agent shows
    participants: tuple[str, ...]  #: that group's node ids in rank order; () without a group
    serving: Serving | None  #: that group's report
    measured: FabricResult | None  #: measurement of its fabric
    hosted: bool  #: A rank of another Mac's group is here.
    model_bytes: int | None  #: disk size of the weights that are or will be served
    left_wired: str
    caches: tuple[Json, ...]
    history: tuple[
        tuple[str, EpochStory], ...
    ]  #: epochs of all groups, newest first, each with its group's id
    transfers: tuple[
        Json, ...
    ] = ()  #: models on their way to a member, as in `TransferCoordinator.under_way_anywhere`
    drafts: tuple[Json, ...] = ()


# --- gathering -------------------------------------------------------------------------------------------


def gather(parts: AgentParts) -> Snapshot:
    node, group = parts.node, parts.groups.shown
    agent = gather_agent(parts)
    servings = parts.groups.reports()
    own = [each for each in servings if each.group == group.scope.group and each.participants]
    serving = next((each for each in own if each.epoch == agent.health.epoch), None)
    if node.alone:
        participants = (node.node_id,) * (agent.group.world_size if agent.group is not None else 0)
    else:
        participants = serving.participants if serving is not None else ()
    return Snapshot(
        node_id=node.node_id,
        name=node.name,
        agent=agent,
        cluster=_cluster(parts, servings),
        shown=group.scope.group,
        participants=participants,
        serving=serving,
        measured=parts.results.of(participants, kind(agent.group)),
        hosted=bool(parts.hosted.ranks),
        model_bytes=group.scope.model.weight_bytes or None,
        left_wired=boot_record.HERE.summary(),
        caches=caches_of(parts),
        drafts=tuple(drafts(parts)),
        history=_history(parts),
        transfers=tuple(parts.transfers.under_way_anywhere()),
    )


def _history(parts: AgentParts) -> tuple[tuple[str, EpochStory], ...]:
    groups = {each.scope.group: each for each in (*parts.groups.by_id.values(), parts.groups.shown)}
    stories = {(name, each.began): (name, each) for name, each in parts.groups.past}
    for name, group in groups.items():  # an ended group may still be shown
        stories |= {(name, each.began): (name, each) for each in group.supervisor.status.history.stories}
    return tuple(deepcopy(sorted(stories.values(), key=lambda each: -each[1].began)[:MOST]))


def gather_agent(parts: AgentParts) -> AgentSnapshot:
    gateway, supervisor = parts.gateway, parts.groups.shown.supervisor
    status, ranks = supervisor.status, supervisor.status.ranks
    return AgentSnapshot(
        health=gateway.health(),
        state=ServingState(gateway.health().state),
        model=next(iter(gateway.models()), None),
        group=status.group,
        pongs=dict(sorted(status.pongs.items())) if ranks is not None else None,
        pids={each.rank: each.pid for each in ranks.processes} if ranks is not None and status.pongs else {},
        processes=_processes(parts),
        requests=gateway.deployments.count_open(),
        phases=gateway.deployments.phases,
        tokens=gateway.deployments.confirmed_tokens,
        kv_room=supervisor.kv.tokens,
        in_epoch=parts.groups.in_epoch,
        proof=supervisor.loader.proof,
        slow_link=loaded.slow_link if (loaded := supervisor.kv.loaded) is not None else "",
        running=running_requests(gateway.deployments),
    )


def _processes(parts: AgentParts) -> dict[str, list[int]]:
    found = {rank.order.group: [rank.pid] for rank in parts.hosted.ranks if rank.pid}
    for each in (*parts.groups.by_id.values(), parts.groups.shown):
        status = each.supervisor.status
        if status.ranks is not None and status.pongs:
            found[each.scope.group] = [process.pid for process in status.ranks.processes]
    return found


def _cluster(parts: AgentParts, servings: Sequence[Serving]) -> ClusterSnapshot:
    node = parts.node
    claim = node.leadership.claim
    ranks = {
        node_id: rank
        for serving in servings
        if serving.state == ServingState.READY
        for rank, node_id in enumerate(serving.participants)
    }
    present = [member.node_id for member in parts.machines.members()]
    return ClusterSnapshot(
        alone=node.alone,
        cluster_id=node.identity.cluster_id,
        claim=claim,
        coordinator=node.name_of(claim.node_id) if claim.node_id else "",
        deployments=deployments_of(parts, servings),
        coming=tuple(parts.selection.progress()),
        problem=node.introduction.problem,
        waiting=parts.coordinator.waiting or parts.groups.shown.waiting,
        left_out=tuple(parts.machines.left_out_lines()),
        members=tuple(
            _member(parts, entry, ranks.get(node_id))
            for node_id, entry in node.replica.roster.members().items()
        ),
        links=tuple(links(parts.machines.topology(), present, parts.round_trips.between)),
    )


def _member(parts: AgentParts, entry: RosterEntry, rank: int | None) -> MemberSnapshot:
    node, node_id = parts.node, entry.node_id
    here, link = node_id == node.node_id, node.links.to(node_id)
    desired, table = parts.groups.shown.scope.model, node.links.reports
    return MemberSnapshot(
        node_id=node_id,
        name=node.name_of(node_id),
        here=here,
        state=str(node.membership.status_of(node_id).state),
        coordinator=not node.alone and node_id == node.leadership.claim.node_id,
        draining=node_id in node.leadership.draining,
        rank=rank,
        address=link.remote if link is not None else "",
        called=any(each.node_id == node_id and not each.dialled for each in node.links.links()),
        http=node.introduction.http if here else node.peer_info.https.get(node_id, ""),
        machine=table.of(Machine).get(node_id),
        model=desired.status if here else table.of(ModelStatus, desired.name).get(node_id),
        model_progress=parts.transfers.progress_text(desired.name, node_id),
        entry=entry,
        admitted_by=node.name_of(entry.admitted_by) if entry.admitted_by else "",
        held_bytes=parts.groups.held_bytes(node_id),
        refused=node.links.refused.get(node_id, ""),
    )


def links(
    topology: Topology, nodes: Sequence[str], trip_us: Callable[[str, str], int | None]
) -> list[NodeLink]:
    found = []
    for a, b in combinations(sorted(nodes), 2):
        trip = trip_us(a, b)
        if topology.rdma(a, b) is not None:
            found.append(NodeLink(a, b, trip, THUNDERBOLT, rdma=True, mbps=None))
        else:
            for link in topology.fastest(a, b)[:1]:
                found.append(NodeLink(a, b, trip, link.network, rdma=False, mbps=link.mbps or None))
    return found


# --- `mlxtp status` --------------------------------------------------------------------------------------


def status(now: Snapshot) -> Json:
    """Return the answer to `mlxtp status`. An agent that runs alone names no cluster."""
    return _here(now) if now.cluster.alone else {**_here(now), **_among_others(now)}


def _everywhere(now: Snapshot) -> Json:
    names = {each.node_id: each.name for each in now.cluster.members}
    return {
        "versions": list(versions_here()),
        "state": now.agent.health.state,
        "starting": now.agent.health.starting,
        "epoch": now.agent.health.epoch,
        "deployments": deployments_rendered(now.cluster.deployments, {now.node_id: now.name, **names}),
        "caches": list(now.caches),
        "drafts": list(now.drafts),
    }


def _here(now: Snapshot) -> Json:
    agent = now.agent
    health, group = agent.health, agent.group
    return {
        **_everywhere(now),
        "name": now.name,
        "pid": os.getpid(),
        "reason": health.reason or "",
        "model": agent.model.id if agent.model is not None else "",
        "group": now.shown,
        "world_size": group.world_size if group is not None else 0,
        "backend": group.backend if group is not None else "none",
        "kind": group.kind if group is not None else "",
        "split": list(group.split) if group is not None else [],
        "open_requests": health.open_requests,
        "left_wired": now.left_wired,
        "slow_link": f"{agent.slow_link}: {REPLUG}" if agent.slow_link else "",
        "ranks": [
            {"rank": rank, "pid": agent.pids.get(rank), "phase": pong.phase, **shown(pong.stats)}
            for rank, pong in (agent.pongs or {}).items()
        ],
        "processes": {group: list(pids) for group, pids in agent.processes.items()},
    }


def _among_others(now: Snapshot) -> Json:
    cluster = now.cluster
    serves = now.serving is not None and now.serving.state == ServingState.READY
    return {
        "problem": cluster.problem,
        "waiting": cluster.waiting,
        "left_out": list(cluster.left_out),
        "cluster": cluster.cluster_id,
        "node_id": now.node_id,
        "coordinator": cluster.coordinator,
        "term": cluster.claim.term,
        "coming": list(cluster.coming),
        "fabric": asdict(now.measured) if now.measured is not None and serves else None,
        "members": members(cluster),
    }


def members(cluster: ClusterSnapshot) -> list[Json]:
    groups = [group for each in cluster.deployments for group in each.groups]
    return [
        {
            **{name: getattr(each, name) for name in _OF_A_MEMBER},
            "self": each.here,
            "works_for": [group.id for group in groups if each.node_id in group.members],
            "chip": (machine := each.machine or UNKNOWN).chip,
            "memory_bytes": machine.memory_bytes,
            "notes": list(machine.notes),
            "formations": formations(machine),
            "admitted_by": each.entry.admitted_by,
            "admitted_by_name": each.admitted_by,
            "joined_from": each.entry.address,
            "joined_at": each.entry.at,
            "holds_authority": is_holder(each.entry),
            "model_problem": each.model.problem if each.model is not None else "",
        }
        for each in cluster.members
    ]


_OF_A_MEMBER = (
    "node_id", "name", "state", "draining", "coordinator", "rank", "address", "http", "refused",
    "model_progress",
)  # fmt: skip


def formations(machine: Machine) -> dict[str, int]:
    """Return the attempts to form a JACCL group since the Mac started, by RDMA device."""
    return {port.rdma: port.formations for port in machine.ports if port.formations}


# --- the page, and `mlxtp status --watch` ----------------------------------------------------------------


class Observer:
    """Source of the page's data: `api.admin.Observed` for one agent."""

    def __init__(self, parts: AgentParts) -> None:
        self.over = asyncio.Event()
        self._parts = parts
        self._meter = RateMeter()

    def snapshot(self) -> Json:
        now = gather(self._parts)
        if now.agent.state in SERVES:
            return page(now, self._meter.rate(now.agent.tokens, time.monotonic()))
        self._meter.reset()
        return page(now, None)


def page(now: Snapshot, tokens_per_second: float | None) -> Json:
    """Return the page's data (`docs/operations.md`). If rank 0 is here, the speed is all requests'."""
    agent, cluster = now.agent, now.cluster
    health = agent.health
    of = "here" if agent.state in SERVES and agent.pongs is None else "group"
    return {
        **_everywhere(now),
        "self": now.node_id,
        "ready": health.ready,
        "reason": health.reason,
        "model": health.model,
        "model_bytes": now.model_bytes,
        "context": agent.model.context if agent.model is not None else None,
        "group": _group(now),
        "ranks": _ranks(now),
        "tokens_per_second": {"value": tokens_per_second, "of": of},
        "requests": {"open": health.open_requests, **agent.phases},
        "running": [asdict(each) for each in agent.running],
        "shown": now.shown,
        "history": [{"group": group, **asdict(story)} for group, story in now.history],
        "cluster": None if cluster.alone else cluster.cluster_id,
        "coordinator": None if cluster.alone else cluster.claim.node_id or None,
        "problem": cluster.problem or None,
        "waiting": cluster.waiting or None,
        "coming": list(cluster.coming),
        "transfers": list(now.transfers),
        "nodes": _nodes(cluster),
        "links": [asdict(each) for each in cluster.links],
    }


def kind(group: EpochGroup | None) -> str:
    if group is None:
        return ""
    return group.kind or (RING_LOOPBACK if group.world_size > 1 else "")


def _group(now: Snapshot) -> Json | None:
    group = now.agent.group
    if group is None or group.world_size == 0:
        return None
    return {
        "world_size": group.world_size,
        "backend": group.backend,
        "kind": kind(group),
        "split": list(group.split),
        "pairs": pairs(group.world_size, mesh=kind(group) == JACCL_MESH),
        "fabric": _fabric(now),
    }


def pairs(world_size: int, *, mesh: bool) -> list[tuple[int, int]]:
    """Return the pairs of ranks that exchange bytes: all in a mesh, neighbors in a ring."""
    if mesh or world_size < 3:
        return list(combinations(range(world_size), 2))
    return [(rank, (rank + 1) % world_size) for rank in range(world_size)]


def _fabric(now: Snapshot) -> Json | None:
    """Return the best known time of a collective: measured for this group, else from the last proof."""
    if (found := now.measured) is not None:
        return {"collective_us": round(found.collective_s * 1e6), "by": "bench", "at": found.at}
    slowest_us = max((pong.stats.collective_us for pong in (now.agent.pongs or {}).values()), default=0)
    return {"collective_us": slowest_us, "by": "proof", "at": None} if slowest_us else None


def _ranks(now: Snapshot) -> list[Json]:
    """Return every rank of the group. Figures are None on an agent that gets no heartbeats from it."""
    pongs, unknown = now.agent.pongs or {}, dict.fromkeys(("phase", "in_flight", *figures()))
    known = {
        rank: {"phase": p.phase, "in_flight": p.in_flight, **shown(p.stats)} for rank, p in pongs.items()
    }
    return [
        {"rank": rank, "node": node, **known.get(rank, unknown)} for rank, node in enumerate(now.participants)
    ]


#: Fields of a member on the page. In the second tuple None replaces an empty value.
_OF_A_NODE = ("node_id", "name", "state", "self", "coordinator", "draining", "notes", "works_for")
_OR_NONE = ("address", "chip", "memory_bytes", "model_problem", "model_progress", "refused")


def _nodes(cluster: ClusterSnapshot) -> list[Json]:
    return [
        {
            **{name: row[name] for name in _OF_A_NODE},
            **{name: row[name] or None for name in _OR_NONE},
            # In steps of 256 MiB, so that an idle Mac causes no update every ten seconds.
            "free_bytes": (each.machine or UNKNOWN).free_bytes >> 28 << 28 or None,
            "held_bytes": each.held_bytes,
        }
        for each, row in zip(cluster.members, members(cluster), strict=True)
    ]

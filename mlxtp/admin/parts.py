"""The parts of an agent, and facts for all reports: deployments, caches, drafts, open requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from ..api.admin import Json
from ..api.request_context import RequestContext
from ..api.request_metrics import UNWATCHED, CountedSequence
from ..cluster.authority import AuthorityKeeping
from ..cluster.control_port import TokenIssuing
from ..cluster.node import ClusterNode
from ..cluster.peer_reports import MachineReports, RoundTripTimes
from ..gateway.dispatcher import ServedDeployments
from ..gateway.gateway import Gateway
from ..gateway.ready_groups import OpenRequest
from ..gateway.request import ClientRequest
from ..groups.coordinator import Coordinator
from ..groups.fabric import FabricBench, FabricResults
from ..groups.group import Group
from ..groups.groups import Groups
from ..groups.health import SERVES, ServingState
from ..groups.hosted_rank import HostedRanks
from ..groups.loading import NO_HEAD
from ..groups.machines import Machines
from ..groups.on_request import OnRequest
from ..groups.selection import ModelSelection
from ..models.local_model import LocalModels
from ..models.transfers import TransferCoordinator
from ..placement.candidates import exposed
from ..placement.topology import Topology
from ..wire.cluster_messages import Deployment, Serving
from ..wire.messages import Pong
from ..wire.rank_stats import of_group


@dataclass(frozen=True, slots=True)
class AgentParts:
    """All parts in the order of construction: each uses only earlier ones."""

    node: ClusterNode
    readings: MachineReports
    round_trips: RoundTripTimes
    authority: AuthorityKeeping
    tokens: TokenIssuing
    transfers: TransferCoordinator
    models: LocalModels
    gateway: Gateway
    hosted: HostedRanks
    results: FabricResults
    machines: Machines
    groups: Groups
    coordinator: Coordinator
    fabric_bench: FabricBench
    selection: ModelSelection
    on_request: OnRequest

    async def close(self) -> None:
        """Send a goodbye on each link, and end the parts."""
        async with AsyncExitStack() as ending:  # in reverse; each part ends even if another fails to
            for part in (
                self.transfers,
                self.models,
                self.node,
                self.hosted,
                self.selection,
                self.fabric_bench,
                self.readings,
            ):
                ending.push_async_callback(part.close)


# --- deployments and their groups -----------------------------------------------------------------------

_BEST = (
    *SERVES, ServingState.LOADING, ServingState.FORMING, ServingState.STARTING,
    ServingState.RESTARTING, ServingState.FAILED,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """One group of a deployment, as its owner reports it. Counts are None if no owner does."""

    id: str
    state: str
    why: str = ""  #: why it is not ready
    owner: str = ""
    members: tuple[str, ...] = ()  #: node ids in rank order
    backend: str = "none"
    kind: str = ""
    epoch: int = 0
    requests: int = 0
    running: int = 0  #: of `requests`, with a first token
    speed: int | None = None  #: tokens a second
    cached: int | None = None
    room: int = 0  #: tokens that its KV caches hold; 0 on other Macs than its owner
    split: tuple[int, ...] = ()  #: layers of each rank of a pipeline
    exposed: str = ""  #: a warning if its tensors cross a foreign network in the clear
    loaded: int | None = None  #: percent of the weights that this agent's ranks have; None if not loading
    faster: str = ""  #: a place where it would be much faster, in words


@dataclass(frozen=True, slots=True)
class DeploymentSnapshot:
    row: Deployment
    groups: tuple[GroupSnapshot, ...]

    @property
    def ready(self) -> int:
        return sum(each.state == ServingState.READY for each in self.groups)

    @property
    def state(self) -> str:
        states = [each.state for each in self.groups]
        return next((str(state) for state in _BEST if state in states), str(ServingState.IDLE))

    @property
    def why(self) -> str:
        """Reason that further groups are not ready; "" if there are enough."""
        found = dict.fromkeys(each.why for each in self.groups if each.state != ServingState.READY)
        return "; ".join(filter(None, found))


def deployments_of(parts: AgentParts, servings: Sequence[Serving]) -> tuple[DeploymentSnapshot, ...]:
    """Return all deployments, the default first."""
    of: dict[str, list[Serving]] = {}
    for serving in servings:
        of.setdefault(serving.group, []).append(serving)
    here = parts.node.node_id if parts.node.alone else ""
    topology = parts.machines.topology(parts.node.settings.fabric_networks)

    def snapshots(name: str) -> Iterator[GroupSnapshot]:
        for each in parts.groups.replicas_of(name):
            yield _group(each, of.get(each.scope.group, ()), here, topology)

    return tuple(
        DeploymentSnapshot(row, tuple(snapshots(row.name))) for row in parts.node.desired.table.live()
    )


def _group(group: Group, servings: Iterable[Serving], alone: str, topology: Topology) -> GroupSnapshot:
    """Return a group as its owner reports it, else as this member knows it."""
    scope, status = group.scope, group.supervisor.status
    # A former owner may still be ending its epoch.
    serving = max(servings, key=lambda each: (each.state in SERVES, each.epoch), default=None)
    if serving is None or not serving.participants:
        state, why = (serving.state, serving.reason) if serving is not None else (str(status.state), "")
        why = why or (status.reason.detail if status.reason is not None else "") or group.waiting
        owner = scope.assignment.owner or alone
        return GroupSnapshot(scope.group, state, why, owner, epoch=status.epoch, loaded=status.loaded)
    return GroupSnapshot(
        scope.group,
        serving.state,
        "" if serving.state == ServingState.READY else serving.reason,
        serving.participants[0],
        tuple(dict.fromkeys(serving.participants)),
        **{
            name: getattr(serving, name)
            for name in ("backend", "kind", "epoch", "running", "cached", "split")
        },
        requests=serving.open_requests,
        speed=serving.speed if serving.state in SERVES else None,
        room=group.supervisor.kv.tokens if scope.owned or alone else 0,
        exposed=exposed(serving.kind, serving.participants, topology),
        loaded=status.loaded,
        faster=scope.assignment.faster,
    )


def deployments_rendered(deployments: Iterable[DeploymentSnapshot], names: Mapping[str, str]) -> list[Json]:
    """Return the deployments for `mlxtp status` and the page. `names`: members' names by node id."""
    return [
        {
            **each.row.wishes(),
            "name": each.row.name,
            "model": each.row.model,
            "state": each.state,
            "replicas": {"ready": each.ready, "wanted": each.row.replicas},
            "pinned": each.row.pinned,
            "on": [names.get(node, node[:8]) for node in each.row.on],
            "why": each.why or None,
            "groups": [_rendered(group, names) for group in each.groups],
        }
        for each in deployments
    ]


def _rendered(group: GroupSnapshot, names: Mapping[str, str]) -> Json:
    return {
        "id": group.id,
        "backend": group.backend,
        "kind": group.kind,
        "split": list(group.split),
        "members": [{"node_id": node, "name": names.get(node, node[:8])} for node in group.members],
        "owner": group.owner or None,
        "owner_name": names.get(group.owner, group.owner[:8]) or None,
        "state": group.state,
        "why": group.why or None,
        "epoch": group.epoch,
        "requests": {"running": group.running, "waiting": max(group.requests - group.running, 0)},
        "tokens_per_second": group.speed,
        "cached_tokens": group.cached,
        "exposed": group.exposed or None,
        "faster": group.faster or None,
        "loaded_percent": group.loaded,
    }


# --- caches of earlier prompts --------------------------------------------------------------------------


def use_of(group: str, pongs: Mapping[int, Pong], nodes: Sequence[str]) -> Json:
    """Return a group's use of its caches in this epoch, by fields of `RankStats`. `nodes`: its Macs."""
    stats = {rank: pong.stats for rank, pong in sorted(pongs.items())}
    macs = {nodes[rank] if len(nodes) > 1 else "": each for rank, each in stats.items()}
    return {"group": group, **of_group(stats.values(), macs.values())}


def caches_of(parts: AgentParts) -> tuple[Json, ...]:
    return tuple(map(cache_use, with_ranks(parts)))


def with_ranks(parts: AgentParts) -> list[Group]:
    """Return the groups whose rank 0 is here and whose ranks report."""
    return [each for each in parts.groups.by_id.values() if each.supervisor.status.pongs]


def cache_use(group: Group) -> Json:
    status = group.supervisor.status
    return use_of(group.scope.group, status.pongs, status.group.nodes if status.group is not None else ())


# --- drafts ---------------------------------------------------------------------------------------------

PROPOSERS = ("lookup", "mtp", "draft")  #: In the order of `RankStats`.


def drafts_of(group: str, pong: Pong, speculation: str) -> Json:
    """Return a group's drafts in this epoch, from rank 0's heartbeat. `speculation` is the setting.

    drafted  tokens by proposer; `accepted`: how many of them were right
    width    mean tokens per decode step in its widest row; 0 before the first step
    gain     recent tokens per second, relative to steps without drafts; 0 if not measured
    note     why it cannot draft; "" if it can
    """
    stats, lacks = pong.stats, speculation == "mtp" and bool(pong.model) and not pong.stats.mtp
    return {
        "group": group,
        "drafted": dict(zip(PROPOSERS, stats.drafted, strict=False)),
        "accepted": dict(zip(PROPOSERS, stats.accepted, strict=False)),
        "width": round(stats.decode_widths / stats.decode_steps, 2) if stats.decode_steps else 0.0,
        "gain": round(stats.draft_gain, 2),
        "note": NO_HEAD if lacks else "",
    }


def drafts(parts: AgentParts) -> Iterator[Json]:
    for each in parts.groups.by_id.values():
        if pongs := each.supervisor.status.pongs:
            yield drafts_of(each.scope.group, pongs[min(pongs)], parts.node.settings.speculation)


# --- open requests, without their text ------------------------------------------------------------------

MOST_SHOWN = 64  #: requests


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """One open request. Counts are in tokens."""

    number: int  #: its name as long as it is open
    model: str
    group: str  #: id of the group that has it; "" for none
    phase: str  #: "waiting" (in a queue), "restarting" (for a group), "reading" or "writing"
    prompt: int
    read: int  #: part of `prompt`, including `cached`
    cached: int | None  #: None if unknown, or if another agent's
    tokens: int  #: length of its answer so far
    here: bool  #: Its client is this agent's.
    owner: str  #: hash of its client's key; viewers never get it


def running_requests(deployments: ServedDeployments) -> tuple[RunningRequest, ...]:
    """Return clients' open requests, oldest first, without the agent's own."""
    every = [(request, name) for name, each in deployments.by_name.items() for request in each.requests]
    found = [_running(*each) for each in every if _is_of_a_client(each[0])]
    return tuple(sorted(found, key=lambda each: each.number)[:MOST_SHOWN])


def senders(deployments: ServedDeployments) -> list[Json]:
    """Return each open request's key and program, of this agent's clients. Only some readers may see them."""
    found = ((request.number, _account(request)) for request in deployments.requests)
    known = [(number, account) for number, account in found if account is not None]
    return [{"number": number, "key": each.key, "app": each.app} for number, each in known[:MOST_SHOWN]]


def _is_of_a_client(request: OpenRequest) -> bool:
    return not isinstance(request, ClientRequest) or request.watch is not UNWATCHED


def _running(request: OpenRequest, name: str) -> RunningRequest:
    prompt, cached = len(request.generate.tokens) - request.generate.answered, None
    if isinstance(request, ClientRequest):
        progress = request.progress()
        phase, read = _PHASES.get(progress.state, "writing"), progress.processed
        if phase in ("reading", "writing"):
            cached = min(request.cached, prompt)
    else:
        phase = "writing" if request.came else "reading" if request.uid else "waiting"
        read = max(prompt - request.left, 0)
    read = prompt if phase == "writing" else min(read, prompt)
    here, account = isinstance(request, ClientRequest), _account(request)
    owner = account.key_hash if account is not None else ""
    return RunningRequest(
        request.number, name, request.group, phase, prompt, read, cached, request.got, here, owner
    )


def _account(request: OpenRequest) -> RequestContext | None:
    watch = request.watch if isinstance(request, ClientRequest) else None
    return watch.account if isinstance(watch, CountedSequence) else None


_PHASES = {"queued": "waiting", "prefill": "reading", "restarting": "restarting"}

"""Deployments and their groups as one member knows them, gathered once and rendered for each reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..api.admin import Json
from ..groups.group import Group
from ..groups.health import SERVES, ServingState
from ..placement.candidates import exposed
from ..placement.topology import Topology
from ..wire.cluster_messages import Deployment, Serving
from .parts import AgentParts

_BEST = (
    *SERVES, ServingState.LOADING, ServingState.FORMING, ServingState.STARTING,
    ServingState.RESTARTING, ServingState.FAILED,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """One group of a deployment, by its owner's report. `members` are node ids in rank order.

    `why` is the reason why it is not ready. `running` of its `requests` have a first token. The speed is in
    tokens per second. Counts are None where no owner reports them. `room` is that of its KV caches in
    tokens, and 0 on other Macs than its owner. `split` has the layers of each rank of a pipeline.
    `exposed` says that its tensors cross a network of others in the clear, if they do. `loaded` is the part
    of the weights that ranks of this agent's epoch have loaded, in percent, None while none of them loads.
    """

    id: str
    state: str
    why: str = ""
    owner: str = ""
    members: tuple[str, ...] = ()
    backend: str = "none"
    kind: str = ""
    epoch: int = 0
    requests: int = 0
    running: int = 0
    speed: int | None = None
    cached: int | None = None
    room: int = 0
    split: tuple[int, ...] = ()
    exposed: str = ""
    loaded: int | None = None


@dataclass(frozen=True, slots=True)
class DeploymentSnapshot:
    """One deployment, and its groups in the order of their ids."""

    row: Deployment
    groups: tuple[GroupSnapshot, ...]

    @property
    def ready(self) -> int:
        """Number of groups that answer requests."""
        return sum(each.state == ServingState.READY for each in self.groups)

    @property
    def state(self) -> str:
        """The state of the group that is closest to being ready."""
        states = [each.state for each in self.groups]
        return next((str(state) for state in _BEST if state in states), str(ServingState.IDLE))

    @property
    def why(self) -> str:
        """Reason why further groups are not ready; empty if as many are as there must be."""
        found = dict.fromkeys(each.why for each in self.groups if each.state != ServingState.READY)
        return "; ".join(filter(None, found))


def gather(parts: AgentParts, servings: Sequence[Serving]) -> tuple[DeploymentSnapshot, ...]:
    """Return all deployments, the default first."""
    of: dict[str, list[Serving]] = {}
    for serving in servings:
        of.setdefault(serving.group, []).append(serving)
    here = parts.node.node_id if parts.node.alone else ""
    topology = parts.machines.topology(parts.node.settings.fabric_networks)
    return tuple(
        DeploymentSnapshot(
            row,
            tuple(
                _group(each, of.get(each.scope.group, ()), here, topology)
                for each in parts.groups.replicas_of(row.name)
            ),
        )
        for row in parts.node.desired.table.live()
    )


def _group(group: Group, servings: Iterable[Serving], alone: str, topology: Topology) -> GroupSnapshot:
    """Return a group by its owner's report, if there is one, else as this member knows it."""
    scope, status = group.scope, group.supervisor.status
    owner = scope.assignment.owner or alone
    # An owner of before may still end its epoch.
    serving = max(servings, key=lambda each: (each.state in SERVES, each.epoch), default=None)
    if serving is None or not serving.participants:
        why = serving.reason if serving is not None else ""
        state = serving.state if serving is not None else str(status.state)
        own = status.reason.detail if status.reason is not None else ""
        why = why or own or group.waiting
        return GroupSnapshot(scope.group, state, why, owner, epoch=status.epoch, loaded=status.loaded)
    return GroupSnapshot(
        scope.group,
        serving.state,
        "" if serving.state == ServingState.READY else serving.reason,
        serving.participants[0],
        tuple(dict.fromkeys(serving.participants)),
        serving.backend,
        serving.kind,
        serving.epoch,
        serving.open_requests,
        serving.running,
        serving.speed if serving.state in SERVES else None,
        serving.cached,
        group.supervisor.kv.tokens if scope.owned or alone else 0,
        serving.split,
        exposed(serving.kind, serving.participants, topology),
        status.loaded,
    )


def rendered(deployments: Iterable[DeploymentSnapshot], names: Mapping[str, str]) -> list[Json]:
    """Return the deployments, as `mlxtp status` and the page have them; see `docs/operations.md`.

    `names` are those of members by node id.
    """
    return [
        {
            "name": each.row.name,
            "model": each.row.model,
            "state": each.state,
            "replicas": {"ready": each.ready, "wanted": each.row.replicas},
            "pinned": each.row.pinned,
            "nodes": each.row.nodes,
            "parallel": each.row.parallel,
            "split": each.row.split,
            "on": [names.get(node, node[:8]) for node in each.row.on],
            "keep_s": each.row.keep_s,
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
        "loaded_percent": group.loaded,
    }

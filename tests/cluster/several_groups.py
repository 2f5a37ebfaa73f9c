"""Rule of simulated clusters with several deployments: real assignments and plans for made-up Macs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxtp.cluster.place import GroupReport, PlaceDecision, PlaceView, WantedDeployment, place
from mlxtp.groups.coordinator import STEADY_S
from mlxtp.placement.cost_model import rank_memory, usable_bytes
from mlxtp.placement.model_shape import ModelShape
from mlxtp.placement.planner import DEFAULT_CONTEXT, PlacementOptions, plan
from mlxtp.placement.topology import MemberMachine
from mlxtp.wire.cluster_messages import Deployment, GroupAssignment

from ..placement.made_up_macs import mac, on_lan
from .simulated_rules import staying

if TYPE_CHECKING:
    from .simulated_node import Node, Part, RunningEpoch


class SeveralGroups:
    """Every deployment has its groups. `memory` is in GiB, by node id; `models` by name."""

    def __init__(self, memory: Mapping[str, int], models: Mapping[str, ModelShape]) -> None:
        macs = on_lan([mac(place, memory=size) for place, size in enumerate(memory.values())])
        self.macs = {name: replace(each, node_id=name) for name, each in zip(memory, macs, strict=True)}
        self.models = models
        self._decisions: dict[object, PlaceDecision] = {}

    def model(self, node: Node, group: str) -> str:
        row, index = node.replica.deployments.get(_name(group)), int(group.rpartition("#")[2])
        return row.model if row is not None and index < row.replicas else ""

    def assign(self, node: Node) -> Iterable[tuple[str, tuple[str, ...]]]:
        return [(each.group, each.ranks) for each in self.decision(node).assignments]

    def decision(self, node: Node) -> PlaceDecision:
        """Return what is assigned when this node coordinates."""
        leadership, now = node.leadership, node.world.now
        rows = node.replica.deployments.live()
        here = [name for name, status in node.membership.statuses().items() if status.present]
        running = [
            (group, each)
            for group, part in sorted(node.parts.items())
            for each in sorted(node.epochs(group), key=lambda each: ready_since(node, part, each))
        ]
        told = tuple((group, each.ranks, each.ready, each.open_requests) for group, each in running)
        flapping = frozenset(name for name, until in leadership.flapping.items() if now < until)
        ranks = {group: part.assigned.ranks for group, part in node.parts.items() if part.assigned.ranks}
        places = {group: GroupAssignment(group, _name(group), ranks=each) for group, each in ranks.items()}
        seen = (rows, tuple(here), told, leadership.draining, flapping, tuple(ranks.items()))
        if seen not in self._decisions:
            self._decisions[seen] = place(
                PlaceView(
                    [self.macs[name] for name in here],
                    [WantedDeployment(row, self.options(row), self.models[row.model]) for row in rows],
                    [
                        GroupReport(group, ranks, ready=ready, open_requests=requests)
                        for group, ranks, ready, requests in told
                    ],
                    leadership.draining,
                    flapping,
                    places=places,
                )
            )
        return self._decisions[seen]

    def options(self, row: Deployment) -> PlacementOptions:
        return PlacementOptions(nodes=int(row.nodes) if row.nodes.isdecimal() else row.nodes)

    def needed(self, epochs: Iterable[tuple[str, RunningEpoch]]) -> dict[str, int]:
        """Return the bytes that ranks of these epochs need, by node id."""
        found: dict[str, int] = {}
        for _, epoch in epochs:
            for name in epoch.ranks:
                found[name] = found.get(name, 0) + self.need(
                    self.macs[name], epoch.form.model, len(epoch.ranks)
                )
        return found

    def need(self, member: MemberMachine, model: str, ranks: int) -> int:
        return rank_memory(member, self.models[model], ranks, DEFAULT_CONTEXT).needed

    def complaint(self, nodes: Sequence[Node], leader: Node) -> str:
        epochs = {
            (group, part.running.owner, part.running.number): part.running
            for node in nodes
            for group, part in node.parts.items()
            if part.running is not None
        }
        by_id = {node.id: node for node in nodes}
        assigned = {group: ranks for group, ranks in self.assign(leader) if ranks}
        if sorted(group for group, _, _ in epochs) != sorted(assigned):
            return f"{assigned} should run: {epochs}"
        for (group, owner, number), epoch in epochs.items():
            if epoch.ranks != assigned[group]:
                return f"{group} is assigned {assigned[group]} and runs on {epoch.ranks}"
            joined = [by_id[name].parts[group].running for name in epoch.ranks]
            if not all(
                each and (each.owner, each.number, each.ready) == (owner, number, True) for each in joined
            ):
                return f"{group} is not ready: {joined}"
        return self.overfull(epochs) or self.left_out(leader, epochs)

    def overfull(self, epochs: Mapping[tuple[str, str, int], RunningEpoch]) -> str:
        """Groups together need no more than the Macs have."""
        needed = self.needed((group, epoch) for (group, _, _), epoch in epochs.items())
        over = [name for name in needed if needed[name] > usable_bytes(self.macs[name])]
        return f"{over} have too many groups: {epochs}" if over else ""

    def left_out(self, leader: Node, epochs: Mapping[tuple[str, str, int], RunningEpoch]) -> str:
        """No deployment is left out although it would fit the Macs that no group uses."""
        used = {name for epoch in epochs.values() for name in epoch.ranks}
        for row in leader.replica.deployments.live():
            macs = [self.macs[name] for name in staying(leader) if name not in used]
            served = any(_name(group) == row.name for group, _, _ in epochs)
            if not served and macs and plan(macs, self.models[row.model], "", self.options(row)).chosen:
                return f"{row.name} is not served: {epochs}"
        return ""


def ready_since(node: Node, part: Part, epoch: RunningEpoch) -> float:
    """Return when an epoch became ready, some seconds earlier for that of the present owner."""
    ready_at = node.world.ready_at.get((epoch.owner, epoch.number), math.inf)
    return ready_at - STEADY_S * (epoch.owner == part.assigned.owner)


def _name(group: str) -> str:
    return group.rpartition("#")[0]

"""Rule of simulated clusters with several deployments: real assignments and plans for made-up Macs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxtp.cluster.assign import AssignDecision, AssignView, GroupReport, WantedDeployment, assign
from mlxtp.cluster.reconcile import GroupPlan, RunningEpoch, Wanted
from mlxtp.groups.coordinator import STEADY_S
from mlxtp.placement.cost_model import CHAT, rank_memory, usable_bytes
from mlxtp.placement.model_shape import ModelShape
from mlxtp.placement.planner import DEFAULT_CONTEXT, PlacementOptions, plan
from mlxtp.placement.topology import MemberMachine
from mlxtp.wire.cluster_messages import Deployment

from ..placement.made_up_macs import mac, on_lan
from .simulated_rules import staying

if TYPE_CHECKING:
    from .simulated_node import Node, Part


class SeveralGroups:
    """Every deployment has its groups. `memory` is in GiB, by node id; `models` by name."""

    def __init__(self, memory: Mapping[str, int], models: Mapping[str, ModelShape]) -> None:
        macs = on_lan([mac(place, memory=size) for place, size in enumerate(memory.values())])
        self.macs = {name: replace(each, node_id=name) for name, each in zip(memory, macs, strict=True)}
        self.models = models
        self._decisions: dict[object, AssignDecision] = {}
        self._plans: dict[object, GroupPlan | None] = {}

    def wanted(self, node: Node, group: str) -> Wanted | None:
        row, index = node.replica.deployments.get(_name(group)), int(group.rpartition("#")[2])
        return Wanted(row.model, row.nodes) if row is not None and index < row.replicas else None

    def assign(self, node: Node) -> Iterable[tuple[str, str, tuple[str, ...]]]:
        return [(each.group, each.owner, each.nodes) for each in self.decision(node).assignments]

    def decision(self, node: Node) -> AssignDecision:
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
        seen = (rows, tuple(here), told, leadership.draining, flapping)
        if seen not in self._decisions:
            self._decisions[seen] = assign(
                AssignView(
                    [self.macs[name] for name in here],
                    [WantedDeployment(row, self.options(row), self.models[row.model]) for row in rows],
                    [GroupReport(group, ranks, 1, ready, requests) for group, ranks, ready, requests in told],
                    leadership.draining,
                    flapping,
                )
            )
        return self._decisions[seen]

    def options(self, row: Deployment) -> PlacementOptions:
        return PlacementOptions(nodes=int(row.nodes) if row.nodes.isdecimal() else row.nodes)

    def plan(self, node: Node, group: str, nodes: Sequence[str]) -> GroupPlan | None:
        """Return the planner's choice among these nodes, with what other groups leave of them."""
        row = node.replica.deployments.get(_name(group))
        here = [name for name in nodes if name in staying(node)]
        if row is None or node.id not in here:
            return None
        others = [(each, one) for each in node.parts if each != group for one in node.epochs(each)]
        taken = self.needed(others)
        seen = (node.id, row.model, row.nodes, tuple((name, taken.get(name, 0)) for name in here))
        if seen not in self._plans:
            members = [replace(self.macs[name], taken_bytes=taken.get(name, 0)) for name in here]
            chosen = plan(members, self.models[row.model], node.id, self.options(row)).chosen
            self._plans[seen] = None
            if chosen is not None and chosen.speed is not None:
                key = (chosen.speed.requests_per_second(CHAT),)
                self._plans[seen] = GroupPlan(chosen.ranks, key, chosen.backend)
        return self._plans[seen]

    def needed(self, epochs: Iterable[tuple[str, RunningEpoch]]) -> dict[str, int]:
        """Return the bytes that ranks of these epochs need, by node id."""
        found: dict[str, int] = {}
        for _, epoch in epochs:
            for name in epoch.ranks:
                found[name] = found.get(name, 0) + self.need(
                    self.macs[name], epoch.wanted.model, len(epoch.ranks)
                )
        return found

    def need(self, member: MemberMachine, model: str, ranks: int) -> int:
        return rank_memory(member, self.models[model], ranks, DEFAULT_CONTEXT).needed

    # --- what must be true

    def complaint(self, nodes: Sequence[Node], leader: Node) -> str:
        epochs = {
            (group, part.running.owner, part.running.number): part.running
            for node in nodes
            for group, part in node.parts.items()
            if part.running is not None
        }
        by_id = {node.id: node for node in nodes}
        assigned = {group: (owner, within) for group, owner, within in self.assign(leader) if owner}
        if sorted(group for group, _, _ in epochs) != sorted(assigned):
            return f"{assigned} should run: {epochs}"
        for (group, owner, number), epoch in epochs.items():
            if owner != assigned[group][0] or not set(epoch.ranks) <= set(assigned[group][1]):
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

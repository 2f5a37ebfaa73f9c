"""Rules by which the coordinator of a simulated cluster assigns groups, and by which owners plan them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from mlxtp.cluster.reconcile import GroupPlan, Wanted

if TYPE_CHECKING:
    from .simulated_node import Node

GROUP = "only#0"


class Rule(Protocol):
    """`node` is the one that decides, from what it knows."""

    def wanted(self, node: Node, group: str) -> Wanted | None: ...

    def assign(self, node: Node) -> Iterable[tuple[str, str, tuple[str, ...]]]:
        """Yield each group with its owner, empty for none, and the nodes that it may use."""

    def plan(self, node: Node, group: str, nodes: Sequence[str]) -> GroupPlan | None: ...

    def complaint(self, nodes: Sequence[Node], leader: Node) -> str:
        """Return what is wrong with the epochs of nodes that all reach each other; empty for nothing."""


class OneGroup:
    """There is one group. It serves the first deployment, and stays with its owner as long as it is ready."""

    def __init__(self, strength: Mapping[str, int] = {}) -> None:
        self.strength = strength

    def wanted(self, node: Node, group: str) -> Wanted | None:
        row = next(iter(node.replica.deployments.live()), None)
        return None if row is None else Wanted(row.model, row.nodes)

    def assign(self, node: Node) -> Iterable[tuple[str, str, tuple[str, ...]]]:
        here = staying(node)
        epochs = sorted(
            node.epochs(GROUP), key=lambda each: (not each.ready, [-n for n in each.key], each.owner)
        )
        owner = next((each.owner for each in epochs if each.owner in here), "")
        plan = self.best(node, here, owner)
        if plan is not None:
            yield GROUP, owner or plan.ranks[0], here
        elif epochs:
            yield GROUP, epochs[0].owner, epochs[0].ranks
        else:
            yield GROUP, "", ()

    def plan(self, node: Node, group: str, nodes: Sequence[str]) -> GroupPlan | None:
        return self.best(node, [each for each in staying(node) if each in nodes], node.id)

    def best(self, node: Node, nodes: Sequence[str], owner: str) -> GroupPlan | None:
        """Return the strongest one, two or four of these nodes, the owner among them if there is one."""
        wanted = self.wanted(node, GROUP)
        if wanted is None or (owner and owner not in nodes):
            return None
        here = sorted(
            nodes, key=lambda each: (each != owner, -self.strength.get(each, 1), each != node.id, each)
        )
        sizes = [int(wanted.nodes)] if wanted.nodes.isdecimal() else [4, 2, 1]
        size = next((size for size in sizes if size <= len(here)), 0)
        first = owner or (node.id if node.id in here[:size] else "")
        chosen = sorted(here[:size], key=lambda each: (each != first, each))
        key = (float(sum(self.strength.get(each, 1) for each in chosen)),)
        return GroupPlan(tuple(chosen), key) if chosen else None

    def complaint(self, nodes: Sequence[Node], leader: Node) -> str:
        """Exactly one epoch has to run, if any can: the assigned owner's, and it is the best one with it."""
        running = {node.id: node.running for node in nodes if node.running is not None}
        assigned = leader.part(GROUP).assigned
        if self.best(leader, staying(leader), "") is None:
            return f"nothing should run: {running}" if running else ""
        owner = next((node for node in nodes if node.id == assigned.owner), None)
        if owner is None:
            return f"a group is not assigned: {assigned}"
        plan = self.plan(owner, GROUP, assigned.nodes)
        epochs = {(one.owner, one.number) for one in running.values()}
        if plan is None or len(epochs) != 1 or not all(one.ready for one in running.values()):
            return f"{plan} should run: {running}"
        epoch = next(iter(running.values()))
        if set(epoch.ranks) != set(running) or epoch.key != plan.key:
            return f"{plan} should run: {running}"
        return (
            "" if epoch.owner == owner.id else f"{owner.id} is assigned the group, {epoch.owner} has rank 0"
        )


def staying(node: Node) -> tuple[str, ...]:
    """Return the nodes that are here and not about to stop."""
    statuses, draining = node.membership.statuses(), node.leadership.draining
    return tuple(sorted(each for each, status in statuses.items() if status.present and each not in draining))

"""Rules by which the coordinator of a simulated cluster assigns ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .simulated_node import Node

GROUP = "only#0"


class Rule(Protocol):
    """`node` is the one that decides, from what it knows."""

    def model(self, node: Node, group: str) -> str:
        """Return the model that a group is to serve; empty for none."""

    def assign(self, node: Node) -> Iterable[tuple[str, tuple[str, ...]]]:
        """Yield each group with its ranks, none where it has no place."""

    def complaint(self, nodes: Sequence[Node], leader: Node) -> str:
        """Return what is wrong with the epochs of nodes that all reach each other; empty for nothing."""


class OneGroup:
    """There is one group, on the strongest nodes. It serves the first deployment, and stays where it is."""

    def __init__(self, strength: Mapping[str, int] = {}) -> None:
        self.strength = strength

    def model(self, node: Node, group: str) -> str:
        row = next(iter(node.replica.deployments.live()), None)
        return "" if row is None else row.model

    def assign(self, node: Node) -> Iterable[tuple[str, tuple[str, ...]]]:
        here = staying(node)
        epochs = sorted(
            node.epochs(GROUP), key=lambda each: (not each.ready, -self.power(each.ranks), each.owner)
        )
        owner = next((each.owner for each in epochs if each.owner in here), "")
        best = self.best(node, here, owner)
        now = next((each.ranks for each in epochs if {*each.ranks} <= {*here}), ())
        if not best or self.power(now) == self.power(best):
            best = now or (epochs[0].ranks if epochs else ())
        yield GROUP, best

    def power(self, ranks: Iterable[str]) -> int:
        return sum(self.strength.get(each, 1) for each in ranks)

    def best(self, node: Node, nodes: Sequence[str], owner: str) -> tuple[str, ...]:
        """Return the strongest one, two or four of these nodes, the owner among them if there is one."""
        row = next(iter(node.replica.deployments.live()), None)
        if row is None or (owner and owner not in nodes):
            return ()
        here = sorted(
            nodes, key=lambda each: (each != owner, -self.strength.get(each, 1), each != node.id, each)
        )
        sizes = [int(row.nodes)] if row.nodes.isdecimal() else [4, 2, 1]
        size = next((size for size in sizes if size <= len(here)), 0)
        first = owner or (node.id if node.id in here[:size] else "")
        return tuple(sorted(here[:size], key=lambda each: (each != first, each)))

    def complaint(self, nodes: Sequence[Node], leader: Node) -> str:
        """Exactly one epoch has to run, if any can: the assigned one, and it is a strongest one."""
        running = {node.id: node.running for node in nodes if node.running is not None}
        assigned = leader.part(GROUP).assigned
        best = self.best(leader, staying(leader), "")
        if not best:
            return f"nothing should run: {running}" if running else ""
        if assigned.owner not in {node.id for node in nodes}:
            return f"a group is not assigned: {assigned}"
        epochs = {(one.owner, one.number) for one in running.values()}
        if len(epochs) != 1 or not all(one.ready for one in running.values()):
            return f"{assigned} should run: {running}"
        epoch = next(iter(running.values()))
        if set(epoch.ranks) != set(running) or epoch.ranks != assigned.ranks:
            return f"{assigned} should run: {running}"
        strongest = self.best(leader, staying(leader), epoch.owner)
        weaker = self.power(epoch.ranks) != self.power(strongest)
        return f"{strongest} should run: {running}" if weaker else ""


def staying(node: Node) -> tuple[str, ...]:
    """Return the nodes that are here and not about to stop."""
    statuses, draining = node.membership.statuses(), node.leadership.draining
    return tuple(sorted(each for each, status in statuses.items() if status.present and each not in draining))

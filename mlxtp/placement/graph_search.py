"""Groups in a graph: nodes that are all joined pairwise, and nodes that can stand in a circle. Pure.

Both searches try nodes in the order given and end with the first group found, so that the same nodes in the
same order make the same group. They are exhaustive within `STEPS` extensions of a partial group. Cables make
thin graphs, which have far fewer extensions, because a Mac has few ports. A network that all nodes share
makes a thick graph, in which the first try fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

STEPS = 20_000

Graph = Mapping[str, frozenset[str]]  #: The neighbours of each node.
Search = Callable[[Sequence[str], int, Graph, str], tuple[str, ...]]


def clique(nodes: Sequence[str], size: int, graph: Graph, must: str = "") -> tuple[str, ...]:
    """Return `size` of `nodes` that are all joined to each other, with `must` as the first; () for none."""
    return _Search(nodes, size, graph, circle=False).run(must)


def circle(nodes: Sequence[str], size: int, graph: Graph, must: str = "") -> tuple[str, ...]:
    """Return `size` of `nodes`, each joined to the next and the last to the first, `must`; () for none."""
    return _Search(nodes, size, graph, circle=True).run(must)


class _Search:
    def __init__(self, nodes: Sequence[str], size: int, graph: Graph, *, circle: bool) -> None:
        self._size = size
        self._circle = circle
        self._graph = graph
        self._peers = {a: [b for b in nodes if b in graph.get(a, ())] for a in nodes}
        self._places = {node: place for place, node in enumerate(nodes)}
        self._done: set[str] = set()
        self._steps = 0

    def run(self, must: str) -> tuple[str, ...]:
        for first in [must] if must else list(self._peers):
            if first in self._peers and (found := self._extend((first,))):
                return found
            self._done.add(first)  # no group has it
        return ()

    def _extend(self, group: tuple[str, ...]) -> tuple[str, ...]:
        if len(group) == self._size:
            closed = not self._circle or self._size <= 2 or group[0] in self._graph[group[-1]]
            return group if closed else ()
        for node in self._peers[group[-1]]:
            self._steps += 1
            if self._steps > STEPS:
                return ()
            if self._fits(node, group) and (found := self._extend((*group, node))):
                return found
        return ()

    def _fits(self, node: str, group: tuple[str, ...]) -> bool:
        if node in group or node in self._done:
            return False
        if self._circle:
            return True
        # The members of a clique come in one order only, after the first.
        ordered = len(group) == 1 or self._places[node] > self._places[group[-1]]
        return ordered and self._graph[node].issuperset(group)

"""Cliques and circles against trying everything."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.placement.candidates import STEPS, Graph, circle, clique, preference

from .made_up_macs import mac

NODES = "abcdef"
PAIRS = list(combinations(NODES, 2))


def graph_of(pairs: set[tuple[str, str]], nodes: str = NODES) -> Graph:
    return {node: frozenset(b if a == node else a for a, b in pairs if node in (a, b)) for node in nodes}


def is_clique(group: tuple[str, ...], graph: Graph) -> bool:
    return all(b in graph[a] for a, b in combinations(group, 2))


def is_circle(group: tuple[str, ...], graph: Graph) -> bool:
    size = len(group)
    return all(group[(i + 1) % size] in graph[group[i]] for i in range(size if size > 1 else 0))


@given(pairs=st.sets(st.sampled_from(PAIRS)), size=st.integers(1, 6), must=st.sampled_from(["", *NODES]))
@settings(max_examples=400, deadline=None)
def test_a_group_is_found_exactly_where_there_is_one(
    pairs: set[tuple[str, str]], size: int, must: str
) -> None:
    graph = graph_of(pairs)
    for search, holds in ((clique, is_clique), (circle, is_circle)):
        found = search(NODES, size, graph, must)
        exists = any(
            holds(group, graph) for group in permutations(NODES, size) if not must or group[0] == must
        )
        assert bool(found) == exists
        if found:
            assert len(set(found)) == size
            assert holds(found, graph)
            assert not must or found[0] == must


def test_the_first_nodes_are_preferred() -> None:
    all_linked = graph_of(set(PAIRS))
    assert clique("fedcba", 3, all_linked) == ("f", "e", "d")
    assert circle("fedcba", 3, all_linked, "a") == ("a", "f", "e")


def test_nodes_that_may_not_take_part_do_not() -> None:
    all_linked = graph_of(set(PAIRS))
    assert set(circle("bdf", 3, all_linked)) == set("bdf")
    assert circle("bdf", 4, all_linked) == ()
    assert clique("bdf", 2, all_linked, "a") == ()


@pytest.mark.parametrize("must", ["", "m0"])
def test_a_hopeless_search_gives_up(must: str) -> None:
    """Three nodes that know all others make long paths and no circle of eight."""
    nodes = [f"m{i}" for i in range(64)]
    hubs = frozenset(nodes[:3])
    graph = {node: frozenset(nodes) - hubs if node in hubs else hubs for node in nodes}
    assert circle(nodes, 8, graph, must) == ()
    assert STEPS < 10**6


def test_macs_are_preferred_by_speed_memory_and_caches() -> None:
    preferred = (
        mac(5, chip="Apple M1 Ultra"),  # it reads faster than an M5 Max, and computes less
        mac(4, chip="Apple M5 Max", memory=128),
        mac(3, chip="Apple M5 Max", caches=("0 model",)),
        mac(2, chip="Apple M5 Max", caches=("1 model",)),
        mac(1, chip="Apple M5 Max", caches=("0 another",), free=60),
        mac(6, chip="Apple M5 Max", free=64),
    )
    assert sorted({*preferred}, key=lambda each: preference(each, "org/model")) == [*preferred]

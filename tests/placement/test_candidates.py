"""Cliques and circles against trying everything, and what joins given ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.placement.candidates import STEPS, Candidate, Fabrics, Graph, PlacementOptions, preference, search
from mlxtp.placement.cost_model import ALONE, JACCL_MESH, RING_ETHERNET, RING_THUNDERBOLT
from mlxtp.placement.formation import FailedGroup, links_of
from mlxtp.placement.topology import MemberMachine, Topology

from .made_up_macs import all_pairs, cabled, changed, mac, node_id, on_lan

NODES = "abcdef"
PAIRS = list(combinations(NODES, 2))
clique, circle = partial(search, closed=False), partial(search, closed=True)


def graph_of(pairs: set[tuple[str, str]], nodes: str = NODES) -> Graph:
    return {node: frozenset(b if a == node else a for a, b in pairs if node in (a, b)) for node in nodes}


def is_clique(group: tuple[str, ...], graph: Graph) -> bool:
    return all(b in graph[a] for a, b in combinations(group, 2))


def is_circle(group: tuple[str, ...], graph: Graph) -> bool:
    size = len(group)
    return all(group[(i + 1) % size] in graph[group[i]] for i in range(size if size > 1 else 0))


@given(pairs=st.sets(st.sampled_from(PAIRS)), size=st.integers(1, 6), must=st.sampled_from(["", *NODES]))
@settings(max_examples=400, deadline=None)
def test_a_group_is_found_where_there_is_one(pairs: set[tuple[str, str]], size: int, must: str) -> None:
    graph = graph_of(pairs)
    for searched, holds in ((clique, is_clique), (circle, is_circle)):
        found = searched(NODES, size, graph, must)
        exists = any(
            holds(group, graph) for group in permutations(NODES, size) if not must or group[0] == must
        )
        assert bool(found) == exists
        if found:
            assert len(set(found)) == size
            assert holds(found, graph)
            assert not must or found[0] == must


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


def wired(
    members: Sequence[MemberMachine], kind: str, ranks: Sequence[int], options: PlacementOptions | None = None
) -> Candidate:
    """These Macs by their places, joined by the cables and networks that there are."""
    options = options or PlacementOptions()
    by_id = {member.node_id: member for member in members}
    return Fabrics(by_id, Topology(members, options.rdma)).wired(kind, tuple(map(node_id, ranks)), options)


def test_ranks_have_the_addresses_and_devices_that_there_are_now() -> None:
    macs = on_lan(cabled([mac(0), mac(1), mac(2)], all_pairs(3)))
    ring = wired(macs, RING_ETHERNET, (1, 0, 2))
    assert (ring.backend, ring.names) == ("ring", ("b", "a", "c"))
    assert ring.ring_addresses == ("192.168.7.2", "192.168.7.1", "192.168.7.3")
    mesh = wired(macs, JACCL_MESH, (1, 0, 2))
    assert (mesh.backend, mesh.ring_addresses, mesh.jaccl_ring) == ("jaccl", (), False)
    assert mesh.rdma == (
        (None, "rdma_en2", "rdma_en3"),
        ("rdma_en2", None, "rdma_en3"),
        ("rdma_en3", "rdma_en2", None),
    )
    alone = wired(macs, ALONE, (2,))
    assert (alone.ranks, alone.backend, alone.reason) == ((node_id(2),), "none", "")


def test_a_link_that_is_missing_now_is_the_reason() -> None:
    macs = cabled([mac(0), mac(1), mac(2)], [(0, 1), (1, 2)])
    for kind, why in (
        (RING_THUNDERBOLT, "a has 1 of the 2 neighbours it needs in a circle of 3"),
        (JACCL_MESH, "RDMA"),
    ):
        found = wired(macs, kind, (0, 1, 2))
        assert (found.ranks, found.verdict) == ((), "refused")
        assert why in found.reason


def test_a_ring_crosses_to_the_network_that_still_joins_its_ranks() -> None:
    """The slowest of its networks names it, whatever it was called before."""
    macs = cabled([mac(0), mac(1), mac(2)], [(0, 1), (1, 2)], rdma="")
    macs[0], macs[2] = on_lan([macs[0], macs[2]])
    for kind in (RING_THUNDERBOLT, RING_ETHERNET):
        found = wired(macs, kind, (0, 1, 2))
        assert (found.kind, found.reason) == (RING_ETHERNET, "")
        assert found.ring_addresses == ("192.168.7.1", "10.0.0.2", "10.0.1.2")
    both = on_lan(cabled([mac(0), mac(1)], [(0, 1)], rdma=""))
    assert wired(both, RING_ETHERNET, (0, 1)).kind == RING_ETHERNET


def test_jaccl_has_the_reason_of_its_preflight() -> None:
    macs = cabled([mac(0), mac(1)], [(0, 1)])
    macs[1] = changed(macs[1], interfaces=(replace(macs[1].machine.interfaces[0], address=""),))
    found = wired(macs, JACCL_MESH, (0, 1))
    assert (found.ranks, found.verdict) == ((), "refused")
    assert "b" in found.reason
    assert "no IPv4 address" in found.reason, found.reason
    by_hand = PlacementOptions(rdma={node_id(0): {node_id(1): "x"}, node_id(1): {node_id(0): "y"}})
    assert wired(macs, JACCL_MESH, (0, 1), by_hand).rdma == ((None, "x"), ("y", None)), "a user named them"


def test_a_group_that_failed_is_wired_and_refused() -> None:
    macs = cabled([mac(0), mac(1)], [(0, 1)])
    mesh = wired(macs, JACCL_MESH, (0, 1))
    failed = FailedGroup(JACCL_MESH, links_of(mesh.ranks, mesh.rdma), "its proof failed")
    again = wired(macs, JACCL_MESH, (0, 1), PlacementOptions(failed=(failed,)))
    assert (again.verdict, again.reason, again.ranks) == ("refused", "its proof failed", mesh.ranks)

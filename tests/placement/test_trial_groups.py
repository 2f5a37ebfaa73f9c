"""Parts of a group that can be tried beside groups that use some of its RDMA devices."""

from __future__ import annotations

from mlxtp.placement.candidates import Candidate, Device, Fabrics, devices_of, parts
from mlxtp.placement.cost_model import JACCL_MESH, JACCL_RING, RING_ETHERNET
from mlxtp.placement.topology import Topology

from .made_up_macs import all_pairs, cabled, mac

MACS = cabled([mac(place) for place in range(4)], all_pairs(4))
TOPOLOGY = Topology(MACS)
FABRICS = Fabrics({each.node_id: each for each in MACS}, TOPOLOGY)
NAMES = {each.node_id: each.name for each in MACS}
IDS = {name: node_id for node_id, name in NAMES.items()}


def nodes(names: str) -> tuple[str, ...]:
    return tuple(IDS[name] for name in names)


def group(names: str, *, circle: bool = False) -> Candidate:
    """A group over JACCL of these Macs, in rank order."""
    ranks, kind = nodes(names), JACCL_RING if circle else JACCL_MESH
    matrix = FABRICS.matrix(ranks, circle=circle)
    return Candidate(kind, len(ranks), ranks=ranks, backend="jaccl", jaccl_ring=circle, rdma=matrix)


def used(names: str, *, circle: bool = False) -> set[Device]:
    return set(devices_of(nodes(names), TOPOLOGY, circle=circle))


def tried(chosen: Candidate, in_use: set[Device]) -> list[str] | None:
    """The parts by the names of their Macs."""
    found = parts(chosen, in_use)
    return found if found is None else ["".join(NAMES[node] for node in part.ranks) for part in found]


def test_a_group_over_its_own_devices_is_tried_as_it_is() -> None:
    mesh = group("abc")
    assert parts(mesh, set()) == [mesh]
    assert parts(group("ab"), used("cd")) == [group("ab")]
    ring = Candidate(RING_ETHERNET, 2, ranks=nodes("ab"), backend="ring")
    assert parts(ring, used("ab")) == [ring]


def test_of_a_larger_mesh_rank_0_tries_the_newcomers() -> None:
    assert parts(group("abc"), used("ab")) == [group("ac")]
    assert tried(group("abcd"), used("ab")) == ["acd"]
    assert tried(group("abcd"), used("abc")) == ["ad"]


def test_a_newcomer_that_is_rank_0_tries_its_cables_one_after_the_other() -> None:
    assert tried(group("abc"), used("bc")) == ["ab", "ac"]


def test_of_a_ring_rank_0_tries_its_free_neighbours() -> None:
    [part] = parts(group("abc", circle=True), used("ab")) or []
    assert part.ranks == nodes("ac")
    assert part.rdma == group("ac").rdma
    assert (part.kind, part.jaccl_ring) == (JACCL_RING, False)
    assert tried(group("abcd", circle=True), used("abc")) == ["ad"]


def test_what_already_works_needs_no_try() -> None:
    assert tried(group("ab"), used("abc")) == []
    assert tried(group("abcd", circle=True), used("abcd")) == []


def test_a_mesh_after_a_ring_tries_the_cables_across() -> None:
    assert tried(group("abcd"), used("abcd", circle=True)) == ["ac"]


def test_free_cables_between_others_cannot_be_tried() -> None:
    ring = group("abdc", circle=True)
    assert tried(ring, used("abc")) is None

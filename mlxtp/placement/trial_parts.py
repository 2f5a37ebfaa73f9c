"""Parts of a group that can be tried while other groups use RDMA devices. Pure.

One RDMA device cannot serve two groups at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import combinations

from .candidates import Candidate
from .topology import Topology

Device = tuple[str, str]  #: A node id, and one of its RDMA devices.


def devices_of(ranks: Sequence[str], topology: Topology, *, circle: bool) -> Iterable[Device]:
    """Yield the devices that a group over JACCL uses; in a circle those between neighbours."""
    pairs = zip(ranks, (*ranks[1:], *ranks[:1]), strict=True) if circle else combinations(ranks, 2)
    for pair in pairs:
        if link := topology.rdma(*pair):
            yield from link.devices.items()


def parts(chosen: Candidate, used: Collection[Device]) -> list[Candidate] | None:
    """Return what rank 0 can try of a group, each part with it as rank 0, while others use `used`.

    That is all of the group if it uses none of these devices. Else it is meshes over the cables of rank 0
    that are free; none are needed if each cable of the group already works for another group. Returns None if
    cables are free, but none of them is rank 0's.
    """
    ranks, rdma = chosen.ranks, chosen.rdma
    cables = {(i, j) for i, j in combinations(range(len(ranks)), 2) if rdma and rdma[i][j]}
    free = {(i, j) for i, j in cables if not {(ranks[i], rdma[i][j]), (ranks[j], rdma[j][i])} & set(used)}
    if free == cables:
        return [chosen]
    left, found = [rank for rank in range(1, len(ranks)) if (0, rank) in free], []
    while left:
        part = [0]
        for rank in left:
            if all((other, rank) in free for other in part):
                part.append(rank)
        left = [rank for rank in left if rank not in part]
        found.append(_of(part, chosen))
    return found if found or not free else None


def _of(part: Sequence[int], chosen: Candidate) -> Candidate:
    """Return the mesh of some ranks. It keeps the group's kind, so that its failure leaves out the group."""
    return replace(
        chosen,
        nodes=len(part),
        ranks=tuple(chosen.ranks[rank] for rank in part),
        rdma=tuple(tuple(chosen.rdma[i][j] for j in part) for i in part),
        jaccl_ring=False,
    )

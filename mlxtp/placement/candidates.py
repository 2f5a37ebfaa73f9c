"""Candidates for a placement: for each number of nodes and fabric the best group, or the reason for none.

Pure. `planner.py` chooses among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .chips import chip
from .cost_model import (
    ALONE,
    JACCL_MESH,
    JACCL_RING,
    RING_ETHERNET,
    Measured,
    RankHardware,
    SpeedEstimate,
    speed,
)
from .fabrics import RINGS, DeviceMatrix, Fabrics
from .failed_groups import FailedGroup, links_of
from .graph_search import Graph, Search, circle, clique
from .model_shape import MAX_RANKS, ModelShape
from .rank_memory import RankMemory, rank_memory, usable_bytes
from .topology import NETWORKS, MemberMachine, TcpLink, Topology

GB = 1e9
TENSOR_PARALLEL = "tensor parallel"
_VARIES = "sums over 32 KiB are added in order of arrival, so they are not repeatable"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve a model, or the reason why it is impossible.

    kind            a key of `cost_model.FABRICS`, ALONE, or TENSOR_PARALLEL if no fabric was tried
    nodes           number of nodes
    verdict         "chosen", "possible" or "refused", which `reason` explains
    ranks, names    node ids in rank order, and their names; () if no group was found
    backend         "none", "ring" or "jaccl"
    jaccl_ring      whether JACCL goes around in a circle rather than between all pairs
    ring_addresses  for the ring: the IPv4 address on which each rank listens for the rank before it
    rdma            for jaccl: [from][to] the RDMA device, None where there is no cable or none is used
    memory, speed   memory of each rank, and the estimated speed
    """

    kind: str
    nodes: int
    verdict: str = "refused"
    reason: str = ""
    ranks: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    backend: str = "none"
    jaccl_ring: bool = False
    ring_addresses: tuple[str, ...] = ()
    rdma: DeviceMatrix = ()
    memory: tuple[RankMemory, ...] = ()
    speed: SpeedEstimate | None = None

    @property
    def title(self) -> str:
        """Its name in a sentence."""
        if self.nodes == 1:
            return f"{self.names[0]} alone" if self.names else ALONE
        return f"{self.kind} of {self.nodes}"


@dataclass(frozen=True, eq=False)
class CandidateFinder:
    """Search for the best group of each size and fabric among `members` (by node id).

    Among equally fast nodes the coordinator comes first, then the node with more memory, then the smaller id.
    """

    members: Mapping[str, MemberMachine]
    topology: Topology
    shape: ModelShape
    context: int
    coordinator: str
    fast_fences: bool
    measured: Measured
    failed: Sequence[FailedGroup] = ()
    repeatable: bool = False

    @cached_property
    def fabrics(self) -> Fabrics:
        return Fabrics(self.members, self.topology)

    def alternatives(self, must: str, *, leave_out: str = "") -> list[Candidate]:
        """Return one candidate for each number of nodes and each fabric, without the node `leave_out`.

        All groups have `must` as rank 0 unless it is empty.
        """
        pool = [node for node in self._order if node != leave_out]
        return [
            found
            for size in range(1, min(MAX_RANKS, len(pool)) + 1)
            for found in self._of_size(size, pool, must)
        ]

    def assumptions(self, chosen: Candidate | None) -> list[str]:
        """Return the assumptions behind the chosen group's estimates, as sentences."""
        chips = {self._ranks[node].chip for node in (chosen.ranks if chosen else ())}
        return [
            f"{c.name or 'a chip without a name'} is not in the table of chips: "
            f"a memory bandwidth of {c.bandwidth / GB:.0f} GB/s is assumed"
            for c in sorted(chips, key=lambda c: c.name)
            if not c.known
        ]

    @cached_property
    def _ranks(self) -> dict[str, RankHardware]:
        return {
            node: RankHardware(
                node, chip(m.machine.chip, m.machine.gpu_cores), metal=m.machine.system == "macos"
            )
            for node, m in self.members.items()
        }

    @cached_property
    def _order(self) -> list[str]:
        def key(node: str) -> tuple[float, float, bool, int, str]:
            flops, usable = self._ranks[node].chip.flops, usable_bytes(self.members[node])
            return -self._reading(node), -flops, node != self.coordinator, -usable, node

        return sorted(self.members, key=key)

    def _reading(self, node: str) -> float:
        return (self.measured.reading or {}).get(node) or self._ranks[node].chip.reading

    def _of_size(self, size: int, pool: Sequence[str], must: str) -> list[Candidate]:
        if obstacles := self.shape.obstacles(size):
            fitting = max(n for n in range(1, size) if not self.shape.obstacles(n))
            others = f", {fitting} can" if fitting > 1 else ""
            text = f"{size} Macs cannot share this model{others}: {'; '.join(obstacles)}"
            return [Candidate(TENSOR_PARALLEL, size, reason=text)]
        fits = [node for node in pool if self._memory(node, size).fits]
        if len(fits) < size or (must and must not in fits):
            kind = ALONE if size == 1 else TENSOR_PARALLEL
            return [Candidate(kind, size, reason=self._no_room(size, pool, must))]
        if size == 1:
            return [self._feasible(ALONE, (must or fits[0],))]
        return self._over_rdma(size, fits, must) + self._over_tcp(size, fits, must)

    def _memory(self, node: str, size: int) -> RankMemory:
        sharing = size if self.topology.is_one_machine else 1
        return rank_memory(self.members[node], self.shape, size, self.context, sharing=sharing)

    def _no_room(self, size: int, pool: Sequence[str], must: str) -> str:
        """Return which rank has too little memory, in the group with the most."""
        most = sorted(pool, key=lambda n: (n != must, -usable_bytes(self.members[n]), n))[:size]
        memories = enumerate(self._memory(node, size) for node in most)
        rank, short = next((rank, memory) for rank, memory in memories if not memory.fits)
        return f"rank {rank} ({short.name}) has {short.available / GB:.1f} GB for {short.needed / GB:.1f} GB"

    def _over_rdma(self, size: int, fits: Sequence[str], must: str) -> list[Candidate]:
        if not self.fabrics.hopes_for_rdma:
            return []
        kinds: list[tuple[str, Search]] = [(JACCL_MESH, clique)]
        kinds += [(JACCL_RING, circle)] if size > 2 else []  # of two, both are the same
        found = []
        for kind, search in kinds:
            if self.repeatable and kind == JACCL_MESH and size > 2:
                found.append(Candidate(kind, size, reason=_VARIES))
            else:
                found.append(self._found(kind, size, fits, must, search))
        return found

    def _over_tcp(self, size: int, fits: Sequence[str], must: str) -> list[Candidate]:
        found = []
        kinds = self.fabrics.rings or (RING_ETHERNET,)
        for kind in kinds:
            found.append(self._found(kind, size, fits, must, circle, networks=(RINGS[kind],)))
        if any(one.ranks for one in found) or len(kinds) == 1:
            return found
        # No network has enough of them; a circle may still cross from one to another.
        group = self._group(size, fits, must, self.fabrics.any_network, circle)
        return [*found, self._feasible("", group, NETWORKS)] if group else found

    def _found(
        self,
        kind: str,
        size: int,
        fits: Sequence[str],
        must: str,
        search: Search,
        *,
        networks: Sequence[str] = (),
    ) -> Candidate:
        """Return the best group that has not failed to form, or the reason for none."""
        graph = self.fabrics.graph(kind)
        group = self._group(size, fits, must, graph, search)
        if not group:
            return self._missing(kind, size, fits, must)
        best = self._feasible(kind, group, networks)
        if best.verdict == "possible" or not best.ranks:
            return best
        for node in reversed(group):
            others = [each for each in fits if each != node]
            if node != must and (group := self._group(size, others, must, graph, search)):
                other = self._feasible(kind, group, networks)
                if other.verdict == "possible":
                    return other
        return best

    def _missing(self, kind: str, size: int, fits: Sequence[str], must: str) -> Candidate:
        preferred = sorted(fits, key=lambda node: node != must)
        return Candidate(kind, size, reason=self.fabrics.missing(kind, size, preferred))

    def _group(
        self, size: int, fits: Sequence[str], must: str, graph: Graph, search: Search
    ) -> tuple[str, ...]:
        """Return the group whose slowest member is the fastest; () if there is none."""
        group = search(fits, size, graph, must)
        slowest = self._reading(must) if must else float("inf")
        speeds = sorted({min(self._reading(node), slowest) for node in fits}, reverse=True)
        low, high = 0, len(speeds) - 1
        while group and low < high:
            middle = (low + high) // 2
            fast = [node for node in fits if self._reading(node) >= speeds[middle]]
            if better := search(fast, size, graph, must):
                group, high = better, middle
            else:
                low = middle + 1
        if self.coordinator in group:
            first = group.index(self.coordinator)
            group = group[first:] + group[:first]
        return group

    def _feasible(self, kind: str, group: tuple[str, ...], networks: Sequence[str] = ()) -> Candidate:
        """Return the group with everything it needs. The slowest of its links' networks names a ring."""
        jaccl = kind in (JACCL_MESH, JACCL_RING)
        matrix = self.fabrics.matrix(group, circle=kind == JACCL_RING) if jaccl else ()
        if twice := self.fabrics.doubled(group, matrix) if jaccl else "":
            return Candidate(kind, len(group), reason=twice)
        links = self.fabrics.ring_links(group, networks) if networks else []
        if links:
            kind = max((k for k in RINGS if RINGS[k] in {x.network for x in links}), key=list(RINGS).index)
        pairs = links_of(group, matrix)
        reason = next((each.reason for each in self.failed if each.is_in(kind, pairs)), "")
        return Candidate(
            kind=kind,
            nodes=len(group),
            verdict="refused" if reason else "possible",
            reason=reason,
            ranks=group,
            names=tuple(self.members[node].name for node in group),
            backend="jaccl" if jaccl else "ring" if links else "none",
            jaccl_ring=kind == JACCL_RING,
            ring_addresses=tuple(link.addresses[node] for link, node in zip(links, group, strict=False)),
            rdma=matrix,
            memory=tuple(self._memory(node, len(group)) for node in group),
            speed=self._speed(kind, group, links),
        )

    def _speed(self, kind: str, group: Sequence[str], links: Sequence[TcpLink]) -> SpeedEstimate:
        mbps = [link.mbps for link in links]
        return speed(
            self.shape,
            [self._ranks[node] for node in group],
            kind,
            fast_fences=self.fast_fences,
            measured=self.measured,
            mbps=min(mbps) if all(mbps) and mbps else 0,
        )

"""Candidates for a placement: for each number of nodes and each fabric, the best group or an obstacle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, count

from ..errors import ConfigError
from .cost_model import (
    ALONE,
    CHAT,
    JACCL,
    JACCL_MESH,
    JACCL_RING,
    RING_ETHERNET,
    RING_LOOPBACK,
    RING_THUNDERBOLT,
    RING_WIFI,
    Collective,
    RankHardware,
    RankMemory,
    SpeedEstimate,
    Workload,
    hardware_of,
    rank_memory,
    speed,
    usable_bytes,
)
from .faults import preflight
from .formation import FailedGroup, links_of
from .model_shape import MAX_RANKS, ModelShape
from .pipelines import Cut, StageCutter
from .topology import (
    ETHERNET,
    FABRIC_NETWORKS,
    LOOPBACK,
    NETWORKS,
    THUNDERBOLT,
    WIFI,
    MemberMachine,
    Overrides,
    TcpLink,
    Topology,
)

# --- groups in a graph: cliques, and circles -------------------------------------------------------------

#: Most extensions of partial groups. Sparse graphs of cables never need so many, and in the dense graph of a
#: shared network the first try succeeds.
STEPS = 20_000

Graph = Mapping[str, frozenset[str]]  #: Neighbors of each node.


def search(nodes: Sequence[str], size: int, graph: Graph, must: str = "", *, closed: bool) -> tuple[str, ...]:
    """Return the first group of `size` nodes that is a closed circle or a clique, with `must` as the first
    node; () for none.
    """
    peers = {a: [b for b in nodes if b in graph.get(a, ())] for a in nodes}
    places = {node: place for place, node in enumerate(nodes)}
    done, steps = set[str](), count(1)  #: Nodes without a group.

    def fits(node: str, group: tuple[str, ...]) -> bool:
        if node in group or node in done:
            return False
        # Try the members of a clique in one order only, after the first.
        ordered = len(group) == 1 or places[node] > places[group[-1]]
        return closed or (ordered and graph[node].issuperset(group))

    def extended(group: tuple[str, ...]) -> tuple[str, ...]:
        if len(group) == size:
            return group if not closed or size <= 2 or group[0] in graph[group[-1]] else ()
        for node in peers[group[-1]]:
            if next(steps) > STEPS:
                return ()
            if fits(node, group) and (found := extended((*group, node))):
                return found
        return ()

    for first in [must] if must else peers:
        if first in peers and (found := extended((first,))):
            return found
        done.add(first)
    return ()


# --- fabrics of a group: joined members, ranks' addresses and devices, missing links ---------------------

#: The network under each TCP ring, the fastest first.
RINGS: Mapping[str, str] = {
    RING_THUNDERBOLT: THUNDERBOLT,
    RING_ETHERNET: ETHERNET,
    RING_WIFI: WIFI,
    RING_LOOPBACK: LOOPBACK,
}
CROSSING = ""  #: Kind of a circle over several networks.
#: Networks of the links of each kind of TCP ring.
_LINKS: Mapping[str, Sequence[str]] = {CROSSING: NETWORKS, **{kind: (RINGS[kind],) for kind in RINGS}}
_WORDS = {THUNDERBOLT: "Thunderbolt", ETHERNET: "Ethernet", WIFI: "Wi-Fi", LOOPBACK: "loopback"}
_SHOWN = 3  #: Missing links to name in a refusal.

DeviceMatrix = tuple[tuple[str | None, ...], ...]


class Fabrics:
    """Links among `members`, by kind of fabric: a key of `cost_model.FABRICS`, or CROSSING."""

    def __init__(self, members: Mapping[str, MemberMachine], topology: Topology) -> None:
        self._members = members
        self._topology = topology

    @cached_property
    def hopes_for_rdma(self) -> bool:
        """True if any member could have RDMA, so that a plan without it needs a reason."""
        able = any(m.machine.rdma != "unsupported" for m in self._members.values())
        return able or self._topology.has_cables()

    @cached_property
    def rings(self) -> tuple[str, ...]:
        return tuple(kind for kind, network in RINGS.items() if self._topology.has(network))

    @cached_property
    def graphs(self) -> dict[str, Graph]:
        def graph(link: Callable[[str, str], object]) -> Graph:
            return {a: frozenset(b for b in self._members if link(a, b)) for a in self._members}

        tcp = {kind: graph(partial(self._topology.links, network)) for kind, network in RINGS.items()}
        crossing = {node: frozenset().union(*(each[node] for each in tcp.values())) for node in self._members}
        rdma = graph(self._topology.rdma)
        return {**tcp, CROSSING: crossing, JACCL_MESH: rdma, JACCL_RING: rdma}

    def joined(self, kind: str, size: int, nodes: Sequence[str], must: str) -> tuple[str, ...]:
        return search(nodes, size, self.graphs[kind], must, closed=kind != JACCL_MESH)

    def over_rdma(self, size: int) -> list[str]:
        """Return the kinds of fabrics over RDMA for so many nodes; with two, a ring equals a mesh."""
        return list(JACCL[: 2 if size > 2 else 1]) if self.hopes_for_rdma else []

    def ring_links(self, group: Sequence[str], kind: str) -> list[TcpLink]:
        networks = _LINKS.get(kind, ())
        pairs = zip((group[-1], *group[:-1]), group, strict=True)
        found = [link for pair in pairs for link in self._topology.fastest(*pair, networks)[:1]]
        return found if len(found) == len(group) else []

    def matrix(self, group: Sequence[str], *, circle: bool) -> DeviceMatrix:
        """Return [from][to] the RDMA device; in a circle only between neighbors."""
        size = len(group)

        def device(i: int, j: int) -> str | None:
            talk = i != j and (not circle or (i - j) % size in (1, size - 1))
            devices = self._topology.rdma(group[i], group[j]) if talk else None
            return devices[group[i]] if devices else None

        return tuple(tuple(device(i, j) for j in range(size)) for i in range(size))

    def wired(self, kind: str, group: tuple[str, ...], options: PlacementOptions) -> Candidate:
        """Return these ranks with their present addresses or devices, or the reason for none. A ring's kind
        is its slowest network's.
        """
        size = len(group)
        if size > 1 and kind not in (*_LINKS, *JACCL):
            return Candidate(kind, size, reason=f"there is no fabric {kind!r}")
        jaccl, links = kind in JACCL, self.ring_links(group, kind)
        if kind in RINGS and not links:
            links = self.ring_links(group, CROSSING)
        matrix = self.matrix(group, circle=kind == JACCL_RING) if jaccl else ()
        pairs = zip(range(size), (*range(1, size), 0), strict=True) if jaccl else ()
        if size > 1 and not (links or (jaccl and all(matrix[i][j] for i, j in pairs))):
            return Candidate(kind, size, reason=self.missing(kind, size, group))
        if jaccl and (trouble := self._no_jaccl(group, matrix, options, circle=kind == JACCL_RING)):
            return Candidate(kind, size, reason=trouble)
        if links:
            kind = max((k for k in RINGS if RINGS[k] in {x.network for x in links}), key=list(RINGS).index)
        joined = links_of(group, matrix)
        reason = next((each.reason for each in options.failed if each.is_in(kind, joined)), "")
        return Candidate(
            kind=kind,
            nodes=size,
            verdict="refused" if reason else "possible",
            reason=reason,
            ranks=group,
            names=tuple(self._members[node].name for node in group),
            backend="jaccl" if jaccl else "ring" if links else "none",
            jaccl_ring=kind == JACCL_RING,
            ring_addresses=tuple(link.addresses[node] for link, node in zip(links, group, strict=False)),
            rdma=matrix,
        )

    def _no_jaccl(
        self, group: tuple[str, ...], matrix: DeviceMatrix, options: PlacementOptions, *, circle: bool
    ) -> str:
        names = [self._members[node].name for node in group]
        for name, row in zip(names, matrix, strict=True):
            for device in filter(None, row):
                if (peers := row.count(device)) > 1:  # by hand
                    return f"{device} of {name} would have to serve {peers} peers; a device serves 1"
        by_rank = {rank: self._members[node].machine for rank, node in enumerate(group)}
        for rank, node in enumerate(group):
            named = list(options.rdma.get(node, {}).values())
            trouble = preflight(rank, by_rank[rank], matrix, ring=circle, others=by_rank, named=named)
            if trouble is not None:
                return f"{names[rank]}: {trouble}"
        return ""

    def missing(self, kind: str, size: int, nodes: Sequence[str], must: str = "") -> str:
        """Return why no `size` of `nodes`, given by preference, form a fabric of this kind with `must`."""
        nodes = sorted(nodes, key=lambda node: node != must)
        if excluded := self._excluded(_LINKS.get(kind, ()), nodes):
            return excluded
        kind = kind or RING_ETHERNET
        graph = self.graphs[kind]
        if size > 2 and kind != JACCL_MESH:
            joined = {node: len(graph[node] & set(nodes)) for node in nodes}
            lonely = [node for node in nodes if joined[node] < 2]
            where = f"circle of {size} {self._over(kind)}"
            if len(nodes) - len(lonely) >= size:
                return f"no {where} can be found"
            name, has = self._members[lonely[0]].name, joined[lonely[0]]
            return f"{name} has {has} of the 2 neighbours it needs in a {where}"
        pairs = list(combinations(nodes[:size], 2))
        absent = [(a, b) for a, b in pairs if b not in graph[a]]
        why = self._topology.no_rdma if kind in JACCL else lambda *_: "no IPv4 network in common"
        gaps = [f"{self._members[a].name} – {self._members[b].name} ({why(a, b)})" for a, b in absent]
        return f"{len(absent)} of {len(pairs)} links {self._over(kind)} are missing: {_some(gaps)}"

    def _excluded(self, networks: Sequence[str], nodes: Sequence[str]) -> str:
        """Return which links of these networks the setting fabric_networks excludes, or ""."""
        setting = self._topology.admitted
        words = {**_WORDS, THUNDERBOLT: "Thunderbolt without a known cable, or with a self-assigned address"}
        words |= {ETHERNET: "shared Ethernet"} if setting != THUNDERBOLT else {}
        pairs = list(combinations(sorted(nodes), 2)) if setting != "any" else []
        found = [
            f"{words[network]} {self._members[a].name} – {self._members[b].name}"
            for network in NETWORKS
            for a, b in pairs
            if network in networks and self._topology.refuses(network, a, b)
        ]
        if not found:
            return ""
        links = f"{len(found)} link{'s' if len(found) > 1 else ''}"
        return f"--fabric-networks {setting} excludes {links}: {_some(found)}"

    @staticmethod
    def _over(kind: str) -> str:
        return f"over {_WORDS[RINGS[kind]]}" if kind in RINGS else "by cables with RDMA"


def _some(links: Sequence[str]) -> str:
    return ", ".join(links[:_SHOWN]) + (f" and {len(links) - _SHOWN} more" if links[_SHOWN:] else "")


def exposed(kind: str, ranks: Sequence[str], topology: Topology) -> str:
    """Return a warning if tensors of these ranks may cross Wi-Fi or shared Ethernet in the clear; else "".

    Neighbors with both a private and a shared network count as if they used the shared one.
    """
    if topology.admitted != "any" or kind not in (RING_WIFI, RING_ETHERNET):
        return ""
    if kind == RING_ETHERNET:
        neighbours = zip(ranks, (*ranks[1:], *ranks[:1]), strict=True)
        links = [link for pair in neighbours for link in topology.links(ETHERNET, *pair)]
        if links and all(link.needs != "any" for link in links):
            return ""
    network = "Wi-Fi" if kind == RING_WIFI else "shared Ethernet"
    return (
        f"tensors cross {network} in the clear: other machines on it can compute prompts and answers from "
        "them (--fabric-networks excludes it)"
    )


# --- candidates ------------------------------------------------------------------------------------------

GB = 1e9
TENSOR_PARALLEL = "tensor parallel"
PIPELINE = "pipeline"
BACKENDS = ("auto", "jaccl", "ring")
PARALLEL = ("auto", "tensor", PIPELINE)
_VARIES = "sums over 32 KiB are added in order of arrival, so they are not repeatable"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve a model, or the reason why it is impossible."""

    kind: str  #: A key of `cost_model.FABRICS`, or ALONE; TENSOR_PARALLEL or PIPELINE if no fabric was tried.
    nodes: int
    verdict: str = "refused"  #: Or "chosen", "possible".
    reason: str = ""  #: Why it is refused.
    ranks: tuple[str, ...] = ()  #: Node ids in rank order; () if no group was found.
    names: tuple[str, ...] = ()
    backend: str = "none"  #: Or "ring", "jaccl".
    jaccl_ring: bool = False
    ring_addresses: tuple[str, ...] = ()  #: Where each rank of a ring listens for its predecessor.
    rdma: DeviceMatrix = ()  #: [from][to] the device for JACCL, None without a cable or if unused.
    memory: tuple[RankMemory, ...] = ()
    speed: SpeedEstimate | None = None
    split: tuple[int, ...] = ()  #: Number of layers of each rank of a pipeline; rank 0 has the last layers.

    def request_seconds(self, workload: Workload) -> float:
        return self.speed.request_seconds(workload) if self.speed else math.inf

    @property
    def title(self) -> str:
        if self.nodes == 1:
            return f"{self.names[0]} alone" if self.names else ALONE
        if self.split:
            return f"pipeline of {self.nodes}, {self.kind}"
        return f"{self.kind} of {self.nodes}"

    @property
    def layers(self) -> str:
        return ", ".join(f"{name} {layers}" for name, layers in zip(self.names, self.split, strict=False))

    @property
    def is_pipeline(self) -> bool:
        return bool(self.split) or self.kind == PIPELINE


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Decisions of the user, and measurements and failures of machines. Any `nodes` or `parallel` but "auto"
    accepts groups that are slower than one node alone.
    """

    backend: str = "auto"
    nodes: str | int = "auto"  #: For the fastest; or "all" for as many as possible, or an exact number.
    max_context: int = 0  #: Tokens of prompt and answer to make room for; 0 for `DEFAULT_CONTEXT`.
    fast_fences: bool = False  #: Ranks run with MLX_METAL_FAST_SYNCH=1.
    measured: tuple[Collective, ...] = ()
    rdma: Overrides = field(default_factory=dict)  #: The user's devices, by node id and peer's node id.
    failed: tuple[FailedGroup, ...] = ()  #: Groups to refuse, because they failed recently.
    repeatable: bool = False  #: Large sums must be the same each time.
    workload: Workload = CHAT
    parallel: str = "auto"  #: How several nodes share the model: one of PARALLEL.
    split: tuple[int, ...] = ()  #: Layers of each rank of a pipeline, as in `Candidate`; () for the best.
    fabric_networks: str = "any"  #: Links that may carry tensors: one of `topology.FABRIC_NETWORKS`.

    def __post_init__(self) -> None:
        if self.split:  # it implies a pipeline of so many nodes
            object.__setattr__(self, "nodes", len(self.split))
            object.__setattr__(self, "parallel", "pipeline")
        words = (("backend", BACKENDS), ("parallel", PARALLEL), ("fabric_networks", FABRIC_NETWORKS))
        for name, choices in words:
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} is {value!r}; it can be {', '.join(choices)}")
        if self.nodes not in ("auto", "all", *range(1, MAX_RANKS + 1)):
            raise ConfigError(f"nodes is {self.nodes!r}; it can be auto, all, or a number up to {MAX_RANKS}")
        if self.max_context < 0:
            raise ConfigError(f"max_context is {self.max_context}; it cannot be negative")


@dataclass(frozen=True, eq=False)
class CandidateFinder:
    """Search for the best group of each size and fabric among `members`, by node id. `context`: tokens."""

    members: Mapping[str, MemberMachine]
    topology: Topology
    shape: ModelShape
    context: int
    options: PlacementOptions

    @cached_property
    def _cutter(self) -> StageCutter:
        shared = self.topology.is_one_machine
        return StageCutter(self.shape, self.context, self.options.workload, shared=shared)

    @cached_property
    def fabrics(self) -> Fabrics:
        return Fabrics(self.members, self.topology)

    def alternatives(self, must: str, *, leave_out: str = "") -> list[Candidate]:
        """Return a candidate for each number of nodes and each fabric, with `must` as rank 0, if any."""
        pool = [node for node in self._order if node != leave_out]
        parallel, split, found = self.options.parallel, self.options.split, list[Candidate]()
        for size in range(1, min(MAX_RANKS, len(pool)) + 1):
            if size == 1 or parallel != PIPELINE:
                found += self._of_size(size, pool, must)
            if size > 1 and parallel != "tensor" and size == (len(split) or size):
                found += self._pipelines(size, pool, must)
        return found

    def assumptions(self, chosen: Candidate) -> list[str]:
        chips = {self._ranks[node].chip for node in chosen.ranks}
        return [
            f"{c.name or 'a chip without a name'} is not in the table of chips: "
            f"a memory bandwidth of {c.bandwidth / GB:.0f} GB/s is assumed"
            for c in sorted(chips, key=lambda c: c.name)
            if not c.known
        ]

    @cached_property
    def _ranks(self) -> dict[str, RankHardware]:
        return {node: hardware_of(member) for node, member in self.members.items()}

    @cached_property
    def _usable(self) -> dict[str, int]:
        return {node: usable_bytes(member) for node, member in self.members.items()}

    @cached_property
    def _order(self) -> list[str]:
        return sorted(self.members, key=lambda node: preference(self.members[node], self.shape.name))

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
            return [self._soonest(ALONE, [(node,) for node in ([must] if must else fits)])]
        return self._tensor_parallel(size, fits, must)

    def _memory(self, node: str, size: int) -> RankMemory:
        sharing = size if self.topology.is_one_machine else 1
        return rank_memory(self.members[node], self.shape, size, self.context, sharing=sharing)

    def _no_room(self, size: int, pool: Sequence[str], must: str) -> str:
        most = sorted(pool, key=lambda n: (n != must, -self._usable[n], n))[:size]
        memories = enumerate(self._memory(node, size) for node in most)
        return next(_no_room(rank, memory) for rank, memory in memories if not memory.fits)

    def _tensor_parallel(self, size: int, fits: Sequence[str], must: str) -> list[Candidate]:
        over_rdma, rings = self.fabrics.over_rdma(size), self.fabrics.rings or (RING_ETHERNET,)
        found = [self._found(kind, size, fits, must) for kind in (*over_rdma, *rings)]
        if self.options.repeatable and size > 2 and over_rdma:
            found[0] = Candidate(JACCL_MESH, size, reason=_VARIES)
        if any(one.ranks for one in found[len(over_rdma) :]) or len(rings) == 1:
            return found
        # No single network joins enough Macs, but a circle may cross several.
        groups = self._groups(CROSSING, size, fits, must)
        return [*found, self._soonest(CROSSING, groups)] if groups else found

    # --- pipelines -----------------------------------------------------------------------------------

    def _pipelines(self, size: int, pool: Sequence[str], must: str) -> list[Candidate]:
        if why := self.shape.uncuttable(size, self.options.split):
            once = size == 2 or self.shape.cuttable or self.options.parallel == PIPELINE
            return [Candidate(PIPELINE, size, reason=why)] if once else []
        kinds = (*self.fabrics.over_rdma(size), *self.fabrics.rings)
        formed = [one for kind in kinds if (one := self._pipeline(kind, size, pool, must)).ranks]
        return formed or [self._pipeline(CROSSING, size, pool, must)]

    def _pipeline(self, kind: str, size: int, pool: Sequence[str], must: str) -> Candidate:
        """Return a pipeline of the fastest Macs that a fabric joins, else of Macs with the most memory."""
        roomy = sorted(pool, key=lambda node: -self._usable[node])
        orders = [pool, [node for node in pool if node in roomy[:size]], roomy]
        if self.options.failed:
            orders += [[node for node in pool if node != out] for out in reversed(pool) if out != must]
        found: Candidate | None = None
        for order in orders:
            if group := self.fabrics.joined(kind, size, order, must):
                one = self._staged(kind, group)
                if one.verdict == "possible":
                    return one
                found = found or one
        return found or Candidate(PIPELINE, size, reason=self.fabrics.missing(kind, size, pool, must))

    def _staged(self, kind: str, group: tuple[str, ...]) -> Candidate:
        size, ranks = len(group), [self.members[node] for node in group]
        if (cut := self._cutter.cut(ranks, self.options.split)) is None:
            rooms = self._cutter.room(ranks)
            each = ", ".join(f"{self.members[n].name} {room}" for n, room in zip(group, rooms, strict=True))
            why = f"these Macs have room for {sum(rooms)} of {self.shape.layers} layers: {each}"
            return Candidate(PIPELINE, size, reason=why)
        if short := [each for each in enumerate(cut.memory) if not each[1].fits]:
            return Candidate(PIPELINE, size, reason=_no_room(*short[0], cut.split[short[0][0]]))
        return self._feasible(kind, group, cut)

    # --- groups ---------------------------------------------------------------------------------------

    def _found(self, kind: str, size: int, fits: Sequence[str], must: str) -> Candidate:
        groups = self._groups(kind, size, fits, must)
        if not groups:
            return Candidate(kind, size, reason=self.fabrics.missing(kind, size, fits, must))
        best = self._soonest(kind, groups)
        for node in reversed(best.ranks if best.verdict != "possible" else ()):
            others = [each for each in fits if each != node]
            if node != must and (groups := self._groups(kind, size, others, must)):
                other = self._soonest(kind, groups)
                if other.verdict == "possible":
                    return other
        return best

    def _groups(self, kind: str, size: int, fits: Sequence[str], must: str) -> list[tuple[str, ...]]:
        """Return groups with the fastest group among them; [] if there is none.

        For each speed of the slowest member in prompts, keep the group whose slowest member reads memory the
        fastest. Usually, one group is best in both.
        """
        slowest = self._ranks[must].chip.flops if must else float("inf")
        found: list[tuple[str, ...]] = []
        for flops in sorted({min(self._ranks[node].chip.flops, slowest) for node in fits}):
            if found and min(self._ranks[node].chip.flops for node in found[-1]) >= flops:
                continue  # the last group is also the best of these
            fast = [node for node in fits if self._ranks[node].chip.flops >= flops]
            group = self._group(kind, size, fast, must)
            if not group:
                break
            found.append(group)
        return found

    def _group(self, kind: str, size: int, fits: Sequence[str], must: str) -> tuple[str, ...]:
        """Return the group whose slowest member reads memory the fastest, or ()."""
        slowest = self._ranks[must].chip.reading if must else float("inf")
        speeds = sorted({min(self._ranks[node].chip.reading, slowest) for node in fits}, reverse=True)
        for least in speeds:
            fast = [node for node in fits if self._ranks[node].chip.reading >= least]
            if group := self.fabrics.joined(kind, size, fast, must):
                return group
        return ()

    def _soonest(self, kind: str, groups: Sequence[tuple[str, ...]]) -> Candidate:
        found, workload = [self._feasible(kind, group) for group in groups], self.options.workload
        return min(found, key=lambda one: (one.verdict != "possible", one.request_seconds(workload)))

    def _feasible(self, kind: str, group: tuple[str, ...], cut: Cut | None = None) -> Candidate:
        wired = self.fabrics.wired(kind, group, self.options)
        if not wired.ranks:
            return wired
        links = self.fabrics.ring_links(group, kind)
        return replace(
            wired,
            memory=cut.memory if cut else tuple(self._memory(node, len(group)) for node in group),
            split=cut.split if cut else (),
            speed=speed(
                self.shape,
                [self._ranks[node] for node in group],
                kind=wired.kind,
                costs=cut.costs if cut else (),
                fast_fences=self.options.fast_fences,
                measured=self.options.measured,
                mbps=min((link.mbps for link in links), default=0),  # 0 if any is unknown
            ),
        )


def preference(member: MemberMachine, model: str) -> tuple[object, ...]:
    """Return a sort key: the fastest Mac first; among equals, the Mac with a low rank's KV caches on disk."""
    machine, name = member.machine, model.rpartition("/")[2]
    has, caches = hardware_of(member).chip, [each.partition(" ") for each in machine.caches]
    rank = next((rank for rank, _, cached in caches if cached == name and rank.isdecimal()), MAX_RANKS)
    return -has.reading, -has.flops, -machine.memory_bytes, min(int(rank), MAX_RANKS), member.node_id


def _no_room(rank: int, memory: RankMemory, layers: int = 0) -> str:
    has, needs = memory.available / GB, memory.needed / GB
    share = f" of {layers} layers" if layers else ""
    if memory.stranded:
        share += f"; {memory.stranded / GB:.1f} GB there may be stranded until that Mac restarts"
    return f"rank {rank} ({memory.name}) has {has:.1f} GB for {needs:.1f} GB{share}"

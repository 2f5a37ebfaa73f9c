"""Fabrics of a group of ranks: the members they join, what ranks need for them, what is missing. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations

from .cost_model import JACCL_MESH, JACCL_RING, RING_ETHERNET, RING_LOOPBACK, RING_THUNDERBOLT, RING_WIFI
from .graph_search import Graph
from .topology import ETHERNET, LOOPBACK, NETWORKS, THUNDERBOLT, WIFI, MemberMachine, TcpLink, Topology

#: The network under each TCP ring, the fastest first.
RINGS: Mapping[str, str] = {
    RING_THUNDERBOLT: THUNDERBOLT,
    RING_ETHERNET: ETHERNET,
    RING_WIFI: WIFI,
    RING_LOOPBACK: LOOPBACK,
}
_WORDS = {THUNDERBOLT: "Thunderbolt", ETHERNET: "Ethernet", WIFI: "Wi-Fi", LOOPBACK: "loopback"}
_SHOWN = 3  #: Missing links that a refusal names.

DeviceMatrix = tuple[tuple[str | None, ...], ...]


class Fabrics:
    """Links among `members`, by kind of fabric (a key of `cost_model.FABRICS`)."""

    def __init__(self, members: Mapping[str, MemberMachine], topology: Topology) -> None:
        self._members = members
        self._topology = topology

    @cached_property
    def hopes_for_rdma(self) -> bool:
        """True if any of them could have RDMA, so that a plan without it needs a reason."""
        return self._topology.has_cables() or any(
            m.jaccl or (m.jaccl is None and m.machine.rdma != "unsupported") for m in self._members.values()
        )

    @cached_property
    def rings(self) -> tuple[str, ...]:
        """Kinds of TCP rings for which any two members have a link, the fastest first."""
        return tuple(kind for kind in RINGS if any(self.graph(kind).values()))

    def graph(self, kind: str) -> Graph:
        """Return the members that each member can reach in this kind of fabric."""
        return self._graphs[kind]

    @cached_property
    def _graphs(self) -> dict[str, Graph]:
        rdma: dict[str, set[str]] = {node: set() for node in self._members}
        tcp = {network: {node: set[str]() for node in self._members} for network in NETWORKS}
        for a, b in combinations(self._members, 2):
            reached = [tcp[network] for network in NETWORKS if self._topology.tcp(network, a, b)]
            for peers in reached + ([rdma] if self._topology.rdma(a, b) else []):
                peers[a].add(b)
                peers[b].add(a)
        found = {kind: _frozen(tcp[network]) for kind, network in RINGS.items()}
        return {**found, JACCL_MESH: _frozen(rdma), JACCL_RING: _frozen(rdma)}

    @cached_property
    def any_network(self) -> Graph:
        """Members that each member can reach over TCP, in any network."""
        return {
            node: frozenset().union(*(self.graph(kind)[node] for kind in RINGS)) for node in self._members
        }

    def ring_links(self, group: Sequence[str], networks: Sequence[str] = NETWORKS) -> list[TcpLink]:
        """Return each rank's link to the one before it, in the first of `networks` that has one."""
        before = (group[-1], *group[:-1])
        return [
            next(link for network in networks if (link := self._topology.tcp(network, one, other)))
            for one, other in zip(before, group, strict=True)
        ]

    def matrix(self, group: Sequence[str], *, circle: bool) -> DeviceMatrix:
        """Return [from][to] the RDMA device; in a circle only between neighbours."""
        size = len(group)

        def device(i: int, j: int) -> str | None:
            if i == j or (circle and (i - j) % size not in (1, size - 1)):
                return None
            link = self._topology.rdma(group[i], group[j])
            return link.devices[group[i]] if link else None

        return tuple(tuple(device(i, j) for j in range(size)) for i in range(size))

    def doubled(self, group: Sequence[str], matrix: DeviceMatrix) -> str:
        """Return, in words, an RDMA device that would serve two peers; only devices given by hand can."""
        for node, row in zip(group, matrix, strict=True):
            devices = [device for device in row if device]
            for device in devices:
                if (count := devices.count(device)) > 1:
                    name = self._members[node].name
                    return f"{device} of {name} would have to serve {count} peers; a device serves 1"
        return ""

    def missing(self, kind: str, size: int, nodes: Sequence[str]) -> str:
        """Return why no `size` of `nodes`, the preferred first, make a fabric of this kind."""
        graph = self.graph(kind)
        if size > 2 and kind != JACCL_MESH:
            lonely = [node for node in nodes if len(graph[node] & set(nodes)) < 2]
            if len(nodes) - len(lonely) < size:
                node = lonely[0]
                return (
                    f"{self._members[node].name} has {len(graph[node] & set(nodes))} of the 2 neighbours it "
                    f"needs in a circle of {size} {self._over(kind)}"
                )
            return f"no circle of {size} {self._over(kind)} can be found"
        pairs = list(combinations(nodes[:size], 2))
        absent = [(a, b) for a, b in pairs if b not in graph[a]]
        shown = ", ".join(self._gap(kind, a, b) for a, b in absent[:_SHOWN])
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        return f"{len(absent)} of {len(pairs)} links {self._over(kind)} are missing: {shown}{more}"

    def _gap(self, kind: str, a: str, b: str) -> str:
        names = f"{self._members[a].name} – {self._members[b].name}"
        jaccl = kind in (JACCL_MESH, JACCL_RING)
        why = self._topology.no_rdma(a, b) if jaccl else "no IPv4 network in common"
        return f"{names} ({why})"

    @staticmethod
    def _over(kind: str) -> str:
        return f"over {_WORDS[RINGS[kind]]}" if kind in RINGS else "by cables with RDMA"


def _frozen(peers: Mapping[str, set[str]]) -> Graph:
    return {node: frozenset(found) for node, found in peers.items()}

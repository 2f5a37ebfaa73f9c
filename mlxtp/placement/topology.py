"""Links among Macs, from their reports: cables, shared networks, RDMA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from ipaddress import IPv4Address, IPv4Network
from itertools import combinations
from typing import NamedTuple

from ..wire.cluster_messages import Interface, Machine, Port
from . import faults
from .probe_macos import self_assigned

THUNDERBOLT = "thunderbolt"
ETHERNET = "ethernet"
WIFI = "wifi"
LOOPBACK = "loopback"
NETWORKS = (THUNDERBOLT, ETHERNET, WIFI, LOOPBACK)  #: Kinds of networks of TCP rings, the fastest first.
#: Values of the setting fabric_networks, the strictest first. Each also admits earlier values' links.
FABRIC_NETWORKS = ("thunderbolt", "private", "any")
_FOR_TWO = 30  #: Shortest prefix of a network with addresses for at most two machines.

Overrides = Mapping[str, Mapping[str, str]]  #: RDMA devices by hand, by node id and peer's node id.


@dataclass(frozen=True, slots=True)
class MemberMachine:
    node_id: str
    name: str
    machine: Machine
    control_address: str = ""  #: Its address as this Mac sees it, for people; may be empty.
    lack: str = ""  #: Why it cannot serve the model.
    held_bytes: int = 0  #: Memory of its ranks, which is free before the next group forms.
    boot_id: str = ""  #: Id of this start of its agent.
    taken_bytes: int = 0  #: Memory set aside for other groups.


class LinkEnd(NamedTuple):
    member: MemberMachine
    interface: Interface

    @property
    def address(self) -> str:
        return self.interface.address

    def strays(self, peer: str) -> bool:
        """Return whether packets for `peer` may leave through Wi-Fi or Ethernet instead."""
        return any(
            each.up
            and each.name != self.interface.name
            and each.prefix >= self.interface.prefix
            and _kind(self.member.machine, each) in (ETHERNET, WIFI)
            and _address(peer) in (_network(each) or ())
            for each in self.member.machine.interfaces
        )


@dataclass(frozen=True, slots=True)
class TcpLink:
    """Addresses of two members in one network, by node id. `needs`: the strictest setting that admits it."""

    network: str
    addresses: Mapping[str, str]
    mbps: int  #: 0 if unknown
    needs: str = "thunderbolt"


class Topology:
    """The links among `members`; both orders of a pair give the same link. `overrides` precede probed
    devices. `admitted`, one of `FABRIC_NETWORKS`, restricts TCP links, but not cables with RDMA.
    """

    def __init__(
        self, members: Sequence[MemberMachine], overrides: Overrides | None = None, admitted: str = "any"
    ) -> None:
        self._members = {m.node_id: m for m in sorted(members, key=lambda m: m.node_id)}
        self._overrides = overrides or {}
        self.admitted = admitted
        self._admitted = FABRIC_NETWORKS[: FABRIC_NETWORKS.index(admitted) + 1]

    @cached_property
    def is_one_machine(self) -> bool:
        """True for several nodes on one machine, which share its memory: all have only 127.0.0.1."""
        return len(self._members) > 1 and all(
            {i.address for i in m.machine.interfaces if i.up} == {"127.0.0.1"} for m in self._members.values()
        )

    def links(self, network: str, one: str, other: str) -> list[TcpLink]:
        """Return the links between two members in this kind of network, the best first."""
        return [link for link in self._between(network, one, other) if link.needs in self._admitted]

    def refuses(self, network: str, one: str, other: str) -> bool:
        """Return whether `admitted` excludes all links between two members in this kind of network."""
        return bool(self._between(network, one, other)) and not self.links(network, one, other)

    def has(self, network: str) -> bool:
        """Return whether any two members are in such a network, admitted or not."""
        return network in self._tcp

    def _between(self, network: str, one: str, other: str) -> Sequence[TcpLink]:
        return self._tcp.get(network, {}).get(frozenset((one, other)), ())

    def fastest(self, one: str, other: str, networks: Sequence[str] = NETWORKS) -> list[TcpLink]:
        """Return the best link between two members in each of these networks."""
        return [link for network in networks for link in self.links(network, one, other)[:1]]

    def rdma(self, one: str, other: str) -> Mapping[str, str] | None:
        """Return two members' RDMA devices for each other, by node id, or None."""
        return self._rdma.get(frozenset((one, other)))

    def no_rdma(self, one: str, other: str) -> str:
        """Return in words why `rdma` is None."""
        a, b = (self._members[node] for node in sorted((one, other)))
        if not (cables := self._cables.get(frozenset((one, other)))):
            return "no cable"
        (at_a, at_b), *_ = cables
        return _no_rdma(a) or _no_rdma(b) or _no_rdma(a, at_a) or _no_rdma(b, at_b)

    def has_cables(self) -> bool:
        return bool(self._cables) or bool(self._overrides)

    @cached_property
    def _cables(self) -> dict[frozenset[str], list[tuple[Port, Port]]]:
        """Cables of each pair: the port of the smaller node id, and the other's."""
        owners: dict[str, tuple[str, Port]] = {}
        for node, member in self._members.items():
            for port in sorted(member.machine.ports, key=lambda p: (p.receptacle, p.interface)):
                if port.domain:
                    owners.setdefault(port.domain, (node, port))
        found: dict[frozenset[str], list[tuple[Port, Port]]] = {}
        used: set[str] = set()
        for domain, (node, port) in owners.items():  # in the order of nodes and receptacles
            peer, there = owners.get(port.peer_domain, (node, port))
            if peer == node or {domain, port.peer_domain} & used:
                continue
            if there.peer_domain not in ("", domain):
                continue  # the other end is in another cable now
            used |= {domain, port.peer_domain}
            ends = (port, there) if node < peer else (there, port)
            found.setdefault(frozenset((node, peer)), []).append(ends)
        for cables in found.values():
            cables.sort(key=lambda ends: (ends[0].receptacle, ends[1].receptacle))
        return found

    @cached_property
    def _rdma(self) -> dict[frozenset[str], Mapping[str, str]]:
        pairs = set(self._cables)
        pairs |= {frozenset((a, b)) for a, peers in self._overrides.items() for b in peers if a != b}
        found = {pair: self._devices(pair) for pair in pairs if pair <= self._members.keys()}
        return {pair: devices for pair, devices in found.items() if all(devices.values())}

    def _devices(self, pair: frozenset[str]) -> Mapping[str, str]:
        """Return each member's device for the other, or ""."""
        a, b = (self._members[node] for node in sorted(pair))
        ends = ((a.node_id, b.node_id), (b.node_id, a.node_id))
        given = {one: self._overrides.get(one, {}).get(other, "") for one, other in ends}
        cables = [] if _no_rdma(a) or _no_rdma(b) else self._cables.get(pair, [])
        usable = [(one, two) for one, two in cables if not (_no_rdma(a, one) or _no_rdma(b, two))]
        # Both ends of one cable: there may be two cables between the same Macs.
        probed = {a.node_id: usable[0][0].rdma, b.node_id: usable[0][1].rdma} if usable else {}
        return {node: given[node] or probed.get(node, "") for node in given}

    @cached_property
    def _tcp(self) -> dict[str, dict[frozenset[str], list[TcpLink]]]:
        """Links of each pair in each kind of network, the best first, admitted or not."""
        if self.is_one_machine:
            nodes = list(self._members)
            link = TcpLink(LOOPBACK, dict.fromkeys(nodes, "127.0.0.1"), 0)
            return {LOOPBACK: {frozenset((a, b)): [link] for a in nodes for b in nodes if a != b}}
        ends = [
            (kind, *pair) for (kind, _), homes in self._networks().items() for pair in combinations(homes, 2)
        ]
        found: dict[str, dict[frozenset[str], list[TcpLink]]] = {}
        for kind, a, b in sorted(ends, key=lambda each: _preference(*each[1:])):
            addresses = {end.member.node_id: end.address for end in (a, b)}
            if len(addresses) == 2 and self._joined(kind, a, b):
                mbps = min(a.interface.mbps, b.interface.mbps)
                link = TcpLink(kind, addresses, mbps, self._needs(kind, a, b))
                found.setdefault(kind, {}).setdefault(frozenset(addresses), []).append(link)
        return found

    def _networks(self) -> dict[tuple[str, IPv4Network], list[LinkEnd]]:
        homes: dict[tuple[str, IPv4Network], list[LinkEnd]] = {}
        for member in self._members.values():
            for interface in member.machine.interfaces:
                network, kind = _network(interface), _kind(member.machine, interface)
                if interface.up and network is not None and kind != LOOPBACK:
                    homes.setdefault((kind, network), []).append(LinkEnd(member, interface))
        return homes

    def _joined(self, kind: str, a: LinkEnd, b: LinkEnd) -> bool:
        """Return whether two interfaces really reach each other, as far as known.

        Bridges, and cables without a set address, may have equal addresses on two Macs. A Mac routes
        link-local addresses through its primary interface, so such a link counts only after a control link
        used it.
        """
        if a.address == b.address:
            return False
        cables = self._cables.get(frozenset((a.member.node_id, b.member.node_id)), [])
        if self_assigned(a.address):
            return kind == THUNDERBOLT and bool(cables) and _answered(a, b)
        bridged = "bridge" in (a.interface.kind, b.interface.kind)
        if kind != THUNDERBOLT or bridged or not (a.member.machine.ports and b.member.machine.ports):
            return True
        names = a.interface.name, b.interface.name  # in the order of node ids, as cables
        return names in [(one.interface, other.interface) for one, other in cables]

    def _needs(self, kind: str, a: LinkEnd, b: LinkEnd) -> str:
        """Return the strictest of `FABRIC_NETWORKS` that admits this link.

        No Mac knows the other machines on its Ethernet, so only a network without a third address is private.
        The route of link-local addresses follows the primary interface, which may be Wi-Fi.
        """
        cabled = kind == THUNDERBOLT and frozenset((a.member.node_id, b.member.node_id)) in self._cables
        wired = a.interface.kind == b.interface.kind == "ethernet"
        for_two = wired and a.interface.prefix >= _FOR_TWO
        strays = self_assigned(a.address) or a.strays(b.address) or b.strays(a.address)
        if strays or not (cabled or for_two):
            return "any"
        return "thunderbolt" if cabled else "private"


_address = lru_cache(1024)(IPv4Address)


def _answered(a: LinkEnd, b: LinkEnd) -> bool:
    return any(f"{x.address} {y.address}" in x.member.machine.reached for x, y in ((a, b), (b, a)))


def _no_rdma(member: MemberMachine, port: Port | None = None) -> str:
    why = faults.no_rdma(member.machine, port)
    return why and f"{member.name}: {why}"


def _kind(machine: Machine, interface: Interface) -> str:
    """Return the kind of network of an interface. A Mac's bridge is over its Thunderbolt ports."""
    if interface.kind == "bridge" and machine.system == "macos":
        return THUNDERBOLT
    return interface.kind if interface.kind in NETWORKS else ETHERNET


def _network(interface: Interface) -> IPv4Network | None:
    try:
        return IPv4Network((interface.address, interface.prefix), strict=False)
    except ValueError:
        return None


def _preference(*ends: LinkEnd) -> tuple[object, ...]:
    """Return a sort key, the best first: no bridge, a proven address, speed, then any fixed order."""
    bridges = sum(end.interface.kind == "bridge" for end in ends)
    mbps = min(end.interface.mbps for end in ends)
    return (bridges, not _answered(*ends), -mbps, *sorted(_address(end.address) for end in ends))

"""Cables, networks and RDMA, from what Macs report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxtp.placement.topology import ETHERNET, LOOPBACK, THUNDERBOLT, WIFI, MemberMachine, Topology
from mlxtp.wire.cluster_messages import Interface

from .made_up_macs import add, cabled, changed, ethernet, linked, linux, mac, node_id, on_lan
from .recorded_macs import factory_ends

A, B, C = node_id(0), node_id(1), node_id(2)


def two(**port: Any) -> list[MemberMachine]:
    return cabled([mac(0), mac(1)], [(0, 1)], **port)


def rdma_of(members: list[MemberMachine], **changes: Any) -> dict[str, str]:
    return dict(Topology(members, **changes).rdma(A, B) or {})


@pytest.mark.parametrize(
    ("port", "why"),
    [
        ({"rdma": ""}, "a: Thunderbolt 1 (en2) has no RDMA device"),
        ({"active": False}, "a: Thunderbolt 1 (en2) is cabled, but its RDMA port rdma_en2 is not active"),
        ({"interface": "en9"}, "a: Thunderbolt 1 (en9) is cabled to another Mac but has no IPv4 address"),
        ({"peer_domain": ""}, "no cable"),
        ({"hub": True}, ""),  # a hub for Thunderbolt 5 carries it; the doctor warns of it
    ],
)
def test_a_cable_without_rdma_says_why(port: dict[str, Any], why: str) -> None:
    members = two(**port)
    assert rdma_of(members) == ({} if why else {A: "rdma_en2", B: "rdma_en2"})
    assert Topology(members).no_rdma(A, B) == why
    assert Topology(members).no_rdma(B, A) == why


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rdma": "disabled"}, "{}: RDMA over Thunderbolt is off"),
        ({"rdma": "unsupported"}, "{}: this machine has no RDMA over Thunderbolt"),
        ({"rdma": "in use by another group"}, "{}: RDMA is in use by another group"),
        ({"bridge_up": True}, "{}: the Thunderbolt bridge, bridge0, holds the Thunderbolt ports"),
    ],
)
def test_either_mac_can_stand_in_the_way(place: int, change: dict[str, Any], why: str) -> None:
    members = two()
    members[place] = changed(members[place], **change)
    assert rdma_of(members) == {}
    assert Topology(members).no_rdma(A, B) == why.format("ab"[place])


def test_of_two_cables_both_ends_name_the_same() -> None:
    """Ends of different cables would wait for each other for ever."""
    crossed = cabled([mac(0), mac(1)], [(0, 1), (0, 1)])
    swapped = changed(crossed[1], ports=crossed[1].machine.ports[::-1])
    domains = {p.rdma: (p.domain, p.peer_domain) for m in crossed for p in m.machine.ports}
    devices = rdma_of([crossed[0], swapped])
    assert devices == {A: "rdma_en2", B: "rdma_en2"}
    assert domains[devices[A]] == domains[devices[B]]
    first, second = swapped.machine.ports
    one_is_enough = changed(swapped, ports=(first, replace(second, active=False)))
    assert rdma_of([crossed[0], one_is_enough]) == {A: "rdma_en3", B: "rdma_en3"}


@pytest.mark.parametrize("silent", [0, 1])
def test_one_end_that_sees_the_cable_is_enough(silent: int) -> None:
    members = cabled([mac(0), mac(1), mac(2)], [(0, 2), (0, 1)])[:2]
    ports = [m.machine.ports for m in members]
    ports[silent] = tuple(replace(p, peer_domain="") for p in ports[silent])
    heard = [changed(m, ports=p) for m, p in zip(members, ports, strict=True)]
    assert rdma_of(heard) == {A: "rdma_en3", B: "rdma_en2"}


def test_a_port_has_one_cable() -> None:
    """Two Macs say that they are cabled to the same port, which says nothing."""
    members = cabled([mac(0), mac(1), mac(2)], [(0, 1)])
    port = members[1].machine.ports[0]
    silent = changed(members[1], ports=(replace(port, peer_domain=""),))
    liar = changed(members[2], ports=(replace(port, domain="other", peer_domain=port.domain),))
    topology = Topology([members[0], silent, liar])
    assert topology.rdma(A, B) is not None
    assert topology.no_rdma(B, C) == "no cable"
    forgotten = changed(members[1], ports=(replace(port, peer_domain="elsewhere"),))
    assert rdma_of([members[0], forgotten]) == {}
    to_itself = replace(port, receptacle=2, domain=port.peer_domain, peer_domain=port.domain)
    assert rdma_of([changed(mac(0), ports=(port, to_itself)), mac(1)]) == {}


def test_devices_given_by_hand_count_most() -> None:
    assert rdma_of(two(), overrides={A: {B: "rdma_en7"}}) == {A: "rdma_en7", B: "rdma_en2"}
    bare = [mac(0, rdma="disabled"), mac(1)]
    assert rdma_of(bare, overrides={A: {B: "rdma_en7"}}) == {}
    assert rdma_of(bare, overrides={A: {B: "x"}, B: {A: "y"}}) == {A: "x", B: "y"}
    assert rdma_of(bare, overrides={A: {B: "x"}, B: {A: "y"}, C: {A: "z"}}) == {A: "x", B: "y"}


def addresses(members: list[MemberMachine], network: str) -> dict[str, str]:
    links = Topology(members).links(network, A, B)
    return dict(links[0].addresses) if links else {}


def test_ethernet_and_wifi_are_told_apart() -> None:
    members = on_lan([mac(0), mac(1)])
    wireless = [
        add(m, [Interface("en1", f"172.16.0.{i + 1}", 24, "wifi", 600, True)]) for i, m in enumerate(members)
    ]
    assert addresses(wireless, ETHERNET) == {A: "192.168.7.1", B: "192.168.7.2"}
    assert addresses(wireless, WIFI) == {A: "172.16.0.1", B: "172.16.0.2"}
    assert addresses(wireless, THUNDERBOLT) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ethernet("10.1.0.1"), ethernet("10.2.0.1")),
        (ethernet("10.1.0.1", 24), ethernet("10.1.0.2", 16)),
        (replace(ethernet("10.1.0.1"), up=False), ethernet("10.1.0.2")),
        (ethernet("172.17.0.1"), ethernet("172.17.0.1")),  # of the bridge of their containers
        *((ethernet(none), ethernet(none)) for none in ("", "::1", "300.1.1.1", "nonsense", "10.0.0")),
    ],
)
def test_what_is_no_network_in_common(one: Interface, other: Interface) -> None:
    assert addresses([add(mac(0), [one]), add(mac(1), [other])], ETHERNET) == {}
    common = (ethernet("10.3.0.1", mbps=1000), ethernet("10.3.0.2"))
    [link] = Topology([add(mac(0), [one, common[0]]), add(mac(1), [other, common[1]])]).links(ETHERNET, A, B)
    assert (link.addresses, link.mbps) == ({A: "10.3.0.1", B: "10.3.0.2"}, 1000), "of the slower end"


def test_link_local_addresses_count_where_a_control_link_came_through() -> None:
    """macOS has one route for them all, through Wi-Fi or Ethernet. Only what answered is known to arrive."""
    macs, ends = factory_ends(), ("169.254.31.7", "169.254.88.10")
    over_wifi = linked(macs, "192.168.1.20", "192.168.1.21")
    for astray in (macs, over_wifi, linked(macs, "192.168.1.20", ends[1]), linked(macs, ends[0], "")):
        assert addresses(astray, THUNDERBOLT) == {}
        assert addresses(astray, WIFI) == {A: "192.168.1.20", B: "192.168.1.21"}
    for place in (0, 1):
        assert addresses(linked(macs, *ends, place), THUNDERBOLT) == {A: ends[0], B: ends[1]}, (
            "either says so"
        )
        assert addresses(linked(macs, *ends[::-1], place), THUNDERBOLT) == {}, (
            "they are the other's addresses"
        )
    assert addresses(linked(macs[::-1], *ends[::-1]), THUNDERBOLT) == {A: ends[0], B: ends[1]}
    unplugged = [changed(m, ports=()) for m in macs]
    assert addresses(linked(unplugged, *ends), THUNDERBOLT) == {}
    wired = [linux(0, "169.254.1.1"), linux(1, "169.254.1.2")]
    assert addresses(linked(wired, "169.254.1.1", "169.254.1.2"), ETHERNET) == {}


def test_rdma_needs_no_route() -> None:
    ports = {"rdma": "enabled", "bridge_up": False}
    macs = [
        changed(
            m,
            interfaces=(Interface("en3", f"169.254.{i}.9", 16, "thunderbolt", 80_000, True),),
            ports=tuple(replace(p, rdma=f"rdma_{p.interface}", active=True) for p in m.machine.ports),
            **ports,
        )
        for i, m in enumerate(factory_ends())
    ]
    assert rdma_of(macs) == {A: "rdma_en3", B: "rdma_en3"}
    assert addresses(macs, THUNDERBOLT) == {}


def test_a_thunderbolt_network_follows_the_cable() -> None:
    """A user gave all Thunderbolt ports addresses of one network; only cabled ones reach each other."""
    members = cabled([mac(0), mac(1), mac(2)], [(0, 1), (1, 2)])
    flat = [
        changed(
            m,
            interfaces=tuple(
                replace(x, address=f"10.9.{i}.{k}", prefix=16) for k, x in enumerate(m.machine.interfaces)
            ),
        )
        for i, m in enumerate(members)
    ]
    assert addresses(members, THUNDERBOLT) == {A: "10.0.0.1", B: "10.0.0.2"}
    assert Topology(members).links(THUNDERBOLT, A, C) == []
    topology = Topology(flat)
    assert topology.links(THUNDERBOLT, A, C) == []
    [link] = topology.links(THUNDERBOLT, B, C)
    assert link.addresses == {B: "10.9.1.1", C: "10.9.2.0"}


def test_a_macs_bridge_is_thunderbolt_and_a_linux_bridge_is_ethernet() -> None:
    def bridged(system: str) -> list[MemberMachine]:
        return [
            add(mac(i, system=system), [Interface("bridge0", f"10.5.0.{i + 1}", 24, "bridge", 0, True)])
            for i in range(2)
        ]

    assert addresses(bridged("macos"), THUNDERBOLT) == {A: "10.5.0.1", B: "10.5.0.2"}
    assert addresses(bridged("linux"), ETHERNET) == {A: "10.5.0.1", B: "10.5.0.2"}


@pytest.mark.parametrize("told_by", [0, 1])
def test_the_address_that_is_known_to_work_is_preferred(told_by: int) -> None:
    members = [linux(0, "10.1.0.1", "10.2.0.1"), linux(1, "10.1.0.2", "10.2.0.2")]
    assert addresses(members, ETHERNET) == {A: "10.1.0.1", B: "10.1.0.2"}
    assert addresses(linked(members, "10.2.0.1", "10.2.0.2", told_by), ETHERNET) == {
        A: "10.2.0.1",
        B: "10.2.0.2",
    }


def test_loopback_joins_nodes_of_one_machine_only() -> None:
    loop = Interface("lo0", "127.0.0.1", 8, "loopback", 0, True)
    same = [add(mac(i), [loop]) for i in range(2)]
    assert addresses(same, LOOPBACK) == {A: "127.0.0.1", B: "127.0.0.1"}
    assert Topology(same).is_one_machine
    other = [same[0], add(same[1], [ethernet("10.1.0.1")])]
    assert addresses(other, LOOPBACK) == {}
    assert not Topology(other).is_one_machine


def test_each_network_has_one_fastest_link() -> None:
    topology = Topology(on_lan(on_lan(two(), "192.168.7"), "192.168.8"))
    assert len(topology.links(ETHERNET, A, B)) == 2
    assert [link.network for link in topology.fastest(A, B)] == [THUNDERBOLT, ETHERNET]

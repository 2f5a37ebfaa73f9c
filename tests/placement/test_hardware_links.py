"""Addresses that count, and what Linux reports of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxtp.placement.probe_machine import Sight, elsewhere, linux_device
from mlxtp.placement.probe_macos import NetworkDevice, interfaces, ipv4, only
from mlxtp.wire.cluster_messages import Interface

from .recorded_macs import over_the_wire

LO = NetworkDevice("lo", "loopback", True, True, addresses=(("127.0.0.1", 8),))
LAN = NetworkDevice("eth0", "ethernet", True, True, mbps=1000, addresses=(("192.168.1.5", 24),))


def names(*given: NetworkDevice) -> list[str]:
    return [interface.name for interface in interfaces(given)]


def test_loopback_counts_only_when_nothing_else_is_up() -> None:
    assert names(LO, LAN) == ["eth0"]
    assert names(LO) == ["lo"]
    assert names(LO, replace(LAN, up=False)) == ["lo", "eth0"]


@pytest.mark.parametrize(
    ("names_", "leads_on"),
    [
        ("docker0 br-0123456789ab virbr0 lxdbr0 podman1 cni-podman0 flannel.1 vmnet8 bridge100", False),
        ("br0 bridge0 en5 veth1a enp3s0 thunderbolt0 cable0", True),
    ],
)
def test_only_what_may_lead_to_a_neighbour_counts(names_: str, leads_on: bool) -> None:
    for name in names_.split():
        assert (name in names(LO, replace(LAN, name=name))) == leads_on, name
    assert names(LAN, replace(LAN, name="tun0", point_to_point=True)) == ["eth0"]


def test_the_most_useful_comes_first() -> None:
    given = (
        NetworkDevice("en9", "ethernet", True, False, addresses=(("10.0.0.9", 24),)),
        NetworkDevice("en1", "thunderbolt", True, True, addresses=(("169.254.3.3", 16),)),
        NetworkDevice("en2", "thunderbolt", True, True, addresses=(("10.1.0.1", 30), ("10.0.0.1", 30))),
        LAN,
    )
    assert [interface.address for interface in interfaces(given)] == [
        "10.0.0.1", "10.1.0.1", "192.168.1.5", "169.254.3.3", "10.0.0.9",
    ]  # fmt: skip


@pytest.mark.parametrize("given", [LO, replace(LAN, name="docker0"), replace(LAN, point_to_point=True)])
def test_an_address_that_is_asked_for_counts_of_any_kind(given: NetworkDevice) -> None:
    address, prefix = given.addresses[0]
    (found,) = only([given, NetworkDevice("x")], address)
    assert found == Interface(given.name, address, prefix, given.kind, given.mbps, True)
    assert only([given], "10.9.9.9") == ()
    assert only([given], "eth0") == ()


@pytest.mark.parametrize("text", ["", "0.0.0.0", "224.0.0.251", "1.2.3", "fe80::1", "1.2.3.4/24", "01.2.3.4"])
def test_what_is_no_address_of_a_machine(text: str) -> None:
    assert ipv4(text) == ""


def test_an_address_or_a_speed_that_cannot_be_is_not_passed_on() -> None:
    (found,) = interfaces(
        [NetworkDevice("e" * 50, "ethernet", True, True, False, 10**9, (("1.1.1.1", 99), ("x", 8)))]
    )
    assert found == Interface("e" * 40, "1.1.1.1", 32, "ethernet", 0, True)


ETH: dict[str, Any] = {"name": "eth0", "flags": "up,broadcast,running,multicast", "speed": 1000, "up": True}
ETH["addresses"] = (("192.168.1.5", "255.255.255.0"),)
SIGHT = Sight(
    system="linux",
    cpuinfo="processor\t: 0\nvendor_id\t: X\nmodel name\t: Example CPU @ 3.00GHz\n",
    os_release='NAME="Example"\nPRETTY_NAME="Example Linux 13 (trial)"\n',
    kernel="6.12.0",
    architecture="x86_64",
    product="Workstation\n",
    cpu_cores=16,
    memory_bytes=64 * 2**30,
    free_bytes=60 * 2**30,
    plugged_in=None,
    devices=(
        linux_device("lo", [("127.0.0.1", "255.0.0.0")], "up,loopback,running", 0, up=True),
        linux_device(**ETH),
    ),
)


def test_a_linux_machine() -> None:
    found = elsewhere(SIGHT)
    assert (found.system, found.release, found.build) == ("linux", "Example Linux 13 (trial)", "6.12.0")
    assert (found.model, found.chip, found.cpu_cores) == ("Workstation", "Example CPU @ 3.00GHz", 16)
    assert (found.free_bytes, found.gpu_bytes, found.wired_bytes) == (60 * 2**30, 0, 0)
    assert (found.power, found.rdma, found.ports, found.notes) == ("ac", "unsupported", (), ())
    assert found.interfaces == (Interface("eth0", "192.168.1.5", 24, "ethernet", 1000, True),)
    assert over_the_wire(found) == found


def test_it_can_be_held_to_loopback() -> None:
    found = elsewhere(SIGHT, "127.0.0.1")
    assert found.interfaces == (Interface("lo", "127.0.0.1", 8, "loopback", 0, True),)
    assert "192.168.1.5" in elsewhere(SIGHT, "10.0.0.1").notes[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cpuinfo": "CPU implementer\t: 0x61\n", "architecture": "aarch64"}, {"chip": "aarch64"}),
        ({"plugged_in": False}, {"power": "battery"}),
        (
            {"system": "freebsd15", "cpuinfo": ""},
            {"system": "other", "release": "freebsd15", "chip": "x86_64"},
        ),
    ],
)
def test_machines_of_other_kinds(changes: dict[str, Any], told: dict[str, str]) -> None:
    found = elsewhere(replace(SIGHT, os_release="", **changes))
    assert {name: getattr(found, name) for name in told} == told
    assert ["battery" in note for note in found.notes] == [True] * ("plugged_in" in changes)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "ethernet"),
        ({"kind": "wifi"}, "wifi"),
        ({"kind": "bridge"}, "bridge"),
        ({"name": "thunderbolt0"}, "thunderbolt"),
        ({"flags": "up,loopback"}, "loopback"),
        ({"flags": "up,loopback", "kind": "bridge"}, "loopback"),
        ({"flags": "up,pointopoint"}, "other"),
    ],
)
def test_kinds(changes: dict[str, Any], kind: str) -> None:
    found = linux_device(**ETH | changes)
    assert found.kind == kind
    assert found.point_to_point is ("pointopoint" in changes.get("flags", ""))
    for unknown in (0, -1, 65535):
        assert linux_device(**ETH | changes | {"speed": unknown}).mbps == 0
    several = linux_device(**ETH | changes | {"addresses": (*ETH["addresses"], ("10.0.0.5", "nonsense"))})
    assert several.addresses == (("192.168.1.5", 24), ("10.0.0.5", 32))

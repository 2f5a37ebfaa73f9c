"""Reasons why JACCL would not form, from a machine's own report; and the meaning of its errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxtp.placement.faults import Finding, cable_addresses, explain, explain_crash, preflight
from mlxtp.wire.cluster_messages import Interface, Machine, Port

from ..mlx_errors import OF_NO_KNOWN_TROUBLE, WHILE_FORMING

THREE = (("", "rdma_en3", "rdma_en4"), ("rdma_en5", "", "rdma_en6"), ("rdma_en3", "rdma_en4", ""))


def address(number: int, **changes: Any) -> Interface:
    return replace(Interface(f"en{number}", f"10.201.{number}.1", 30, "thunderbolt", 80_000, True), **changes)


def port(number: int, peer: str = "", **changes: Any) -> Port:
    """The Thunderbolt port of interface en`number`, cabled to the domain `peer`."""
    whole = Port(number, f"en{number}", f"A{number}", peer, False, 80, f"rdma_en{number}", True)
    return replace(whole, **changes)


STUDIO = Machine(
    system="macos",
    release="26.3",
    build="25D125",
    model="Mac15,14",
    chip="Apple M3 Ultra",
    cpu_cores=32,
    gpu_cores=80,
    memory_bytes=512 << 30,
    free_bytes=400 << 30,
    wired_bytes=4 << 30,
    gpu_bytes=384 << 30,
    power="ac",
    rdma="enabled",
    bridge_up=False,
    interfaces=(Interface("en0", "192.168.1.5", 24, "ethernet", 10_000, True), address(3), address(4)),
    ports=(port(2, rdma="", active=False), port(3, "B5"), port(4, "C3")),
)
B = replace(STUDIO, ports=(port(5, "A3", domain="B5"), port(6, "C4", domain="B6")))
C = replace(STUDIO, ports=(port(3, "A4", domain="C3"), port(4, "B6", domain="C4")))
OTHERS = {1: B, 2: C}


def refuse(machine: Machine, **how: Any) -> Finding:
    trouble = preflight(how.pop("rank", 0), machine, how.pop("matrix", THREE), **how)
    assert trouble.fix
    return trouble


def with_port(number: int, **changes: Any) -> Machine:
    ports = tuple(replace(each, **changes) if each.receptacle == number else each for each in STUDIO.ports)
    return replace(STUDIO, ports=ports)


def test_a_mac_that_is_ready() -> None:
    assert preflight(0, STUDIO, THREE, others=OTHERS) is None
    assert preflight(0, STUDIO, THREE, ring=True, others=OTHERS) is None


OTHER_DEVICE = (("", "rdma_en9", "rdma_en4"), *THREE[1:])
NO_RDMA = (("", "rdma_en2", "rdma_en4"), *THREE[1:])
ONE_SIDED = (("", ""), ("rdma_en5", ""))
OFF, NONE = (replace(STUDIO, rdma=state) for state in ("disabled", "unsupported"))
BY_HAND = "name the device by hand (--rdma NODE=DEVICE)"
NOT_ACTIVE = "Thunderbolt 4 (en4) is cabled, but its RDMA port rdma_en4 is not active"


@pytest.mark.parametrize(
    ("machine", "how", "what", "fix"),
    [
        # A matrix with a fault is refused before anything is looked at.
        (OFF, {"matrix": ONE_SIDED}, "rank 1 has rdma_en5 for rank 0, which has no RDMA device", BY_HAND),
        (STUDIO, {"matrix": ONE_SIDED, "named": {"rdma_en5"}}, "", "correct the device that --rdma names"),
        (OFF, {}, "RDMA over Thunderbolt is off", "rdma_ctl enable"),
        (replace(NONE, release="26.1.2"), {}, "macOS 26.1.2 has no RDMA over Thunderbolt", "26.2"),
        *(
            (replace(NONE, system=system, release=release), {}, "", "--backend ring")
            for system, release in (("macos", "26.2"), ("macos", ""), ("linux", "13"))
        ),
        (replace(STUDIO, bridge_up=True), {}, "bridge0", "sudo ifconfig bridge0 down"),
        (with_port(4, active=False), {}, NOT_ACTIVE, "PORT_ACTIVE"),
        (replace(STUDIO, interfaces=(address(3), address(4, up=False))), {}, NOT_ACTIVE, "PORT_ACTIVE"),
        (STUDIO, {"matrix": NO_RDMA}, "Thunderbolt 2 (en2) has no RDMA device", "ibv_devices"),
        (
            replace(STUDIO, model="Mac Studio (Mac15,14)"),
            {"matrix": NO_RDMA},
            "the port next to Ethernet",
            "move the cable",
        ),
        (
            STUDIO,
            {"matrix": OTHER_DEVICE},
            "no RDMA device rdma_en9 for rank 1; this Mac has: rdma_en3, rdma_",
            "",
        ),
        (replace(STUDIO, ports=()), {"matrix": OTHER_DEVICE}, "this Mac has: none", ""),
        (STUDIO, {"rank": 1}, "there is no RDMA device rdma_en5 for rank 0", ""),
    ],
)
def test_what_keeps_jaccl_from_forming(machine: Machine, how: dict[str, Any], what: str, fix: str) -> None:
    trouble = refuse(machine, **how)
    assert what in trouble.what
    assert fix in trouble.fix
    assert str(trouble).startswith(trouble.what)
    assert str(trouble).endswith(f"{trouble.why}. To do: {trouble.fix}")


@pytest.mark.parametrize("interfaces", [(address(3),), (address(3), address(4, address=""))])
def test_errno_22_a_port_without_an_address(interfaces: tuple[Interface, ...]) -> None:
    trouble = refuse(replace(STUDIO, interfaces=interfaces))
    assert (trouble.id, "errno 22" in trouble.why) == ("port-without-address", True)
    assert trouble.what == "Thunderbolt 4 (en4) is cabled to another Mac but has no IPv4 address"
    ours, theirs = cable_addresses("A4", "C3")
    assert f"sudo ifconfig en4 inet {ours} netmask 255.255.255.252; " in trouble.fix
    assert trouble.fix.endswith(f"; the other end gets {theirs}")
    assert (
        "sudo networksetup -createnetworkservice 'mlxtp 4' 'Thunderbolt 4'; sudo networksetup" in trouble.fix
    )
    assert f"sudo route change {theirs} -interface en4; " in trouble.fix


def test_errno_60_cables_that_are_swapped_at_one_end() -> None:
    swapped = replace(STUDIO, ports=(port(3, "C3"), port(4, "B5")))
    trouble = refuse(swapped, others=OTHERS)
    assert (trouble.id, "errno 60" in trouble.why) == ("cable-misled", True)
    assert trouble.what == (
        "the cable in Thunderbolt 3 (en3), rdma_en3, should lead to rdma_en5 of rank 1 and ends at "
        "another machine"
    )
    assert preflight(0, swapped, THREE) is None, "who knows no other machine cannot tell"


def test_errno_60_a_cable_in_another_port_of_the_right_mac() -> None:
    trouble = refuse(with_port(3, peer_domain="B6"), others=OTHERS)
    assert trouble.id == "cable-misled"
    assert trouble.what.endswith("should lead to rdma_en5 of rank 1 and ends in Thunderbolt 6 (en6) of it")
    assert trouble.fix.startswith("move that end to Thunderbolt 5 (en5) of rank 1")


def test_what_a_person_named_is_believed() -> None:
    """Its probe is left out; the rest of the machine is read, as long as it is needed."""
    matrix = (("", "mlx5_0", "rdma_en4"), *THREE[1:])
    assert preflight(0, STUDIO, matrix, named={"mlx5_0"}) is None
    assert "is not active" in refuse(with_port(4, active=False), matrix=matrix, named={"mlx5_0"}).what
    nothing = replace(STUDIO, system="linux", rdma="unsupported", bridge_up=True, ports=(), interfaces=())
    assert preflight(0, nothing, matrix, named={"mlx5_0", "rdma_en4"}) is None


def test_a_ring_asks_for_its_neighbours_only() -> None:
    ring = (
        ("", "rdma_en3", "rdma_en9", "rdma_en4"),
        ("rdma_en5", "", "rdma_en6", ""),
        ("", "rdma_en4", "", "rdma_en3"),
        ("rdma_en3", "", "rdma_en4", ""),
    )
    assert preflight(0, STUDIO, ring, ring=True) is None


FIXES = {
    "errno 22": "a /30 for each cable",
    "No IPv4-mapped GID": "a /30 for each cable",
    "errno 60": "move the cable to the port that",
    "errno 16": "ranks of an earlier group",
    "(16)": "ranks of an earlier group",
    "completion queue": "ranks of an earlier group",
    "protection domain": "PORT_ACTIVE",
    "(22)": "only a restart is said to free what killed ranks held",
    "96": "only a restart is said to free what killed ranks held",
    "memory region": "one cable and one group",
    "device rdma_en9": "ibv_devices",
    "a valid": "the cables that `mlxtp plan` names",
    "device file": "unset variables that begin with JACCL_",
    "mesh supports": "fewer Macs",
    "per direction": "fewer cables",
    "Device names": "the devices that --rdma names",
}
"""Part of each message, and of what to do about it."""


@pytest.mark.parametrize(("message", "fault"), WHILE_FORMING.items())
def test_each_message_of_jaccl_is_read_for_what_it_means(message: str, fault: str) -> None:
    trouble = explain(f"mini: rank 1: jaccl did not form: {message}")
    assert trouble.id == fault
    [fix] = {fix for part, fix in FIXES.items() if part in message}
    assert fix in trouble.fix
    helps = ("errno 60", " open device", " find device", "valid mesh", "valid ring", "connectivity")
    assert any(part in message for part in helps) is ("or name the device by hand" in trouble.fix)


@pytest.mark.parametrize(
    "message",
    [
        *OF_NO_KNOWN_TROUBLE,  # a number alone means nothing
        *(each.removeprefix("[jaccl] ") for each in WHILE_FORMING),
        *("", "std::bad_cast", "[Errno 22] Invalid argument", "OSError: errno 16"),
    ],
)
def test_nothing_but_jaccls_own_words_is_explained(message: str) -> None:
    assert explain(message) is None
    assert explain(f"rank 1: jaccl did not form: {message.removeprefix('[jaccl] ')}") is None


@pytest.mark.parametrize(
    ("message", "what", "fix"),
    [
        ("mini: rank 1 was ended by signal 10 in phase proving", "", "nothing; the group starts again"),
        (
            "rank 1 was ended by signal 11 in phase idle",
            "known fault of MLX",
            "nothing; the group starts again",
        ),
        ("rank 1 was ended by signal 11 in phase decode", "", "each Thunderbolt cable"),
        ("b: rank 0 did not come to round 1 of JACCL's side channel within 10 s", "", "restart that Mac"),
        ("b: rank 0 did not form the group in time", "", "restart that Mac"),
    ],
)
def test_a_crash_is_explained_by_its_phase_and_a_hang_by_the_driver(
    message: str, what: str, fix: str
) -> None:
    trouble = explain_crash(message)
    assert what in trouble.what
    assert fix in trouble.fix
    assert explain(message) is None


@pytest.mark.parametrize("end", ["signal 11 in phase loading", "signal 9 in phase idle"])
def test_other_ends_are_no_cables_fault(end: str) -> None:
    assert explain_crash(f"rank 1 was ended by {end}") is None


@pytest.mark.parametrize(
    ("message", "named", "advice"),
    [
        ("[jaccl] Could not find device rdma_en9 (3 available)", set(), "name the device by hand"),
        ("[jaccl] Could not find device rdma_en9 (3 available)", {"rdma_en5"}, "name the device by hand"),
        ("[jaccl] Could not find device rdma_en9 (3 available)", {"rdma_en9"}, "correct the device"),
        ("[jaccl] Changing queue pair to RTR failed with errno 60", {"rdma_en9"}, "correct the device"),
    ],
)
def test_a_device_that_was_named_is_not_to_be_named_again(message: str, named: set[str], advice: str) -> None:
    trouble = explain(message, named)
    assert advice in trouble.fix
    assert ("name the device by hand" in trouble.fix) == (advice == "name the device by hand")

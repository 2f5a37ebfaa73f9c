"""One parser for each command of macOS: the corners that no recorded Mac has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxtp.placement.probe_macos import (
    SERVICES,
    NetworkDevice,
    Output,
    Reading,
    count,
    note,
    parse_hardware_ports,
    parse_ibv_devices,
    parse_ibv_devinfo,
    parse_ifconfig,
    parse_profile,
    parse_rdma_ctl,
    parse_services,
    parse_sysctl,
    parse_vm_stat,
    printable,
)
from mlxtp.wire.cluster_messages import Port

from .recorded_macs import ULTRA, recorded

OWN, PEER, FAR = (f"{n}0000000-0000-4000-8000-000000000000" for n in "ABC")


def bus(*items: Any, **port: str) -> Port:
    told = {"receptacle_id_key": "2", "receptacle_status_key": "receptacle_connected", **port}
    entry = {"domain_uuid_key": OWN, "receptacle_1_tag": told, "_items": list(items)}
    (found,) = parse_profile(json.dumps({"SPThunderboltDataType": [entry]})).value.ports
    return found


def nested(depth: int, leaf: dict[str, str]) -> dict[str, Any]:
    """A Mac behind so many hubs."""
    return {"_items": [nested(depth - 1, leaf)]} if depth else leaf


@pytest.mark.parametrize(
    ("items", "peer", "hub"),
    [
        ([{"domain_uuid_key": PEER}], PEER, False),
        ([{"domain_uuid_key": PEER.lower()}], PEER, False),  # both ends spell a domain alike
        ([nested(2, {"domain_uuid_key": PEER})], PEER, True),
        ([nested(100, {"domain_uuid_key": PEER})], "", False),
        ([nested(1, {"domain_uuid_key": FAR}), {"domain_uuid_key": PEER}], PEER, False),  # the nearest counts
        *(([{"domain_uuid_key": none}], "", False) for none in ("0", f"{PEER}0", f"{PEER[:-1]}g", 7, ["a"])),
    ],
)
def test_the_mac_at_the_other_end(items: list[Any], peer: str, hub: bool) -> None:
    assert bus(*items, current_speed_key="80 Gb/s") == Port(2, "", OWN, peer, hub, 80, "", True)


@pytest.mark.parametrize(
    ("told", "gbps"),
    [("Up to 120 Gb/s", 120), ("Bis zu 40 Gb/s x1", 40), ("80 Gb/s", 80), ("fast", 0), ("9999", 0)],
)
def test_the_number_in_a_speed_counts_in_any_language(told: str, gbps: int) -> None:
    assert bus(current_speed_key=told).gbps == gbps


@pytest.mark.parametrize("receptacle", ["", "0", "65", "x", "-"])
def test_a_port_without_a_number_is_none(receptacle: str) -> None:
    told = [{"domain_uuid_key": OWN, "receptacle_1_tag": {"receptacle_id_key": receptacle}}]
    reading = parse_profile(json.dumps({"SPThunderboltDataType": told}))
    assert reading.value.ports == ()
    assert "Thunderbolt cables" in reading.missing
    assert "Thunderbolt cables" not in parse_profile('{"SPThunderboltDataType": []}').missing


@pytest.mark.parametrize(
    ("told", "size"), [("512 GB", 512), ("1 TB", 1024), ("16 MB", 0), ("GB", 0), (16, 0)]
)
def test_memory_is_counted_as_apple_does(told: object, size: int) -> None:
    text = json.dumps({"SPHardwareDataType": [{"physical_memory": told}]})
    assert parse_profile(text).value.memory_bytes == size * 2**30


def test_a_name_that_sysctl_does_not_know_is_left_out() -> None:
    reading = parse_sysctl("kern.osproductversion: 14.6.1\nhw.ncpu: 8\n")
    assert reading.missing == ("memory",)
    assert (reading.value.release, reading.value.gpu_bytes) == ("14.6.1", 0)


#: Two outputs that owners published. Active and inactive alone do not tell the file cache from programs.
CAPTURED = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                   {}.
Pages active:                                {}.
Pages inactive:                               {}.
Pages speculative:                             {}.
Pages throttled:                                   0.
Pages wired down:                             {}.
Pages purgeable:                               {}.
"Translation faults":                    14026101855.
File-backed pages:                           {}.
Anonymous pages:                              {}.
"""


@pytest.mark.parametrize(
    ("pages", "free_gb"),
    [
        ((316945, 1027099, 971814, 81769, 206856, 20325, 1393814, 686868), 28.4),
        ((18660, 657327, 656870, 566, 275610, 93652, 436701, 878062), 9.0),
    ],
)
def test_free_is_what_no_program_has_and_what_files_have_or_programs_may_lose(
    pages: tuple[int, ...], free_gb: float
) -> None:
    _, active, inactive, read_ahead, wired, _, files, anonymous = pages
    assert active + inactive + read_ahead == files + anonymous, "files have what is read ahead"
    found = parse_vm_stat(CAPTURED.format(*pages))
    assert found.missing == ()
    assert found.value[0] / 1e9 == pytest.approx(free_gb, abs=0.05)
    assert found.value[1] == wired * 16384
    for lacks in ("page size", "Pages free", "Pages wired", "Pages purgeable", "File-backed"):
        without = CAPTURED.format(*pages).replace(lacks, "")
        assert parse_vm_stat(without).missing == ("free memory", "wired memory")


def kinds(*ports: str) -> list[str]:
    text = "".join(f"Hardware Port: {port}\nDevice: en{n}\n\n" for n, port in enumerate(ports))
    return list(parse_hardware_ports(text).value.kinds.values())


def test_kinds_of_ports() -> None:
    told = (
        "Ethernet",
        "Wi-Fi",
        "Thunderbolt 1",
        "USB 10/100/1G/2.5G LAN",
        "Bluetooth PAN",
        "Thunderbolt Ethernet",
    )
    assert kinds(*told) == ["ethernet", "wifi", "thunderbolt", "ethernet", "other", "ethernet"]
    assert kinds("Ethernet 1", "Ethernet 2") == ["ethernet", "ethernet"]
    assert kinds("Thunderbolt 1", "Slot 2") == ["thunderbolt", "ethernet"]
    assert parse_hardware_ports("Device: en0\nHardware Port: Wi-Fi\n").missing


def test_services_that_are_on_are_known_by_their_devices() -> None:
    assert parse_services(recorded(ULTRA)[SERVICES]).value == {
        "en0": "Ethernet",
        "en4": "Cable to Max",
        "en1": "Wi-Fi",
    }
    again = "(7) Second\n(Hardware Port: Ethernet, Device: en0)\n"
    assert parse_services(recorded(ULTRA)[SERVICES] + again).value["en0"] == "Ethernet"
    off = "(*) Old\n(Hardware Port: T, Device: en3)\n\n(3) mlxtp 2\n(Hardware Port: T, Device: en3)\n"
    assert parse_services(off).value == {"en3": "mlxtp 2"}
    for name in ("a  b", "x" * 61, "a\u200db"):
        assert parse_services(f"(1) {name}\n(Hardware Port: T, Device: en3)\n").value == {}
    assert parse_services("nothing").missing


def link(*lines: str, flags: str = "UP,BROADCAST") -> NetworkDevice:
    text = f"en7: flags=8863<{flags}> mtu 1500\n" + "".join(f"\t{line}\n" for line in lines)
    (found,) = parse_ifconfig(text).value
    return found


@pytest.mark.parametrize(
    ("line", "flags", "mbps", "up"),
    [
        ("media: autoselect (1000baseT <full-duplex>)", "UP", 1000, True),
        ("media: autoselect (10Gbase-T <full-duplex,flow-control>)", "UP", 10_000, True),
        ("media: autoselect (2500Base-T <full-duplex>)", "UP", 2500, True),
        ("media: 100baseTX <full-duplex>", "UP", 100, True),
        ("media: autoselect (none)", "UP", 0, True),
        ("media: 999999Gbase-T", "UP", 10**7, True),
        ("status: active", "UP", 0, True),
        ("status: inactive", "UP", 0, False),
        ("", "BROADCAST", 0, False),
    ],
)
def test_the_speed_of_an_interface_and_whether_it_is_up(line: str, flags: str, mbps: int, up: bool) -> None:
    found = link(line, flags=flags)
    assert (found.mbps, found.up) == (mbps, up)


def test_several_addresses_of_one_interface() -> None:
    found = link(
        "inet 10.0.0.1 netmask 0xff000000 broadcast 10.255.255.255",
        "inet6 fe80::1%en7 prefixlen 64",
        "inet 10.0.0.2 --> 10.0.0.3 netmask 0xfffffffc",
        "inet 999.0.0.1 netmask 0xffffff00",
        "inet 0.0.0.0 netmask 0xffffff00",
    )
    assert found.addresses == (("10.0.0.1", 8), ("10.0.0.2", 30))


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("enabled\n", "enabled"),
        ("RDMA is enabled", "enabled"),
        ("disabled\n", "disabled"),
        ("not enabled", "disabled"),
        ("RDMA is not supported on this Mac", "unsupported"),
        ("aktiviert", ""),
        ("", ""),
    ],
)
def test_the_switch(said: str, state: str) -> None:
    assert parse_rdma_ctl(said).value == state
    assert bool(parse_rdma_ctl(said).missing) is not bool(state)


def test_a_heading_alone_is_no_device_and_no_mistake() -> None:
    heading = "    device          \t   node GUID\n    ------          \t----------------\n"
    assert parse_ibv_devices(heading) == Reading(frozenset())
    assert parse_ibv_devices(heading + "    rdma_en4   \t01\n    mlx5_0 \t02\n").value == {"rdma_en4"}
    assert parse_ibv_devices("Killed: 9").missing


def test_a_device_is_active_when_its_port_is() -> None:
    text = "hca_id:\trdma_en1\n\tstate: PORT_DOWN (1)\nhca_id: rdma_en2\n\t\tstate:\t\t\tPORT_ACTIVE (4)\n"
    assert parse_ibv_devinfo(text).value == {"rdma_en1": False, "rdma_en2": True}
    assert parse_ibv_devinfo("state: PORT_ACTIVE (4)\n").missing


@pytest.mark.parametrize(
    ("value", "kept"),
    [("Mac\tStudio\n", "Mac Studio"), ("a\x00b\ud800c", "a b c"), ("x" * 99, "x" * 10), (7, ""), (None, "")],
)
def test_only_what_can_be_printed_is_kept(value: object, kept: str) -> None:
    assert printable(value, 10) == kept


@pytest.mark.parametrize(
    ("value", "number"),
    [("12.", 12), (" 7 GB", 7), (5, 5), ("101", 0), (-1, 0), (True, 0), (1.5, 0), ("٣", 0)],
)
def test_a_count_is_a_number_within_its_bounds(value: object, number: int) -> None:
    assert count(value, 100) == number


def test_a_note_is_one_short_sentence() -> None:
    (sentence,) = note("vm_stat", Output(problem="p" * 400), ("free memory",))
    assert len(sentence) == 300
    assert note("vm_stat", Output(problem="failed"), ()) == ()

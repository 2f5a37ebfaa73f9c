"""Whole Macs, from what their commands printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxtp.placement.probe_machine import mac, mac_again
from mlxtp.placement.probe_macos import COMMANDS, Output
from mlxtp.wire.cluster_messages import Interface

from .recorded_macs import (
    BOOK,
    MACS,
    MAX,
    MINI,
    OLD_BOOK,
    ULTRA,
    buses,
    machine,
    outputs,
    over_the_wire,
    port,
    profile,
    recorded,
)

GB = 2**30
LATE = Output(problem="did not answer within 5 s")


@pytest.mark.parametrize(
    ("name", "model", "chip", "cpu", "gpu", "memory_gb", "ports"),
    [
        (ULTRA, "Mac Studio (Mac15,14)", "Apple M3 Ultra", 32, 80, 512, 6),
        (MAX, "Mac Studio (Mac16,9)", "Apple M4 Max", 16, 40, 128, 4),
        (MINI, "Mac mini (Mac16,11)", "Apple M4 Pro", 14, 20, 64, 3),
        (BOOK, "MacBook Pro (Mac16,5)", "Apple M4 Max", 16, 40, 64, 3),
        (OLD_BOOK, "MacBook Pro (Mac15,9)", "Apple M3 Max", 16, 40, 36, 3),
    ],
)
def test_each_mac_is_known_for_what_it_is(
    name: str, model: str, chip: str, cpu: int, gpu: int, memory_gb: int, ports: int
) -> None:
    found = machine(name)
    assert (found.system, found.model, found.chip) == ("macos", model, chip)
    assert (found.cpu_cores, found.gpu_cores, found.memory_bytes) == (cpu, gpu, memory_gb * GB)
    assert [port.receptacle for port in found.ports] == list(range(1, ports + 1))
    assert 0 < found.wired_bytes < found.free_bytes < found.memory_bytes
    assert found.power == ("battery" if name == BOOK else "ac")
    assert over_the_wire(found) == found


def test_two_macs_on_one_cable_name_each_other() -> None:
    ultra, other = port(machine(ULTRA), 3), port(machine(MAX), 2)
    assert (ultra.domain, ultra.peer_domain) == (other.peer_domain, other.domain)
    assert (ultra.interface, ultra.rdma, ultra.active) == ("en4", "rdma_en4", True)
    assert (other.interface, other.rdma, other.active) == ("en3", "rdma_en3", True)
    assert (ultra.gbps, ultra.hub, other.hub) == (80, False, False)
    mini, book = port(machine(MINI), 2), port(machine(BOOK), 2)
    assert (mini.domain, mini.peer_domain) == (book.peer_domain, book.domain)
    assert (mini.hub, book.hub) == (True, False), "a hub in between is seen from one end"
    disk = port(machine(ULTRA), 4)
    assert (disk.peer_domain, disk.hub, disk.gbps) == ("", False, 80)
    assert {(port.gbps, port.peer_domain) for port in machine(OLD_BOOK).ports} == {(0, "")}


NO_DEVICES = {"ibv_devices": recorded(BOOK)["ibv_devices"], "ibv_devinfo": ""}


@pytest.mark.parametrize(
    ("name", "changes", "rdma"),
    [
        (BOOK, {}, "disabled"),  # until it is enabled in recovery
        (BOOK, {"rdma_ctl": "enabled"}, "unsupported"),  # without a single device
        (OLD_BOOK, {}, "unsupported"),  # a macOS without the command
        (OLD_BOOK, {"rdma_ctl": "enabled"} | NO_DEVICES, "unsupported"),
        (OLD_BOOK, {"rdma_ctl": "disabled"} | NO_DEVICES, "unsupported"),
    ],
)
def test_rdma_needs_thunderbolt_5_and_the_switch(name: str, changes: dict[str, str], rdma: str) -> None:
    found = machine(name, **changes)
    assert found.rdma == rdma
    assert changes or not any(port.rdma for port in found.ports)
    assert found.notes == () or name == BOOK
    listed = machine(OLD_BOOK, rdma_ctl="enabled", ibv_devices=recorded(MINI)["ibv_devices"])
    assert listed.rdma == "unsupported", "Thunderbolt 4 is known by its ports, even if macOS lists devices"


def test_devices_prove_rdma_when_the_switch_does_not_answer() -> None:
    found = machine(MAX, rdma_ctl=LATE)
    assert found.rdma == "enabled"
    assert found.notes == ("rdma_ctl: did not answer within 5 s; not known: whether RDMA is enabled",)


def test_the_port_next_to_ethernet_has_no_rdma_on_a_mac_studio() -> None:
    assert "rdma_en2" in recorded(ULTRA)["ibv_devices"]
    assert [port.rdma for port in machine(ULTRA).ports[:2]] == ["", "rdma_en3"]
    assert port(machine(MINI), 1).rdma == "rdma_en2"


def test_a_cable_slower_than_thunderbolt_5_carries_no_rdma() -> None:
    slow = recorded(MAX)["system_profiler"].replace('"80 Gb/s"', '"40 Gb/s"')
    found = machine(MAX, system_profiler=slow)
    assert (port(found, 2).gbps, port(found, 2).rdma) == (40, "")
    assert (found.rdma, port(found, 3).rdma) == ("enabled", "rdma_en4")
    not_listed = recorded(MAX)["ibv_devices"].replace("rdma_en3", "rdma_en9")
    assert port(machine(MAX, ibv_devices=not_listed), 2).rdma == ""


def test_slow_cables_in_all_ports_say_nothing_about_the_mac() -> None:
    text = recorded(MAX)["system_profiler"]
    text = text.replace("Up to 120", "40").replace('"80 Gb', '"40 Gb')
    text = text.replace("receptacle_no_devices_", "receptacle_")
    found = machine(MAX, system_profiler=text)
    assert {port.gbps for port in found.ports} == {40}
    assert found.rdma == "enabled"


@pytest.mark.parametrize(
    ("told", "instead", "gpu_mib"),
    [
        ("wired_limit_mb: 0", "wired_limit_mb: 458752", 64 << 10),  # no more than the memory
        ("wired_limit_mb: 0", "wired_limit_mb: 50000", 50_000),  # what the user set
        # What Metal reports of such Macs.
        ("", "", 53_084),
        (f"memsize: {64 * GB}", f"memsize: {36 * GB}", 27 << 10),
    ],
)
def test_the_gpu_may_wire_what_the_user_set_or_else_what_metal_reports(
    told: str, instead: str, gpu_mib: int
) -> None:
    assert machine(MINI, sysctl=recorded(MINI)["sysctl"].replace(told, instead)).gpu_bytes == gpu_mib << 20


def test_interfaces_are_named_by_kind_and_speed() -> None:
    assert machine(ULTRA).interfaces == (
        Interface("en0", "192.168.1.10", 24, "ethernet", 10_000, True),
        Interface("en4", "10.10.3.1", 30, "thunderbolt", 80_000, True),
        Interface("en2", "169.254.31.7", 16, "thunderbolt", 80_000, True),
    )


def test_the_thunderbolt_bridge_is_up_when_it_holds_ports() -> None:
    assert machine(MINI).bridge_up
    assert machine(MINI).interfaces[-1] == Interface("bridge0", "169.254.88.10", 16, "bridge", 80_000, True)
    assert not machine(ULTRA).bridge_up  # it is there, with members, but down
    emptied = "\n".join(line for line in recorded(MINI)["ifconfig"].splitlines() if "member:" not in line)
    assert not machine(MINI, ifconfig=emptied).bridge_up
    assert "status: active" not in recorded(OLD_BOOK)["ifconfig"].partition("bridge0")[2].partition("en0")[0]
    assert machine(OLD_BOOK).bridge_up, "without a cable, too"


FLAGS = "flags=8843<UP,BROADCAST,RUNNING,SIMPLEX,MULTICAST> mtu 1500"
#: Devices with an address: what ifconfig has below it, what networksetup has of it, and the kind that counts.
DEVICES: dict[str, tuple[str, str, str]] = {
    "feth4017": ("", "", ""),  # ZeroTier: Ethernet in software
    "tap0": ("", "", ""),
    "zt5u4uqk2n": ("", "", ""),
    "vnic0": ("", "Parallels Shared Networking Adapter", ""),  # listed by old versions
    "utun9": ("", "", ""),
    "ap1": ("", "", ""),
    "en9": ("", "", ""),  # of a phone, whose port macOS does not list
    "en10": ("", "iPhone USB", ""),
    "en11": ("", "Bluetooth PAN", ""),
    "en12": ("", "USB 10/100/1G/2.5G LAN", "ethernet"),
    "en13": ("", "Thunderbolt Ethernet Slot 1", "ethernet"),
    "bridge1": ("member: en12 flags=3<LEARNING,DISCOVER>", "", ""),  # and no en12 here
    "bridge2": ("member: en0 flags=3<LEARNING,DISCOVER>", "bridge2", "ethernet"),
    "bridge3": ("member: en4 flags=3<LEARNING,DISCOVER>", "", "bridge"),
    "bridge4": ("member: en0 flags=3<DISCOVER>\n\tmember: tap0 flags=3<DISCOVER>", "", ""),
    "bridge101": ("member: vmenet0 flags=3<LEARNING,DISCOVER>", "", ""),
    "bridge9": ("member: bridge9 flags=3<DISCOVER>", "", ""),
    "vlan0": ("vlan: 22 parent interface: en0", "", "ethernet"),
    "vlan1": ("vlan: 22 parent interface: feth0", "", ""),
    "bond0": ("bond interfaces: en0 en1", "", "ethernet"),
    "bond1": ("bond key: 0x0001 interfaces: en0", "", "ethernet"),
    "bond2": ("bond interfaces: <none>", "", ""),
    "bond3": ("", "bond3", "ethernet"),
    "vlan2": (f"vlan: 2 parent interface: bond9\nbond9: {FLAGS}\n\tbond interfaces: en0", "", "ethernet"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("later", [False, True])
def test_what_lies_over_no_port_of_a_mac_is_not_offered(device: str, later: bool) -> None:
    below, port, kind = DEVICES[device]
    link = f"{device}: {FLAGS}\n\tinet 10.147.18.1 netmask 0xffffff00\n\t{below}\n\tstatus: active\n"
    listed = f"\nHardware Port: {port}\nDevice: {device}\nEthernet Address: 02:00:00:00:00:99\n"
    changed = {
        "ifconfig": recorded(MAX)["ifconfig"] + link,
        "networksetup": recorded(MAX)["networksetup"] + listed * bool(port),
    }
    found = mac_again(machine(MAX), cheap(MAX, **changed)) if later else machine(MAX, **changed)
    assert [each.kind for each in found.interfaces if each.name == device] == [kind] * bool(kind)
    (named,) = mac(outputs(MAX, **changed), "10.147.18.1").interfaces
    assert named.name == device


def test_a_vlan_counts_that_is_listed_behind_the_ports() -> None:
    listed = 'VLAN User Defined Name: Slot 9\nParent Device: en0\nDevice ("Hardware" Port): vlan0\nTag: 22\n'
    link = f"vlan0: {FLAGS}\n\tinet 10.2.0.1 netmask 0xffffff00\n"
    of = recorded(MAX)
    found = machine(MAX, ifconfig=of["ifconfig"] + link, networksetup=of["networksetup"] + listed)
    assert [each.kind for each in found.interfaces if each.name == "vlan0"] == ["ethernet"]
    assert found.ports == machine(MAX).ports


def test_an_adapter_and_a_bridge_count_while_macos_does_not_tell_its_ports() -> None:
    devices = "".join(
        f"{name}: {FLAGS}\n\tinet 10.3.{n}.1 netmask 0xffffff00\n\tmember: en9 flags=3\n"
        for n, name in enumerate(("en9", "feth0", "bridge0"))
    )
    found = machine(MAX, networksetup=LATE, ifconfig=recorded(MAX)["ifconfig"] + devices)
    assert [each.name for each in found.interfaces] == ["bridge0", "en0", "en1", "en3", "en9"]
    assert found.interfaces[0].kind == "bridge"


def test_an_address_that_is_asked_for_is_the_only_one() -> None:
    found = mac(outputs(ULTRA), "127.0.0.1")
    assert found.interfaces == (Interface("lo0", "127.0.0.1", 8, "loopback", 0, True),)
    assert found.notes == machine(ULTRA).notes
    (vpn,) = mac(outputs(ULTRA), "100.100.7.1").interfaces
    assert (vpn.name, vpn.prefix) == ("utun4", 32)
    none = mac(outputs(MAX), "10.0.0.9")
    assert none.interfaces == ()
    assert none.notes[0] == (
        "No interface has the requested address 10.0.0.9;"
        " this machine has: 192.168.1.12, 192.168.1.13, 10.10.3.2"
    )


def test_a_mac_that_speaks_german_is_the_same_mac() -> None:
    ports = recorded(BOOK)["networksetup"].replace("Wi-Fi", "WLAN").replace("Thunderbolt B", "Thunderbolt-B")
    speeds = recorded(BOOK)["system_profiler"].replace("Up to", "Bis zu")
    assert machine(BOOK, networksetup=ports, system_profiler=speeds) == machine(BOOK)
    chinese = recorded(BOOK)["networksetup"].replace("Thunderbolt Bridge", "雷雳网桥")
    assert machine(BOOK, networksetup=chinese.replace("Thunderbolt", "雷雳")) == machine(BOOK)


def test_a_mac_that_answers_nothing_is_still_a_machine_and_says_what_it_does_not_know() -> None:
    found = mac(dict.fromkeys(COMMANDS, LATE))
    assert (found.chip, found.memory_bytes, found.ports, found.interfaces) == ("", 0, (), ())
    assert (found.power, found.rdma) == ("unknown", "unsupported")
    unknown = dict(note.split(": did not answer within 5 s; not known: ") for note in found.notes)
    assert unknown == {
        "system_profiler": "model, chip, GPU cores, Thunderbolt cables",
        "rdma_ctl": "whether RDMA is enabled",
        "sysctl": "macOS version, cores, memory",
        "vm_stat": "free memory, wired memory",
        "networksetup": "which interface is which port",
        "networksetup -listnetworkserviceorder": "names of network services",
        "ifconfig": "network interfaces",
        "pmset": "power supply",
    }
    assert over_the_wire(found) == found


@pytest.mark.parametrize("command", sorted(COMMANDS))
@pytest.mark.parametrize(
    "text", ["", "\x00\x01", "{", "[]", "null", '{"SPThunderboltDataType": 1}', "$" * 100_000]
)
def test_one_command_talking_nonsense_costs_only_what_it_would_have_told(command: str, text: str) -> None:
    found = machine(MAX, **{command: text})
    assert over_the_wire(found) == found
    assert found.chip == "Apple M4 Max"
    if command not in ("ibv_devinfo", "ibv_devices", "rdma_ctl"):
        assert any(sentence.startswith(f"{command}: ") for sentence in found.notes)
    if command != "ifconfig":
        assert [interface.name for interface in found.interfaces] == ["en0", "en1", "en3"]


def test_json_that_was_cut_short_leaves_what_other_commands_know() -> None:
    found = machine(MAX, system_profiler=recorded(MAX)["system_profiler"][:-200])
    assert (found.model, found.chip, found.gpu_cores, found.ports) == ("Mac16,9", "Apple M4 Max", 0, ())
    words = "system_profiler: its output cannot be parsed; not known: "
    assert found.notes == (f"{words}model, chip, GPU cores, Thunderbolt cables",)
    without = machine(MAX, system_profiler=profile(MAX, SPDisplaysDataType=[]))
    assert without.notes == (f"{words}GPU cores",), "a part that is missing is named alone"


def test_a_mac_without_sysctl_counts_its_memory_and_cores_elsewhere() -> None:
    found = machine(ULTRA, sysctl=LATE)
    assert (found.memory_bytes, found.cpu_cores) == (512 * GB, 32)


def test_far_too_much_is_cut_to_what_the_wire_carries() -> None:
    many = [
        bus | {"receptacle_1_tag": {"receptacle_id_key": str(n)}} for n in range(200) for bus in buses(MAX)
    ]
    addresses = "".join(
        f"en{n}: flags=8863<UP,BROADCAST> mtu 1500\n" + f"\tinet 10.0.{n}.1 netmask 0xffffff00\n" * 99
        for n in range(250)
    )
    found = machine(MAX, system_profiler=profile(MAX, SPThunderboltDataType=many), ifconfig=addresses)
    assert (len(found.ports), len(found.interfaces)) == (16, 32)
    assert over_the_wire(found) == found


def test_notes_are_at_most_what_the_wire_carries_and_the_important_ones_come_first() -> None:
    (cabled,) = (bus for bus in buses(ULTRA) if bus["receptacle_1_tag"]["receptacle_id_key"] == "3")
    hub = [{"_items": cabled["_items"]}]
    everywhere = [
        bus | cabled | {"_items": hub, "receptacle_1_tag": bus["receptacle_1_tag"]} for bus in buses(ULTRA)
    ]
    cables, bridge = profile(ULTRA, SPThunderboltDataType=everywhere), recorded(MINI)["ifconfig"]
    found = machine(
        ULTRA, system_profiler=cables, ifconfig=bridge.replace("192.168", "10.77"), ibv_devinfo=""
    )
    assert len(found.notes) == 16
    assert "bridge0" in found.notes[0]
    assert over_the_wire(found) == found


CHEAP = [name for name, command in COMMANDS.items() if command.cheap]


def cheap(name: str, **changed: str | Output) -> dict[str, Output]:
    return {command: outputs(name, **changed)[command] for command in CHEAP}


@pytest.mark.parametrize("name", MACS)
def test_a_refresh_with_nothing_new_changes_nothing(name: str) -> None:
    assert mac_again(machine(name), cheap(name)) == machine(name)


def test_a_refresh_sees_memory_power_addresses_and_active_ports_change() -> None:
    before, said = machine(MAX), recorded(MAX)
    changes = {
        "vm_stat": said["vm_stat"].replace("5000000.", "1000000."),
        "pmset": "Now drawing from 'Battery Power'",
        "ifconfig": said["ifconfig"].replace("10.10.3.2", "10.10.3.6"),
        "ibv_devinfo": said["ibv_devinfo"].replace("PORT_ACTIVE", "PORT_DOWN"),
        "sysctl": said["sysctl"].replace("wired_limit_mb: 0", "wired_limit_mb: 102400"),
    }
    after = mac_again(before, cheap(MAX, **changes))
    assert before.free_bytes - after.free_bytes == 4_000_000 * 16384
    assert (after.power, after.gpu_bytes) == ("battery", 100 * GB)
    assert after.interfaces[-1] == replace(before.interfaces[-1], address="10.10.3.6")
    assert not port(after, 2).active
    assert [sentence.split()[0] for sentence in after.notes] == ["Thunderbolt", "this"]


def test_what_a_refresh_cannot_read_stays_as_it_was() -> None:
    before = machine(MAX)
    after = mac_again(before, dict.fromkeys(CHEAP, LATE))
    assert replace(after, notes=()) == replace(before, notes=())
    assert [sentence.partition(":")[0] for sentence in after.notes] == [
        "sysctl", "vm_stat", "networksetup", "networksetup -listnetworkserviceorder", "ifconfig", "pmset",
        "ibv_devinfo",
    ]  # fmt: skip
    ultra = machine(ULTRA)
    again = mac_again(ultra, cheap(ULTRA, sysctl=LATE, networksetup=LATE))
    assert (again.gpu_bytes, again.interfaces) == (458752 << 20, ultra.interfaces)


def test_addresses_left_out_on_request_are_not_missed_when_none_can_be_read_any_more() -> None:
    before = mac(outputs(MAX), "127.0.0.1")
    (sentence,) = mac_again(before, cheap(MAX, ifconfig=LATE), "127.0.0.1").notes
    assert sentence.startswith("ifconfig: ")


def test_what_the_first_look_could_not_read_is_not_forgotten_and_the_rest_is() -> None:
    first = machine(MAX, system_profiler=LATE, vm_stat=LATE)
    assert [sentence.partition(":")[0] for sentence in first.notes] == ["system_profiler", "vm_stat"]
    assert mac_again(first, cheap(MAX)).notes == first.notes[:1]

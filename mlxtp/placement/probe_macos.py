"""Commands that probe a Mac, a parser for each, and the choice of addresses.

The commands only read, and none needs root; `COMMANDS` has their purposes. Parsers accept any text, never
raise, and cut values to the limits of `wire/cluster_messages.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from ipaddress import AddressValueError, IPv4Address
from typing import Any

from .. import free_memory
from ..wire.cluster_messages import MAX_INTERFACES, MAX_PORTS, MAX_SERVICE, Interface, Machine, Port
from ..wire.codecs import U63

# --- outputs of commands, and values read from them ------------------------------------------------------

MAX_NOTE = 300  #: Characters of one sentence in `Machine.notes`.
#: A machine without known values. Parsers fill in their part.
UNKNOWN = Machine("other", "", "", "", "", 0, 0, 0, 0, 0, 0, "unknown", "unsupported", False)


@dataclass(frozen=True, slots=True)
class Output:
    text: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    value: Any
    missing: tuple[str, ...] = ()


NOT_RUN = Output(problem="was not run")
NOT_INSTALLED = Output(problem="is not installed")


def note(command: str, output: Output, missing: Iterable[str]) -> tuple[str, ...]:
    """Return a sentence about unknown values, if any, which begins with the command's name and a colon."""
    unknown = ", ".join(missing)
    problem = output.problem or "its output cannot be parsed"
    return (f"{command}: {problem}; not known: {unknown}"[:MAX_NOTE],) if unknown else ()


def printable(value: object, max_chars: int) -> str:
    """Return a text on one line, cut and printable; "" for any other value."""
    if not isinstance(value, str):
        return ""
    # Far more than any field holds, but little work for a megabyte in the wrong place.
    words = "".join(c if c.isprintable() else " " for c in value[: 8 * max_chars]).split()
    return " ".join(words)[:max_chars].strip()


_FIRST_NUMBER = re.compile(r"\d{1,19}", re.ASCII)


def count(value: object, high: int) -> int:
    """Return `value`, or the first number in a text; 0 unless it is from 0 to `high`."""
    if isinstance(value, str) and (found := _FIRST_NUMBER.search(value[:200])):
        value = int(found[0])
    return value if type(value) is int and 0 <= value <= high else 0


# --- addresses of this machine for others nearby: "Addresses" in docs/placement.md -----------------------

MAX_LINKS = 256  #: Most network devices to read; a machine with many containers has some dozens.
MAX_ADDRESSES = 32  #: Most IPv4 addresses to read for each device.
MAX_MBPS = 10**7


@dataclass(frozen=True, slots=True)
class NetworkDevice:
    """One network device with its IPv4 addresses, each (address, prefix)."""

    name: str
    kind: str = "other"
    enabled: bool = False  #: By the owner's setting.
    up: bool = False  #: Enabled, and with a peer at the other end of the cable.
    point_to_point: bool = False
    mbps: int = 0
    addresses: tuple[tuple[str, int], ...] = ()
    members: tuple[str, ...] = ()  #: Devices of a bridge or a bond, or the device below a VLAN.
    portless: bool = False  #: Uses no port of this Mac: an overlay, or a network of virtual machines.


def ipv4(text: str) -> str:
    """Return `text` if it is a possible IPv4 address of a machine, else ""."""
    try:
        address = IPv4Address(text)
    except AddressValueError:
        return ""
    return "" if address.is_unspecified or address.is_multicast else str(address)


def self_assigned(address: str) -> bool:
    return address.startswith("169.254.")  # RFC 3927


def interfaces(links: Iterable[NetworkDevice]) -> tuple[Interface, ...]:
    """Return the addresses that count: those up first, then not self-assigned, then by name."""
    outward = (x for x in links if not (x.point_to_point or x.portless or _INWARD.fullmatch(x.name)))
    found = [interface for link in outward for interface in _of(link)]
    if any(each.up and each.kind != "loopback" for each in found):
        found = [each for each in found if each.kind != "loopback"]
    found.sort(key=lambda each: (not each.up, self_assigned(each.address), each.name, each.address))
    return tuple(found[:MAX_INTERFACES])


def only(links: Iterable[NetworkDevice], address: str) -> tuple[Interface, ...]:
    return tuple(i for link in links for i in _of(link) if i.address == ipv4(address))[:1]


def _of(link: NetworkDevice) -> list[Interface]:
    name = printable(link.name, 40)
    mbps = link.mbps if 0 <= link.mbps <= MAX_MBPS else 0
    return [
        Interface(name, address, min(max(prefix, 0), 32), link.kind, mbps, link.up)
        for address, prefix in link.addresses[:MAX_ADDRESSES]
        if ipv4(address) == address
    ]


#: Devices without another machine at their end.
_INWARD = re.compile(
    r"(docker|podman|virbr|lxcbr|lxdbr|cni|flannel|vmnet|vmenet|vboxnet)[\w.-]*|br-[0-9a-f]{12}|bridge1\d\d"
)


# --- commands that print lines ---------------------------------------------------------------------------


def parse_sysctl(text: str) -> Reading:
    """Read a part of a Machine, with the owner's limit, or 0, in `gpu_bytes`."""
    values = {name: value.strip() for name, colon, value in _parted(text, ":") if colon}
    system = replace(
        UNKNOWN,
        release=printable(values.get("kern.osproductversion"), 60),
        build=printable(values.get("kern.osversion"), 60),
        model=printable(values.get("hw.model"), 60),
        chip=printable(values.get("machdep.cpu.brand_string"), 80),
        cpu_cores=count(values.get("hw.ncpu"), 4096),
        memory_bytes=count(values.get("hw.memsize"), U63),
        gpu_bytes=min(count(values.get("iogpu.wired_limit_mb"), 2**43) * 2**20, U63),
    )
    told = {"macOS version": system.release, "cores": system.cpu_cores, "memory": system.memory_bytes}
    return Reading(system, tuple(name for name, value in told.items() if not value))


def parse_vm_stat(text: str) -> Reading:
    """Read the bytes of free and wired memory, as `free_memory.parse_vm_stat`."""
    if (found := free_memory.parse_vm_stat(text)) is None:
        return Reading((0, 0), ("free memory", "wired memory"))
    return Reading(tuple(min(size, U63) for size in found))


@dataclass(frozen=True, slots=True)
class HardwarePorts:
    """Kinds of network devices by name, and device names of Thunderbolt ports 1, 2, ..."""

    kinds: Mapping[str, str]
    thunderbolt: Mapping[int, str]


_THUNDERBOLT = re.compile(r"Thunderbolt (\d{1,2})", re.ASCII)
#: The same in other languages of macOS: one word and a number.
_TRANSLATED = re.compile(r"(?!Ethernet|USB|LAN)[^\W\d_]+ (\d{1,2})")


def parse_hardware_ports(text: str) -> Reading:
    pairs: list[tuple[str, str]] = []
    port = ""
    for name, _, value in _parted(text, ": "):
        if name == "Hardware Port":
            port = printable(value, 80)
        elif name == "VLAN User Defined Name":
            port = "VLAN"
        elif name.startswith("Device") and port and len(pairs) < MAX_LINKS:
            pairs.append((port, printable(value, 40)))
            port = ""
    numbered = _THUNDERBOLT if any(_THUNDERBOLT.fullmatch(port) for port, _ in pairs) else _TRANSLATED
    thunderbolt = {int(found[1]): device for port, device in pairs if (found := numbered.fullmatch(port))}
    kinds = {device: _kind(port, device, thunderbolt.values()) for port, device in pairs}
    return Reading(HardwarePorts(kinds, thunderbolt), () if kinds else ("which interface is which port",))


SERVICES = "networksetup -listnetworkserviceorder"
_SERVICE = re.compile(r"^\((\d+|\*)\) (.{1,400})\n\(Hardware Port: .*, Device: (\w{1,40})\)$", re.MULTILINE)


def parse_services(text: str) -> Reading:
    """Read the first enabled network service of each device: "(2) NAME"; "(*) NAME" is disabled. An
    unprintable name counts as none, because commands would not find it.
    """
    named = _SERVICE.findall(text)
    found = {
        device: name
        for place, name, device in reversed(named)
        if place != "*" and name == printable(name, MAX_SERVICE)
    }
    return Reading(found, () if named else ("names of network services",))


def _kind(port: str, device: str, thunderbolt: Iterable[str]) -> str:
    if device in thunderbolt:
        return "thunderbolt"
    if device.startswith("bridge"):
        return "bridge"
    if port in ("Wi-Fi", "WLAN", "AirPort"):
        return "wifi"
    real = device.startswith(("en", "bond", "vlan")) and not _TETHER.search(port)
    return "ethernet" if real else "other"


#: Connections of other devices, not networks of Macs.
_TETHER = re.compile("Bluetooth|iPhone|iPad|Android|RNDIS")
_HEADER = re.compile(r"([\w.-]{1,40}): flags=[0-9a-f]{1,16}<([A-Z0-9_,]{0,400})>")
_INET = re.compile(r"inet ([0-9.]{7,15})(?: --> [0-9.]{7,15})? netmask 0x([0-9a-f]{8})\b")
#: Devices below a VLAN ("vlan: 22 parent interface: en0") or a bond ("bond interfaces: en4 en5").
_BELOW = re.compile(r"(?:vlan: \d+ parent interface|bond .{0,40}interfaces):(.*)", re.ASCII)
_MEDIA = re.compile(r"(\d{1,6})(G?)base", re.ASCII | re.IGNORECASE)


def parse_ifconfig(text: str) -> Reading:
    """Read all network devices. Among their kinds, it shows only loopback and bridges."""
    blocks: list[tuple[re.Match[str], list[str]]] = []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            blocks.append((header, []))
        elif blocks and line[:1].isspace():
            blocks[-1][1].append(line.strip()[:200])
    links = tuple(_link(header, lines) for header, lines in blocks[:MAX_LINKS])
    return Reading(links, () if links else ("network interfaces",))


def _link(header: re.Match[str], lines: list[str]) -> NetworkDevice:
    name, flags = header[1], header[2].split(",")
    addresses: list[tuple[str, int]] = []
    members: list[str] = []
    mbps, active = 0, True
    for line in lines:
        key, _, value = line.partition(": ")
        if found := _INET.match(line):
            if ipv4(found[1]) and len(addresses) < MAX_ADDRESSES:
                addresses.append((ipv4(found[1]), int(found[2], 16).bit_count()))
        elif key == "media" and (speed := _MEDIA.search(value)):
            mbps = min(int(speed[1]) * (1000 if speed[2] else 1), MAX_MBPS)
        elif key == "status":
            active = value == "active"
        elif key == "member":
            members.append(value.partition(" ")[0])
        elif found := _BELOW.match(line):
            members += found[1].split()
    return NetworkDevice(
        name=name,
        kind="loopback" if "LOOPBACK" in flags else "bridge" if name.startswith("bridge") else "other",
        enabled="UP" in flags,
        up="UP" in flags and active,
        point_to_point="POINTOPOINT" in flags,
        mbps=mbps,
        addresses=tuple(addresses),
        members=tuple(members[:MAX_LINKS]),
    )


_RDMA_DEVICE = re.compile(r"rdma_en\d{1,4}", re.ASCII)


def parse_ibv_devices(text: str) -> Reading:
    """Read the table of RDMA devices: only a heading if RDMA is off or absent."""
    names = (line.split(maxsplit=1)[:1] for line in text.splitlines()[:MAX_LINKS])
    devices = frozenset(name for words in names for name in words if _RDMA_DEVICE.fullmatch(name))
    return Reading(devices, () if devices or "device" in text[:1000] else ("RDMA devices",))


def parse_ibv_devinfo(text: str) -> Reading:
    """Read whether each RDMA device has an active port: a cable in it, and RDMA on at both ends."""
    active: dict[str, bool] = {}
    device = ""
    for name, _, told in _parted(text, ":"):
        value = told.strip()
        if name == "hca_id":
            device = value if _RDMA_DEVICE.fullmatch(value) and len(active) < MAX_LINKS else ""
            if device:
                active.setdefault(device, False)
        elif name == "state" and device:
            active[device] = active[device] or value.partition(" ")[0] == "PORT_ACTIVE"
    return Reading(active, () if active else ("state of RDMA ports",))


def parse_rdma_ctl(text: str) -> Reading:
    """Read the switch, not the hardware: "enabled", "disabled", "unsupported", or "" if unknown."""
    words = re.findall(r"[a-z]+", text[:1000].lower())
    for word, without in (("supported", "unsupported"), ("enabled", "disabled")):
        if without in words or (word in words and "not" in words):
            return Reading(without)
    return Reading("enabled") if "enabled" in words else Reading("", ("whether RDMA is enabled",))


def parse_pmset(text: str) -> Reading:
    for supply, power in (("'AC Power'", "ac"), ("'Battery Power'", "battery")):
        if supply in text[:1000]:
            return Reading(power)
    return Reading("unknown", ("power supply",))


def _parted(text: str, separator: str) -> Iterator[tuple[str, str, str]]:
    return (line.strip()[:400].partition(separator) for line in text.splitlines())


# --- system_profiler -json: the Mac's model, and the cable in each Thunderbolt port ----------------------
# Keys are the same in every language. Values may be translated ("Up to 120 Gb/s"), so these parsers read only
# keys, numbers, UUIDs and Apple's constants.

_MAX_ITEMS = 64  #: Most devices to read behind one port; a chain of hubs has a handful.


_OF_PROFILE = ("model", "chip", "GPU cores", "Thunderbolt cables")


def parse_profile(text: str) -> Reading:
    """Read a part of a Machine. Connected ports are `active`; for others, `gbps` is their maximum."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return Reading(UNKNOWN, _OF_PROFILE)
    hardware = next(_maps(_get(told, "SPHardwareDataType")), {})
    # A Mac may also list external displays' adapters: only its GPU has a count of cores.
    gpu_cores = [count(_get(gpu, "sppci_cores"), 4096) for gpu in _maps(_get(told, "SPDisplaysDataType"))]
    name, identifier = (printable(_get(hardware, f"machine_{key}"), 28) for key in ("name", "model"))
    profile = replace(
        UNKNOWN,
        model=f"{name} ({identifier})" if name and identifier else name or identifier,
        chip=printable(_get(hardware, "chip_type"), 80),
        # "proc 32:24:8" is all cores, fast cores, slow cores.
        cpu_cores=count(_get(hardware, "number_processors"), 4096),
        gpu_cores=max(gpu_cores, default=0),
        memory_bytes=_memory_bytes(_get(hardware, "physical_memory")),
        ports=_ports(_get(told, "SPThunderboltDataType")),
    )
    cables = profile.ports or _get(told, "SPThunderboltDataType") == []
    found = dict(zip(_OF_PROFILE, (profile.model, profile.chip, profile.gpu_cores, cables), strict=True))
    return Reading(profile, tuple(name for name, value in found.items() if not value))


def _memory_bytes(told: object) -> int:
    """Return the bytes of "512 GB", in Apple's units of 2^30."""
    size = printable(told, 20)
    return min(count(size, 10**6) << {"TB": 40, "GB": 30}[size[-2:]], U63) if size[-2:] in ("TB", "GB") else 0


def _ports(told: object) -> tuple[Port, ...]:
    ports: dict[int, Port] = {}
    for port in map(_port, _maps(told)):
        ports.setdefault(port.receptacle, port)  # a port may be listed twice
    ports.pop(0, None)  # a bus without a receptacle has no port
    return tuple(ports[number] for number in sorted(ports)[:MAX_PORTS])


def _port(entry: dict[str, Any]) -> Port:
    port = _get(entry, "receptacle_1_tag")
    # A list of a hub does not show which Mac has the cable; take the nearest.
    macs = ((_uuid(item), depth) for item, depth in _devices(entry) if _uuid(item))
    peer, depth = next(macs, ("", 0))
    return Port(
        receptacle=count(_get(port, "receptacle_id_key"), 64),
        interface="",
        domain=_uuid(entry),
        peer_domain=peer,
        hub=depth > 0,
        gbps=count(_get(port, "current_speed_key"), 1000),
        rdma="",
        active=_get(port, "receptacle_status_key") == "receptacle_connected" or bool(peer),
    )


def _devices(entry: dict[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the devices behind a port, the nearest first, with the number of devices in between."""
    waiting = [(entry, -1)]
    for item, depth in waiting:  # which grows
        children = [(child, depth + 1) for child in _maps(_get(item, "_items"))]
        waiting += children[: _MAX_ITEMS + 1 - len(waiting)]
    yield from waiting[1:]


_UUID = re.compile(r"[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}")


def _uuid(entry: object) -> str:
    """Return its domain UUID in capitals, the same at both ends of a cable; or ""."""
    uuid = printable(_get(entry, "domain_uuid_key"), 64).upper()
    return uuid if _UUID.fullmatch(uuid) else ""


def _get(told: object, key: str) -> object:
    return told.get(key) if isinstance(told, dict) else None


def _maps(told: object) -> Iterator[dict[str, Any]]:
    return (item for item in told if isinstance(item, dict)) if isinstance(told, list) else iter(())


_SYSCTLS = (
    "hw.memsize", "hw.ncpu", "hw.model", "machdep.cpu.brand_string",
    "kern.osproductversion", "kern.osversion", "iogpu.wired_limit_mb",
)  # fmt: skip
_PROFILES = ("SPHardwareDataType", "SPDisplaysDataType", "SPThunderboltDataType")


@dataclass(frozen=True, slots=True)
class ProbeCommand:
    """A command that probes. `cheap` commands run at each refresh."""

    parse: Callable[[str], Reading]
    arguments: tuple[str, ...] = ()
    cheap: bool = True
    deadline_s: float = 5.0


#: By name, with arguments if necessary. Notes are in this order.
COMMANDS: Mapping[str, ProbeCommand] = {
    # Model, GPU cores; ports with speed, hubs and domain UUIDs: a port's peer is another Mac's domain.
    "system_profiler": ProbeCommand(parse_profile, (*_PROFILES, "-json"), cheap=False, deadline_s=20.0),
    "ibv_devices": ProbeCommand(parse_ibv_devices, cheap=False),  # ports with an RDMA device
    "rdma_ctl": ProbeCommand(parse_rdma_ctl, ("status",), cheap=False),  # RDMA on or off
    "sysctl": ProbeCommand(parse_sysctl, _SYSCTLS),  # memory, cores, system, GPU's limit
    "vm_stat": ProbeCommand(parse_vm_stat),  # free memory
    "networksetup": ProbeCommand(parse_hardware_ports, ("-listallhardwareports",)),  # interfaces of ports
    SERVICES: ProbeCommand(parse_services),  # names of services, for users' commands
    "ifconfig": ProbeCommand(parse_ifconfig, ("-a",)),  # addresses, speeds, members of the bridge
    "pmset": ProbeCommand(parse_pmset, ("-g", "batt")),  # mains or battery
    "ibv_devinfo": ProbeCommand(parse_ibv_devinfo),  # usable RDMA devices
}


# --- commands of the doctor alone; their parsers return None if unknown -----------------------------------

FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"  #: It is not in PATH.
ASK_S = 5.0

_SETTING = re.compile(r"^ {0,8}([A-Za-z]\w{1,39})[ \t]+(\d{1,9})\b", re.ASCII | re.MULTILINE)


def parse_power(text: str) -> Mapping[str, int] | None:
    """Read the present settings of `pmset -g`: names and whole numbers; times are in minutes."""
    text = text[:20_000] if "Currently in use:" in text[:20_000] else ""
    return {name: int(value) for name, value in _SETTING.findall(text)} or None


def parse_firewall_state(text: str) -> int | None:
    """Read `socketfilterfw --getglobalstate`: 0 is off, 1 is on, 2 admits only the system's needs."""
    found = re.search(r"\(State = (\d)\)", text[:1000])
    return int(found[1]) if found else None


def parse_block_all(text: str) -> bool | None:
    """Read `socketfilterfw --getblockall`, in the wording of old and new systems."""
    said = text[:1000].lower()
    known = "block all" in said and ("enabled" in said) != ("disabled" in said)
    return "enabled" in said if known else None


_VERDICT = re.compile(r"\bis (blocked|permitted|allowed)\b")


def parse_firewall_app(text: str) -> str | None:
    """Read `socketfilterfw --getappblocked PROGRAM`: "allowed", "blocked" or "unlisted"."""
    said = text[:4000].lower()
    if "not part of the firewall" in said:
        return "unlisted"
    found = _VERDICT.findall(said)
    return ("blocked" if found[-1] == "blocked" else "allowed") if found else None


_LAST_WORD = re.compile(r"(?:counter packets \d+ bytes \d+ )?(?:drop|reject\b.*)")


def parse_nft(text: str) -> bool:
    """Return whether a chain of `nft list ruleset` drops or rejects incoming packets by default."""
    hooked = closed = False
    for line in map(str.strip, text[: 1 << 20].splitlines()):
        if line.startswith("chain "):
            hooked = closed = False
        elif line.startswith("type filter hook input "):
            hooked, closed = True, "policy drop" in line
        elif line == "}" and hooked:
            if closed:
                return True
            hooked = False
        else:
            closed = closed or _LAST_WORD.fullmatch(line[:400]) is not None
    return False

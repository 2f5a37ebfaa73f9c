"""Commands that probe a Mac, with a parser for each. They only read; none of them needs root.

`system_profiler` has a file of its own, `probe_profiler.py`. docs/placement.md has the purpose of each
command.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..wire.base import U63
from .probe_addresses import MAX_ADDRESSES, MAX_LINKS, MAX_MBPS, NetworkDevice, ipv4
from .probe_output import Reading, count, printable


@dataclass(frozen=True, slots=True)
class ProbeCommand:
    """Arguments of a command and the seconds to wait for it. `cheap` commands run again at each refresh."""

    arguments: tuple[str, ...]
    deadline_s: float
    cheap: bool


_SYSCTLS = (
    "hw.memsize", "hw.ncpu", "hw.model", "machdep.cpu.brand_string",
    "kern.osproductversion", "kern.osversion", "iogpu.wired_limit_mb",
)  # fmt: skip
_PROFILES = ("SPHardwareDataType", "SPDisplaysDataType", "SPThunderboltDataType")

#: Every command that is ever run, by its name.
COMMANDS: Mapping[str, ProbeCommand] = {
    "system_profiler": ProbeCommand((*_PROFILES, "-json"), 20.0, cheap=False),
    "rdma_ctl": ProbeCommand(("status",), 5.0, cheap=False),
    "ibv_devices": ProbeCommand((), 5.0, cheap=False),
    "ibv_devinfo": ProbeCommand((), 5.0, cheap=True),
    "sysctl": ProbeCommand(_SYSCTLS, 5.0, cheap=True),
    "vm_stat": ProbeCommand((), 5.0, cheap=True),
    "networksetup": ProbeCommand(("-listallhardwareports",), 5.0, cheap=True),
    "ifconfig": ProbeCommand(("-a",), 5.0, cheap=True),
    "pmset": ProbeCommand(("-g", "batt"), 5.0, cheap=True),
}


@dataclass(frozen=True, slots=True)
class System:
    """Values of `sysctl`. Memory is in bytes; a `wired_limit_bytes` of 0 is the system's own default."""

    release: str = ""
    build: str = ""
    model: str = ""
    chip: str = ""
    cpu_cores: int = 0
    memory_bytes: int = 0
    wired_limit_bytes: int = 0


def parse_sysctl(text: str) -> Reading[System]:
    """Read lines of `name: value`. A name that this macOS does not know has no line."""
    values = {name: value.strip() for name, colon, value in _parted(text, ":") if colon}
    system = System(
        release=printable(values.get("kern.osproductversion"), 60),
        build=printable(values.get("kern.osversion"), 60),
        model=printable(values.get("hw.model"), 60),
        chip=printable(values.get("machdep.cpu.brand_string"), 80),
        cpu_cores=count(values.get("hw.ncpu"), 4096),
        memory_bytes=count(values.get("hw.memsize"), U63),
        wired_limit_bytes=min(count(values.get("iogpu.wired_limit_mb"), 2**43) * 2**20, U63),
    )
    told = {"macOS version": system.release, "cores": system.cpu_cores, "memory": system.memory_bytes}
    return Reading(system, tuple(name for name, value in told.items() if not value))


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes that are available now, and bytes that may not leave memory."""

    free_bytes: int = 0
    wired_bytes: int = 0


_PAGE_SIZE = re.compile(r"page size of (\d{1,9}) bytes", re.ASCII)


def parse_vm_stat(text: str) -> Reading[MemoryReading]:
    """Read page counts. Available is what is free, read ahead, or not used lately, as psutil counts it."""
    found = _PAGE_SIZE.search(text[:1000])
    page = int(found[1]) if found else 0
    pages = {name.strip(): count(value, U63) for name, colon, value in _parted(text, ":") if colon}
    if not page or "Pages free" not in pages or "Pages wired down" not in pages:
        return Reading(MemoryReading(), ("free memory", "wired memory"))
    free = sum(pages.get(f"Pages {kind}", 0) for kind in ("free", "speculative", "inactive"))
    return Reading(MemoryReading(min(free * page, U63), min(pages["Pages wired down"] * page, U63)))


@dataclass(frozen=True, slots=True)
class HardwarePorts:
    """Kind of each network device, by its name, and the device names of Thunderbolt ports 1, 2, ..."""

    kinds: Mapping[str, str] = field(default_factory=dict)
    thunderbolt: Mapping[int, str] = field(default_factory=dict)


_THUNDERBOLT = re.compile(r"Thunderbolt (\d{1,2})", re.ASCII)
#: The same where macOS has another language: one word and a number.
_TRANSLATED = re.compile(r"(?!Ethernet|USB|LAN)[^\W\d_]+ (\d{1,2})")


def parse_hardware_ports(text: str) -> Reading[HardwarePorts]:
    """Read pairs of `Hardware Port: ...` and `Device: ...`."""
    pairs: list[tuple[str, str]] = []
    port = ""
    for name, _, value in _parted(text, ": "):
        if name == "Hardware Port":
            port = printable(value, 80)
        elif name == "Device" and port and len(pairs) < MAX_LINKS:
            pairs.append((port, printable(value, 40)))
            port = ""
    numbered = _THUNDERBOLT if any(_THUNDERBOLT.fullmatch(port) for port, _ in pairs) else _TRANSLATED
    thunderbolt = {int(found[1]): device for port, device in pairs if (found := numbered.fullmatch(port))}
    kinds = {device: _kind(port, device, thunderbolt.values()) for port, device in pairs}
    return Reading(HardwarePorts(kinds, thunderbolt), () if kinds else ("which interface is which port",))


def _kind(port: str, device: str, thunderbolt: Iterable[str]) -> str:
    if device in thunderbolt:
        return "thunderbolt"
    if device.startswith("bridge"):
        return "bridge"
    if port in ("Wi-Fi", "WLAN", "AirPort"):
        return "wifi"
    return "ethernet" if device.startswith("en") and "Bluetooth" not in port else "other"


_HEADER = re.compile(r"([\w.-]{1,40}): flags=[0-9a-f]{1,16}<([A-Z0-9_,]{0,400})>")
_INET = re.compile(r"inet ([0-9.]{7,15})(?: --> [0-9.]{7,15})? netmask 0x([0-9a-f]{8})\b")
_MEDIA = re.compile(r"(\d{1,6})(G?)base", re.ASCII | re.IGNORECASE)


def parse_ifconfig(text: str) -> Reading[tuple[NetworkDevice, ...]]:
    """Read all network devices. Of their kinds, only loopback and bridges are known here."""
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
        elif key == "member" and len(members) < MAX_LINKS:
            members.append(value.partition(" ")[0])
    return NetworkDevice(
        name=name,
        kind="loopback" if "LOOPBACK" in flags else "bridge" if name.startswith("bridge") else "other",
        enabled="UP" in flags,
        up="UP" in flags and active,
        point_to_point="POINTOPOINT" in flags,
        mbps=mbps,
        addresses=tuple(addresses),
        members=tuple(members),
    )


_RDMA_DEVICE = re.compile(r"rdma_en\d{1,4}", re.ASCII)


def parse_ibv_devices(text: str) -> Reading[frozenset[str]]:
    """Read the table of RDMA devices. With RDMA off, or none in the hardware, it has a heading only."""
    names = (line.split(maxsplit=1)[:1] for line in text.splitlines()[:MAX_LINKS])
    devices = frozenset(name for words in names for name in words if _RDMA_DEVICE.fullmatch(name))
    return Reading(devices, () if devices or "device" in text[:1000] else ("RDMA devices",))


def parse_ibv_devinfo(text: str) -> Reading[Mapping[str, bool]]:
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


def parse_rdma_ctl(text: str) -> Reading[str]:
    """Read "enabled", "disabled" or "unsupported", "" for anything else: the switch, not the hardware."""
    words = re.findall(r"[a-z]+", text[:1000].lower())
    for word, without in (("supported", "unsupported"), ("enabled", "disabled")):
        if without in words or (word in words and "not" in words):
            return Reading(without)
    return Reading("enabled") if "enabled" in words else Reading("", ("whether RDMA is enabled",))


def parse_pmset(text: str) -> Reading[str]:
    """Read "ac", "battery" or "unknown"."""
    if "'AC Power'" in text[:1000]:
        return Reading("ac")
    if "'Battery Power'" in text[:1000]:
        return Reading("battery")
    return Reading("unknown", ("power supply",))


def _parted(text: str, separator: str) -> Iterator[tuple[str, str, str]]:
    """Yield each line without its indent, split at the first separator, shortened to what any field holds."""
    return (line.strip()[:400].partition(separator) for line in text.splitlines())

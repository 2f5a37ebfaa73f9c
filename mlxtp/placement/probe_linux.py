"""Parsers for Linux: texts of /proc and /etc, and rows of psutil, which `hardware.py` reads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network

from .probe_output import MAX_ADDRESSES, MAX_LINKS, NetworkDevice, Reading, printable


@dataclass(frozen=True, slots=True)
class InterfaceRow:
    """One IPv4 address as psutil reports it: dotted netmask, flags by commas, speed in Mb/s (0 unknown).

    `wireless` and `bridge` are from /sys/class/net.
    """

    device: str
    address: str
    netmask: str
    flags: str
    speed: int
    up: bool
    wireless: bool = False
    bridge: bool = False


@dataclass(frozen=True, slots=True)
class Sight:
    """Readings of a machine that is no Mac. Memory is in bytes; `plugged_in` is None without a battery.

    Texts are empty where their file is missing.
    """

    system: str
    cpuinfo: str
    os_release: str
    kernel: str
    architecture: str
    product: str
    cpu_cores: int
    memory_bytes: int
    free_bytes: int
    plugged_in: bool | None
    rows: tuple[InterfaceRow, ...]


_CHIP = re.compile(r"^(?:model name|Model|Hardware|cpu model)\s*:(.*)$", re.MULTILINE)


def parse_cpuinfo(text: str) -> Reading[str]:
    """Read the processor's name, which many ARM kernels do not report."""
    found = _CHIP.search(text[:20_000])
    chip = printable(found[1], 80) if found else ""
    return Reading(chip, () if chip else ("chip",))


def parse_os_release(text: str) -> Reading[str]:
    """Read the distribution's name and version for people, such as "Debian GNU/Linux 13 (trixie)"."""
    for line in text.splitlines()[:100]:
        name, _, value = line.partition("=")
        if name.strip() == "PRETTY_NAME" and (release := printable(value.strip().strip("\"'"), 60)):
            return Reading(release)
    return Reading("", ("release",))


def links(rows: Iterable[InterfaceRow]) -> tuple[NetworkDevice, ...]:
    """Group the rows by device, in their order."""
    devices: dict[str, list[InterfaceRow]] = {}
    for row in rows:
        devices.setdefault(row.device, []).append(row)
    return tuple(_link(rows) for rows in list(devices.values())[:MAX_LINKS])


def _link(rows: list[InterfaceRow]) -> NetworkDevice:
    row = rows[0]
    flags = row.flags.split(",")
    return NetworkDevice(
        name=row.device,
        kind=_kind(row, flags),
        enabled="up" in flags or row.up,
        up=row.up,
        point_to_point="pointopoint" in flags or "pointtopoint" in flags,
        # A driver that does not know the speed reports 0, -1 or 65535.
        mbps=0 if row.speed in (-1, 65535) else row.speed,
        addresses=tuple((row.address, _prefix(row.netmask)) for row in rows[:MAX_ADDRESSES]),
    )


def _kind(row: InterfaceRow, flags: list[str]) -> str:
    if "loopback" in flags or row.device == "lo":
        return "loopback"
    if row.wireless:
        return "wifi"
    if row.bridge:
        return "bridge"
    if row.device.startswith("thunderbolt"):
        return "thunderbolt"
    return "ethernet" if "broadcast" in flags else "other"


def _prefix(netmask: str) -> int:
    try:
        return IPv4Network((0, netmask)).prefixlen
    except ValueError:
        return 32

"""Parser of `system_profiler ... -json`: the Mac's model, and the cable in each Thunderbolt port.

The keys are Apple's and the same in every language. Values may be translated ("Up to 120 Gb/s"), so only
keys, numbers, UUIDs and Apple's own constants are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..wire.base import U63
from ..wire.machine import MAX_PORTS
from .probe_output import Reading, count, printable

_MAX_ITEMS = 64  #: Devices that are read behind one port; a chain of hubs has a handful.
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Bus:
    """One Thunderbolt port with the cable in it, as `wire/machine.py` has it.

    `gbps` is the speed of the link if `connected`, else the most that the port can do, 0 when unknown.
    `peer_domain` is the Thunderbolt domain of the nearest Mac: behind a hub there can be several.
    """

    receptacle: int
    domain: str
    peer_domain: str
    hub: bool
    connected: bool
    gbps: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Model and hardware of a Mac. Unknown values are empty or 0. Memory is in bytes."""

    model: str = ""
    chip: str = ""
    cpu_cores: int = 0
    gpu_cores: int = 0
    memory_bytes: int = 0
    buses: tuple[Bus, ...] = ()


def parse_profile(text: str) -> Reading[Profile]:
    """Read the JSON of SPHardwareDataType, SPDisplaysDataType and SPThunderboltDataType."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return Reading(Profile(), ("model", "chip", "GPU cores", "Thunderbolt cables"))
    hardware = next(_maps(_get(told, "SPHardwareDataType")), {})
    # A Mac may list external displays' adapters too: the GPU is the one that counts its cores.
    gpu_cores = [count(_get(gpu, "sppci_cores"), 4096) for gpu in _maps(_get(told, "SPDisplaysDataType"))]
    name, identifier = (printable(_get(hardware, f"machine_{key}"), 28) for key in ("name", "model"))
    profile = Profile(
        model=f"{name} ({identifier})" if name and identifier else name or identifier,
        chip=printable(_get(hardware, "chip_type"), 80),
        # "proc 32:24:8" is all cores, then the fast and the slow ones.
        cpu_cores=count(_get(hardware, "number_processors"), 4096),
        gpu_cores=max(gpu_cores, default=0),
        memory_bytes=_memory_bytes(_get(hardware, "physical_memory")),
        buses=_buses(_get(told, "SPThunderboltDataType")),
    )
    missing = [
        name
        for name, value in (
            ("model", profile.model),
            ("chip", profile.chip),
            ("GPU cores", profile.gpu_cores),
            ("Thunderbolt cables", profile.buses or _get(told, "SPThunderboltDataType") == []),
        )
        if not value
    ]
    return Reading(profile, tuple(missing))


def _memory_bytes(told: object) -> int:
    """Return the bytes of "512 GB", as Apple counts memory: in units of 2^30."""
    size = printable(told, 20)
    unit = {"TB": 1024 * _GIB, "GB": _GIB}.get(size[-2:], 0)
    return min(count(size, 10**6) * unit, U63)


def _buses(told: object) -> tuple[Bus, ...]:
    buses: dict[int, Bus] = {}
    for entry in _maps(told):
        bus = _bus(entry)
        # A bus without a receptacle leads to no port; two with one number would be one port listed twice.
        if bus is not None:
            buses.setdefault(bus.receptacle, bus)
    return tuple(buses[number] for number in sorted(buses)[:MAX_PORTS])


def _bus(entry: dict[str, Any]) -> Bus | None:
    port = _get(entry, "receptacle_1_tag")
    receptacle = count(_get(port, "receptacle_id_key"), 64)
    if not receptacle:
        return None
    macs = [(_uuid(item), depth) for item, depth in _devices(entry) if _uuid(item)]
    # Nearest first: a hub's own place in the list does not show which Mac is cabled to it.
    peer, depth = min(macs, key=lambda mac: mac[1], default=("", 0))
    return Bus(
        receptacle=receptacle,
        domain=_uuid(entry),
        peer_domain=peer,
        hub=depth > 0,
        connected=_get(port, "receptacle_status_key") == "receptacle_connected" or bool(peer),
        gbps=count(_get(port, "current_speed_key"), 1000),
    )


def _devices(entry: dict[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the devices on a bus, with the number of hubs in between. Bounded in depth and width."""
    waiting = [(item, 0) for item in _maps(_get(entry, "_items"))][:_MAX_ITEMS]
    for _ in range(_MAX_ITEMS):
        if not waiting:
            return
        item, depth = waiting.pop(0)
        yield item, depth
        waiting += [(child, depth + 1) for child in _maps(_get(item, "_items"))][:_MAX_ITEMS]


_UUID = re.compile(r"[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}")


def _uuid(entry: object) -> str:
    """Return its domain UUID in capitals, so that both ends of a cable spell it alike; "" if it has none."""
    uuid = printable(_get(entry, "domain_uuid_key"), 64).upper()
    return uuid if _UUID.fullmatch(uuid) else ""


def _get(told: object, key: str) -> object:
    return told.get(key) if isinstance(told, dict) else None


def _maps(told: object) -> Iterator[dict[str, Any]]:
    return (item for item in told if isinstance(item, dict)) if isinstance(told, list) else iter(())

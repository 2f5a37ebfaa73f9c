"""A `Machine` from the outputs of its commands. Any outputs give a valid message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from itertools import chain

from ..wire.cluster_messages import MAX_NOTES, Machine, Port
from ..wire.codecs import U63
from .cost_model import default_gpu_bytes
from .faults import THUNDERBOLT_5_GBPS, notes_of, unable
from .probe_macos import (
    COMMANDS,
    MAX_ADDRESSES,
    MAX_LINKS,
    NOT_INSTALLED,
    NOT_RUN,
    SERVICES,
    UNKNOWN,
    HardwarePorts,
    NetworkDevice,
    Output,
    Reading,
    count,
    interfaces,
    note,
    only,
    printable,
)

Outputs = Mapping[str, Output]  #: By command of `COMMANDS`; missing commands were not run.

# --- macOS ------------------------------------------------------------------------------------------------


def mac(outputs: Outputs, address: str = "") -> Machine:
    """Return a Mac from the outputs of all `COMMANDS`. With `address`, only its interface counts."""
    read = _read(outputs, cheap=False)
    profile: Machine = read["system_profiler"].value
    devices, switch = read["ibv_devices"], read["rdma_ctl"].value
    every = _read(outputs, cheap=True)
    system: Machine = every["sysctl"].value
    ports: HardwarePorts = every["networksetup"].value
    machine = replace(
        profile,
        system="macos",
        release=system.release,
        build=system.build,
        model=profile.model or system.model,
        chip=profile.chip or system.chip,
        cpu_cores=system.cpu_cores or profile.cpu_cores,
        memory_bytes=system.memory_bytes or profile.memory_bytes,
        rdma=_rdma(switch, devices, profile.ports),
        ports=tuple(_port(port, ports.thunderbolt, devices.value, profile.model) for port in profile.ports),
    )
    if switch != "enabled":
        del read["ibv_devices"]
    if outputs.get("rdma_ctl") == NOT_INSTALLED:  # this macOS has no RDMA
        del read["rdma_ctl"]
    return _changing(replace(machine, notes=_notes(outputs, read)), outputs, every, address)


def mac_again(machine: Machine, outputs: Outputs, address: str = "") -> Machine:
    """Return the same Mac with new outputs of the cheap commands: memory, addresses, power, RDMA ports."""
    dear = {name for name, command in COMMANDS.items() if not command.cheap}
    kept = tuple(sentence for sentence in machine.notes if sentence.partition(": ")[0] in dear)
    return _changing(replace(machine, notes=kept), outputs, _read(outputs, cheap=True), address)


def _read(outputs: Outputs, *, cheap: bool) -> dict[str, Reading]:
    return {
        name: command.parse(outputs.get(name, NOT_RUN).text)
        for name, command in COMMANDS.items()
        if command.cheap is cheap
    }


def _changing(machine: Machine, outputs: Outputs, read: dict[str, Reading], address: str) -> Machine:
    """Return `machine`, with the other commands' notes, and present values of cheap commands."""
    has_rdma = any(port.rdma for port in machine.ports)
    active = read["ibv_devinfo"]
    if not has_rdma:
        del read["ibv_devinfo"]
    unread = machine.notes + _notes(outputs, read)
    system, memory, power, services = (read[name] for name in ("sysctl", "vm_stat", "pmset", SERVICES))
    if not memory.missing:
        free, wired = memory.value
        machine = replace(machine, free_bytes=free, wired_bytes=wired)
    if not system.missing or not machine.gpu_bytes:
        limit = min(system.value.gpu_bytes, machine.memory_bytes or U63)
        machine = replace(machine, gpu_bytes=limit or default_gpu_bytes(machine.memory_bytes))
    if not power.missing:
        machine = replace(machine, power=power.value)
    if has_rdma and not active.missing:
        ports = [replace(port, active=active.value.get(port.rdma, False)) for port in machine.ports]
        machine = replace(machine, ports=tuple(ports))
    if not services.missing:
        named = services.value
        ports = [replace(port, service=named.get(port.interface, "")) for port in machine.ports]
        machine = replace(machine, ports=tuple(ports), bridge_service=named.get("bridge0", ""))
    links: tuple[NetworkDevice, ...] = read["ifconfig"].value
    if not links:  # no address is known to be missing
        notes = notes_of(replace(machine, interfaces=())) + unread
        return replace(machine, notes=notes[:MAX_NOTES])
    holds = any(link.name == "bridge0" and link.enabled and link.members for link in links)
    machine = replace(machine, bridge_up=holds)
    return _addressed(machine, _with_kinds(links, read["networksetup"], machine), address, unread)


def _notes(outputs: Outputs, read: Mapping[str, Reading]) -> tuple[str, ...]:
    told = (note(name, outputs.get(name, NOT_RUN), reading.missing) for name, reading in read.items())
    return tuple(chain.from_iterable(told))


def _rdma(switch: str, devices: Reading, ports: Iterable[Port]) -> str:
    """Return "enabled", "disabled" or "unsupported": the switch in Recovery exists on any Mac."""
    idle = [port.gbps for port in ports if not port.active and port.gbps]
    linked = [port.gbps for port in ports if port.active]
    if idle and max(idle + linked) < THUNDERBOLT_5_GBPS:
        return "unsupported"
    if devices.value:
        return "disabled" if switch == "disabled" else "enabled"
    if switch == "enabled" and not devices.missing:
        return "unsupported"
    return switch or "unsupported"


def _port(port: Port, names: Mapping[int, str], devices: frozenset[str], model: str) -> Port:
    interface = names.get(port.receptacle, "")
    device = f"rdma_{interface}"
    found = replace(port, interface=interface, gbps=port.gbps if port.active else 0, active=False)
    # Some listed devices cannot connect.
    return found if device not in devices or unable(model, found) else replace(found, rdma=device)


def _with_kinds(links: Sequence[NetworkDevice], ports: Reading, machine: Machine) -> Iterator[NetworkDevice]:
    """Yield links with their kinds, and Thunderbolt links with the speed of their cables."""
    listed: HardwarePorts = ports.value
    kinds = dict(listed.kinds) or {each.name: each.kind for each in machine.interfaces}
    for link in (*links, *links):  # a VLAN may lie over a bond
        held = {kinds.get(member, "other") for member in link.members}
        if held and not ports.missing:
            bridges = link.kind == "bridge" and (held == {"thunderbolt"} or not listed.thunderbolt)
            kinds[link.name] = "other" if "other" in held else "bridge" if bridges else "ethernet"
    cables = {port.interface: port.gbps * 1000 for port in machine.ports if port.gbps and port.interface}
    for link in links:
        kind = link.kind if link.kind == "loopback" else kinds.get(link.name, link.kind)
        # A bridge is as slow as the slowest cable in it.
        held_mbps = [cables[member] for member in link.members if member in cables]
        mbps = link.mbps or cables.get(link.name, 0) or min(held_mbps, default=0)
        portless = kind == "other" and not (ports.missing and link.name.startswith("en"))
        yield replace(link, kind=kind, mbps=mbps, portless=portless)


# --- elsewhere --------------------------------------------------------------------------------------------


def elsewhere(sight: Sight, address: str = "") -> Machine:
    """Return a machine that is no Mac. `build` is its kernel; `chip` may be its architecture."""
    machine = replace(
        UNKNOWN,
        system="linux" if sight.system == "linux" else "other",
        release=_first(_RELEASE, sight.os_release, 60) or printable(sight.system, 60),
        build=printable(sight.kernel, 60),
        model=printable(sight.product, 60),
        chip=_first(_CHIP, sight.cpuinfo, 80) or printable(sight.architecture, 80),
        cpu_cores=count(sight.cpu_cores, 4096),
        memory_bytes=count(sight.memory_bytes, U63),
        free_bytes=count(sight.free_bytes, U63),
        power="battery" if sight.plugged_in is False else "ac",
    )
    return _addressed(machine, sight.devices[:MAX_LINKS], address, ())


# --- both -------------------------------------------------------------------------------------------------


def _addressed(
    machine: Machine, links: Iterable[NetworkDevice], address: str, unread: tuple[str, ...]
) -> Machine:
    """Return `machine` with the interfaces that count, and its notes: advice, then unknown values."""
    links = tuple(links)
    machine = replace(machine, interfaces=interfaces(links))
    notes = notes_of(machine) + unread  # the faults of a cable do not depend on the requested address
    named = only(links, address) if address else machine.interfaces
    if address and not named:
        has = ", ".join(interface.address for interface in machine.interfaces[:8]) or "none"
        wanted = printable(address, 40)
        notes = (f"No interface has the requested address {wanted}; this machine has: {has}", *notes)
    return replace(machine, interfaces=named, notes=notes[:MAX_NOTES])


# --- linux: texts of /proc and /etc, and psutil's values, read by `hardware.py` ---------------------------


@dataclass(frozen=True, slots=True)
class Sight:
    """Readings of a machine that is no Mac. Memory is in bytes; texts of missing files are empty."""

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
    devices: tuple[NetworkDevice, ...]


#: The processor's name; many ARM kernels do not report it.
_CHIP = re.compile(r"^(?:model name|Model|Hardware|cpu model)\s*:(.*)$", re.MULTILINE)
#: The distribution's name and version for people, such as "Debian GNU/Linux 13 (trixie)".
_RELEASE = re.compile(r"^[ \t]*PRETTY_NAME[ \t]*=(.*)$", re.MULTILINE)


def _first(pattern: re.Pattern[str], text: str, max_chars: int) -> str:
    found = pattern.search(text[:20_000])
    return printable(found[1].strip().strip("\"'"), max_chars) if found else ""


def linux_device(
    name: str, addresses: Iterable[tuple[str, str]], flags: str, speed: int, *, up: bool, kind: str = ""
) -> NetworkDevice:
    """Return a device from psutil's IPv4 addresses with dotted netmasks, comma-separated flags, and Mb/s.
    `kind`: "wifi" or "bridge" if known.
    """
    has = flags.split(",")
    if "loopback" in has or name == "lo":
        kind = "loopback"
    elif not kind:
        ethernet = "ethernet" if "broadcast" in has else "other"
        kind = "thunderbolt" if name.startswith("thunderbolt") else ethernet
    return NetworkDevice(
        name=name,
        kind=kind,
        enabled="up" in has or up,
        up=up,
        point_to_point="pointopoint" in has or "pointtopoint" in has,
        # Drivers report an unknown speed as 0, -1 or 65535.
        mbps=0 if speed in (-1, 65535) else speed,
        addresses=tuple((address, _prefix(mask)) for address, mask in list(addresses)[:MAX_ADDRESSES]),
    )


def _prefix(netmask: str) -> int:
    try:
        return IPv4Network((0, netmask)).prefixlen
    except ValueError:
        return 32

"""Advice about a Mac's cables and settings: what is wrong, why it matters, and the command that mends it.

The commands are for the person at the keyboard. Nothing here, or anywhere in this program, runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from zlib import crc32

from ..wire.reports import Machine, Port
from .probe_output import self_assigned

THUNDERBOLT_5_GBPS = 80  #: Gb/s in each direction; Thunderbolt 4 and USB4 end at 40.
MAC_STUDIO = "Mac Studio"
RDMA_SINCE = (26, 2)  #: The first macOS with RDMA over Thunderbolt (Apple's TN3205).


RDMA, BRIDGE, CABLE, ADDRESS, POWER = "rdma", "bridge", "cable", "address", "power"  #: Subjects of a note.


@dataclass(frozen=True, slots=True)
class Advice:
    """One fault in words, and what a person does about it. `about`: one of the subjects above."""

    about: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}. {self.fix}"


def findings(machine: Machine) -> tuple[str, ...]:
    """Return sentences for people, the most important first. `machine` has all its interfaces.

    Each has at most 300 characters, the limit of `Machine.notes`.
    """
    return tuple(map(str, notes(machine)))


def notes(machine: Machine) -> tuple[Advice, ...]:
    """Return the same in parts."""
    return (
        (*_of_mac(machine), *_of_power(machine)) if machine.system == "macos" else tuple(_of_power(machine))
    )


def _of_mac(machine: Machine) -> Iterator[Advice]:
    if machine.rdma == "disabled":
        yield Advice(
            RDMA,
            "RDMA over Thunderbolt is off, so Macs exchange over TCP, with a multiple of the latency",
            "Shut down, hold the power button until the options load, choose Options, then Terminal in the"
            " Utilities menu, and run: rdma_ctl enable",
        )
    if _too_old(machine):
        yield Advice(
            RDMA,
            f"macOS {machine.release} has no RDMA over Thunderbolt; macOS 26.2 brings it, for Thunderbolt 5",
            "Available updates: softwareupdate --list",
        )
    if machine.rdma == "enabled" and machine.bridge_up:
        yield Advice(
            BRIDGE,
            "The Thunderbolt bridge holds the Thunderbolt ports, and RDMA then fails to connect (errno 22)",
            "Until the next restart: sudo ifconfig bridge0 down; for good: sudo networksetup"
            " -setnetworkserviceenabled 'Thunderbolt Bridge' off",
        )
    own = {port.domain for port in machine.ports if port.domain}
    for port in machine.ports:
        if port.peer_domain in own:
            what = f"{_name(port)} is cabled to another port of this same Mac: that connects nothing"
            yield Advice(CABLE, what, "Move it")
        elif port.peer_domain:
            yield from _of_cable(machine, port)


def _of_cable(machine: Machine, port: Port) -> Iterator[Advice]:
    if machine.rdma == "enabled":
        yield from _of_rdma(machine, port)
    # A machine whose interfaces could not be read has none, not even loopback.
    if port.interface and machine.interfaces:
        yield from _of_address(machine, port)
    if port.hub:
        yield Advice(
            CABLE,
            f"{_name(port)} reaches the other Mac through a hub or dock, which adds latency and shares its"
            " bandwidth",
            "Cable the two Macs directly",
        )


def _of_rdma(machine: Machine, port: Port) -> Iterator[Advice]:
    """Yield the reason why a cable that could carry RDMA does not."""
    if port.rdma and not port.active:
        yield Advice(
            CABLE,
            f"{_name(port)} is cabled, but its RDMA port {port.rdma} is not active: most likely the other"
            " Mac has RDMA off",
            "Look there with: rdma_ctl status",
        )
    elif port.rdma:
        return
    elif machine.model.startswith(MAC_STUDIO) and port.interface == "en2":
        yield Advice(
            CABLE,
            f"{_name(port)} is the port next to Ethernet, which has no RDMA on a Mac Studio",
            "Move the cable to another Thunderbolt port of this Mac",
        )
    elif 0 < port.gbps < THUNDERBOLT_5_GBPS:
        yield Advice(
            CABLE,
            f"{_name(port)} runs at {port.gbps} Gb/s, and RDMA needs Thunderbolt 5 (80 Gb/s), in both Macs"
            " and in the cable",
            "Look with: system_profiler SPThunderboltDataType",
        )
    else:
        what = f"{_name(port)} has no RDMA device, so it carries TCP only"
        yield Advice(CABLE, what, "Look with: ibv_devices")


def _of_address(machine: Machine, port: Port) -> Iterator[Advice]:
    """Yield the address that a cabled port lacks: an IPv4 address, better one that stays."""
    bridged = machine.bridge_up and any(interface.kind == "bridge" for interface in machine.interfaces)
    if bridged and machine.rdma != "enabled":
        return
    addresses = [interface.address for interface in machine.interfaces if interface.name == port.interface]
    own, other = cable_addresses(port.domain, port.peer_domain)
    command = (
        f"Until the next restart: sudo ifconfig {port.interface} inet {own} netmask 255.255.255.252"
        f" (at the other end {other})"
    )
    if not addresses:
        yield Advice(
            ADDRESS,
            f"{_name(port)} is cabled to another Mac but has no IPv4 address, which RDMA and TCP both need",
            command,
        )
    elif all(self_assigned(address) for address in addresses):
        yield Advice(
            ADDRESS,
            f"{_name(port)} has only the address {addresses[0]}, which it gave itself and may change with the"
            " next cable",
            command,
        )


def _of_power(machine: Machine) -> Iterator[Advice]:
    if machine.power == "battery":
        yield Advice(
            POWER,
            "This machine runs on battery, so it may slow down or fall asleep while others wait",
            "Plug it in",
        )


def _too_old(machine: Machine) -> bool:
    """Return whether a faster cable than Thunderbolt 4 carries is in, and only macOS lacks RDMA."""
    version = tuple(int(part) for part in machine.release.split(".")[:2] if part.isdecimal())
    fast = any(port.peer_domain and port.gbps >= THUNDERBOLT_5_GBPS for port in machine.ports)
    return machine.rdma == "unsupported" and fast and () < version < RDMA_SINCE


def cable_addresses(domain: str, peer_domain: str) -> tuple[str, str]:
    """Return (ours, theirs): two addresses of a /30 that both ends of a cable compute alike.

    The /30 is one of the 16,384 networks of 10.201.0.0/16, by the two Thunderbolt domains. No message is
    needed.
    """
    low, high = sorted((domain, peer_domain))
    network = crc32(f"{low} {high}".encode()) % 2**14 * 4
    first, second = (f"10.201.{(network + host) >> 8}.{(network + host) & 255}" for host in (1, 2))
    return (first, second) if domain == low else (second, first)


def _name(port: Port) -> str:
    return (
        f"Thunderbolt {port.receptacle} ({port.interface})"
        if port.interface
        else f"Thunderbolt {port.receptacle}"
    )

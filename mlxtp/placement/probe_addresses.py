"""Addresses of a machine that count: those at which another machine nearby may reach it.

kept        Ethernet, Wi-Fi, Thunderbolt and the Thunderbolt bridge, up or down, self-assigned addresses too
left out    links that lead elsewhere: point-to-point links (VPNs), and networks that exist inside this
            machine only (containers, virtual machines, Internet Sharing)
loopback    only when nothing else is up
named       an address named with `--interface` counts in any case, and then no other does
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address

from ..wire.machine import MAX_INTERFACES, Interface
from .probe_output import printable

MAX_LINKS = 256  #: Network devices that are read; a machine with many containers has some dozens.
MAX_ADDRESSES = 32  #: IPv4 addresses that are read for each device.
MAX_MBPS = 10**7


@dataclass(frozen=True, slots=True)
class NetworkDevice:
    """One network device with its IPv4 addresses, each (address, prefix).

    enabled   the owner's setting
    up        enabled, and with a peer at the other end of the cable
    members   the devices that a bridge holds
    """

    name: str
    kind: str = "other"
    enabled: bool = False
    up: bool = False
    point_to_point: bool = False
    mbps: int = 0
    addresses: tuple[tuple[str, int], ...] = ()
    members: tuple[str, ...] = ()


def ipv4(text: str) -> str:
    """Return `text` if it is an IPv4 address that a machine can have, else ""."""
    try:
        address = IPv4Address(text)
    except AddressValueError:
        return ""
    return "" if address.is_unspecified or address.is_multicast else str(address)


def self_assigned(address: str) -> bool:
    """Return whether it is from 169.254.0.0/16, from which a machine assigns itself addresses (RFC 3927)."""
    return address.startswith("169.254.")


def interfaces(links: Iterable[NetworkDevice]) -> tuple[Interface, ...]:
    """Return all addresses that count, the most useful first: up, not self-assigned, by name."""
    found = [interface for link in links if not _inward(link) for interface in _of(link)]
    if any(interface.up and interface.kind != "loopback" for interface in found):
        found = [interface for interface in found if interface.kind != "loopback"]
    return tuple(sorted(found, key=_usefulness)[:MAX_INTERFACES])


def only(links: Iterable[NetworkDevice], address: str) -> tuple[Interface, ...]:
    """Return the one interface that has `address`, of any kind; none when no interface has it."""
    return tuple(i for link in links for i in _of(link) if i.address == ipv4(address))[:1]


def _of(link: NetworkDevice) -> list[Interface]:
    name = printable(link.name, 40)
    mbps = link.mbps if 0 <= link.mbps <= MAX_MBPS else 0
    return [
        Interface(name, address, min(max(prefix, 0), 32), link.kind, mbps, link.up)
        for address, prefix in link.addresses[:MAX_ADDRESSES]
        if ipv4(address) == address
    ]


_INWARD = re.compile(
    r"(docker|podman|virbr|lxcbr|lxdbr|cni|flannel|vmnet|vmenet|vboxnet)[\w.-]*|br-[0-9a-f]{12}|bridge1\d\d"
)


def _inward(link: NetworkDevice) -> bool:
    return link.point_to_point or bool(_INWARD.fullmatch(link.name))


def _usefulness(interface: Interface) -> tuple[bool, bool, str, str]:
    return (not interface.up, self_assigned(interface.address), interface.name, interface.address)

"""Output of a command, the values read from it, and the addresses among them that count.

No output is trusted: parsers take any text at all, raise nothing, and return values that are cut to what
`wire/reports.py` allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address
from typing import Generic, TypeVar

from ..wire.reports import MAX_INTERFACES, Interface

T = TypeVar("T")

MAX_NOTE = 300  #: Characters of one sentence in `Machine.notes`.


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a command and, in words, its failure ("" for none)."""

    text: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """Value read from a text, and the names of the values that the text lacks."""

    value: T
    missing: tuple[str, ...] = ()


NOT_RUN = Output(problem="was not run")
NOT_INSTALLED = Output(problem="is not installed")


def note(command: str, output: Output, missing: Iterable[str]) -> tuple[str, ...]:
    """Return one sentence about the values that `command` left unknown, or none when nothing is missing.

    It begins with the command's name and a colon, by which `belongs_to` finds it again.
    """
    unknown = ", ".join(missing)
    if not unknown:
        return ()
    problem = output.problem or "its output cannot be parsed"
    return (f"{command}: {problem}; not known: {unknown}"[:MAX_NOTE],)


def belongs_to(sentence: str, commands: Iterable[str]) -> bool:
    """Return whether `note` made this sentence for one of `commands`."""
    return sentence.partition(": ")[0] in set(commands)


def printable(value: object, max_chars: int) -> str:
    """Return a text on one line, cut and without unprintable characters; "" for any other value."""
    if not isinstance(value, str):
        return ""
    # Far more than any field holds, so that a megabyte in the wrong place costs little.
    words = "".join(c if c.isprintable() else " " for c in value[: 8 * max_chars]).split()
    return " ".join(words)[:max_chars].strip()


_FIRST_NUMBER = re.compile(r"\d{1,19}", re.ASCII)


def count(value: object, high: int) -> int:
    """Return `value`, or the first number in it if it is a text; 0 if there is none up to `high`."""
    if isinstance(value, str) and (found := _FIRST_NUMBER.search(value[:200])):
        value = int(found[0])
    return value if type(value) is int and 0 <= value <= high else 0


# --- addresses at which another machine nearby may reach this one ----------------------------------------
# kept        Ethernet, Wi-Fi, Thunderbolt and the Thunderbolt bridge, up or down, self-assigned addresses too
# left out    links that lead elsewhere: point-to-point links (VPNs), and networks that exist inside this
#             machine only (containers, virtual machines, Internet Sharing)
# loopback    only when nothing else is up
# named       an address named with `--interface` counts in any case, and then no other does

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

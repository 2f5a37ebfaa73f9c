"""Macs on a desk, made up: members with cables between them and networks over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from mlxtp.placement.topology import MemberMachine
from mlxtp.wire.cluster_messages import Interface, Machine, Port, RosterEntry

GIB = 1024**3
NAMES = "abcdefghij"


def unsealed(entry: RosterEntry) -> RosterEntry:
    """Return an entry of the roster without a signature."""
    return entry


def node_id(place: int) -> str:
    return f"{place:032x}"


def mac(
    place: int, *, chip: str = "Apple M3 Ultra", memory: int = 64, free: int = 0, **changes: Any
) -> MemberMachine:
    """The Mac that is called a, b, c, ... by its place, with so many GiB, without any link."""
    machine = Machine(
        system="macos",
        release="26.2",
        build="",
        model="",
        chip=chip,
        cpu_cores=16,
        gpu_cores=0,
        memory_bytes=memory * GIB,
        free_bytes=free * GIB,
        wired_bytes=0,
        gpu_bytes=memory * GIB,
        power="ac",
        rdma="enabled",
        bridge_up=False,
    )
    return changed(MemberMachine(node_id(place), NAMES[place], machine), **changes)


def linux(place: int, *addresses: str, memory: int = 8) -> MemberMachine:
    """A Linux machine with Ethernet."""
    found = mac(place, chip="", memory=memory, system="linux", rdma="unsupported")
    return add(found, [ethernet(a, name=f"eth{i}") for i, a in enumerate(addresses)])


def changed(member: MemberMachine, **changes: Any) -> MemberMachine:
    """The same with other fields of its machine."""
    return replace(member, machine=replace(member.machine, **changes))


def add(
    member: MemberMachine, interfaces: Sequence[Interface] = (), ports: Sequence[Port] = ()
) -> MemberMachine:
    machine = member.machine
    return changed(member, interfaces=(*machine.interfaces, *interfaces), ports=(*machine.ports, *ports))


def ethernet(address: str, prefix: int = 24, *, name: str = "en0", mbps: int = 10_000) -> Interface:
    return Interface(name, address, prefix, "ethernet", mbps, True)


def on_lan(members: Sequence[MemberMachine], network: str = "192.168.7") -> list[MemberMachine]:
    """The same with 10 Gb/s Ethernet that they share."""
    return [add(m, [ethernet(f"{network}.{i + 1}")]) for i, m in enumerate(members)]


def cabled(
    members: Sequence[MemberMachine], pairs: Iterable[tuple[int, int]], **port: Any
) -> list[MemberMachine]:
    """The same with a Thunderbolt cable for each pair of places, each a network of its own.

    `port` changes both ends of every cable: hub, rdma, active, gbps.
    """
    joined = list(members)
    for cable, (a, b) in enumerate(pairs):
        for end, other, host in ((a, b, 1), (b, a, 2)):
            number = len(joined[end].machine.ports) + 1
            name = f"en{number + 1}"
            made = Port(number, name, f"D{cable}-{end}", f"D{cable}-{other}", False, 80, f"rdma_{name}", True)
            interface = Interface(name, f"10.0.{cable}.{host}", 30, "thunderbolt", 80_000, True)
            joined[end] = add(joined[end], [interface], [replace(made, **port)])
    return joined


def linked(members: Sequence[MemberMachine], here: str, there: str, told_by: int = 0) -> list[MemberMachine]:
    """The same; one of the first two says that a control link joins `here`, of the first, and `there`."""
    own, other = (here, there) if told_by == 0 else (there, here)
    return [
        changed(m, reached=(f"{own} {other}",)) if place == told_by else m for place, m in enumerate(members)
    ]


def all_pairs(size: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(size) for b in range(a + 1, size)]

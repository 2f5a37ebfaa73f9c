"""Parser of a file (TOML or JSON) that describes machines that the user does not have yet.

`docs/placement.md` has the format. It makes up cables, ports and addresses, so that the same code judges
these and real Macs.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from ..errors import ConfigError
from ..wire.cluster_messages import Interface, Port
from .faults import THUNDERBOLT_5_GBPS
from .probe_macos import UNKNOWN
from .tables import chip, core_counts, named, names, nearest
from .topology import MemberMachine

MAX_NODES = 64
_NODE_FIELDS = ("name", "chip", "memory", "count", "gpu_cores", "free", "ports", "rdma")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB|TB|TiB)", re.IGNORECASE)
_MOST_BYTES = 2**53  #: Bytes of memory; more than any machine has.
_SHAPES = ("mesh", "ring")
_THUNDERBOLT = {"thunderbolt5": THUNDERBOLT_5_GBPS, "thunderbolt4": 40, "thunderbolt3": 40}  #: Gb/s.
_ETHERNET = {"1g": 1000, "2.5g": 2500, "5g": 5000, "10g": 10_000, "25g": 25_000, "100g": 100_000}
_WIFI_MBPS = 1000
_LINKS = 'links are "thunderbolt5 mesh", "thunderbolt5 ring", "thunderbolt4 ring", "ethernet 10g" or "wifi"'


def read_machines(text: str, source: str = "the machines file") -> tuple[MemberMachine, ...]:
    """Return the members of a text of TOML or JSON. Raises ConfigError with `source` and the place."""
    table = _parse(text, source)
    if unknown := sorted(table.keys() - {"node", "links"}):
        raise ConfigError(f"{source}: unknown key {unknown[0]!r}; the keys are `links` and [[node]]")
    entries = table.get("node")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f'{source}: it has no machines; one is [[node]] with a chip and memory = "512GB"')
    nodes = [node for place, entry in enumerate(entries, 1) for node in _nodes(entry, place, source)]
    if len(nodes) > MAX_NODES:
        raise ConfigError(f"{source}: {len(nodes)} machines are more than {MAX_NODES}")
    members = [replace(member, node_id=f"{place:032x}") for place, (member, _) in enumerate(nodes)]
    called = [member.name for member in members]
    if twice := [name for at, name in enumerate(called) if name in called[:at]]:
        raise ConfigError(f"{source}: two machines are called {twice[0]!r}")
    links = table.get("links", [])
    wanted = [links] if isinstance(links, str) else links
    if not isinstance(wanted, list) or not all(isinstance(link, str) for link in wanted):
        raise ConfigError(f"{source}: links is {links!r}; {_LINKS}, or a list of them")
    if sum(link.lower().startswith("thunderbolt") for link in wanted) > 1:
        raise ConfigError(f"{source}: links is {links!r}; Thunderbolt cables can be given once only")
    for place, link in enumerate(wanted):
        members = _joined(members, [ports for _, ports in nodes], link, place, source)
    return tuple(members)


def _parse(text: str, source: str) -> Mapping[str, Any]:
    try:
        if text.lstrip().startswith("{"):
            return dict(json.loads(text))
        return tomllib.loads(text)
    except ValueError as error:  # of either format
        raise ConfigError(f"{source} cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source} cannot be read: it is nested too deeply") from None


def _nodes(entry: object, place: int, source: str) -> list[tuple[MemberMachine, int]]:
    where = f"{source}: machine {place}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {entry!r}, not a table")
    if unknown := sorted(entry.keys() - set(_NODE_FIELDS)):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; the keys are {', '.join(_NODE_FIELDS)}")
    kind = _chip_name(entry.get("chip"), where)
    cores = entry.get("gpu_cores", 0)
    if cores and (isinstance(cores, bool) or cores not in core_counts(kind)):
        counts = " or ".join(map(str, core_counts(kind)))
        raise ConfigError(f"{where}: gpu_cores is {cores!r}; {kind} has {counts}")
    found = chip(kind, cores)
    memory = _bytes(entry, "memory", where)
    if memory is None:
        raise ConfigError(f'{where}: it has no memory; write memory = "512GB"')
    free = _bytes(entry, "free", where)
    if free is not None and free > memory:
        raise ConfigError(f"{where}: free is {entry['free']}, more than the memory of {entry['memory']}")
    name, count = entry.get("name", f"node-{place}"), _whole(entry, "count", 1, MAX_NODES, where)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: name is {name!r}, not a text")
    rdma = entry.get("rdma", True)
    if not isinstance(rdma, bool):
        raise ConfigError(f"{where}: rdma is {rdma!r}; it can be true or false")
    called = [f"{name}-{i}" for i in range(1, count + 1)] if count > 1 else [name]
    ports = _whole(entry, "ports", found.ports, 15, where)
    machine = replace(
        UNKNOWN,
        system="macos",
        chip=found.name,
        gpu_cores=found.gpu_cores,
        memory_bytes=memory,
        free_bytes=free or 0,
        power="ac",
        rdma="unsupported" if not found.thunderbolt5 else "enabled" if rdma else "disabled",
    )
    return [(MemberMachine("", each, machine), ports) for each in called]


def _chip_name(value: object, where: str) -> str:
    kind, close = (named(value), nearest(value)) if isinstance(value, str) else ("", "")
    if not kind:
        advice = f"the nearest known one is {close}; it can be" if close else "it can be"
        raise ConfigError(f"{where}: chip is {value!r}; {advice} {', '.join(names())}")
    return kind


def _whole(entry: Mapping[str, Any], field: str, default: int, most: int, where: str) -> int:
    value = entry.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{where}: {field} is {value!r}; it can be a whole number up to {most}")
    return value


def _bytes(entry: Mapping[str, Any], field: str, where: str) -> int | None:
    """Return an amount of memory, in Macs' powers of two; None if it is missing."""
    if field not in entry:
        return None
    value = entry[field]
    found = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    size = float(found[1]) * 1024 ** (4 if found[2].upper().startswith("T") else 3) if found else 0.0
    if not 1 <= size <= _MOST_BYTES:
        raise ConfigError(f'{where}: {field} is {value!r}; it can be "512GB" or "1TB"')
    return int(size)


def _joined(
    members: Sequence[MemberMachine], ports: Sequence[int], link: str, place: int, source: str
) -> list[MemberMachine]:
    match link.lower().split():
        case [generation, shape] if generation in _THUNDERBOLT and shape in _SHAPES:
            return _cabled(members, ports, generation, shape, source)
        case ["wifi"]:
            return _networked(members, "wifi", _WIFI_MBPS, place)
        case ["ethernet", speed] if speed in _ETHERNET:
            return _networked(members, "ethernet", _ETHERNET[speed], place)
    raise ConfigError(f"{source}: links is {link!r}; {_LINKS}")


def _networked(members: Sequence[MemberMachine], kind: str, mbps: int, place: int) -> list[MemberMachine]:
    return [
        _with(m, [Interface(f"net{place}", f"192.168.{place}.{i}", 24, kind, mbps, True)], [])
        for i, m in enumerate(members, 1)
    ]


def _cabled(
    members: Sequence[MemberMachine], ports: Sequence[int], generation: str, shape: str, source: str
) -> list[MemberMachine]:
    """Cable all pairs, or a circle in the order of the file. Each cable is its own network."""
    size = len(members)
    around = ((i, (i + 1) % size) for i in range(size if size > 2 else size - 1))
    pairs = list(combinations(range(size), 2) if shape == "mesh" else around)
    for i, (member, has) in enumerate(zip(members, ports, strict=True)):
        if (needed := sum(i in pair for pair in pairs)) > has:
            advice = "a ring needs 2; " if shape == "mesh" else ""
            raise ConfigError(
                f"{source}: in a {shape} of {size} each Mac needs {needed} cables, and {member.name} has "
                f"{has} ports for them ({advice}if it has more, write ports = {needed})"
            )
    rdma = generation == "thunderbolt5"
    joined = list(members)
    for cable, (a, b) in enumerate(pairs):
        for end, other, host in ((a, b, 1), (b, a, 2)):
            number = len(joined[end].machine.ports) + 1
            name = f"en{number + 1}"
            port = Port(
                receptacle=number,
                interface=name,
                domain=f"{cable}-{end}",
                peer_domain=f"{cable}-{other}",
                hub=False,
                gbps=_THUNDERBOLT[generation],
                rdma=f"rdma_{name}" if rdma else "",
                active=rdma,
            )
            address = f"10.{cable // 256}.{cable % 256}.{host}"
            interface = Interface(name, address, 30, "thunderbolt", _THUNDERBOLT[generation] * 1000, True)
            joined[end] = _with(joined[end], [interface], [port])
    return joined


def _with(member: MemberMachine, interfaces: Sequence[Interface], ports: Sequence[Port]) -> MemberMachine:
    had = member.machine
    more = replace(had, interfaces=(*had.interfaces, *interfaces), ports=(*had.ports, *ports))
    return replace(member, machine=more)

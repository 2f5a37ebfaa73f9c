"""Addresses of other nodes: the announced ones, and the next ones to dial. Pure: time is an argument."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..background import Backoff

# --- cache of the nodes that announce themselves on the network ------------------------------------------
# A sighting only hints at where a node may be, because any device on the network can announce anything. So
# every sighting is checked, their number is limited, and they expire.

SERVICE = "_mlxtp._tcp.local."
TXT_VERSION = "1"

MAX_SIGHTINGS = 64
MAX_ADDRESSES = 16
_MAX_WAITING = 64
_MAX_TXT_KEYS = 16
_MAX_TXT_BYTES = 512
_MAX_LABEL_BYTES = 63  #: RFC 1035, section 2.3.4.

#: Seconds between two checks of a sighting. A check queries the network only if the host's records have
#: expired, after 120 s (RFC 6762, section 10).
CONFIRM_S = 30.0
BELIEVED_S = 60.0  #: Seconds that a sighting stays accepted without its records.
RETRY = Backoff(1.0, 60.0)  #: Pauses between requests for missing records.

#: Keys of the TXT record, with each value's pattern and description. A missing value counts as empty.
_TXT = {
    b"txtvers": (re.compile(TXT_VERSION.encode()), TXT_VERSION),
    b"id": (re.compile(rb"[0-9a-f]{32}"), "32 hex digits"),
    b"cl": (re.compile(rb"([0-9a-f]{16})?"), "16 hex digits or empty"),
    b"v": (re.compile(rb"[0-9]{1,4}"), "a number of up to 4 digits"),
    b"ca": (re.compile(rb"1?"), "1 or empty"),
}


@dataclass(frozen=True, slots=True)
class Advert:
    """Announcement of a node, for every device on the network."""

    node_id: str
    cluster_id: str  #: "" without a cluster
    name: str
    port: int  #: the control port
    has_ca: bool  #: It can admit joiners.
    version: int

    def service(self) -> str:
        ending = f" [{self.node_id[:8]}]"
        # A dot would begin another label of the name.
        printable = "".join(char if char.isprintable() else "" for char in self.name.replace(".", "-"))
        room = _MAX_LABEL_BYTES - len(ending) - len("-9999")
        short = printable.encode("utf-8", "ignore")[:room].decode("utf-8", "ignore").strip()
        return f"{short or 'mlxtp'}{ending}.{SERVICE}"

    def properties(self) -> dict[str, str]:
        return {
            "txtvers": TXT_VERSION,
            "id": self.node_id,
            "cl": self.cluster_id,
            "v": str(self.version),
            "ca": "1" if self.has_ca else "",
        }


@dataclass(frozen=True, slots=True)
class DiscoveredPeer:
    """Announcement of a peer, not authenticated."""

    node_id: str
    cluster_id: str
    name: str
    addresses: tuple[str, ...]  #: 1 to 16 times "ip:port", sorted
    has_ca: bool
    version: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Records that no mlxtp node would announce, and why."""

    reason: str


def validate(
    service: str,
    properties: Mapping[bytes, bytes | None],
    addresses: Sequence[bytes],
    port: int | None,
    *,
    loopback: bool = False,
) -> DiscoveredPeer | Refused:
    """Return the peer that these records describe, without `addresses` (packed) that cannot be dialed.

    `loopback`: only loopback addresses count, else only others.
    """
    if isinstance(label := _label(service), Refused):
        return label
    if isinstance(told := _read_txt(properties), Refused):
        return told
    if port is None or not 0 < port < 1 << 16:
        return Refused(f"port {port} is not from 1 to 65535")
    hosts = sorted({host for host in map(_host, addresses) if host and host.is_loopback == loopback})
    if not hosts:
        return Refused("no IPv4 address that could be dialled")
    return replace(
        told,
        name=label.rpartition(" [")[0] or label,
        addresses=tuple(f"{host}:{port}" for host in hosts[:MAX_ADDRESSES]),
    )


def _label(service: str) -> str | Refused:
    if not service.endswith(f".{SERVICE}"):
        return Refused(f"the name does not end with {SERVICE}")
    label = service.removesuffix(f".{SERVICE}")
    size = len(label.encode("utf-8", "replace"))
    if not 0 < size <= _MAX_LABEL_BYTES:
        return Refused(f"a name of {size} bytes; it has 1 to {_MAX_LABEL_BYTES}")
    if not label.isprintable():
        return Refused("the name has characters that cannot be printed")
    return label


def _read_txt(properties: Mapping[bytes, bytes | None]) -> DiscoveredPeer | Refused:
    """Parse a TXT record. Unknown keys are ignored, for later versions."""
    size = sum(len(key) + len(value or b"") for key, value in properties.items())
    if len(properties) > _MAX_TXT_KEYS or size > _MAX_TXT_BYTES:
        return Refused(f"a TXT record of {len(properties)} keys and {size} bytes")
    values = {key: properties.get(key) or b"" for key in _TXT}
    for key, (pattern, what) in _TXT.items():
        if not pattern.fullmatch(values[key]):
            return Refused(f"{key.decode()} is not {what}")
    if values[b"ca"] and not values[b"cl"]:
        return Refused("the key of a cluster that has no id")
    node_id, cluster_id = values[b"id"].decode(), values[b"cl"].decode()
    return DiscoveredPeer(node_id, cluster_id, "", (), bool(values[b"ca"]), int(values[b"v"]))


def _host(packed: bytes) -> ipaddress.IPv4Address | None:
    if len(packed) != 4 or not packed[0]:  # 0.0.0.0/8 is "this network"
        return None
    host = ipaddress.IPv4Address(packed)
    return None if host.is_multicast or host.is_reserved else host


def is_copy(service: str, sighting: DiscoveredPeer, own_service: str, own_addresses: Collection[str]) -> bool:
    """Return True if another machine announces our node id: our home folder was copied."""
    here = any(address.rpartition(":")[0] in own_addresses for address in sighting.addresses)
    return service != own_service or not here


#: Remedy if macOS keeps a process from the local network. Source of the exemptions: Apple's TN3179.
ALLOW = (
    "allow it, or the app that it was started in (iTerm, an editor), in System Settings > Privacy & Security "
    "> Local Network; a LaunchDaemon (`mlxtp service install`) needs no permission, nor does a session of "
    "Terminal or ssh that stays open"
)


def explain(errno: int | None, detail: str) -> str:
    """Return why discovery fails, and a remedy, for the user. `errno`: raised by a send."""
    aid = "other Macs can be named by --peer HOST:PORT meanwhile"
    match errno:
        case 65:  # EHOSTUNREACH as macOS numbers it
            return (
                "macOS does not let this process reach the local network, if there is one (errno 65, No "
                f"route to host). That is Local Network Privacy: {ALLOW}. Until then neither multicast nor "
                "--peer can work."
            )
        case 48 | 98:  # EADDRINUSE: macOS, Linux
            return f"UDP port 5353 is taken by a program that does not share it: {detail}; {aid}"
        case None:
            return f"other Macs cannot be found by multicast: {detail}"
        case _:
            return f"other Macs cannot be found by multicast: {detail}; {aid}"


@dataclass(slots=True)
class _Entry:
    """An announced name."""

    due: float  #: when to check its records
    tries: int = 0
    seen: float = 0.0  #: when they were last there
    sighting: DiscoveredPeer | None = None


class PeerCache:
    """Announced names, in two kinds: waiting for their records, or accepted. Refused ones are forgotten.

    Each kind has room for 64; the name announced longest ago is dropped.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Entry] = {}
        self._believed: dict[str, _Entry] = {}

    def announced(self, service: str, now: float) -> None:
        if service in self._believed:
            self._believed[service].due = now
            return
        if isinstance(_label(service), Refused):
            return
        self._waiting.pop(service, None)
        _put(self._waiting, service, _Entry(due=now), _MAX_WAITING)

    def doubt(self, now: float) -> None:
        for entry in (*self._waiting.values(), *self._believed.values()):
            entry.due, entry.tries = now, 0

    def withdrawn(self, service: str) -> bool:
        """Drop a name after its owner's goodbye. Return True if accepted sightings changed."""
        self._waiting.pop(service, None)
        return self._believed.pop(service, None) is not None

    def due(self, now: float) -> list[str]:
        """Return names to check now: the least tried first, then the latest announced."""
        entries = [*self._waiting.items(), *self._believed.items()]
        ready = [(name, entry) for name, entry in reversed(entries) if entry.due <= now]
        return [name for name, entry in sorted(ready, key=lambda pair: pair[1].tries)]

    def next_due(self) -> float | None:
        return min((e.due for group in (self._waiting, self._believed) for e in group.values()), default=None)

    def resolved(self, service: str, verdict: DiscoveredPeer | Refused, now: float) -> bool:
        """Apply the verdict on a name's records. Return True if accepted sightings changed."""
        waiting = self._waiting.pop(service, None)
        before = self._believed.pop(service, None)
        if waiting is None and before is None:
            return False  # withdrawn or crowded out before its records arrived
        if isinstance(verdict, Refused):
            return before is not None
        changed = before is None or before.sighting != verdict
        _put(self._believed, service, _Entry(now + CONFIRM_S, seen=now, sighting=verdict), MAX_SIGHTINGS)
        return changed

    def failed(self, service: str, now: float) -> bool:
        """Retry later, as no records arrived. Return True if a sighting expired, after BELIEVED_S."""
        entry = self._waiting.get(service) or self._believed.get(service)
        if entry is None:
            return False
        entry.due = now + RETRY.after(entry.tries)
        entry.tries += 1
        if entry.sighting is None or now - entry.seen < BELIEVED_S:
            return False
        del self._believed[service]
        _put(self._waiting, service, replace(entry, sighting=None), _MAX_WAITING)
        return True

    @property
    def believed(self) -> tuple[DiscoveredPeer, ...]:
        return tuple(entry.sighting for _, entry in sorted(self._believed.items()) if entry.sighting)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._believed)


def _put(group: dict[str, _Entry], name: str, entry: _Entry, most: int) -> None:
    group[name] = entry
    if len(group) > most:
        del group[next(iter(group))]


# --- choice of the interfaces to announce on -------------------------------------------------------------

_NETWORK, _CABLE, _TUNNEL = range(3)


def announced_from(numbers: Mapping[str, int], prefixes: Mapping[str, int], primary: str) -> list[str]:
    """Return an address of the main network's interface and of one more, preferably a cable's.

    `numbers`: interface of each address. `primary`: address of the default route. Both ends of two cables
    choose the same cable. When all addresses were announced, macOS renamed its host hundreds of times.
    """

    def kind(address: str) -> int:
        prefix = prefixes.get(address, 24)
        if prefix == 32:
            return _TUNNEL
        return _CABLE if prefix >= 30 or ipaddress.ip_address(address).is_link_local else _NETWORK

    def rank(address: str) -> tuple[int, bool, int, int]:
        network = ipaddress.IPv4Network((address, prefixes.get(address, 24)), strict=False)
        return (kind(address), address != primary, int(network.network_address), numbers[address])

    first, *others = sorted(numbers, key=rank)
    others = [a for a in others if numbers[a] != numbers[first] and kind(a) != _TUNNEL]
    return [first, *sorted(others, key=lambda address: kind(address) != _CABLE)[:1]]


# --- choice of the addresses to dial, to keep a link with every node of the cluster ----------------------
# Addresses ("host:port", compared as text) are from the user (`--peer`), from links of earlier runs, and from
# sightings. Only a link shows which node is there.

V = TypeVar("V")

AT_ONCE = 8
#: Sightings among the AT_ONCE dials: false ones must not crowd out other addresses.
HINTED_AT_ONCE = 6
AT_ONCE_A_NODE = 2  #: As many unauthenticated connections as a node admits from one source.
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
FOREIGN_S = 60.0
STEADY_S = 10.0  #: Seconds. The address of a link that lasted this long is dialed again at once.
DIAL_S = 30.0  #: Seconds until a dial without a result has failed.
MAX_KNOWN = 2048
MAX_LENGTH = 300  #: Characters of an address. A host name has up to 253.
_BACKOFF = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
_MAX_KEPT = 256
_MAX_MARKED = 64


def host_and_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    if not host or len(address) > MAX_LENGTH or not port.isascii() or not port.isdecimal():
        return None
    return (host, int(port)) if 0 < int(port) < 1 << 16 else None


@dataclass(slots=True)
class _Address:
    static: bool = False
    hinted: set[str] = field(default_factory=set)  #: nodes that sightings report there
    kept: str = ""  #: the node that an earlier link reached there
    found: str = ""  #: the node that answered last
    tries: int = 0  #: dials since the last reason to retry at once
    due: float = 0.0
    reached_at: float = float("-inf")

    def wanted(self, linked: Collection[str]) -> list[str]:
        """Return the unlinked nodes that may be here; "" stands for an unknown node."""
        if self.static and not self.found:
            return [""]
        return [node for node in sorted({*self.hinted, self.kept, self.found}) if node and node not in linked]

    @property
    def is_only_hinted(self) -> bool:
        return not self.static and not self.kept


class Dialing:
    """Addresses known to one node of a cluster, and when to dial them. `static`: the user's own.

    Call `tick` about twice a second, and dial what it returns. Report each result by `reached`, `failed`,
    `ourselves` or `foreign`.
    """

    def __init__(self, node_id: str, cluster_id: str, static: Iterable[str] = ()) -> None:
        self._node_id = node_id
        self._cluster_id = cluster_id
        self._addresses = {address: _Address(static=True) for address in static}
        self._sighted: set[tuple[str, str]] = set()
        self._in_flight: dict[str, tuple[float, str]] = {}
        self._dialled: dict[str, float] = {}
        self._own: dict[str, None] = {}
        self._foreign: dict[str, float] = {}

    # --- what is known

    def remember(self, node_id: str, addresses: Iterable[str]) -> None:
        for address in addresses:
            self._keep(address, node_id)

    def remembered(self) -> Mapping[str, tuple[str, ...]]:
        """Return each node's addresses from earlier links, latest first."""
        nodes: dict[str, list[tuple[float, str]]] = {}
        for address, entry in self._addresses.items():
            if entry.kept:
                nodes.setdefault(entry.kept, []).append((-entry.reached_at, address))
        return {node: tuple(address for _, address in sorted(found)) for node, found in nodes.items()}

    def forget(self, node_id: str) -> None:
        for address, entry in list(self._addresses.items()):
            entry.kept = "" if entry.kept == node_id else entry.kept
            entry.found = "" if entry.found == node_id else entry.found
            self._drop_if_idle(address)

    def sighted(self, sightings: Sequence[DiscoveredPeer], now: float) -> None:
        """Replace the current sightings. New addresses of this cluster are due at once."""
        believed = {
            (sighting.node_id, address)
            for sighting in sightings
            if sighting.cluster_id == self._cluster_id and sighting.node_id != self._node_id
            for address in sighting.addresses
        }
        for node_id, address in self._sighted - believed:
            if address in self._addresses:
                self._addresses[address].hinted.discard(node_id)
                self._drop_if_idle(address)
        for node_id, address in sorted(believed - self._sighted):
            if (entry := self._entry(address)) is not None:
                entry.hinted.add(node_id)
                self._give_hope(address, now)
        self._sighted = believed

    def interfaces_changed(self, now: float) -> None:
        """Make all addresses due, since they may now lead to other nodes."""
        self._own.clear()
        self._foreign.clear()
        for address in self._addresses:
            self._give_hope(address, now)

    # --- what to do

    def tick(self, now: float, linked: Collection[str]) -> list[str]:
        """Return the addresses to dial now. `linked`: ids of nodes that need no dial."""
        for address, (since, _) in list(self._in_flight.items()):
            if now - since >= DIAL_S:
                self.failed(address, now)
        for entry in self._addresses.values():
            if entry.found in linked and now - entry.reached_at >= STEADY_S:
                entry.tries, entry.due = 0, min(entry.due, now)
        chosen = []
        for address, entry in sorted(self._addresses.items(), key=lambda pair: _turn(pair[1])):
            node = self._node_to_dial(address, entry, now, linked)
            if node is not None:
                self._in_flight[address] = (now, node)
                _mark(self._dialled, address, now, MAX_KNOWN)
                chosen.append(address)
        return chosen

    def _node_to_dial(self, address: str, entry: _Address, now: float, linked: Collection[str]) -> str | None:
        """Return the node to reach by dialing this address; None if the address must wait."""
        if address in self._in_flight or address in self._own or now < entry.due:
            return None
        if now - self._dialled.get(address, float("-inf")) < FIRST_BACKOFF_S:
            return None
        if len(self._in_flight) >= AT_ONCE:
            return None
        hinted = sum(1 for a in self._in_flight if a in self._addresses and self._addresses[a].is_only_hinted)
        if entry.is_only_hinted and hinted >= HINTED_AT_ONCE:
            return None
        busy = [node for _, node in self._in_flight.values()]
        free = (node for node in entry.wanted(linked) if not node or busy.count(node) < AT_ONCE_A_NODE)
        return next(free, None)

    # --- results

    def reached(self, address: str, node_id: str, now: float) -> None:
        """Record an open link, which refutes other hints. If it breaks soon, its dial counts as failed."""
        if node_id == self._node_id:
            self.ourselves(address)
            return
        self._in_flight.pop(address, None)
        self._keep(address, node_id)
        if (entry := self._addresses.get(address)) is not None:
            entry.hinted.clear()
            entry.found, entry.reached_at = node_id, now
            _back_off(entry, now)

    def failed(self, address: str, now: float) -> None:
        self._in_flight.pop(address, None)
        if address in self._addresses:
            _back_off(self._addresses[address], now)
            self._drop_if_idle(address)

    def ourselves(self, address: str) -> None:
        """Record that this node itself answered. The address rests until the interfaces change."""
        self._in_flight.pop(address, None)
        _mark(self._own, address, None, _MAX_MARKED)
        if address in self._addresses:
            self._drop_if_idle(address)

    def foreign(self, address: str, now: float) -> None:
        """Record that a node of another cluster answered. The address rests for a minute."""
        self._in_flight.pop(address, None)
        _mark(self._foreign, address, now + FOREIGN_S, _MAX_MARKED)
        if (entry := self._addresses.get(address)) is not None:
            entry.found, entry.due = "", now + FOREIGN_S
            self._drop_if_idle(address)

    # --- keeping books

    def __len__(self) -> int:
        return len(self._addresses)

    def _entry(self, address: str) -> _Address | None:
        if address not in self._addresses:
            if len(self._addresses) >= MAX_KNOWN and not self._make_room():
                return None
            self._addresses[address] = _Address(due=self._foreign.get(address, 0.0))
        return self._addresses[address]

    def _make_room(self) -> bool:
        for address, entry in self._addresses.items():
            if entry.is_only_hinted and address not in self._in_flight:
                del self._addresses[address]
                return True
        return False

    def _keep(self, address: str, node_id: str) -> None:
        entry = self._entry(address) if node_id != self._node_id else None
        if entry is None:
            return
        entry.kept = node_id
        kept = [(entry.reached_at, address) for address, entry in self._addresses.items() if entry.kept]
        if len(kept) > _MAX_KEPT:
            _, oldest = min(pair for pair in kept if pair[1] != address)
            self._addresses[oldest].kept = ""
            self._drop_if_idle(oldest)

    def _give_hope(self, address: str, now: float) -> None:
        """Make the address due now. `_node_to_dial` still spaces its dials by the shortest backoff."""
        entry = self._addresses[address]
        entry.tries = 0
        entry.due = max(now, self._foreign.get(address, now))

    def _drop_if_idle(self, address: str) -> None:
        entry = self._addresses[address]
        if entry.is_only_hinted and not entry.hinted and address not in self._in_flight:
            del self._addresses[address]


def _turn(entry: _Address) -> tuple[bool, int, float]:
    """Sort key: first addresses that are more than a hint, then the least tried, then the first due."""
    return (entry.is_only_hinted, entry.tries, entry.due)


def _back_off(entry: _Address, now: float) -> None:
    entry.due = now + _BACKOFF.after(entry.tries)
    entry.tries = min(entry.tries + 1, 16)


def _mark(marks: dict[str, V], address: str, value: V, most: int) -> None:
    marks.pop(address, None)
    marks[address] = value
    if len(marks) > most:
        del marks[next(iter(marks))]

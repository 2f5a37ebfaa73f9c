"""Cache of the nodes that announce themselves on the network.

A sighting is a hint where a node may be reached; it makes no node a member. Any device on the network can
announce anything. So every sighting is checked, their number is limited, and they expire. `discovery/mdns.py`
passes the records; time is in seconds of any clock that only goes forward.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..background import Backoff

SERVICE = "_mlxtp._tcp.local."
TXT_VERSION = "1"

MAX_SIGHTINGS = 64
MAX_ADDRESSES = 16
_MAX_WAITING = 64
_MAX_TXT_KEYS = 16
_MAX_TXT_BYTES = 512
_MAX_LABEL_BYTES = 63  #: RFC 1035, section 2.3.4.

#: Seconds between two checks of a sighting against its records. The network is queried only if those are too
#: old, which is after 120 s for a host's (RFC 6762, section 10).
CONFIRM_S = 30.0
BELIEVED_S = 60.0  #: Seconds for which a sighting is accepted after its records were last there.
RETRY = Backoff(1.0, 60.0)  #: Pauses between requests for records that do not come.

#: The keys of the TXT record: the pattern of each value, and its description. A missing one is an empty one.
_TXT = {
    b"txtvers": (re.compile(TXT_VERSION.encode()), TXT_VERSION),
    b"id": (re.compile(rb"[0-9a-f]{32}"), "32 hex digits"),
    b"cl": (re.compile(rb"([0-9a-f]{16})?"), "16 hex digits or empty"),
    b"v": (re.compile(rb"[0-9]{1,4}"), "a number of up to 4 digits"),
    b"ca": (re.compile(rb"1?"), "1 or empty"),
}


@dataclass(frozen=True, slots=True)
class Advert:
    """Announcement of a node, readable by every device on the network: no secrets.

    `name` is for people. `cluster_id` is empty for a node without a cluster. `has_ca`: the node handles
    joins. `port` is the control port, `version` that of the protocol.
    """

    node_id: str
    cluster_id: str
    name: str
    port: int
    has_ca: bool
    version: int

    def service(self) -> str:
        """Return its full name on the network: the node's name, made printable, and the start of its id."""
        ending = f" [{self.node_id[:8]}]"
        # A dot would start another part of the name.
        printable = "".join(char if char.isprintable() else "" for char in self.name.replace(".", "-"))
        room = _MAX_LABEL_BYTES - len(ending) - len("-9999")
        short = printable.encode("utf-8", "ignore")[:room].decode("utf-8", "ignore").strip()
        return f"{short or 'mlxtp'}{ending}.{SERVICE}"

    def properties(self) -> dict[str, str]:
        """Return its TXT record, the version of that record first."""
        return {
            "txtvers": TXT_VERSION,
            "id": self.node_id,
            "cl": self.cluster_id,
            "v": str(self.version),
            "ca": "1" if self.has_ca else "",
        }


@dataclass(frozen=True, slots=True)
class DiscoveredPeer:
    """Announcement of a peer, not authenticated. `addresses` are "ip:port", sorted, 1 to 16 of them."""

    node_id: str
    cluster_id: str
    name: str
    addresses: tuple[str, ...]
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
    """Return the peer that these records describe. `addresses` are packed; those that cannot be dialled are
    left out.

    With `loopback` only addresses of this machine's loopback count, otherwise only others.
    """
    label = _label(service)
    if isinstance(label, Refused):
        return label
    told = _read_txt(properties)
    if isinstance(told, Refused):
        return told
    if port is None or not 0 < port < 1 << 16:
        return Refused(f"port {port} is not from 1 to 65535")
    hosts = sorted(
        {host for host in map(_host, addresses) if host is not None and host.is_loopback == loopback}
    )
    if not hosts:
        return Refused("no IPv4 address that could be dialled")
    return replace(
        told,
        name=label.rpartition(" [")[0] or label,
        addresses=tuple(f"{host}:{port}" for host in hosts[:MAX_ADDRESSES]),
    )


def _label(service: str) -> str | Refused:
    """Return the first part of a full name."""
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
    """Return the peer in a TXT record. Unknown keys are ignored: they are for later versions."""
    size = sum(len(key) + len(value or b"") for key, value in properties.items())
    if len(properties) > _MAX_TXT_KEYS or size > _MAX_TXT_BYTES:
        return Refused(f"a TXT record of {len(properties)} keys and {size} bytes")
    values = {key: properties.get(key) or b"" for key in _TXT}
    for key, (pattern, what) in _TXT.items():
        if not pattern.fullmatch(values[key]):
            return Refused(f"{key.decode()} is not {what}")
    if values[b"ca"] and not values[b"cl"]:
        return Refused("the key of a cluster that has no id")
    return DiscoveredPeer(
        node_id=values[b"id"].decode(),
        cluster_id=values[b"cl"].decode(),
        name="",
        addresses=(),
        has_ca=bool(values[b"ca"]),
        version=int(values[b"v"]),
    )


def _host(packed: bytes) -> ipaddress.IPv4Address | None:
    """Return an IPv4 address that one machine can have; None for other addresses."""
    if len(packed) != 4:
        return None
    host = ipaddress.IPv4Address(packed)
    nobodys = host.is_multicast or host.is_reserved or host in _THIS_NETWORK
    return None if nobodys else host


_THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")


def is_copy(service: str, sighting: DiscoveredPeer, own_service: str, own_addresses: Collection[str]) -> bool:
    """Return True if a sighting with our node id is from elsewhere, because our home folder was copied.

    `own_service` is the name we are announced by, `own_addresses` are this machine's.
    """
    here = any(address.rpartition(":")[0] in own_addresses for address in sighting.addresses)
    return service != own_service or not here


def explain(errno: int | None, detail: str) -> str:
    """Return a message for the user: why discovery fails and how to fix it. `errno` is what a send raised."""
    aid = "other Macs can be named by --peer HOST:PORT meanwhile"
    match errno:
        case 65:  # EHOSTUNREACH as macOS numbers it
            return (
                "macOS does not let this process reach the local network, if there is one (errno 65, No "
                "route to host). That is Local Network Privacy: allow it in System Settings, Privacy & "
                "Security, Local Network, or run it as a LaunchDaemon (`mlxtp service install`), which is "
                "exempt. Until then neither multicast nor --peer can work."
            )
        case 48 | 98:  # EADDRINUSE: macOS, Linux
            return f"UDP port 5353 is taken by a program that does not share it: {detail}; {aid}"
        case None:
            return f"other Macs cannot be found by multicast: {detail}"
        case _:
            return f"other Macs cannot be found by multicast: {detail}; {aid}"


@dataclass(slots=True)
class _Entry:
    """An announced name. `due` is when to check its records, `seen` when they were last there."""

    due: float
    tries: int = 0
    seen: float = 0.0
    sighting: DiscoveredPeer | None = None


class PeerCache:
    """Announced names, and the sightings that were accepted.

    Each name either waits for its records or is accepted. A name whose records are refused is forgotten until
    it has others. At most 64 wait and 64 are accepted: the one announced longest ago goes.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Entry] = {}
        self._believed: dict[str, _Entry] = {}

    def announced(self, service: str, now: float) -> None:
        """Check the records of this name now, because they are new or changed."""
        if service in self._believed:
            self._believed[service].due = now
            return
        if isinstance(_label(service), Refused):
            return
        self._waiting.pop(service, None)
        _put(self._waiting, service, _Entry(due=now), _MAX_WAITING)

    def doubt(self, now: float) -> None:
        """Check all names again, because earlier announcements no longer count."""
        for entry in (*self._waiting.values(), *self._believed.values()):
            entry.due, entry.tries = now, 0

    def withdrawn(self, service: str) -> bool:
        """Drop a name after its owner's goodbye, or because its records are too old. Returns True if accepted
        sightings changed.
        """
        self._waiting.pop(service, None)
        return self._believed.pop(service, None) is not None

    def due(self, now: float) -> list[str]:
        """Return names whose records to check now, the least tried first, among them the latest announced."""
        entries = [*self._waiting.items(), *self._believed.items()]
        ready = [(name, entry) for name, entry in reversed(entries) if entry.due <= now]
        return [name for name, entry in sorted(ready, key=lambda pair: pair[1].tries)]

    def next_due(self) -> float | None:
        """Return the time at which `due` will have something, as far as is known."""
        return min((e.due for group in (self._waiting, self._believed) for e in group.values()), default=None)

    def resolved(self, service: str, verdict: DiscoveredPeer | Refused, now: float) -> bool:
        """Store the verdict on its records. Returns True if accepted sightings changed."""
        waiting = self._waiting.pop(service, None)
        before = self._believed.pop(service, None)
        if waiting is None and before is None:
            return False  # withdrawn, or crowded out, while its records were on their way
        if isinstance(verdict, Refused):
            return before is not None
        changed = before is None or before.sighting != verdict
        _put(self._believed, service, _Entry(now + CONFIRM_S, seen=now, sighting=verdict), MAX_SIGHTINGS)
        return changed

    def failed(self, service: str, now: float) -> bool:
        """Schedule a retry after a request for records without reply. A sighting expires after BELIEVED_S.

        Returns True if accepted sightings changed.
        """
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
        """Accepted sightings, in the order of the names."""
        return tuple(entry.sighting for _, entry in sorted(self._believed.items()) if entry.sighting)

    def __len__(self) -> int:
        """Return the number of names kept."""
        return len(self._waiting) + len(self._believed)


def _put(group: dict[str, _Entry], name: str, entry: _Entry, most: int) -> None:
    """Add an entry; if that is one too many, drop the oldest."""
    group[name] = entry
    if len(group) > most:
        del group[next(iter(group))]

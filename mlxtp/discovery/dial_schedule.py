"""Choice of the addresses to dial, to keep a link with every node of the cluster. Pure: the caller passes the
time.

Addresses come from the user (`--peer`), from links of earlier runs, and from sightings on the network. Only
the link itself shows which node is there. Addresses are "host:port", compared as text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..background import Backoff
from .peer_cache import DiscoveredPeer

V = TypeVar("V")

AT_ONCE = 8
#: Hints from the network among the AT_ONCE dials: false ones must not crowd out the others.
HINTED_AT_ONCE = 6
AT_ONCE_A_NODE = 2  #: As many as a node admits from one source before they authenticate.
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
FOREIGN_S = 60.0
STEADY_S = 10.0  #: Seconds. When a link that lasted this long breaks, its address is dialled at once.
DIAL_S = 30.0  #: Seconds without a result after which a dial has failed.
MAX_ADDRESSES = 2048
MAX_LENGTH = 300  #: Characters of one address; a host name has up to 253.
_BACKOFF = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
_MAX_KEPT = 256
_MAX_MARKED = 64


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return the two parts of "host:port"; None for an invalid address."""
    host, _, port = address.rpartition(":")
    if not host or len(address) > MAX_LENGTH or not port.isascii() or not port.isdecimal():
        return None
    return (host, int(port)) if 0 < int(port) < 1 << 16 else None


@dataclass(slots=True)
class _Address:
    """One address. `hinted` and `kept` are the nodes reported there, by sightings and by earlier links.

    `found` is the node that answered last. `tries` counts dials since the last reason to retry at once.
    """

    static: bool = False
    hinted: set[str] = field(default_factory=set)
    kept: str = ""
    found: str = ""
    tries: int = 0
    due: float = 0.0
    reached_at: float = float("-inf")

    def wanted(self, linked: Collection[str]) -> list[str]:
        """Return the nodes without a link that may be here; "" stands for a node that is still unknown."""
        if self.static and not self.found:
            return [""]
        return [node for node in sorted({*self.hinted, self.kept, self.found}) if node and node not in linked]

    @property
    def is_only_hinted(self) -> bool:
        return not self.static and not self.kept


class Dialing:
    """Addresses known to one node of a cluster, with the times of their dials.

    `static` are the user's. Call `tick` about twice a second, dial what it returns, and report the end of
    each dial: one of `reached`, `failed`, `ourselves`, `foreign`.
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
        """Store addresses at which a node was reached in earlier runs."""
        for address in addresses:
            self._keep(address, node_id)

    def remembered(self) -> Mapping[str, tuple[str, ...]]:
        """Return the addresses at which each node was reached, the latest first, to keep over a restart."""
        nodes: dict[str, list[tuple[float, str]]] = {}
        for address, entry in self._addresses.items():
            if entry.kept:
                nodes.setdefault(entry.kept, []).append((-entry.reached_at, address))
        return {node: tuple(address for _, address in sorted(found)) for node, found in nodes.items()}

    def forget(self, node_id: str) -> None:
        """Forget the addresses of a node that was removed from the cluster."""
        for address, entry in list(self._addresses.items()):
            entry.kept = "" if entry.kept == node_id else entry.kept
            entry.found = "" if entry.found == node_id else entry.found
            self._drop_if_idle(address)

    def sighted(self, sightings: Sequence[DiscoveredPeer], now: float) -> None:
        """Replace the current sightings of the network; new addresses are dialled without waiting.

        Sightings of other clusters, and of our own id, are ignored.
        """
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
            entry = self._entry(address)
            if entry is not None:
                entry.hinted.add(node_id)
                self._give_hope(address, now)
        self._sighted = believed

    def interfaces_changed(self, now: float) -> None:
        """Retry all addresses, because this machine's addresses or cables changed: other nodes may be behind
        them now.
        """
        self._own.clear()
        self._foreign.clear()
        for address in self._addresses:
            self._give_hope(address, now)

    # --- what to do

    def tick(self, now: float, linked: Collection[str]) -> list[str]:
        """Return the addresses to dial now. `linked` are the ids of the nodes that need no dialling."""
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
                _mark(self._dialled, address, now, MAX_ADDRESSES)
                chosen.append(address)
        return chosen

    def _node_to_dial(self, address: str, entry: _Address, now: float, linked: Collection[str]) -> str | None:
        """Return the node that a dial of this address is for; None if the address has to wait."""
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

    # --- what came of it

    def reached(self, address: str, node_id: str, now: float) -> None:
        """Record an open link: this node is there, and other hints about the address were wrong.

        If the link breaks soon, the address waits as if the dial had failed.
        """
        if node_id == self._node_id:
            self.ourselves(address)
            return
        self._in_flight.pop(address, None)
        self._keep(address, node_id)
        entry = self._addresses.get(address)
        if entry is not None:
            entry.hinted.clear()
            entry.found, entry.reached_at = node_id, now
            _back_off(entry, now)

    def failed(self, address: str, now: float) -> None:
        """Record a dial without an answer, or without that of a node of this cluster."""
        self._in_flight.pop(address, None)
        if address in self._addresses:
            _back_off(self._addresses[address], now)
            self._drop_if_idle(address)

    def ourselves(self, address: str) -> None:
        """Record that this node itself answered. It is dialled again only if this machine's interfaces
        change.
        """
        self._in_flight.pop(address, None)
        _mark(self._own, address, None, _MAX_MARKED)
        if address in self._addresses:
            self._drop_if_idle(address)

    def foreign(self, address: str, now: float) -> None:
        """Record an answer by a node of another cluster. The address is dialled again after a minute."""
        self._in_flight.pop(address, None)
        _mark(self._foreign, address, now + FOREIGN_S, _MAX_MARKED)
        entry = self._addresses.get(address)
        if entry is not None:
            entry.found, entry.due = "", now + FOREIGN_S
            self._drop_if_idle(address)

    # --- keeping books

    def __len__(self) -> int:
        """Return the number of known addresses."""
        return len(self._addresses)

    def _entry(self, address: str) -> _Address | None:
        """Return the entry of this address, which may be a new one; None if there is no room."""
        if address not in self._addresses:
            if len(self._addresses) >= MAX_ADDRESSES and not self._make_room():
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
        """Let the address be dialled now, though never twice within the shortest backoff."""
        entry = self._addresses[address]
        entry.tries = 0
        entry.due = max(now, self._foreign.get(address, now))

    def _drop_if_idle(self, address: str) -> None:
        entry = self._addresses[address]
        if entry.is_only_hinted and not entry.hinted and address not in self._in_flight:
            del self._addresses[address]


def _turn(entry: _Address) -> tuple[bool, int, float]:
    """Sort key: addresses that are more than a hint first, then the least tried, then the longest waiting."""
    return (entry.is_only_hinted, entry.tries, entry.due)


def _back_off(entry: _Address, now: float) -> None:
    entry.due = now + _BACKOFF.after(entry.tries)
    entry.tries = min(entry.tries + 1, 16)


def _mark(marks: dict[str, V], address: str, value: V, most: int) -> None:
    """Record `value` for an address, even one that is not to be dialled. The oldest mark is dropped."""
    marks.pop(address, None)
    marks[address] = value
    if len(marks) > most:
        del marks[next(iter(marks))]

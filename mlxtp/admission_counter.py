"""Counter of what is open at one time, in all and of each source; places of connections, and fair order.

Pure: its callers accept, refuse and close.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass


class AdmissionCounter:
    """Admits at most `most` at one time, and of these at most `most_of_one` of one source."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._open: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Number of those that are open, of all sources."""
        return self._open.total()

    def of(self, source: str) -> int:
        """Return the number of those that are open of one source."""
        return self._open[source]

    def admit(self, source: str, *, exempt: bool = False) -> str:
        """Count one more, or return why it is refused; an empty text admits it.

        `exempt`: only the bound of all sources applies.
        """
        if not exempt and self._open[source] >= self._most_of_one:
            return "too many from one address"
        if self.total >= self._most:
            return "too many"
        self._open[source] += 1
        return ""

    def release(self, source: str) -> None:
        """Count one less of a source. Call it once for each that was admitted."""
        self._open[source] -= 1
        if not self._open[source]:
            del self._open[source]  # a source that is gone takes no memory


# --- places of HTTP connections ---------------------------------------------------------------------------


#: Places that loopback alone may take, and as many for connections that have shown a valid key.
RESERVED = 64


@dataclass(eq=False, slots=True)
class Place:
    """Place of one connection, which `close` cuts. `refusal`: why all its requests are refused; else ""."""

    close: Callable[[], None]
    source: str
    local: bool
    known: bool = False
    refusal: str = ""


class Places:
    """All places: `most` and `most_of_one` that are served, and those that at least get a refusal.

    A connection is silent until it has sent a complete head that was admitted: with a valid key, where one is
    needed. Beyond half of all places, each newcomer closes the oldest silent connection. So a machine that
    opens thousands and sends nothing closes its own. None from elsewhere closes one of this Mac.
    """

    def __init__(self, most: int, most_of_one: int, refused: int, refused_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._reserved = min(RESERVED, most // 8)
        self._open = AdmissionCounter(refused, refused_of_one)
        self._local = self._known = 0  # `_known`: those from elsewhere
        #: By `local` and `known`, the oldest first: silent connections, and known ones between two requests.
        self._weak: dict[tuple[bool, bool], dict[Place, None]] = {
            (local, known): {} for local in (False, True) for known in (False, True)
        }

    def enter(self, address: str, close: Callable[[], None]) -> Place | None:
        """Return a place, which may cost another connection its own; None where there is none at all."""
        place = Place(close, *source_of(address))
        if self._open.total >= self._most // 2:
            self._close_oldest(place.local, known=False)
        if not (room := self._has_room(place.local)):
            self._close_oldest(place.local, known=True)
            room = self._has_room(place.local)
        if self._open.admit(place.source):
            return None
        if self._open.of(place.source) > self._most_of_one:
            place.refusal = (
                f"{self._most_of_one} connections of {place.source} are open, the most for one address"
            )
        elif not room:
            place.refusal = f"{self._most} connections are open, the most this server takes"
        self._local += place.local
        self._weak[place.local, False][place] = None
        return place

    def admit(self, place: Place) -> None:
        """Note that a request of this connection was admitted."""
        if self._weak[place.local, place.known].pop(place, place) is None and not place.known:
            self._known += not place.local
            place.known = True

    def rest(self, place: Place) -> None:
        """Note that a connection has no request any more."""
        if place.known and place.source:
            self._weak[place.local, True][place] = None

    def release(self, place: Place) -> None:
        """Give a place back. May be repeated."""
        self._weak[place.local, place.known].pop(place, None)
        if place.source:
            self._open.release(place.source)
            self._local -= place.local
            self._known -= place.known and not place.local
            place.source = ""  # given back

    def _has_room(self, local: bool) -> bool:
        others, served = self._open.total - self._local, self._most - self._reserved
        return self._open.total < self._most and (
            local or (others < served and others - self._known < served - self._reserved)
        )

    def _close_oldest(self, local: bool, *, known: bool) -> None:
        """Close one of another machine; if there is none, for a newcomer of this Mac, one of this Mac."""
        for own in (False, True)[: 1 + local]:
            if (oldest := next(iter(self._weak[own, known]), None)) is not None:
                self.release(oldest)
                oldest.close()
                return


def source_of(address: str) -> tuple[str, bool]:
    """Return the source that an address counts as, and True for loopback. IPv6 counts by /64."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address or "?", False
    if isinstance(found, ipaddress.IPv6Address) and not found.is_loopback:
        if found.ipv4_mapped is None:
            return str(ipaddress.ip_network((found, 64), strict=False)), False
        found = found.ipv4_mapped
    return str(found), found.is_loopback


# --- fair order of requests when several clients wait ----------------------------------------------------
# Start-time fair queueing (Goyal, Vin and Cheng, 1996), with every request as large as every other. A
# client's requests get successive start numbers, and a new client gets the number that is being served. If
# one client has 136 requests waiting, at most one of them goes before a new client's.

MAX_CLIENTS = 1024  # clients whose last number is remembered


class FairQueue:
    """Start numbers that order waiting requests: lower ones first, equal ones as they came."""

    def __init__(self) -> None:
        self._now = 0  # the highest number that has begun
        self._begun: dict[Hashable, int] = {}  # by client, its highest number that has begun

    def following(self, client: Hashable, waiting: Iterable[int]) -> int:
        """Return the number of a client's new request. `waiting`: those of its others that wait."""
        own = max(waiting, default=-1)
        return max(self._now, own + 1, self._begun.get(client, -1) + 1)

    def record(self, client: Hashable, turn: int) -> None:
        """Record that a client's request has begun."""
        self._now = max(self._now, turn)
        self._begun[client] = max(turn, self._begun.get(client, 0))
        if len(self._begun) > MAX_CLIENTS:  # from the next number on, none of these is ahead of the others
            self._now += 1
            self._begun.clear()

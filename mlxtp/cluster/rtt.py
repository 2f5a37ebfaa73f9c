"""Round-trip times to other agents over the control links, and the times that others report of theirs."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Mapping

from ..errors import MlxtpError
from ..wire.cluster_messages import MAX_TRIP_US, Echo, Trip
from .links import ControlLink, PeerLinks

ASK_S = 2.0
#: Trips of half a minute: the best of them is the link's time, the others were held up in an agent.
_KEPT = 15


class RoundTripTimes:
    """Measures round trips: requests go out every ASK_S, replies at once.

    Times are in seconds of a clock that does not jump.
    """

    def __init__(self, node_id: str, links: PeerLinks) -> None:
        self._node_id = node_id
        self._links = links
        self._asked: dict[str, int] = {}  #: By node id: the open request, named by its time in microseconds.
        self._took: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._reported: dict[str, Mapping[str, int]] = {}

    def ask(self, now: float) -> None:
        """Send a request to every node that has a link."""
        nodes, asked_us = self._links.nodes(), round(now * 1e6)
        for known in (self._took, self._reported):
            for gone in known.keys() - nodes:
                del known[gone]
        self._asked = dict.fromkeys(nodes, asked_us)
        trips = tuple(Trip(node, min(took)) for node, took in self._took.items())
        self._links.broadcast(Echo(asked_us, False, trips))

    def received(self, link: ControlLink, echo: Echo, now: float) -> None:
        """Reply to a request; count a reply only if it is to the last request."""
        node_id = link.node_id
        if not echo.answer:
            self._reported[node_id] = {trip.node_id: trip.us for trip in echo.trips}
            with contextlib.suppress(MlxtpError):
                link.send(Echo(echo.asked_us, True, ()))
        elif self._asked.get(node_id) == echo.asked_us:
            del self._asked[node_id]
            self._took[node_id].append(min(max(round(now * 1e6) - echo.asked_us, 0), MAX_TRIP_US))

    def between(self, a: str, b: str) -> int | None:
        """Return the round trip in microseconds, as either node measured it; None if neither has."""
        if self._node_id in (a, b):
            took = self._took.get(b if a == self._node_id else a)
            return min(took) if took else None
        return self._reported.get(a, {}).get(b, self._reported.get(b, {}).get(a))

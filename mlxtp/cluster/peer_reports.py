"""Reports between agents on their machines and on round-trip times of links."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..background import Background
from ..errors import MlxtpError
from ..placement import hardware
from ..wire.cluster_messages import (
    MAX_BY_HAND,
    MAX_MEMBERS,
    MAX_TRIP_US,
    Echo,
    EndEpoch,
    Machine,
    MachineWanted,
    RoundTrip,
)
from .links import ControlLink
from .node import ClusterNode

REPORT_S = 10.0  #: Seconds between readings of this machine's memory, addresses, power and round trips.
PROBE_S = 60.0  #: Seconds between readings of everything, cables included.
LOOK_S = 5.0  #: Seconds for reading machines before a group is planned.


class MachineReports:
    """Reads this machine in the background and reports it. `counted` adds this agent's own counts."""

    def __init__(
        self, node: ClusterNode, counted: Callable[[Machine], Machine] = lambda machine: machine
    ) -> None:
        self._counted = counted
        self._rewired = False  #: Addresses changed, and maybe cables, too.
        self._node = node
        by_hand = tuple(node.settings.rdma)[:MAX_BY_HAND]
        node.links.reports.publish(Machine, replace(self._machine, by_hand=by_hand))
        self._probe_at = time.monotonic() + PROBE_S
        self._background = Background()
        self._looking: asyncio.Task[None] | None = None
        self._read_due = False
        self._asked_by: set[str] = set()  #: Members that requested a report.
        self._awaited: set[str] = set()  #: Members whose reports `read_machine_now` awaits.
        self._reported = asyncio.Event()
        node.links.on(self._wanted, MachineWanted)
        node.links.reports.on(lambda node_id, _machine: self._heard_of(node_id), Machine)
        node.links.on(self._ended, EndEpoch)
        node.links.on_up(lambda _link: self._reach())
        node.links.on_lost(lambda node_id, _why: self._heard_of(node_id))
        node.links.on_lost(lambda _node_id, _why: self._reach())
        node.rounds.every(REPORT_S, lambda _now: self.read_again(), first_s=REPORT_S)

    @property
    def _machine(self) -> Machine:
        return self._node.links.reports.of(Machine)[self._node.node_id]

    def _reach(self) -> None:
        links = self._node.links
        reached = tuple(sorted({f"{each.local} {each.remote}" for each in links.links()}))[:MAX_MEMBERS]
        links.reports.publish(Machine, replace(self._machine, reached=reached))

    def rewired(self) -> None:
        self._rewired = True
        self.read_again()

    def _wanted(self, link: ControlLink, _message: MachineWanted) -> None:
        self._asked_by.add(link.node_id)
        self.read_again()

    def _ended(self, _link: ControlLink, message: EndEpoch) -> None:
        if not message.in_order:  # the group failed: a cable may be out
            self.read_again()

    def _heard_of(self, node_id: str) -> None:
        self._awaited.discard(node_id)
        self._reported.set()

    async def read_machine_now(self, nodes: Iterable[str]) -> None:
        """Read this machine again, and have the other `nodes` report theirs, including RDMA ports."""
        links = self._node.links
        for node_id in links.nodes() & set(nodes):
            with contextlib.suppress(MlxtpError):  # its link just ended
                links.send(node_id, MachineWanted())
                self._awaited.add(node_id)
        looking = self.read_again()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await asyncio.wait({looking})
                while self._awaited:
                    self._reported.clear()
                    await self._reported.wait()
        self._awaited.clear()

    def read_again(self) -> asyncio.Task[None]:
        """Read this machine in the background; if a reading is under way, read again after it."""
        self._read_due = True
        if self._looking is None or self._looking.done():
            self._looking = self._background.start(self._read(), "reading this machine")
        return self._looking

    async def close(self) -> None:
        await self._background.close()

    async def _read(self) -> None:
        node = self._node
        address = node.settings.loopback
        while self._read_due:
            everything = self._rewired or time.monotonic() >= self._probe_at
            if everything:
                self._probe_at = time.monotonic() + PROBE_S
            self._rewired = self._read_due = False
            asked_by, self._asked_by = self._asked_by, set()
            reading = hardware.probe(address) if everything else hardware.refresh(self._machine, address)
            machine = self._counted(await reading)
            machine = replace(machine, reached=self._machine.reached, by_hand=self._machine.by_hand)
            if machine != self._machine:
                node.links.reports.publish(Machine, machine)
                node.changed()
                continue
            for node_id in asked_by:
                with contextlib.suppress(MlxtpError):  # its link ended
                    node.links.send(node_id, node.links.reports.report(machine))


# --- round-trip times ------------------------------------------------------------------------------------

ASK_S = 2.0
_KEPT = 15  #: Trips of half a minute: the best is the link's time, because agents delayed the others.


class RoundTripTimes:
    """Measures round trips, every ASK_S. Times are of a monotonic clock."""

    def __init__(self, node: ClusterNode) -> None:
        self._node_id = node.node_id
        self._links = node.links
        self._asked: dict[str, int] = {}  #: Open request by node id, named by its time in microseconds.
        self._took: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=_KEPT))
        node.links.on(lambda link, echo: self.received(link, echo, time.monotonic()), Echo)
        node.rounds.every(ASK_S, self.measure, needed=node.links.nodes)
        node.rounds.every(REPORT_S, lambda _now: self.report(), first_s=REPORT_S, needed=node.links.nodes)

    def measure(self, now: float) -> None:
        nodes, asked_us = self._links.nodes(), round(now * 1e6)
        for gone in self._took.keys() - nodes:
            del self._took[gone]
        self._asked = dict.fromkeys(nodes, asked_us)
        self._links.broadcast(Echo(asked_us, False))

    def report(self) -> None:
        """Report the best trips; rarely, because each changed row begins a round at every node."""
        self._links.reports.publish(RoundTrip, *(RoundTrip(node, min(us)) for node, us in self._took.items()))

    def received(self, link: ControlLink, echo: Echo, now: float) -> None:
        """Reply to a request; count a reply only to the last request."""
        node_id = link.node_id
        if not echo.answer:
            with contextlib.suppress(MlxtpError):
                link.send(Echo(echo.asked_us, True))
        elif self._asked.get(node_id) == echo.asked_us:
            del self._asked[node_id]
            self._took[node_id].append(min(max(round(now * 1e6) - echo.asked_us, 0), MAX_TRIP_US))

    def between(self, a: str, b: str) -> int | None:
        """Return the round trip in microseconds that either node measured, or None."""
        if self._node_id in (a, b):
            return min(self._took.get(b if a == self._node_id else a, ()), default=None)
        table = self._links.reports
        trip = table.of(RoundTrip, b).get(a) or table.of(RoundTrip, a).get(b)
        return trip.us if trip is not None else None

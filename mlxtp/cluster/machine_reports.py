"""Repeated readings of this machine, and the reports of others that a plan waits for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable

from ..errors import MlxtpError
from ..placement import hardware
from ..wire.cluster_messages import MachineReport, MachineWanted
from ..wire.reports import Machine
from .surroundings import Surroundings

log = logging.getLogger(__name__)

PROBE_S = 60.0  #: Seconds between readings of everything, cables included.
LOOK_S = 5.0  #: Seconds for reading machines before a group is planned.


class MachineReports:
    """Reads this machine in the background, one reading at a time, and reports it to the others."""

    def __init__(self, cluster: Surroundings) -> None:
        self.rewired = False  #: True when addresses changed, so that cables may have changed, too.
        self._cluster = cluster
        self._probe_at = time.monotonic() + PROBE_S
        self._looking: asyncio.Task[None] | None = None
        self._read_due = False
        self._asked_by: set[str] = set()  #: Members that requested a report.
        self._awaited: set[str] = set()  #: Members whose report `read_machine_now` waits for.
        self._reported = asyncio.Event()

    def report(self) -> MachineReport:
        """Return the report of this machine for the other members."""
        machine = self._cluster.peer_info.machines[self._cluster.node_id]
        return MachineReport(*(getattr(machine, name) for name in Machine.__match_args__))

    def report_to(self, node_id: str) -> None:
        """Read the machine for a member, and report it even if nothing changed."""
        self._asked_by.add(node_id)
        self.read_again()

    def reported(self, node_id: str) -> None:
        """Note that a member has reported its machine, or is gone."""
        self._awaited.discard(node_id)
        self._reported.set()

    async def read_machine_now(self, nodes: Iterable[str]) -> None:
        """Read this machine again and have the others of `nodes` report theirs, including RDMA ports."""
        links = self._cluster.links
        for node_id in links.nodes() & set(nodes):
            with contextlib.suppress(MlxtpError):  # it has just gone
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
        """Read this machine in the background; if a reading is under way, read once more after it."""
        self._read_due = True
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._read())
            self._looking.add_done_callback(_log_failure)
        return self._looking

    async def close(self) -> None:
        """Stop reading."""
        if self._looking is not None:
            self._looking.cancel()

    async def _read(self) -> None:
        cluster = self._cluster
        interface = cluster.settings.interface
        while self._read_due:
            everything = self.rewired or time.monotonic() >= self._probe_at
            if everything:
                self._probe_at = time.monotonic() + PROBE_S
            self.rewired = self._read_due = False
            asked_by, self._asked_by = self._asked_by, set()
            before = cluster.peer_info.machines[cluster.node_id]
            machine = await (hardware.probe(interface) if everything else hardware.refresh(before, interface))
            if machine != before:
                cluster.peer_info.machines[cluster.node_id] = machine
                cluster.links.broadcast(self.report())
                cluster.changed()
                continue
            for node_id in asked_by:
                with contextlib.suppress(MlxtpError):  # it is gone
                    cluster.links.send(node_id, self.report())


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("reading this machine failed: %s", error)

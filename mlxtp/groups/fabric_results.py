"""Times of a group's collectives: one measurement, and the results that all members keep."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from ..cluster.links import ControlLink
from ..cluster.node import ClusterNode
from ..errors import MlxtpError
from ..identity.private_files import read_private, write_private
from ..models.inspect import read_config
from ..placement import measurements
from ..placement.cost_model import Measured
from ..placement.model_shape import shape_of
from ..wire.cluster_messages import FabricReport
from ..wire.messages import CollectivesTimed
from ..wire.reports import FabricResult

log = logging.getLogger(__name__)

_ACTIVATION_BYTES = 2

#: Times collectives on all ranks: kind, bytes of each rank, how many.
Time = Callable[[str, int, int], Awaitable[CollectivesTimed]]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, as in FabricResult."""

    metal: bool
    collective_s: float
    sizes: tuple[int, ...]
    sums_s: tuple[float, ...]
    gathers_s: tuple[float, ...]


async def measure(clock: Time, row_bytes: int) -> Times:
    """Time collectives of all sizes, small ones first. Sizes that would take too long are left out.

    This node decides how many of each to run, after one of them was timed; all ranks get the same number.
    """

    async def timed(kind: str, size: int) -> float:
        once = (await clock(kind, size, 1)).seconds
        count = measurements.rounds(once)
        return (await clock(kind, size, count)).seconds if count > 1 else once

    first = await clock("chain", measurements.CHAIN_BYTES, 1)
    count = measurements.rounds(first.seconds)
    chain = await clock("chain", measurements.CHAIN_BYTES, count)
    sizes, sums, gathers = [], [], []
    for size in measurements.sizes(row_bytes):
        sizes.append(size)
        sums.append(await timed("sum", size))
        gathers.append(await timed("gather", size))
        if max(sums[-1], gathers[-1]) > measurements.SLOW_S:
            break
    return Times(chain.metal, chain.seconds, tuple(sizes), tuple(sums), tuple(gathers))


def row_bytes(folder: Path) -> int:
    """Return the bytes of one token's row in a collective of the model in `folder`; 0 if it is unreadable."""
    try:
        shape = shape_of(read_config(folder), name=folder.name)
    except MlxtpError:
        return 0
    return shape.hidden * _ACTIVATION_BYTES


# --- results ---------------------------------------------------------------------------------------------


FILE = "fabric.json"


class FabricResults:
    """All results. The file is this node's own; others get reports."""

    def __init__(self, node: ClusterNode) -> None:
        self._path = node.home / FILE
        self._fast_fences = node.settings.fast_fences
        self.results = _load(self._path)
        self._reported: dict[str, FabricResult] = {}  #: The last report of each node.
        self._on_change: list[Callable[[], None]] = [node.changed]
        node.links.on(self._received, FabricReport)
        node.links.on_up(self._greet)
        node.links.on_lost(lambda node_id, _why: self._forget(node_id))

    def on_change(self, handler: Callable[[], None]) -> None:
        """Have `handler` called when a measurement was added."""
        self._on_change.append(handler)

    def measured(self) -> Measured:
        """Return measurements that placement prefers to its assumptions, for the fences that ranks use."""
        return measurements.measured(self.results, fast_fences=self._fast_fences)

    def of(self, nodes: tuple[str, ...], kind: str) -> FabricResult | None:
        """Return the measurement of such a group."""
        return measurements.find(self.results, nodes, kind, fast_fences=self._fast_fences)

    def reported(self, node_id: str) -> FabricResult | None:
        """Return the last report of a node with a link."""
        return self._reported.get(node_id)

    def keep(self, result: FabricResult) -> None:
        """Add a measurement, and write it to the disk."""
        try:
            kept = measurements.merged(self.results, [measurements.check(result)])
        except ValueError as error:
            log.warning("a reported fabric measurement is left aside: %s", error)
            return
        if kept == self.results:
            return
        self.results = kept
        try:
            write_private(self._path, measurements.to_text(kept).encode())
        except MlxtpError as error:
            log.error("the fabric measurement is lost when this agent ends: %s", error.detail)
        for handler in self._on_change:
            handler()

    def _greet(self, link: ControlLink) -> None:
        for result in self.results:
            link.send(report(result))

    def _received(self, link: ControlLink, message: FabricReport) -> None:
        result = FabricResult(*(getattr(message, name) for name in FabricResult.__match_args__))
        self._reported[link.node_id] = result
        self.keep(result)

    def _forget(self, node_id: str) -> None:
        self._reported.pop(node_id, None)


def report(result: FabricResult) -> FabricReport:
    """Return the report of a measurement for other members."""
    return FabricReport(*(getattr(result, name) for name in FabricResult.__match_args__))


def _load(path: Path) -> tuple[FabricResult, ...]:
    """Return the saved measurements; for an unusable file log a line and return none."""
    try:
        data = read_private(path)
        return measurements.from_text(data.decode()) if data is not None else ()
    except (MlxtpError, ValueError, RecursionError) as error:
        log.warning("%s is left aside, so fabric speeds are assumed: %s", path, error)
        return ()

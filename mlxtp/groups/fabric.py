"""Times of a group's collectives: a measurement, the results that all members keep, and the bench."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from ..background import Background
from ..cluster.links import ControlLink
from ..cluster.node import ClusterNode
from ..errors import Code, LinkError, MlxtpError, UserError
from ..gateway.gateway import Gateway
from ..identity.private_files import read_private, write_private
from ..placement import measurements
from ..placement.cost_model import Collective
from ..wire.cluster_messages import FabricAnswer, FabricResult, FabricWanted, Serving
from ..wire.messages import CollectivesTimed
from .health import ServingState
from .lifecycle import Supervisor
from .loading import row_bytes
from .process_group import EpochGroup

log = logging.getLogger(__name__)

ANSWER_S = 50.0  #: Seconds that another agent may take to measure its group.

Time = Callable[[str, int, int], Awaitable[CollectivesTimed]]  #: Arguments: kind, bytes of each rank, rounds.


async def measure(group: EpochGroup, clock: Time, row_bytes: int, *, fast_fences: bool) -> FabricResult:
    """Time collectives of all sizes, small ones first; skip sizes that would take too long."""

    async def timed(kind: str, size: int) -> float:
        # The first one shows how many to run, the same number on all ranks.
        once = (await clock(kind, size, 1)).seconds
        count = measurements.rounds(once)
        return (await clock(kind, size, count)).seconds if count > 1 else once

    once = await clock("chain", measurements.CHAIN_BYTES, 1)
    chain = await clock("chain", measurements.CHAIN_BYTES, measurements.rounds(once.seconds))
    sizes, sums, gathers = [], [], []
    for size in measurements.sizes(row_bytes):
        sizes.append(size)
        sums.append(await timed("sum", size))
        gathers.append(await timed("gather", size))
        if max(sums[-1], gathers[-1]) > measurements.SLOW_S:
            break
    found = chain.metal, int(time.time()), chain.seconds, tuple(sizes), tuple(sums), tuple(gathers)
    return FabricResult(group.nodes, group.backend, group.kind, fast_fences, *found)


# --- results ---------------------------------------------------------------------------------------------

FILE = "fabric.json"
SAVE_S = 1.0  #: Seconds between two writes: each waits for the disk, and many reports may arrive.


class FabricResults:
    """All results, in a file of this node, and in rows for other nodes."""

    def __init__(self, node: ClusterNode) -> None:
        self._path = node.home / FILE
        self._fast_fences = node.settings.fast_fences
        self.results = _load(self._path)
        self._changed = node.changed
        self._publish = partial(node.links.reports.publish, FabricResult)
        node.links.reports.on(lambda _node_id, result: self.keep(result), FabricResult)
        self._publish(*self.results)
        self._unsaved = False
        self._saving = Background()
        self._disk = asyncio.Lock()
        node.rounds.every(
            SAVE_S,
            lambda _now: self._disk.locked() or self._saving.start(self.flush(), "saving measurements"),
            needed=lambda: self._unsaved,
        )

    def measured(self) -> tuple[Collective, ...]:
        """Return measurements with the fences that ranks use: placement prefers them to its assumptions."""
        return measurements.measured(self.results, fast_fences=self._fast_fences)

    def of(self, nodes: tuple[str, ...], kind: str) -> FabricResult | None:
        return measurements.find(self.results, nodes, kind, fast_fences=self._fast_fences)

    def keep(self, result: FabricResult) -> None:
        """Add a measurement. It is on disk after SAVE_S, or a `flush`."""
        try:
            kept = measurements.merged(self.results, [measurements.check(result)])
        except ValueError as error:
            log.warning("a reported fabric measurement is left aside: %s", error)
            return
        if kept == self.results:
            return
        self.results, self._unsaved = kept, True
        self._publish(*self.results)
        self._changed()

    async def flush(self) -> None:
        async with self._disk:
            if not self._unsaved:
                return
            self._unsaved, text = False, measurements.to_text(self.results)
            try:
                await asyncio.to_thread(write_private, self._path, text.encode())
            except MlxtpError as error:
                log.error("the fabric measurement is lost when this agent ends: %s", error.detail)


def _load(path: Path) -> tuple[FabricResult, ...]:
    try:
        data = read_private(path)
        return measurements.from_text(data.decode()) if data is not None else ()
    except (MlxtpError, ValueError, RecursionError) as error:
        log.warning("%s is left aside, so fabric speeds are assumed: %s", path, error)
        return ()


# --- the bench -------------------------------------------------------------------------------------------


class FabricBench:
    """Measures a group of a deployment, by default the first one, on the Mac of its rank 0.

    `shown` returns the supervisor of that group. Raises UserError for an unknown name.
    """

    def __init__(
        self, node: ClusterNode, gateway: Gateway, shown: Callable[[str], Supervisor], results: FabricResults
    ) -> None:
        self._node = node
        self._gateway = gateway
        self._shown = shown
        self._results = results
        self._measuring = False
        self._background = Background()
        node.links.on(self._received, FabricWanted)

    async def measure(self, deployment: str = "") -> FabricResult:
        """Time collectives on an idle group; clients must retry meanwhile. Raises UserError if it cannot."""
        gateway, shown = self._gateway, self._shown(deployment)
        status, ranks, model = shown.status, shown.status.ranks, shown.info
        if self._measuring or status.state is ServingState.LOADING:
            raise UserError("the group is loading or being measured right now; try again", Code.NOT_READY)
        if ranks is None or model is None:
            raise UserError(f"there is no group to measure; it is {status.state}", Code.NOT_READY)
        if ranks.group.world_size == 1:
            why = "one rank serves alone and exchanges nothing; `mlxtp serve MODEL --nodes 2` makes a group"
            raise UserError(why)
        if count := gateway.open_requests:
            why = "1 request is open" if count == 1 else f"{count} requests are open"
            raise UserError(f"{why}; a fabric is measured only without open requests", Code.NOT_READY)
        self._measuring = True
        try:
            with gateway.admission.hold("the fabric is being measured, which takes some seconds; try again"):
                async with shown.kv.commanding:
                    fast = self._node.settings.fast_fences
                    return await measure(ranks.group, ranks.time, row_bytes(model.path), fast_fences=fast)
        except MlxtpError as error:
            raise UserError(f"the group ended while it was measured: {error.detail}") from error
        finally:
            self._measuring = False

    async def bench(self, deployment: str = "") -> FabricResult:
        """Return a new measurement of a ready group. Raises UserError."""
        if self._shown(deployment).status.in_epoch:
            return await self._bench_here(deployment)
        owners = [
            owner
            for owner, each in self._node.links.reports.others(Serving)
            if deployment in ("", each.deployment) and each.state == ServingState.READY
        ]
        if not owners:
            raise UserError("no group serves right now; `mlxtp status` shows why", Code.NOT_READY)
        coordinator = self._node.leadership.claim.node_id
        return await self._bench_at(coordinator if coordinator in owners else min(owners), deployment)

    async def _bench_here(self, deployment: str) -> FabricResult:
        result = await self.measure(deployment)
        try:
            measurements.check(result)
        except ValueError as error:
            raise UserError(f"the measurement is implausible and is not kept: {error}") from None
        self._results.keep(result)
        await self._results.flush()
        return result

    async def _bench_at(self, node_id: str, deployment: str) -> FabricResult:
        name, wanted = self._node.name_of(node_id), FabricWanted(secrets.token_bytes(16), deployment)
        try:
            answer = await self._node.links.ask(node_id, wanted, FabricAnswer, ANSWER_S)
        except LinkError as error:
            late = f"{name}, which has rank 0, did not reply; try again, or run this there"
            went = f"{name} went while it measured"
            raise UserError(late if error.code is Code.LINK_TIMEOUT else went) from None
        if not answer.results:
            raise UserError(answer.problem or "nothing was measured")
        return answer.results[0]

    def _received(self, link: ControlLink, wanted: FabricWanted) -> None:
        self._background.start(self._answer(link.node_id, wanted), "measuring the fabric")

    async def _answer(self, node_id: str, wanted: FabricWanted) -> None:
        try:
            if not self._shown(wanted.deployment).status.in_epoch:  # else two agents could ping-pong forever
                raise UserError(f"rank 0 is no longer on {self._node.name}; try again")
            answer = FabricAnswer(wanted.nonce, "", (await self._bench_here(wanted.deployment),))
        except MlxtpError as error:
            answer = FabricAnswer(wanted.nonce, error.detail)
        with contextlib.suppress(MlxtpError):  # its link is gone
            self._node.links.send(node_id, answer)

    async def close(self) -> None:
        await self._background.close()
        await self._results.flush()

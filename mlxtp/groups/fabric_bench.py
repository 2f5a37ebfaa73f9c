"""Measurement of a group's collectives, on the node of its rank 0."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time

from ..background import Background
from ..cluster.links import ControlLink
from ..cluster.node import ClusterNode
from ..errors import Code, LinkError, MlxtpError, UserError
from ..placement import measurements
from ..wire.cluster_messages import FabricAnswer, FabricWanted
from ..wire.reports import FabricResult
from .fabric_results import FabricResults, report
from .health import ServingState
from .lifecycle import Supervisor
from .owned_epoch import ServingReports

log = logging.getLogger(__name__)

ANSWER_S = 50.0  #: Seconds that another agent may take to measure its group.


class FabricBench:
    """Measures the group that serves, here or where its rank 0 is."""

    def __init__(
        self, node: ClusterNode, supervisor: Supervisor, reports: ServingReports, results: FabricResults
    ) -> None:
        self._node = node
        self._supervisor = supervisor
        self._reports = reports
        self._results = results
        self._background = Background()
        node.links.on(self._received, FabricWanted)

    async def bench(self) -> FabricResult:
        """Return a new measurement of the group that serves. Raises UserError when that fails."""
        if self._supervisor.in_epoch:
            return await self._bench_here()
        servings = self._node.peer_info.servings.items()
        owners = [node_id for node_id, serving in servings if serving.state == ServingState.READY]
        if not owners:
            raise UserError("no group serves right now; `mlxtp status` shows why", Code.NOT_READY)
        coordinator = self._node.leadership.claim.node_id
        return await self._bench_at(coordinator if coordinator in owners else min(owners))

    async def _bench_here(self) -> FabricResult:
        serving = self._reports.serving()
        times = await self._supervisor.measure_fabric()
        assert serving is not None
        result = FabricResult(
            serving.participants,
            serving.backend,
            serving.kind,
            self._supervisor.fast_fences,
            times.metal,
            int(time.time()),
            times.collective_s,
            times.sizes,
            times.sums_s,
            times.gathers_s,
        )
        try:
            measurements.check(result)
        except ValueError as error:
            raise UserError(f"the measurement is implausible and is not kept: {error}") from None
        self._results.keep(result)
        self._node.links.broadcast(report(result))
        return result

    async def _bench_at(self, node_id: str) -> FabricResult:
        """Return the measurement of another agent, which reports it before it replies."""
        name, wanted = self._node.name_of(node_id), FabricWanted(secrets.token_bytes(16))
        try:
            answer = await self._node.links.ask(node_id, wanted, FabricAnswer, ANSWER_S)
        except LinkError as error:
            if error.code is not Code.LINK_TIMEOUT:
                raise UserError(f"{name} went while it measured") from None
            raise UserError(
                f"{name}, which has rank 0, did not reply; try again, or run this there"
            ) from None
        reported = self._results.reported(node_id)
        if reported is None or answer.problem:
            raise UserError(answer.problem or "nothing was measured")
        return reported

    def _received(self, link: ControlLink, wanted: FabricWanted) -> None:
        self._background.start(self._answer(link.node_id, wanted.nonce), "measuring the fabric")

    async def _answer(self, node_id: str, nonce: bytes) -> None:
        problem = ""
        try:
            if not self._supervisor.in_epoch:  # two agents could ping-pong for ever
                raise UserError(f"rank 0 is no longer on {self._node.name}; try again")
            await self._bench_here()
        except MlxtpError as error:
            problem = error.detail
        with contextlib.suppress(MlxtpError):  # it is gone
            self._node.links.send(node_id, FabricAnswer(nonce, problem))

    async def close(self) -> None:
        """Stop measuring."""
        await self._background.close()

"""Measurement of a group's collectives, on the node of its rank 0, and storage of the results."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from pathlib import Path

from ..background import Background
from ..cluster.surroundings import Surroundings
from ..errors import Code, MlxtpError, UserError
from ..identity.private_files import read_private, write_private
from ..placement import measurements
from ..placement.cost_model import Measured
from ..wire.cluster_messages import FabricAnswer, FabricReport, FabricWanted
from ..wire.reports import FabricResult
from .controller import GroupController
from .health import ServingState

log = logging.getLogger(__name__)

FILE = "fabric.json"
ANSWER_S = 50.0  #: Seconds that another agent may take to measure its group.


class FabricBench:
    """Measurements of the fabrics of this cluster. The file is this node's own; others get reports."""

    def __init__(self, cluster: Surroundings, controller: GroupController) -> None:
        self._cluster = cluster
        self._controller = controller
        self._path = cluster.settings.home / FILE
        self.results = _load(self._path)
        self._logged: dict[str, FabricResult] = {}  #: The last report of each node.
        #: Open requests, by node id and nonce.
        self._answers: dict[tuple[str, bytes], asyncio.Future[FabricResult]] = {}
        self._background = Background()

    def measured(self) -> Measured:
        """Return measurements that placement prefers to its assumptions, for the fences that ranks use."""
        return measurements.measured(self.results, fast_fences=self._cluster.settings.fast_fences)

    def of(self, nodes: tuple[str, ...], kind: str) -> FabricResult | None:
        """Return the measurement of such a group."""
        fast = self._cluster.settings.fast_fences
        return measurements.find(self.results, nodes, kind, fast_fences=fast)

    def report(self) -> list[FabricReport]:
        """Return the reports for a node that has just come."""
        return list(map(_report, self.results))

    async def bench(self) -> FabricResult:
        """Measure the group that serves, here or where its rank 0 is. Raises UserError when that fails."""
        cluster = self._cluster
        if cluster.supervisor.in_epoch:
            return await self._bench_here()
        servings = cluster.peer_info.servings.items()
        owners = [node for node, serving in servings if serving.state == ServingState.READY]
        if not owners:
            raise UserError("no group serves right now; `mlxtp status` shows why", Code.NOT_READY)
        coordinator = cluster.leadership.claim.node_id
        return await self._bench_at(coordinator if coordinator in owners else min(owners))

    async def _bench_here(self) -> FabricResult:
        serving = self._controller.serving()
        times = await self._cluster.supervisor.measure_fabric()
        assert serving is not None
        result = FabricResult(
            serving.participants,
            serving.backend,
            serving.kind,
            self._cluster.settings.fast_fences,
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
        self._keep(result)
        self._cluster.links.broadcast(_report(result))
        return result

    async def _bench_at(self, node_id: str) -> FabricResult:
        name, nonce = self._cluster.name_of(node_id), secrets.token_bytes(16)
        answer: asyncio.Future[FabricResult] = asyncio.get_running_loop().create_future()
        self._answers[node_id, nonce] = answer
        try:
            self._cluster.links.send(node_id, FabricWanted(nonce))
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise UserError(
                f"{name}, which has rank 0, did not reply; try again, or run this there"
            ) from None
        finally:
            del self._answers[node_id, nonce]

    def received(self, node_id: str, message: FabricWanted | FabricReport | FabricAnswer) -> None:
        """Handle another agent's request to measure, or its report."""
        match message:
            case FabricWanted(nonce):
                self._background.start(self._answer(node_id, nonce), "measuring the fabric")
            case FabricReport():
                result = FabricResult(*(getattr(message, name) for name in FabricResult.__match_args__))
                self._logged[node_id] = result
                self._keep(result)
            case FabricAnswer(nonce, problem):
                answer, said = self._answers.get((node_id, nonce)), self._logged.get(node_id)
                if answer is None or answer.done():
                    return
                if said is not None and not problem:
                    answer.set_result(said)
                else:
                    answer.set_exception(UserError(problem or "nothing was measured"))

    def lost(self, node_id: str) -> None:
        """Note that the last link to an agent has ended."""
        self._logged.pop(node_id, None)
        for (asked, _), answer in self._answers.items():
            if asked == node_id and not answer.done():
                answer.set_exception(UserError(f"{self._cluster.name_of(node_id)} went while it measured"))

    async def _answer(self, node_id: str, nonce: bytes) -> None:
        problem = ""
        try:
            if not self._cluster.supervisor.in_epoch:  # two agents could ping-pong for ever
                raise UserError(f"rank 0 is no longer on {self._cluster.name}; try again")
            await self._bench_here()
        except MlxtpError as error:
            problem = error.detail
        with contextlib.suppress(MlxtpError):  # it is gone
            self._cluster.links.send(node_id, FabricAnswer(nonce, problem))

    def _keep(self, result: FabricResult) -> None:
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
        self._controller.remeasured()
        self._cluster.changed()

    async def close(self) -> None:
        """Stop measuring."""
        await self._background.close()


def _report(result: FabricResult) -> FabricReport:
    return FabricReport(*(getattr(result, name) for name in FabricResult.__match_args__))


def _load(path: Path) -> tuple[FabricResult, ...]:
    """Return the saved measurements; for an unusable file log a line and return none."""
    try:
        data = read_private(path)
        return measurements.from_text(data.decode()) if data is not None else ()
    except (MlxtpError, ValueError, RecursionError) as error:
        log.warning("%s is left aside, so fabric speeds are assumed: %s", path, error)
        return ()

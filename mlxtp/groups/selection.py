"""Selection of the model to serve: checked, and brought here, before the present one is unloaded for it.

A pending selection is kept in the memory of the agent that received the request. A later selection at any
agent replaces it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container
from dataclasses import dataclass

from ..cluster.node import ClusterNode
from ..errors import MlxtpError, ModelError, UserError
from ..models.download import apart
from ..models.holdings import described
from ..models.inspect import Servable, hub_folder, in_folders, inspect, is_hub_id
from ..models.transfers import TransferCoordinator
from ..placement.model_shape import ModelShape
from ..wire.cluster_messages import DesiredState
from .health import ServingState
from .lifecycle import Supervisor

log = logging.getLogger(__name__)

LOOK_S = 0.5
SILENT_S = 5.0  #: Seconds that members may take to report that a model is on its way to them.
_SERVES = (ServingState.READY, ServingState.DRAINING, ServingState.LOADING)


@dataclass(frozen=True, slots=True)
class SelectionResult:
    """Result of a selection. `coming`: the present model is served until the new one is here."""

    model: str
    desired: DesiredState
    coming: bool = False


class ModelSelection:
    """Owner of the pending selection.

    `no_place` returns the reason why the present members, or some of them, cannot serve a model of this shape
    on `nodes` Macs, else "".
    """

    def __init__(
        self,
        node: ClusterNode,
        supervisor: Supervisor,
        transfers: TransferCoordinator,
        no_place: Callable[[ModelShape, str, Container[str] | None], str],
    ) -> None:
        self._node = node
        self._supervisor = supervisor
        self._transfers = transfers
        self._no_place = no_place
        self._progress = 0
        #: A model that is on its way, and the name under which it comes.
        self._next: tuple[str, str] | None = None
        self._problem = ""
        self._task: asyncio.Task[None] | None = None

    def progress(self) -> list[str]:
        """Return the models that come to this Mac, for people: the next one to serve, and other downloads."""
        transfers = self._transfers
        model, name = self._next or ("", "")
        found = [f"{model} is served as soon as it is here{_far(transfers, name)}"] if model else []
        found += [self._problem] if self._problem else []
        wanted = self._node.replica.desired.model
        return found + [
            f"{each} is on its way here{_far(transfers, each)}"
            for each in transfers.under_way()
            if each not in (name, wanted)
        ]

    async def serve(self, model: str, nodes: str) -> SelectionResult:
        """Make `model` the desired model, after its download if needed. `nodes`: how many Macs ("" keeps the
        setting).

        Raises UserError, and changes nothing, if it is known that the model cannot be served.
        """
        node, number = self._node, self.cancel()
        present = node.replica.desired
        over = nodes or present.nodes
        if (model, over) == (present.model, present.nodes):
            return SelectionResult(model, node.desired.set(model, nodes))
        found = await asyncio.to_thread(in_folders, model, node.settings.model_folders)
        servable = await self._inspect(found)
        if number != self._progress or node.replica.desired.version != present.version:
            raise UserError(f"another request changed the model meanwhile, so {model} is not served")
        if present.model and self._supervisor.status.state in _SERVES:
            self._check_place(model, servable, over)
            if is_hub_id(found) and not await self._can_begin(servable, over):
                self._next = (model, model)
                self._task = asyncio.ensure_future(self._bring(model, servable, over, present.version))
                self._task.add_done_callback(_ended)
                return SelectionResult(model, present, coming=True)
        if servable is not None and servable.manifest is not None:
            self._transfers.learned(found, servable.manifest)
        return SelectionResult(model, node.desired.set(model, nodes))

    def cancel(self) -> int:
        """Cancel the pending selection because of a later one. Its download goes on, but it is not served.

        Returns the number of the next selection.
        """
        self._progress += 1
        self._next, self._problem = None, ""
        if self._task is not None:
            self._task.cancel()
        return self._progress

    async def _inspect(self, model: str) -> Servable | None:
        """Look at a model on this disk, else on the Hub; None if it is complete on another member's only."""

        def look() -> Servable | None:
            if elsewhere and hub_folder(model) is None:
                return None
            return inspect(model, self._node.settings.kv_bits, ask_hub=True)

        elsewhere = is_hub_id(model) and self._transfers.stored.is_elsewhere(model)
        try:
            return await apart(look)
        except ModelError as error:
            raise ModelError(
                f"{model} cannot be served, so all stays as it is: {error.detail}", error.code
            ) from None

    def _check_place(self, model: str, servable: Servable | None, nodes: str) -> None:
        why = self._no_place(servable.shape, nodes, None) if servable is not None else ""
        if why:
            raise UserError(f"{model} cannot be served, so all stays as it is: {why}")

    async def _can_begin(self, servable: Servable | None, nodes: str) -> bool:
        """Return True if the members that have all of it already can serve it."""
        if servable is None or servable.folder is None:
            return False
        have = {self._node.node_id, *self._who_have(servable.name)}
        return not self._no_place(servable.shape, nodes, have)

    def _who_have(self, model: str) -> list[str]:
        return [node_id for node_id in self._node.links.nodes() if self._transfers.stored.has(node_id, model)]

    async def _bring(self, model: str, servable: Servable | None, nodes: str, version: int) -> None:
        node, loop = self._node, asyncio.get_running_loop()
        try:
            known = servable.manifest if servable is not None else None
            name = await self._transfers.pull(model, everywhere=True, known=known)
            self._next, began = (model, name), loop.time()
            while True:
                await asyncio.sleep(LOOK_S)  # the first time: for the other members' reports
                rows = self._transfers.progress(name)
                silent = not rows or (len(rows) == 1 and node.links.nodes())
                over = all(row["complete"] or row["problem"] for row in rows)
                if over and (not silent or loop.time() - began > SILENT_S):
                    break
                if node.replica.desired.version != version:
                    return
            have = {row["node_id"] for row in rows if row["complete"]}
            problems = [f"{row['name']}: {row['problem']}" for row in rows if row["problem"]]
            if servable is None and have:
                servable = await self._inspect(model)
            if node.replica.desired.version != version:
                return
            able = have | {*self._who_have(name)}
            why = self._no_place(servable.shape, nodes, able) if servable is not None and have else ""
            if have and not why:
                node.desired.set(model, nodes)
            else:
                reasons = "; ".join(filter(None, [why, *problems])) or "no member has reported its progress"
                self._problem = f"{model} was to be served, and cannot be: {reasons}"
        except MlxtpError as error:
            self._problem = error.detail
        finally:
            self._next = None
            if self._problem:
                log.warning("%s", self._problem)

    async def close(self) -> None:
        """Cancel the pending selection."""
        self.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)


def _far(transfers: TransferCoordinator, name: str) -> str:
    rows = [row for row in transfers.progress(name) if row["self"]]
    return f": {described(rows[0])}" if rows and not rows[0]["complete"] else ""


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("pending model change failed", exc_info=error)

"""Selection of models that users name: checked, and brought here before others are unloaded for them.

The agent that received the request keeps those on their way in its memory. One that is to replace all others
counts no longer once a deployment was added or changed otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from ..background import Background
from ..cluster.cluster_state import DeploymentTable, name_of
from ..cluster.node import ClusterNode
from ..errors import GroupError, MlxtpError, ModelError, UserError
from ..models.download import apart
from ..models.inspect import Servable, hub_folder, in_folders, inspect, is_hub_id
from ..models.manifest import described
from ..models.transfers import TransferCoordinator
from ..wire.cluster_messages import Deployment
from .machines import Machines, contradiction

log = logging.getLogger(__name__)

LOOK_S = 0.5
SILENT_S = 5.0  #: Seconds that members may take to report that a model is on its way to them.


@dataclass(slots=True, eq=False)
class SelectedModel:
    """A model from the request for it until it is deployed. `asked`: what else was requested of that.

    `before` is the table then. `replaces`: all other deployments end for it. `servable` is None until it is
    checked, and if only another member has it. `comes_as` is the name under which its files come.
    """

    name: str
    asked: Mapping[str, Any]
    before: DeploymentTable
    replaces: bool
    servable: Servable | None = None
    comes_as: str = ""
    coming: bool = False  #: True while members that lack its files get them; it is deployed after that.
    error: MlxtpError | None = None  #: Why it could not be served.

    @property
    def downloads(self) -> bool:
        """True if no member had all of its files when it was checked."""
        return self.servable is not None and self.servable.folder is None


class ModelSelection:
    def __init__(self, node: ClusterNode, transfers: TransferCoordinator, machines: Machines) -> None:
        self._node = node
        self._transfers = transfers
        self._machines = machines
        self._selected: dict[str, SelectedModel] = {}  #: By the name that a user gave.
        self._background = Background()

    def progress(self) -> list[str]:
        """Return the models that come to this Mac, for people: those to serve, and other downloads."""
        lines, shown = [], {row.model for row in self._node.desired.table.live()}
        for each in self._selected.values():
            if each.error is not None:
                lines.append(each.error.detail)
            elif each.coming:
                shown.add(each.comes_as)
                lines.append(f"{each.name} is served as soon as it is here{self._far(each.comes_as)}")
        coming = [each for each in self._transfers.under_way() if each not in shown]
        return lines + [f"{each} is on its way here{self._far(each)}" for each in coming]

    def _far(self, name: str) -> str:
        rows = [row for row in self._transfers.progress(name) if row["self"]]
        return f": {described(rows[0])}" if rows and not rows[0]["complete"] else ""

    # --- for users -----------------------------------------------------------------------------------

    async def serve(self, model: str, *, replace: bool = False, **asked: Any) -> SelectedModel:
        """Add a deployment of `model`, or change it, as `DesiredDeployments.serve` has it.

        With `replace` all others end. If its files have to come first, it is still `coming`, and until then
        they go on. Raises UserError, and changes nothing, if it is known that the model cannot be served.
        """
        node, table = self._node, self._node.desired.table
        self._selected = {
            name: each for name, each in self._selected.items() if not (replace or each.replaces)
        }
        if node.desired.has(model, replace=replace, **asked):
            node.desired.serve(model, replace=replace, **asked)  # as long as a model is lacking: try again
            return SelectedModel(model, asked, table, replace)
        others = [row for row in table.live() if row.model != model]
        selected = self._selected[model] = SelectedModel(model, asked, table, replace, comes_as=model)
        try:
            found = await asyncio.to_thread(in_folders, model, node.settings.model_folders)
            servable = selected.servable = await self._inspect(found)
            if self._is_outdated(selected):
                raise UserError(f"another request changed the models meanwhile, so {model} is not served")
            shape = servable.shape if servable is not None else None
            if why := contradiction(node.settings, self._row(selected), shape):
                raise UserError(f"{model} cannot be served so, and all stays as it is: {why}")
            if table.live():
                if servable is not None and (why := self._no_place(selected)):
                    raise UserError(f"{model} cannot be served, so all stays as it is: {why}")
                selected.coming = bool(replace and others and is_hub_id(found) and self._lacks(selected))
        except BaseException:
            self._drop(selected)
            raise
        if selected.coming:
            self._background.start(self._bring(selected), f"the pending change to {model}")
            return selected
        if servable is not None and servable.manifest is not None:
            self._transfers.learned(found, servable.manifest)
        return self._want(selected)

    def cancel(self, model: str = "") -> list[str]:
        """Cancel the selection of a model that is unloaded, or of all. Return the names of pending ones.

        Downloads go on.
        """
        gone = [name for name in self._selected if not model or name_of(name) == name_of(model)]
        return [name for name in gone if self._selected.pop(name).error is None]

    def _want(self, selected: SelectedModel) -> SelectedModel:
        self._node.desired.serve(selected.name, replace=selected.replaces, **selected.asked)
        self._drop(selected)  # from now on the table has it
        return selected

    def _drop(self, selected: SelectedModel) -> None:
        if self._selected.get(selected.name) is selected:
            del self._selected[selected.name]

    def _is_outdated(self, selected: SelectedModel) -> bool:
        """Return True if a later selection counts instead, or what it replaces has changed and not gone."""
        later = set(self._node.desired.table.live()) - set(selected.before.live())
        return bool(selected.replaces and later) or self._selected.get(selected.name) is not selected

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

    def _lacks(self, selected: SelectedModel) -> bool:
        """Return whether the members that have all of it already cannot serve it."""
        servable = selected.servable
        if servable is None or servable.folder is None:
            return True
        return self._no_place(selected, {self._node.node_id, *self._who_have(servable.name)}) != ""

    def _no_place(self, selected: SelectedModel, only: Container[str] | None = None) -> str:
        """Return why no Macs, or none of `only`, can serve the model, if they served nothing else."""
        assert selected.servable is not None
        return self._machines.no_place(selected.servable.shape, self._row(selected), only)

    def _row(self, selected: SelectedModel) -> Deployment:
        return self._node.desired.row(selected.name, **selected.asked)

    def _who_have(self, model: str) -> list[str]:
        return [node_id for node_id in self._node.links.nodes() if self._transfers.stored.has(node_id, model)]

    async def _bring(self, selected: SelectedModel) -> None:
        """Get a model to all members, and deploy it alone if those that have it can serve it."""
        try:
            known = selected.servable.manifest if selected.servable is not None else None
            name = await self._transfers.pull(selected.name, everywhere=True, known=known)
            if not self._is_outdated(selected):
                selected.comes_as = name
            if lack := await self._lack_once_here(selected):
                raise GroupError(f"{selected.name} was to be served, and cannot be: {lack}")
            if not self._is_outdated(selected):
                self._want(selected)
        except MlxtpError as error:
            if not self._is_outdated(selected):
                log.warning("%s", error.detail)
                selected.error = error
        finally:
            if selected.error is None:
                self._drop(selected)

    async def _lack_once_here(self, selected: SelectedModel) -> str:
        """Wait for the files. Return the reason why the members that have them cannot serve the model."""
        loop = asyncio.get_running_loop()
        began, over = loop.time(), False
        rows: list[dict[str, Any]] = []
        while not (over or self._is_outdated(selected)):
            await asyncio.sleep(LOOK_S)  # the first time: for the other members' reports
            rows = self._transfers.progress(selected.comes_as)
            silent = not rows or (len(rows) == 1 and self._node.links.nodes())
            ended = all(row["complete"] or row["problem"] for row in rows)
            over = ended and (not silent or loop.time() - began > SILENT_S)
        have = {row["node_id"] for row in rows if row["complete"]}
        why = ""
        if have:
            selected.servable = selected.servable or await self._inspect(selected.name)
            if selected.servable is not None:
                why = self._no_place(selected, have | {*self._who_have(selected.comes_as)})
            if not why:
                return ""
        problems = [f"{row['name']}: {row['problem']}" for row in rows if row["problem"]]
        return "; ".join(filter(None, [why, *problems])) or "no member has reported its progress"

    async def close(self) -> None:
        self.cancel()
        await self._background.close()

"""Selection of models by users: each is checked, and fetched before it replaces other models.

The agent that received the request keeps pending selections in memory. A selection that replaces all others
lapses if another deployment is added or changed meanwhile.
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
SILENT_S = 5.0  #: Seconds for members to report that they are getting a model.


@dataclass(slots=True, eq=False)
class SelectedModel:
    """A requested model until it is deployed."""

    name: str
    asked: Mapping[str, Any]  #: Other requested properties of the deployment.
    before: DeploymentTable  #: The table at the time of the request.
    replaces: bool  #: All other deployments end.
    servable: Servable | None = None  #: None until checked, and if only another member has the model.
    comes_as: str = ""  #: Name of the files in transfers.
    coming: bool = False  #: True while members get its files; it is deployed after that.
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
        self._selected: dict[str, SelectedModel] = {}  #: By the user's name for it.
        self._background = Background()

    def progress(self) -> list[str]:
        """Return lines for people on pending selections and other downloads to this Mac."""
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
        """Add or change a deployment of `model`, as `DesiredDeployments.serve`; `replace`: end all others.

        If its files are missing, it is `coming`, and the others end only once it is deployed. Raises
        UserError, and changes nothing, for a model that cannot be served.
        """
        node, table = self._node, self._node.desired.table
        self._selected = {
            name: each for name, each in self._selected.items() if not (replace or each.replaces)
        }
        if node.desired.has(model, replace=replace, **asked):
            node.desired.serve(model, replace=replace, **asked)  # retries if a model is missing
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
        """Cancel the selection of a model, or all. Return the names of pending ones. Downloads continue."""
        gone = [name for name in self._selected if not model or name_of(name) == name_of(model)]
        return [name for name in gone if self._selected.pop(name).error is None]

    def _want(self, selected: SelectedModel) -> SelectedModel:
        self._node.desired.serve(selected.name, replace=selected.replaces, **selected.asked)
        self._drop(selected)  # the table has it now
        return selected

    def _drop(self, selected: SelectedModel) -> None:
        if self._selected.get(selected.name) is selected:
            del self._selected[selected.name]

    def _is_outdated(self, selected: SelectedModel) -> bool:
        """Return True after a later selection, or if it replaces others and any was added or changed."""
        later = set(self._node.desired.table.live()) - set(selected.before.live())
        return bool(selected.replaces and later) or self._selected.get(selected.name) is not selected

    async def _inspect(self, model: str) -> Servable | None:
        """Inspect a model on this disk or the Hub; None if only another member has all of it."""

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
        """Return True if the members with all of its files cannot serve it."""
        servable = selected.servable
        if servable is None or servable.folder is None:
            return True
        return self._no_place(selected, {self._node.node_id, *self._who_have(servable.name)}) != ""

    def _no_place(self, selected: SelectedModel, only: Container[str] | None = None) -> str:
        """Return why no Macs (of `only`) could serve the model, even if they served nothing else."""
        assert selected.servable is not None
        return self._machines.no_place(selected.servable.shape, self._row(selected), only)

    def _row(self, selected: SelectedModel) -> Deployment:
        return self._node.desired.row(selected.name, **selected.asked)

    def _who_have(self, model: str) -> list[str]:
        return [node_id for node_id in self._node.links.nodes() if self._transfers.stored.has(node_id, model)]

    async def _bring(self, selected: SelectedModel) -> None:
        """Get a model to all members, and replace all deployments with it if they can serve it."""
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
        """Wait for the files. Return why the members that have them cannot serve the model, or empty."""
        loop = asyncio.get_running_loop()
        began, over = loop.time(), False
        rows: list[dict[str, Any]] = []
        while not (over or self._is_outdated(selected)):
            await asyncio.sleep(LOOK_S)  # first, for other members' reports
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

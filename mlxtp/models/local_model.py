"""The desired model on this machine: found or downloaded ahead of time, so that an epoch need not wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from ..cluster.links import ControlLink
from ..cluster.node import ClusterNode
from ..errors import Code, MlxtpError, ModelError
from ..wire.cluster_messages import DesiredState, ModelStatus
from . import self_test
from .inspect import ModelSource, find_model, in_folders, is_hub_id, open_model
from .manifest import is_commit
from .stored import REPORT_S
from .transfers import TransferCoordinator

log = logging.getLogger(__name__)


class LocalModel:
    """Search for the desired model, whose result this node reports to the others."""

    def __init__(self, node: ClusterNode, transfers: TransferCoordinator) -> None:
        self.version = 0
        self._since = 0  #: The first version that desired this model, as has every version since.
        self.source: ModelSource | None = None
        self._path: Path | None = None
        self.fingerprint = ""
        self.problem = ""
        self._model = ""
        self._download = True  #: True if it may be downloaded from the Hub: not for a request.
        self._draft = node.settings.draft_model
        self._folders = node.settings.model_folders
        self._node = node
        self._transfers = transfers
        self._task: asyncio.Task[None] | None = None
        transfers.stored.on_files(self._files_arrived)
        node.links.on(self._received, ModelStatus)
        node.links.on_up(lambda link: link.send(self.status))
        node.desired.on_change(lambda _before, desired: self.resolve(desired))
        node.desired.retry_if(self._is_lacking)
        node.rounds.every(REPORT_S, lambda _now: self.retry(), first_s=REPORT_S)

    @property
    def status(self) -> ModelStatus:
        """Status to be reported to the other members."""
        return ModelStatus(self.version, self.fingerprint, self.problem, self._revision)

    @property
    def coming(self) -> str:
        """Progress of its download to this node, for users; empty when there is none."""
        return self._transfers.progress_text(self._model)

    def resolve(self, desired: DesiredState) -> None:
        """Start the search for this model. With only a new version, the earlier result stays."""
        self.version, self._download = desired.version, desired.pinned
        if desired.model == self._model and not self.problem:
            self._since = min(self._since, desired.version)
            self._report()
            return
        self._since = desired.version
        self._model, self.fingerprint, self.problem = desired.model, "", ""
        self.source = self._path = None
        if self._task is not None:
            self._task.cancel()
        if desired.model:
            self._task = asyncio.ensure_future(self._find(desired.model))
            self._task.add_done_callback(self._ended)

    def retry(self) -> None:
        """Search again for a missing folder: a user may have added the files. Failures on the Hub are left to
        the user.
        """
        looks = self._task is not None and not self._task.done()
        if self.problem and not looks and not is_hub_id(self._model):
            self._task = asyncio.ensure_future(self._find(self._model))
            self._task.add_done_callback(self._ended)

    def _files_arrived(self, name: str) -> None:
        """Search again after files of OWNER/NAME came or changed: the desired model may be there now, or
        differ.
        """
        looks = self._task is not None and not self._task.done()
        if not looks and is_hub_id(self._model) and self._model.partition("@")[0] == name:
            self._task = asyncio.ensure_future(self._compare(self._model))
            self._task.add_done_callback(self._ended)

    def folder(self, version: int) -> Path:
        """Return its folder. Raises ModelError if it is missing, not yet here, or not of this version.

        An epoch that began before the same model was pinned goes on.
        """
        if not self._since <= version <= self.version:
            raise ModelError(
                f"version {version} of the desired state is not known here", Code.MODEL_NOT_FOUND
            )
        if self._path is None or not self.fingerprint:
            raise ModelError(self.problem or f"{self._model} is still being looked for", Code.MODEL_NOT_FOUND)
        return self._path

    def _received(self, link: ControlLink, status: ModelStatus) -> None:
        self._node.peer_info.models[link.node_id] = status
        self._node.changed()

    def _is_lacking(self) -> bool:
        """Return True while the search here or on another member has failed."""
        return bool(self.problem) or any(
            each.desired == self.version and each.problem for each in self._node.peer_info.models.values()
        )

    def reported_by(self, node_id: str) -> bool:
        """Return True if a member has reported what its search for the desired model found."""
        told = self._node.peer_info.models.get(node_id)
        return told is not None and told.desired == self.version and bool(told.fingerprint or told.problem)

    def _report(self) -> None:
        self._node.links.broadcast(self.status)
        self._node.changed()

    async def _compare(self, model: str) -> None:
        same = False
        if self._path is not None and not self.problem:
            with contextlib.suppress(OSError):
                same = await asyncio.to_thread(self_test.fingerprint, self._path) == self.fingerprint
        if not same:
            await self._find(model)

    async def _find(self, model: str) -> None:
        try:
            model = await asyncio.to_thread(in_folders, model, self._folders)
            self._path = await self._resolve(model)
            self.fingerprint = await asyncio.to_thread(self_test.fingerprint, self._path)
            self.problem = ""
            if is_hub_id(self._draft):
                await self._transfers.get(self._draft)
            self._report()  # enough for a rank; the tokenizer takes another second
            self.source = await open_model(model, self._draft)
        except MlxtpError as error:
            if error.detail != self.problem:
                log.warning("%s: %s", model, error.detail)
            self.fingerprint, self.problem = "", error.detail
        except OSError as error:
            self.problem = f"{model}: {error}"
        self._report()

    async def _resolve(self, model: str) -> Path:
        if self._download and is_hub_id(model):
            return await find_model(str(await self._transfers.get(model)))
        return await find_model(model)

    @property
    def _revision(self) -> str:
        """The commit of a model in the Hub's cache that was searched by its name; else empty."""
        named = self.fingerprint and self._path is not None and is_hub_id(self._model)
        return self._path.name if named and self._path is not None and is_commit(self._path.name) else ""

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Log a bug, so that it does not look like a slow download."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s cannot be opened", self._model, exc_info=error)
            self.fingerprint, self.problem = "", f"{self._model}: {type(error).__name__}: {error}"
            self._report()

    async def close(self) -> None:
        """Stop the search."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

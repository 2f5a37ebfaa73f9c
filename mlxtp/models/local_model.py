"""The desired model on this machine: found or downloaded ahead of time, so that an epoch need not wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from ..background import Background
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
        self.source: ModelSource | None = None
        self.fingerprint = ""
        self.problem = ""
        self._since = 0  #: The first version that desired this model, as has every version since.
        self._path: Path | None = None
        self._node = node
        self._transfers = transfers
        self._background = Background(self._failed)
        self._search: asyncio.Task[None] | None = None
        transfers.stored.on_files(self._files_arrived)
        node.links.on(self._received, ModelStatus)
        node.links.on_up(lambda link: link.send(self.status))
        node.desired.on_change(self.resolve)
        node.desired.retry_if(self._is_lacking)
        node.rounds.every(REPORT_S, lambda _now: self.retry(), first_s=REPORT_S)

    @property
    def version(self) -> int:
        """Version of the desired state that the status is about."""
        return self._node.desired.now.version

    @property
    def status(self) -> ModelStatus:
        """Status to be reported to the other members."""
        return ModelStatus(self.version, self.fingerprint, self.problem, self._revision)

    @property
    def coming(self) -> str:
        """Progress of its download to this node, for users; empty when there is none."""
        return self._transfers.progress_text(self._name)

    @property
    def _name(self) -> str:
        return self._node.desired.now.model

    def resolve(self, before: DesiredState, desired: DesiredState) -> None:
        """Start the search for the model of `desired`. If only the version is new, the result stays."""
        if desired.model == before.model and not self.problem:
            self._since = min(self._since, desired.version)
            self._report()
            return
        self._since = desired.version
        self.source, self._path, self.fingerprint, self.problem = None, None, "", ""
        if self._search is not None:
            self._search.cancel()
        if desired.model:
            self._start(self._find(desired.model))

    def retry(self) -> None:
        """Search again for a missing folder: a user may have added the files. Failures on the Hub are left to
        the user.
        """
        if self.problem and not self._searching and not is_hub_id(self._name):
            self._start(self._find(self._name))

    def _files_arrived(self, name: str) -> None:
        """Search again after files of OWNER/NAME came or changed: the desired model may be there now, or
        differ.
        """
        if not self._searching and is_hub_id(self._name) and self._name.partition("@")[0] == name:
            self._start(self._compare(self._name))

    @property
    def _searching(self) -> bool:
        return self._search is not None and not self._search.done()

    def _start(self, search: Coroutine[Any, Any, None]) -> None:
        self._search = self._background.start(search, "the search for the desired model")

    def folder(self, version: int) -> Path:
        """Return its folder. Raises ModelError if it is missing, not yet here, or not of this version.

        An epoch that began before the same model was pinned goes on.
        """
        if not self._since <= version <= self.version:
            raise ModelError(
                f"version {version} of the desired state is not known here", Code.MODEL_NOT_FOUND
            )
        if self._path is None or not self.fingerprint:
            raise ModelError(self.problem or f"{self._name} is still being looked for", Code.MODEL_NOT_FOUND)
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
            settings = self._node.settings
            model = await asyncio.to_thread(in_folders, model, settings.model_folders)
            fetched = self._node.desired.now.pinned and is_hub_id(model)  # none is downloaded for a request
            self._path = await find_model(str(await self._transfers.get(model)) if fetched else model)
            self.fingerprint = await asyncio.to_thread(self_test.fingerprint, self._path)
            self.problem = ""
            if is_hub_id(settings.draft_model):
                await self._transfers.get(settings.draft_model)
            self._report()  # enough for a rank; the tokenizer takes another second
            self.source = await open_model(model, settings.draft_model)
        except MlxtpError as error:
            if error.detail != self.problem:
                log.warning("%s: %s", model, error.detail)
            self.fingerprint, self.problem = "", error.detail
        except OSError as error:
            self.problem = f"{model}: {error}"
        self._report()

    @property
    def _revision(self) -> str:
        """The commit of a model in the Hub's cache that was searched by its name; else empty."""
        path = self._path if self.fingerprint and is_hub_id(self._name) else None
        return path.name if path is not None and is_commit(path.name) else ""

    def _failed(self, _search: asyncio.Task[None], error: BaseException) -> None:
        """Log a bug, so that it does not look like a slow download."""
        log.error("%s cannot be opened", self._name, exc_info=error)
        self.fingerprint, self.problem = "", f"{self._name}: {type(error).__name__}: {error}"
        self._report()

    async def close(self) -> None:
        """Stop the search."""
        await self._background.close()

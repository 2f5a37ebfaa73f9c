"""The wanted models on this machine: found or downloaded in advance, so that an epoch need not wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..background import Background
from ..cluster.cluster_state import DeploymentTable
from ..cluster.node import ClusterNode
from ..config import Settings
from ..errors import Code, MlxtpError, ModelError, ProtocolError
from ..model_files import fingerprint, stray_files
from ..placement.model_shape import ModelShape, unpacked
from ..wire.cluster_messages import ModelStatus
from .inspect import ModelSource, facts_in, find_model, in_folders, is_hub_id, open_model
from .manifest import is_commit
from .model_transfer import REPORT_S
from .transfers import TransferCoordinator

log = logging.getLogger(__name__)

TELL_S = 3.0  #: Seconds that a new member may take to report whether it has the model.


class LocalModel:
    """One model on this machine, and the search for it. `report` is called when its status changes."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        transfers: TransferCoordinator,
        report: Callable[[LocalModel], None],
    ) -> None:
        self.name = name  #: As in the deployment; "" for none.
        self.may_download = False  #: True once a user chose it. A request alone causes no download.
        self.source: ModelSource | None = None
        self.path: Path | None = None
        self.fingerprint = ""
        self.problem = ""
        self.weight_bytes = 0  #: Size of its `*.safetensors`; 0 while unknown.
        self._settings = settings
        self._transfers = transfers
        self._report = report
        self._background = Background(self._failed)
        self._search: asyncio.Task[None] | None = None
        self._shape: ModelShape | None = None
        self._packed = b""  #: Its `DescribedModel`, sent to other members.

    @property
    def status(self) -> ModelStatus:
        weight_mib = -(-self.weight_bytes >> 20)  # rounded up
        shape = self._packed if self.fingerprint else b""
        return ModelStatus(self.name, self.fingerprint, self.problem, self._revision, weight_mib, shape)

    @property
    def shape(self) -> ModelShape:
        assert self._shape is not None
        return self._shape

    @property
    def coming(self) -> str:
        return self._transfers.progress_text(self.name)

    @property
    def left_s(self) -> float:
        return next((r["left_s"] or 0.0 for r in self._transfers.progress(self.name) if r["self"]), 0.0)

    @property
    def _revision(self) -> str:
        """The commit of a Hub model that was found by its name; else ""."""
        path = self.path if self.fingerprint and is_hub_id(self.name) else None
        return path.name if path is not None and is_commit(path.name) else ""

    @property
    def _searching(self) -> bool:
        return self._search is not None and not self._search.done()

    def search(self) -> None:
        if self._search is not None:
            self._search.cancel()
        self.source, self.path, self.fingerprint, self.problem, self.weight_bytes = None, None, "", "", 0
        self._start(self._find())
        self._report(self)

    def retry(self) -> None:
        """Search again for a missing folder. Only a user retries a failed download from the Hub."""
        if self.problem and not self._searching and not is_hub_id(self.name):
            self._start(self._find())

    def files_arrived(self, repository: str) -> None:
        """Search again after files of OWNER/NAME appeared or changed."""
        if not self._searching and is_hub_id(self.name) and self.name.partition("@")[0] == repository:
            self._start(self._compare())

    def _start(self, search: Coroutine[Any, Any, None]) -> None:
        self._search = self._background.start(search, f"the search for {self.name}")

    async def _compare(self) -> None:
        same = False
        if self.path is not None and not self.problem:
            with contextlib.suppress(OSError, ModelError):
                same = await asyncio.to_thread(fingerprint, self.path) == self.fingerprint
        if not same:
            await self._find()

    async def _find(self) -> None:
        try:
            draft = self._settings.draft_model
            model = await asyncio.to_thread(in_folders, self.name, self._settings.model_folders)
            fetched = self.may_download and is_hub_id(model)
            self.path = await find_model(str(await self._transfers.get(model)) if fetched else model)
            public = model if is_hub_id(model) else self.path.name
            facts = await asyncio.to_thread(facts_in, self.path)
            self._shape, self._packed = facts.shape(public, self._settings.kv_bits), facts.packed()
            self.fingerprint = await asyncio.to_thread(fingerprint, self.path)
            self.weight_bytes = facts.weight_bytes
            if strays := await asyncio.to_thread(stray_files, self.path):
                log.warning("%s: not in its index, and so not read: %s", self.name, ", ".join(strays))
            self.problem = ""
            if is_hub_id(draft):
                await self._transfers.get(draft)
            self._report(self)  # enough for a rank; the tokenizer takes another second
            self.source = replace(await open_model(model, draft), shape=self._shape)
        except MlxtpError as error:
            if error.detail != self.problem:
                log.warning("%s: %s", self.name, error.detail)
            self.fingerprint, self.problem = "", error.detail
        except OSError as error:
            self.problem = f"{self.name}: {error}"
        self._report(self)

    def _failed(self, _search: asyncio.Task[None], error: BaseException) -> None:
        """Log a bug, lest it look like a slow download."""
        log.error("%s cannot be opened", self.name, exc_info=error)
        self.fingerprint, self.problem = "", f"{self.name}: {type(error).__name__}: {error}"
        self._report(self)

    async def close(self) -> None:
        await self._background.close()
        if self.source is not None:
            self.source.text.close()


class LocalModels:
    """The wanted models on this machine, by name. This node reports their status."""

    def __init__(self, node: ClusterNode, transfers: TransferCoordinator) -> None:
        self._node = node
        self._transfers = transfers
        self._wanted: dict[str, LocalModel] = {}
        self._background = Background()
        transfers.stored.on_files(self._files_arrived)
        node.links.reports.on(self._check, ModelStatus)
        node.desired.on_change(self.resolve)
        node.desired.retry_if(self.is_lacking)
        node.rounds.every(REPORT_S, lambda _now: self.retry(), first_s=REPORT_S)

    def of(self, name: str) -> LocalModel:
        """Return the search for a model; an empty one if the model is not wanted."""
        return self._wanted.get(name) or self._new(name)

    def _new(self, name: str) -> LocalModel:
        return LocalModel(name, self._node.settings, self._transfers, self._report)

    def want(self, models: Mapping[str, bool]) -> None:
        """Search for these models alone; True permits a download. Results stay while wanted."""
        for name in self._wanted.keys() - models.keys():
            self._background.start(self._wanted.pop(name).close(), f"the end of the search for {name}")
        for name, may_download in models.items():
            known = self._wanted.get(name)
            found = self._wanted[name] = known or self._new(name)
            found.may_download = may_download
            if known is None:
                found.search()
        self._publish()

    def resolve(self, before: DeploymentTable, after: DeploymentTable) -> None:
        """Want the models of all deployments. A changed row restarts a search that failed."""
        self.want({row.model: row.pinned for row in after.live()})
        for row in after.live():
            known = self._wanted[row.model]
            if known.problem and row != before.get(row.name):
                known.search()

    def retry(self) -> None:
        for each in self._wanted.values():
            each.retry()

    def folder(self, name: str) -> Path:
        """Return the folder of a model. Raises ModelError if it is not wanted here or not yet found."""
        found = self._wanted.get(name)
        if found is None:
            raise ModelError(f"{name} is not wanted here", Code.MODEL_NOT_FOUND)
        if found.path is None or not found.fingerprint:
            raise ModelError(found.problem or f"{name} is still being looked for", Code.MODEL_NOT_FOUND)
        return found.path

    def unreported(self, model: str) -> dict[str, float]:
        """Return the linked members that have yet to report on a model, and until when to wait for each."""
        told, met_at = self._node.links.reports.of(ModelStatus, model), self._node.peer_info.met_at
        return {
            node_id: met_at.get(node_id, 0.0) + TELL_S
            for node_id in self._node.links.nodes()
            if (status := told.get(node_id)) is None or not (status.fingerprint or status.problem)
        }

    def is_lacking(self, model: str) -> bool:
        return any(status.problem for status in self._node.links.reports.of(ModelStatus, model).values())

    def _files_arrived(self, repository: str) -> None:
        for each in self._wanted.values():
            each.files_arrived(repository)

    def _check(self, _node_id: str, status: ModelStatus) -> None:
        if status.shape:
            try:
                unpacked(status.shape)
            except ValueError as error:
                raise ProtocolError(f"the shape of {status.model}: {error}", Code.FIELD_INVALID) from None

    def _report(self, found: LocalModel) -> None:
        if self._wanted.get(found.name) is found:  # a search may succeed after the model is unwanted
            self._publish()
            self._node.changed()

    def _publish(self) -> None:
        self._node.links.reports.publish(ModelStatus, *(each.status for each in self._wanted.values()))

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._wanted.values()))
        while self._background.tasks:
            await asyncio.wait(self._background.tasks)

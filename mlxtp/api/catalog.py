"""The models that a request may name: the loaded one, and those that load on request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from ..errors import Code, ModelError, RequestError
from ..text.tokenizer import Text
from .backend import COMING, DRAINING, Backend, ModelInfo, StoredModelInfo
from .budget import UNNAMED, find_model, unknown_model

KEPT = 2  # tokenizers of unloaded models kept in memory, tens of megabytes each


class Catalog:
    """Facts of models that do not need their weights, for `backend`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._texts: dict[Path, Text] = {}  # by folder, the last one used at the end
        self._reading = asyncio.Lock()

    async def listed(self) -> tuple[ModelInfo | StoredModelInfo, ...]:
        """Return the models that can be served now, then those that a request can load."""
        return self._with_loaded(await self._backend.on_request())

    async def loaded(self, name: str | None) -> tuple[ModelInfo, Text]:
        """Return the loaded model, by one of its names. Raises RequestError.

        404 for a model that no request could load either, 503 where none is loaded.
        """
        if (here := self._here(name)) is None:
            raise self._missing(name, await self._backend.on_request())
        return here

    async def find(self, name: str | None) -> ModelInfo | StoredModelInfo:
        """Return a loaded model, or one that a request can load. Raises RequestError as `loaded` does."""
        if (here := self._here(name)) is not None:
            return here[0]
        stored = await self._backend.on_request()
        for each in stored:
            if each.id == name:
                return each
        raise self._missing(name, stored)

    async def opened(self, name: str | None) -> tuple[ModelInfo | StoredModelInfo, Text]:
        """Return the same with its tokenizer, read from the disk where the model is not loaded.

        Raises RequestError as `find` does, and 400 for a folder that cannot be read.
        """
        model = await self.find(name)
        if isinstance(model, ModelInfo):
            return await self.loaded(model.id)
        try:
            return model, await self._read(model.path)
        except ModelError as error:
            detail = f"{model.id} cannot be read: {error.detail}"
            raise RequestError(detail, error.code, status=400, param="model") from error

    def not_ready(self) -> RequestError:
        """Return the error that explains why no model is loaded."""
        health = self._backend.health()
        why = f": {health.reason}" if health.reason else ""
        if health.state == DRAINING:
            return RequestError(f"no new requests{why}; try again", Code.SHUTTING_DOWN, status=503)
        detail, state = f"no model is ready (state {health.state}){why}", health.state
        if health.starting:
            detail = f"mlxtp is starting: {health.starting}. Try again in a few seconds."
            state = state if state in COMING else "starting"  # the cluster is still idle
        return RequestError(detail, Code.NOT_READY, status=503, state=state)

    def _here(self, name: str | None) -> tuple[ModelInfo, Text] | None:
        model, text = find_model(name, self._backend.models()), self._backend.text()
        return None if model is None or text is None else (model, text)

    def _with_loaded(self, stored: Sequence[StoredModelInfo]) -> tuple[ModelInfo | StoredModelInfo, ...]:
        models = self._backend.models()
        loaded = {model.id for model in models}
        return (*models, *(each for each in stored if each.id not in loaded))

    def _missing(self, name: str | None, stored: Sequence[StoredModelInfo]) -> RequestError:
        """Return the error for a name that is not loaded, where `stored` could be."""
        known = [each.id for each in self._with_loaded(stored)]
        loads = not self._backend.models() and self._backend.health().state in COMING
        if loads or not known or name in (*UNNAMED, *known):
            return self.not_ready()
        return unknown_model(name, known)

    async def _read(self, folder: Path) -> Text:
        async with self._reading:
            text = self._texts.pop(folder, None)
            if text is None:
                text = await asyncio.to_thread(Text.load, folder)
            self._texts[folder] = text
            while len(self._texts) > KEPT:
                del self._texts[next(iter(self._texts))]
            return text

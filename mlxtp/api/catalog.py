"""The models that a request may name: the loaded one, and those that load on request.

Also the choice among them by name, and the limits of a model's context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import Code, ModelError, RequestError
from ..text.tokenizer import Text
from .backend import COMING, DRAINING, Backend, ModelInfo, StoredModelInfo
from .request_body import shown

# --- one model and its context ----------------------------------------------------------------------------


QUICK_CHARACTERS = 1_000_000  # characters that are tokenized within a second
UNNAMED = (None, "", "default")  # Names that mean the loaded model.


def find_model(name: str | None, models: Sequence[ModelInfo]) -> ModelInfo | None:
    """Return the model by exact id, else by alias; for `default` or no name, the first; else None."""
    for model in models:
        if name == model.id:
            return model
    for model in models:
        if name in model.aliases:
            return model
    return models[0] if models and name in UNNAMED else None


def unknown_model(name: str | None, known: Iterable[str]) -> RequestError:
    """Return a 404 that lists the available models."""
    return RequestError(
        f"the model {shown(name)} does not exist here; available: {', '.join(known)}",
        Code.MODEL_NOT_FOUND,
        status=404,
        param="model",
    )


class TooLong(RequestError):
    """A prompt that does not fit the context, in tokens; each dialect has its own message for it.

    `counted` is text: a number, or "more than" one.
    """

    def __init__(self, tokens: int, context: int, *, more: bool = False) -> None:
        self.counted = f"more than {tokens}" if more else str(tokens)
        self.most = min(context, tokens - 1)  # at least one token is left for the answer
        detail = f"the prompt has {self.counted} tokens, and the model's context holds {self.most} at most"
        super().__init__(detail, Code.CONTEXT_OVERFLOW, param="messages")


def check_may_fit(
    characters: int,
    longest_token: int,
    model: ModelInfo | StoredModelInfo,
    prompts: int = 1,
    *,
    turns: int = 0,
) -> None:
    """Refuse prompts that cannot fit and would take seconds to tokenize. Raises TooLong.

    `longest_token` is in characters. Each chat turn takes at least one token.
    """
    least = max(characters // longest_token // prompts if characters > QUICK_CHARACTERS else 0, turns)
    if least > model.context:
        raise TooLong(least, model.context, more=True)


def token_budget(asked: int | None, prompt: Sequence[int], model: ModelInfo) -> int:
    """Return the most tokens that the answer may have: as requested, or as fit. Raises RequestError."""
    if not prompt:
        raise RequestError("the prompt is empty", param="messages")
    if min(prompt) < 0 or max(prompt) >= model.vocabulary:
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        raise RequestError(
            f"the prompt has token {wrong}, but the model knows only {model.vocabulary} tokens: "
            "its tokenizer and its weights do not belong together",
            Code.MODEL_INVALID,
            param="messages",
        )
    room = model.context - len(prompt)
    if room < 1:
        raise TooLong(len(prompt), model.context)
    return min(asked or room, room)


# --- all models -------------------------------------------------------------------------------------------


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

"""The models that a request may name, loaded or not: how to find one, its context, its facts on disk.

A fact that is not on disk stays unknown; nothing is guessed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import Code, ModelError, RequestError
from ..model_files import (
    INDEX,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    parameters_in,
    table,
    tokenizer_settings,
    weight_sizes,
)
from ..short_names import stands_for
from ..text.tokenizer import Text
from .backend import (
    COMING,
    DRAINING,
    GREEDY,
    Backend,
    DeploymentHealth,
    Health,
    ModelInfo,
    Sampling,
    StoredModelInfo,
)
from .request_body import shown
from .request_context import RequestContext, current, own_models
from .sampling import SETTINGS

log = logging.getLogger(__name__)


# --- facts of a model's folder ---------------------------------------------------------------------------


Json = dict[str, Any]

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_UNITS = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3))


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts about a model. An empty string, or 0, means unknown.

    `family` is the `model_type` of `config`, the whole of config.json. Examples of `parameters`: "8.0B"; of
    `quantization`: "4-bit", "BF16". `weight_bytes` are on this disk. `digest` (64 hexadecimal digits)
    identifies a folder by its configuration and the names and sizes of its weight files. `template` is the
    chat template, in Jinja.
    """

    config: Mapping[str, Any]
    family: str
    parameters: str
    quantization: str
    weight_bytes: int
    digest: str
    template: str

    def number(self, name: str) -> int | None:
        """Return an integer from the language model's configuration."""
        text = self.config.get("text_config")
        for config in (text if isinstance(text, dict) else {}, self.config):
            if type(config.get(name)) is int:
                return int(config[name])
        return None


def read_card(model: ModelInfo | StoredModelInfo) -> ModelCard:
    """Read the small files of the model's folder. Blocks: call it in a thread."""
    config = _read_json(model.path / "config.json")
    weights: dict[str, int] = {}
    template: object = None
    with suppress(OSError, ValueError):
        weights = weight_sizes(model.path)
    with suppress(OSError, ValueError):
        template = tokenizer_settings(model.path).get("chat_template")
    family = config.get("model_type")
    known = json.dumps([model.id, config, sorted(weights.items())])
    digest = hashlib.sha256(known.encode()).hexdigest()
    return ModelCard(
        config=config,
        family=family if isinstance(family, str) else "",
        parameters=_parameters(_read_json(model.path / INDEX), partial(parameters_in, model.path, digest)),
        quantization=_quantization(config),
        weight_bytes=sum(weights.values()),
        digest=digest,
        template=template if isinstance(template, str) else "",
    )


def _read_json(path: Path) -> Json:
    try:
        return table(path, MAX_INDEX_BYTES)
    except (OSError, ValueError):
        return {}


def _parameters(index: Json, counted: Callable[[], int]) -> str:
    """Return the number of parameters that mlx-lm counted when it wrote the weights, else `counted`."""
    metadata = index.get("metadata")
    count = metadata.get("total_parameters") if isinstance(metadata, dict) else None
    count = counted() if count is None else count
    if type(count) is not int or count <= 0:
        return ""
    return next((f"{count / unit:.1f}{letter}" for letter, unit in _UNITS if count >= unit), str(count))


def _quantization(config: Json) -> str:
    for name in ("quantization", "quantization_config"):
        table = config.get(name)
        if isinstance(table, dict):
            bits, method = table.get("bits"), table.get("quant_method")
            return f"{bits}-bit" if type(bits) is int else method if isinstance(method, str) else ""
    text = config.get("text_config")
    both = {**config, **(text if isinstance(text, dict) else {})}
    dtype = both.get("dtype", both.get("torch_dtype"))
    return _DTYPES.get(dtype, "") if isinstance(dtype, str) else ""


# --- sampling defaults ------------------------------------------------------------------------------------


def load_defaults(folder: Path) -> Sampling:
    """Return the defaults for requests that leave settings out. Greedy if the file is missing or unusable."""
    path = folder / "generation_config.json"
    try:
        config = table(path, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        return GREEDY
    except (OSError, ValueError) as error:
        log.warning("%s is not used: %s", path, error)
        return GREEDY
    return defaults_of(config)


def defaults_of(config: Mapping[str, Any]) -> Sampling:
    """Return the model's sampling with `do_sample`, else greedy. A value out of range counts as absent."""
    if config.get("do_sample") is not True:
        return GREEDY
    ranges = {name: each.openai for name, each in SETTINGS.items() if each.of_model}
    found: dict[str, Any] = {
        name: type(getattr(GREEDY, name))(config[name])
        for name, (least, most) in ranges.items()
        if type(config.get(name)) in (int, float) and max(least, 0) <= config[name] <= most
    }
    return Sampling(**{"temperature": 1.0} | found)


# --- one model and its context ----------------------------------------------------------------------------


QUICK_CHARACTERS = 1_000_000  # characters that are tokenized within a second
#: Names that mean the first of the loaded models; mlx-lm's server knows the last two.
UNNAMED = (None, "", "default", "default_model", "chat_model")


def find_model(name: str | None, models: Sequence[ModelInfo]) -> ModelInfo | None:
    """Return the model by exact id; else the first for `default` or no name; else by alias or short name."""
    named = [model for model in models if name == model.id]
    also = models if name in UNNAMED else [model for model in models if name in model.aliases]
    short = [model for model in models if stands_for(name) == model.id]
    return next(iter((*named, *also, *short)), None)


def permitted_name(
    name: str | None, models: Sequence[ModelInfo], request: RequestContext | None
) -> str | None:
    """Return a model name that the request's key may use. Raises RequestError, 403.

    For `default` or no name, it is the first such model that is loaded, else the first that the key names.
    """
    if request is None or not request.models:
        return name
    if (model := find_model(name, [each for each in models if is_permitted(each, request)])) is not None:
        return model.id
    if name in UNNAMED:
        return request.models[0]
    for called in (name, stands_for(name)):
        if called in request.models:
            return called
    raise not_permitted(request, str(name))


def is_permitted(model: ModelInfo | StoredModelInfo, request: RequestContext | None) -> bool:
    if request is None or not request.models:
        return True
    return model.id in request.models or any(each in request.models for each in getattr(model, "aliases", ()))


def not_permitted(request: RequestContext, name: str) -> RequestError:
    words = f"the key {request.key} is not for {name[:200]}; it is for {', '.join(request.models)}"
    return RequestError(words, Code.NOT_PERMITTED, status=403, param="model")


def find_deployment(
    name: str | None, models: Sequence[ModelInfo], deployments: Sequence[DeploymentHealth]
) -> DeploymentHealth | None:
    """Return the deployment of the model, also if the model is yet to be loaded."""
    model = find_model(name, models)
    names = (name, stands_for(name) or name) if model is None else (name, model.id)
    named = [each for each in deployments if each.name in names or each.model in names]
    return next(iter(named or (deployments if name in UNNAMED else ())), None)


def unknown_model(name: str | None, known: Iterable[str]) -> RequestError:
    """Return a 404 that lists the available models, if there are any."""
    available, full = ", ".join(known), stands_for(name)
    return RequestError(
        # clients of Ollama look for the first words, others for the last
        f"the model {shown(name)} was not found: it does not exist here"
        + (f"; it stands for {full}, which `mlxtp serve {full}` serves" if full else "")
        + (f"; available: {available}" if available else ""),
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
        self.most = min(context, tokens - 1)  # leaves at least one token for the answer
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
    """Return the answer's token limit, at least 1: as requested, or as many as fit. Raises RequestError."""
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
    return room if asked is None else min(max(asked, 1), room)


# --- all models -------------------------------------------------------------------------------------------


KEPT = 2  # tokenizers of unloaded models kept in memory, tens of megabytes each


class Catalog:
    """Lookup of models and tokenizers, without weights, for `backend`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._texts: dict[Path, Text] = {}  # by folder, most recently used last
        self._reading = asyncio.Lock()

    async def listed(self) -> tuple[ModelInfo | StoredModelInfo, ...]:
        """Return the loaded models, then the models that a request can load."""
        return self._with_loaded(await self._backend.on_request())

    async def loaded(self, name: str | None) -> tuple[ModelInfo, Text]:
        """Return a loaded model by one of its names.

        Raises RequestError: 404 for a model that no request could load either, 503 if none is loaded.
        """
        if (here := self._here(name)) is None:
            raise self._missing(name, await self._backend.on_request())
        return here

    async def find(self, name: str | None) -> ModelInfo | StoredModelInfo:
        """Return a model that is loaded, or that a request can load.

        Raises RequestError as `loaded` does, and 403 if the request's key may not use the model.
        """
        name = self.permitted(name)
        if (here := self._here(name)) is not None:
            return here[0]
        stored = await self._backend.on_request()
        for called in (name, stands_for(name)):
            if found := next((each for each in stored if each.id == called), None):
                return found
        raise self._missing(name, stored)

    async def opened(self, name: str | None) -> tuple[ModelInfo | StoredModelInfo, Text]:
        """Return the model and its tokenizer, from disk if the model is not loaded.

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

    def models(self) -> tuple[ModelInfo, ...]:
        """Return the loaded models that the request's key may use."""
        request = current()
        return tuple(each for each in self._backend.models() if is_permitted(each, request))

    def permitted(self, name: str | None) -> str | None:
        return permitted_name(name, self._backend.models(), current())

    async def check_loads(self, name: str | None) -> None:
        """Raise RequestError, 403, if the request would load a model and its key may not."""
        request = current()
        if request is None or request.loads or self.deployment(name) is not None:
            return
        if find_model(name, self._backend.models()) is None and await self._backend.on_request():
            lacks = f"the key {request.key} lacks the scope to load it, on-request"
            words = f"{shown(name)} is not loaded; {lacks}"
            raise RequestError(words, Code.NOT_PERMITTED, status=403, param="model")

    def deployment(self, name: str | None) -> DeploymentHealth | None:
        return find_deployment(name, self._backend.models(), self._backend.health().deployments)

    def health(self, name: str | None, models: Sequence[str] = ()) -> Health:
        """Return the state of the deployment with this name; of the cluster for None, or without such one.

        A key limited to `models` sees neither other deployments nor, if there are any, the reasons.
        """
        deployment = self.deployment(name) if name is not None else None
        health = self._backend.health(deployment.name if deployment is not None else "")
        names = {*models, *filter(None, map(stands_for, models))}
        names |= {each.id for each in self._backend.models() if names & set(each.aliases)}
        found = self._backend.health().deployments
        own = tuple(each for each in found if names & {each.name, each.model})
        if not models or own == found:
            return health
        if health.model not in {each.model for each in own}:
            health = replace(health, model=None, ranks=())
        return replace(health, reason=None, starting="", deployments=own)

    def not_ready(self, name: str | None) -> RequestError:
        """Return the error that explains why a model, or any, is not loaded."""
        health = self.health(name, own_models())
        why = f": {health.reason}" if health.reason else ""
        if health.state == DRAINING:
            return RequestError(f"no new requests{why}; try again", Code.SHUTTING_DOWN, status=503)
        detail, state = f"no model is ready (state {health.state}){why}", health.state
        if self._backend.models() and name not in UNNAMED:
            detail = f"{name} is not ready (state {health.state}){why}"
        if health.starting:
            detail = f"mlxtp is starting: {health.starting}. Try again in a few seconds."
            state = state if state in COMING else "starting"  # the cluster is still idle
        return RequestError(detail, Code.NOT_READY, status=503, state=state)

    def _here(self, name: str | None) -> tuple[ModelInfo, Text] | None:
        model = find_model(name, self._backend.models())
        text = self._backend.text(model.id) if model is not None else None
        return None if model is None or text is None else (model, text)

    def _with_loaded(self, stored: Sequence[StoredModelInfo]) -> tuple[ModelInfo | StoredModelInfo, ...]:
        models, request = self.models(), current()
        loaded = {model.id for model in models}
        others = (each for each in stored if each.id not in loaded and is_permitted(each, request))
        return (*models, *others)

    def _missing(self, name: str | None, stored: Sequence[StoredModelInfo]) -> RequestError:
        known = [each.id for each in self._with_loaded(stored)]
        health = self._backend.health()
        own = self.health(None, own_models()).deployments
        known += [each.model for each in own if each.model and each.model not in known]
        loads = not self._backend.models() and health.state in COMING
        there = known or self._backend.models() or health.deployments  # some only for other keys
        if loads or not there or name in (*UNNAMED, *known) or self.deployment(name) is not None:
            return self.not_ready(name)
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

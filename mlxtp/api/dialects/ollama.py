"""The Ollama dialect: `/api/chat`, `/api/generate`, and model information that its clients request first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...errors import MlxtpError
from ...text.conversation import GenerationRequest
from ...text.transcript import WholeAnswer
from ..adapter import NDJSON, About, AnswerWriter, Json, Operation
from ..backend import ModelInfo, StoredModelInfo
from ..generation import Generation
from ..model_card import load_defaults, read_card
from ..request_body import not_supported, parsed, shown
from .ollama_answers import LineWriter, list_row, no_answer, running_row, show_body, whole_body
from .ollama_request import (
    Arrival,
    NoPrompt,
    OllamaAnswerOptions,
    OllamaChat,
    OllamaGenerate,
    OllamaShow,
    parse_chat,
    parse_generate,
    served_name,
)

#: Version of Ollama's API, not of mlxtp. Clients compare its three numbers with the least that they accept
#: (0.6.4 for Copilot Chat, 0.14.2 for those that use Ollama's `/v1/messages` too). By then Ollama had all
#: features that are served here: thinking, tool calls in streams, schemas, log-probabilities.
VERSION = "0.14.2"

Handler = Callable[[Request], Awaitable[Response]]
_MANAGED = (
    ("POST", "/api/pull"),
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("POST", "/api/blobs/{digest}"),
)
_EMBEDDINGS = (("POST", "/api/embed"), ("POST", "/api/embeddings"))


class Ollama:
    """The adapter of all paths below `/api`."""

    prefixes: tuple[str, ...] = ("/api/",)
    too_long = (
        "the prompt is longer than the context length currently available to the model: it has {tokens} "
        "tokens, and {most} fit; shorten the prompt, or use a model with a longer context length"
    )
    media_type = NDJSON
    names: Mapping[str, str] = MappingProxyType(
        {
            "max_tokens": "num_predict",
            "repetition_penalty": "repeat_penalty",
            "response_format": "format",
            "needs_thinking": "think",
        }
    )
    operations = (
        Operation("POST", "/api/chat", "Answer a chat (Ollama)", OllamaChat, stream=NDJSON),
        Operation(
            "POST",
            "/api/generate",
            "Answer a prompt (Ollama)",
            OllamaGenerate,
            stream=NDJSON,
        ),
        Operation("GET", "/api/tags", "The models that can be served (Ollama)"),
        Operation("GET", "/api/ps", "The loaded model (Ollama)"),
        Operation("POST", "/api/show", "Details of a model (Ollama)", OllamaShow),
        Operation("GET", "/api/version", "The version of Ollama's API"),
        *[Operation(*each, "Refused: embeddings are not served", always=400) for each in _EMBEDDINGS],
        *[Operation(*each, "Refused: mlxtp's own commands manage models", always=400) for each in _MANAGED],
    )

    def routes(self, generation: Generation) -> Sequence[Route]:
        def route(method: str, path: str, handler: Handler) -> Route:
            return Route(path, generation.endpoint(self, handler), methods=[method])

        models = _Models(generation)
        return [
            route("POST", "/api/chat", _answering(self, generation, parse_chat)),
            route("POST", "/api/generate", _answering(self, generation, parse_generate)),
            route("GET", "/api/tags", models.tags),
            route("GET", "/api/ps", models.ps),
            route("POST", "/api/show", models.show),
            route("GET", "/api/version", _version),
            *[route(*each, _no_embeddings) for each in _EMBEDDINGS],
            *[route(*each, _not_managed) for each in _MANAGED],
        ]

    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        [answer] = wholes
        return whole_body(about, answer)

    def writer(self, about: About) -> AnswerWriter:
        return LineWriter(about)

    def error(self, error: MlxtpError, status: int) -> Json:
        return {"error": error.detail}


class _Models:
    """The endpoints for information about models. Their folders are read again each time."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def tags(self, _request: Request) -> Response:
        models = await self._generation.catalog.listed()
        rows = [list_row(model, await asyncio.to_thread(read_card, model)) for model in models]
        return JSONResponse({"models": rows})

    async def ps(self, _request: Request) -> Response:
        models, health = self._generation.models(), self._generation.health()
        rows = [running_row(model, await asyncio.to_thread(read_card, model), health) for model in models]
        return JSONResponse({"models": rows})

    async def show(self, request: Request) -> Response:
        body = await self._generation.parsed(request, partial(parsed, OllamaShow))
        name = served_name(body.model or body.name or "", self._generation.models())
        model, text = await self._generation.catalog.opened(name)
        capabilities = ["completion"]
        if text.knows_tools:
            capabilities.append("tools")
        if text.markup.think is not None:
            capabilities.append("thinking")
        return JSONResponse(await asyncio.to_thread(_shown, model, capabilities))


def _shown(model: ModelInfo | StoredModelInfo, capabilities: Sequence[str]) -> Json:
    """Return the answer to `/api/show`. Reads the small files of the model's folder."""
    defaults = model.defaults if isinstance(model, ModelInfo) else load_defaults(model.path)
    return show_body(model, defaults, read_card(model), capabilities)


def _answering(
    adapter: Ollama, generation: Generation, parse: Callable[[Arrival, bytes], GenerationRequest]
) -> Handler:
    """Return the endpoint that generates, for bodies that `parse` reads."""

    async def answer(request: Request) -> Response:
        arrival = Arrival(time.perf_counter_ns(), generation.models())
        try:
            return await generation.answer(adapter, request, partial(parse, arrival))
        except NoPrompt as wish:
            name = served_name(wish.asked.model, arrival.models)
            if wish.unload:
                return await _unloaded(generation, name, wish.asked)
            return JSONResponse(no_answer(wish.asked, await generation.load(request, name), "load"))

    return answer


async def _unloaded(generation: Generation, name: str, asked: OllamaAnswerOptions) -> Response:
    """Refuse to unload the loaded model: other clients use it, too."""
    model = await generation.catalog.find(name)
    if isinstance(model, ModelInfo):
        raise not_supported(
            f"keep_alive 0 does not unload {shown(model.id)}, which the cluster serves to all its clients; "
            "`mlxtp unload` does",
            "keep_alive",
        )
    return JSONResponse(no_answer(asked, model, "unload"))


async def _version(_request: Request) -> Response:
    return JSONResponse({"version": VERSION})


async def _no_embeddings(request: Request) -> Response:
    raise not_supported(f"{request.url.path} is not served: this server makes no embeddings", "")


async def _not_managed(request: Request) -> Response:
    raise not_supported(
        f"{request.url.path} is not served: models are managed with mlxtp's own commands, such as "
        "`mlxtp serve MODEL` and `mlxtp unload`",
        "",
    )

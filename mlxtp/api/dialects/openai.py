"""The OpenAI dialect: `POST /v1/chat/completions` and `GET /v1/models`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...errors import MlxtpError
from ...text.transcript import WholeAnswer
from ..adapter import SSE, About, AnswerWriter, Json, Operation
from ..generation import Generation
from ..http_errors import error_body_of
from . import anthropic_answers
from . import openai_answers as answers
from .openai_request import ChatRequest, OpenAIAnswerOptions, parse_chat

MODELS = "/v1/models"


class OpenAIChat:
    """The adapter of chats, and of all paths that no other dialect owns."""

    prefixes: tuple[str, ...] = ("/v1/", "/")
    names: Mapping[str, str] = {}
    too_long = answers.TOO_LONG
    media_type = SSE
    operations = (
        Operation("GET", "/health", "The state of the cluster"),
        Operation(
            "GET",
            "/v1/models",
            "The models that can be served, the loaded one first",
        ),
        Operation("GET", "/v1/models/{id}", "One model"),
        Operation("POST", "/v1/chat/completions", "Answer a chat", ChatRequest, SSE),
    )

    def routes(self, generation: Generation) -> Sequence[Route]:
        async def chat(request: Request) -> Response:
            return await generation.answer(self, request, parse_chat)

        async def models(request: Request) -> Response:
            return JSONResponse(_shapes(request).models_body(await generation.catalog.listed()))

        async def model(request: Request) -> Response:
            found = await generation.catalog.find(request.path_params["id"])
            return JSONResponse(_shapes(request).model_body(found))

        return [
            Route("/v1/chat/completions", generation.endpoint(self, chat), methods=["POST"]),
            # `app.py` handles their errors, since it knows the client's dialect
            Route(MODELS, models, methods=["GET"]),
            Route(f"{MODELS}/", models, methods=["GET"]),
            Route(f"{MODELS}/{{id:path}}", model, methods=["GET"]),
        ]

    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        asked: OpenAIAnswerOptions = about.ask.dialect
        return answers.completion_body(about, wholes, asked.custom)

    def writer(self, about: About) -> AnswerWriter:
        asked: OpenAIAnswerOptions = about.ask.dialect
        return answers.ChunkWriter(about, asked.include_usage, asked.custom)

    def error(self, error: MlxtpError, status: int) -> Json:
        return error_body_of(error)


def speaks_anthropic(headers: Headers) -> bool:
    """Return True for a client of Anthropic's dialect. Two dialects list models at the same path."""
    return "anthropic-version" in headers


def _shapes(request: Request) -> ModuleType:
    return anthropic_answers if speaks_anthropic(request.headers) else answers

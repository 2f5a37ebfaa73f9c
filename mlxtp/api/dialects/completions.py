"""OpenAI's older dialect: prompts that are continued, without a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...errors import MlxtpError
from ...text.transcript import WholeAnswer
from ..adapter import SSE, About, Json, Operation
from ..generation import Generation
from ..http_errors import error_body_of
from . import unserved
from .completions_answers import CompletionWriter, whole_body
from .completions_request import CompletionRequest, parse
from .openai_answers import TOO_LONG

PATH = "/v1/completions"


class Completions:
    """The adapter of `/v1/completions`, and of OpenAI's endpoints that are not served."""

    prefixes: tuple[str, ...] = (PATH, *unserved.PREFIXES)
    names: Mapping[str, str] = {"messages": "prompt"}
    too_long = TOO_LONG
    media_type = SSE
    operations = (
        Operation("POST", PATH, "Continue a prompt", CompletionRequest, SSE),
        *unserved.OPERATIONS,
    )

    def routes(self, generation: Generation) -> Sequence[Route]:
        async def complete(request: Request) -> Response:
            return await generation.answer(self, request, parse)

        return [
            Route(PATH, generation.endpoint(self, complete), methods=["POST"]),
            *unserved.routes(lambda handler: generation.endpoint(self, handler)),
        ]

    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        return whole_body(about, wholes)

    def writer(self, about: About) -> CompletionWriter:
        return CompletionWriter(about)

    def error(self, error: MlxtpError, status: int) -> Json:
        return error_body_of(error)

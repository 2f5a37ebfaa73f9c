"""The Anthropic dialect: `POST /v1/messages`, whole and streamed, and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...errors import Code, MlxtpError, RequestError
from ...text.transcript import WholeAnswer
from ..adapter import SSE, About, Json, Operation
from ..generation import Generation
from .anthropic_answers import OVERLOADED_STATUS, MessageWriter, error_body, request_id, whole_body
from .anthropic_request import CountRequest, MessagesRequest, parse_count, parse_messages


class Anthropic:
    """Adapter for clients of Anthropic's API, such as Claude Code. Their base URL ends before `/v1`."""

    prefixes: tuple[str, ...] = ("/v1/messages",)
    names: Mapping[str, str] = MappingProxyType(
        {
            "stop": "stop_sequences",
            "response_format": "output_config.format",
            "function.name": "name",
            "function.parameters": "input_schema",
        }
    )
    too_long = "prompt is too long: {tokens} tokens > {most} maximum"
    media_type = SSE
    operations = (
        Operation("POST", "/v1/messages", "Answer a chat", MessagesRequest, SSE),
        Operation("POST", "/v1/messages/count_tokens", "Count a prompt", CountRequest),
    )

    def routes(self, generation: Generation) -> Sequence[Route]:
        async def messages(request: Request) -> Response:
            try:
                return _with_id(await generation.answer(self, request, parse_messages))
            except RequestError as error:
                if error.code is Code.OVERLOADED:
                    error.status = OVERLOADED_STATUS
                raise

        async def count(request: Request) -> Response:
            return _with_id(JSONResponse({"input_tokens": await generation.count(request, parse_count)}))

        return [
            Route("/v1/messages", generation.endpoint(self, messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", generation.endpoint(self, count), methods=["POST"]),
        ]

    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        [answer] = wholes
        return whole_body(about, answer)

    def writer(self, about: About) -> MessageWriter:
        return MessageWriter(about)

    def error(self, error: MlxtpError, status: int) -> Json:
        return error_body(error, status)


def _with_id(response: Response) -> Response:
    response.headers["request-id"] = request_id()
    return response


ANTHROPIC = Anthropic()

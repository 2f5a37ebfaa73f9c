"""OpenAI's newer dialect: items instead of messages, named events, and answers that are kept for a while.

`responses_request.py` and `responses_items.py` read the request. `responses_answers.py` builds the answer
from the items in `responses_output.py`. `responses_store.py` keeps answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...errors import MlxtpError
from ...text.conversation import GenerationRequest
from ...text.transcript import WholeAnswer
from ..adapter import SSE, About, Json, Operation
from ..generation import Generation
from ..http_errors import error_body_of
from .openai_answers import TOO_LONG, finishes
from .responses_answers import ResponseWriter, response_body
from .responses_output import (
    items_of_whole,
    status_of,
)
from .responses_request import ResponseRequest, ResponsesAnswerOptions, parse
from .responses_store import ResponseStore

PATH = "/v1/responses"


class Responses:
    """The adapter of `/v1/responses`. Each has its own store."""

    prefixes: tuple[str, ...] = (PATH,)
    names: Mapping[str, str] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }
    too_long = TOO_LONG
    media_type = SSE
    operations = (
        Operation("POST", PATH, "Answer a conversation", ResponseRequest, SSE),
        Operation(
            "POST",
            f"{PATH}/input_tokens",
            "Count the tokens of an input",
            ResponseRequest,
        ),
    )

    def __init__(self, store: ResponseStore | None = None, clock: Callable[[], float] = time.time) -> None:
        self._store = ResponseStore() if store is None else store
        self._clock = clock

    def routes(self, generation: Generation) -> Sequence[Route]:
        async def create(request: Request) -> Response:
            # a short body may name a long conversation
            return await generation.answer(self, request, self._parse, slow=True)

        async def count(request: Request) -> Response:
            tokens = await generation.count(request, self._parse)
            return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

        return [
            Route(path, generation.endpoint(self, handler), methods=["POST"])
            for path, handler in ((PATH, create), (f"{PATH}/input_tokens", count))
        ]

    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        [whole], [finish] = wholes, finishes(wholes)
        output = items_of_whole(about, whole, finish)
        response = response_body(about, status_of(finish), output, finish=finish, completed_at=self._clock())
        self._keep(about, response)
        return response

    def writer(self, about: About) -> ResponseWriter:
        return ResponseWriter(about, lambda response: self._keep(about, response), self._clock)

    def error(self, error: MlxtpError, status: int) -> Json:
        return error_body_of(error)

    def _parse(self, body: bytes) -> GenerationRequest:
        return parse(body, self._store)

    def _keep(self, about: About, response: Json) -> None:
        wanted: ResponsesAnswerOptions = about.ask.dialect
        if wanted.input is not None:
            self._store.put(response["id"], wanted.input, response["output"])

"""OpenAI's newer dialect: items instead of messages, named events, and answers that are kept for a while.

`responses_request.py` and `responses_items.py` read the request. `responses_answers.py` builds the answer
from the items in `responses_output.py`. `responses_store.py` keeps answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...errors import MlxtpError, RequestError
from ...text.conversation import GenerationRequest
from ...text.events import WholeAnswer
from ..adapter import SSE, About, Json
from ..generation import Generation
from ..http_errors import error_body_of
from ..openapi import Operation
from ..schema import not_supported, shown
from .openai_answers import TOO_LONG, finishes
from .responses_answers import ResponseWriter, response_body
from .responses_output import (
    items_of_whole,
    status_of,
)
from .responses_request import ResponseRequest, ResponsesAnswerOptions, parse
from .responses_store import ResponseStore

PATH = "/v1/responses"
_MOST_LISTED, _LISTED = 100, 20  # input items, as in OpenAI's API


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
        Operation("GET", f"{PATH}/{{id}}", "Return a stored answer"),
        Operation("DELETE", f"{PATH}/{{id}}", "Delete a stored answer"),
        Operation(
            "GET",
            f"{PATH}/{{id}}/input_items",
            "List the input of a stored answer",
        ),
        Operation("POST", f"{PATH}/{{id}}/cancel", "Not served", always=400),
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

        async def get(request: Request) -> Response:
            if request.query_params.get("stream", "false") not in ("false", "0"):
                raise not_supported("stream: a stored answer is not streamed again; leave it out", "stream")
            return Response(self._store.get(request.path_params["id"]).body, media_type="application/json")

        async def delete(request: Request) -> Response:
            id_ = request.path_params["id"]
            self._store.delete(id_)
            return JSONResponse({"id": id_, "object": "response", "deleted": True})

        async def input_items(request: Request) -> Response:
            kept = self._store.get(request.path_params["id"])
            items: list[Json] = await asyncio.to_thread(json.loads, kept.input)
            return JSONResponse(listed(items, request.query_params))

        async def cancel(_request: Request) -> Response:
            raise not_supported("only answers in the background can be cancelled; close the connection", "id")

        table = (
            ("POST", PATH, create),
            ("POST", f"{PATH}/input_tokens", count),
            ("GET", f"{PATH}/{{id}}", get),
            ("DELETE", f"{PATH}/{{id}}", delete),
            ("GET", f"{PATH}/{{id}}/input_items", input_items),
            ("POST", f"{PATH}/{{id}}/cancel", cancel),
        )
        return [
            Route(path, generation.endpoint(self, handler), methods=[method])
            for method, path, handler in table
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
            self._store.put(response, wanted.input)


def listed(items: Sequence[Json], query: QueryParams) -> Json:
    """Return one page of a list: `limit` items after `after`, the newest first unless `order` is asc."""
    limit, order, after = query.get("limit", str(_LISTED)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= _MOST_LISTED):
        raise RequestError(f"limit should be from 1 to {_MOST_LISTED}, got {shown(limit)}", param="limit")
    if order not in ("asc", "desc"):
        raise RequestError(f'order should be "asc" or "desc", got {shown(order)}', param="order")
    rows = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        at = next((i for i, row in enumerate(rows) if row["id"] == after), None)
        if at is None:
            raise RequestError(f"after: there is no item {shown(after)} in this list", param="after")
        rows = rows[at + 1 :]
    page = rows[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(rows) > len(page),
    }

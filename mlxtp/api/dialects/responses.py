"""OpenAI's newer dialect: items instead of messages, named events, and answers that are kept for a while.

The request is read in `response_request.py` and `response_items.py`; `response_output.py` has the shapes of
the answer, `response_store.py` what is kept.
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
from ..adapter import SSE, About, Json
from ..ask import Ask
from ..errors import error_body
from ..events import CallArguments, CallBegan, Event, Finish, Said, Scored, Thought, Whole
from ..generation import Generation
from ..openapi import Operation
from ..schema import not_supported, shown
from ..streaming import COMMENT
from .openai_answers import finishes, sse
from .openai_shapes import OpenAIError
from .response_output import (
    Item,
    Message,
    Reasoning,
    ToolCall,
    items_of_whole,
    logprobs,
    place,
    response_body,
    scores_of_first,
    speaks,
    status_of,
)
from .response_request import ResponseRequest, Wanted, parse
from .response_shapes import InputItems, InputTokens, ResponseBody, ResponseDeleted
from .response_store import ResponseStore

PATH = "/v1/responses"
_MOST_LISTED, _LISTED = 100, 20  # input items, as in OpenAI's API


class _Writer:
    """One answer as events. `keep` takes the whole response when it is over."""

    def __init__(self, about: About, keep: Callable[[Json], None], clock: Callable[[], float]) -> None:
        self._about = about
        self._keep = keep
        self._clock = clock
        self._number = 0
        self._output: list[Json] = []
        self._item: Item | None = None
        self._late: list[Scored] = []
        """Scores of tokens of which it is not known yet whether they belong to what is said."""
        self._finish: Finish | None = None

    def open(self) -> bytes:
        response = response_body(self._about, "in_progress", ())
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._sent({"type": kind, "response": response}) for kind in kinds])

    def write(self, event: Event) -> bytes:
        match event:
            case Thought(text=text):
                return self._think(text)
            case Said(text=text, scores=scores):
                return self._say(text, scores)
            case CallBegan(id=id_, name=name):
                return self._begin(ToolCall(self._place(), id_, name))
            case CallArguments(text=text):
                assert isinstance(self._item, ToolCall)
                return self._sent(self._item.more(text))
            case Finish():
                return self._finished(event)

    def close(self) -> bytes:
        assert self._finish is not None
        status = status_of(self._finish)
        response = response_body(
            self._about, status, self._output, finish=self._finish, completed_at=self._clock()
        )
        self._keep(response)
        return self._sent({"type": f"response.{status}", "response": response})

    def fail(self, error: MlxtpError) -> bytes:
        before = self._end("incomplete")
        response = response_body(self._about, "failed", self._output, error=error)
        return before + self._sent({"type": "response.failed", "response": response})

    def idle(self) -> bytes:
        return COMMENT

    def _think(self, text: str) -> bytes:
        before = b""
        if not isinstance(self._item, Reasoning):
            before = self._begin(Reasoning(self._place()))
        assert isinstance(self._item, Reasoning)
        return before + self._sent(self._item.more(text))

    def _say(self, text: str, scores: Sequence[Scored]) -> bytes:
        """Scores without a text are those of thoughts and calls, or of what ends the answer."""
        if not text:
            if isinstance(self._item, Message):
                self._late += scores
            return b""
        before = b""
        if not isinstance(self._item, Message):
            if self._item is not None:
                scores = scores_of_first(self._about, text, scores)
            before = self._begin(Message(self._place()))
        return before + self._more(text, scores)

    def _more(self, text: str, scores: Sequence[Scored]) -> bytes:
        assert isinstance(self._item, Message)
        scores = [*self._late, *scores]
        self._late = []
        return self._sent(self._item.more(text, logprobs(self._about, scores)))

    def _finished(self, finish: Finish) -> bytes:
        self._finish = finish
        kinds = {item["type"] for item in self._output} | ({self._item.kind} if self._item else set())
        before = b""
        if "message" not in kinds and speaks(finish, "reasoning" in kinds, "function_call" in kinds):
            before = self._begin(Message(self._place()))
        elif self._late:
            before = self._more("", ())
        return before + self._end(status_of(finish))

    def _place(self) -> str:
        return place(self._about, len(self._output) + (self._item is not None))

    def _begin(self, item: Item) -> bytes:
        before = self._end("completed")
        self._item, self._late = item, []
        added = {"type": "response.output_item.added", "item": item.json("in_progress")}
        return before + b"".join([self._sent(event) for event in (added, *item.opened())])

    def _end(self, status: str) -> bytes:
        """The end of the item that is open, if one is."""
        item = self._item
        if item is None:
            return b""
        whole = item.json(status)
        done = {"type": "response.output_item.done", "item": whole}
        sent = b"".join([self._sent(event) for event in (*item.closed(), done)])
        self._item = None
        self._output.append(whole)
        return sent

    def _sent(self, event: Json) -> bytes:
        """With its number and, for one of an item, the item's place."""
        numbered = event | {"sequence_number": self._number}
        if self._item is not None:
            numbered["output_index"] = len(self._output)
        self._number += 1
        return b"event: %b\n%b" % (event["type"].encode(), sse(numbered))


class Responses:
    """The adapter. Each has a memory of its own."""

    prefixes: tuple[str, ...] = (PATH,)
    names: Mapping[str, str] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }
    media_type = SSE
    operations = (
        Operation("POST", PATH, "Answer a conversation", ResponseRequest, ResponseBody, OpenAIError, SSE),
        Operation("GET", f"{PATH}/{{id}}", "An answer that is kept", None, ResponseBody, OpenAIError),
        Operation("DELETE", f"{PATH}/{{id}}", "Forget an answer", None, ResponseDeleted, OpenAIError),
        Operation("GET", f"{PATH}/{{id}}/input_items", "What it answered", None, InputItems, OpenAIError),
        Operation("POST", f"{PATH}/{{id}}/cancel", "Not served", None, None, OpenAIError),
        Operation(
            "POST",
            f"{PATH}/input_tokens",
            "Count the tokens of an input",
            ResponseRequest,
            InputTokens,
            OpenAIError,
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
                raise not_supported("stream: an answer that is over is not streamed again", "stream")
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
            raise not_supported("only answers in the background can be cancelled: close the connection", "id")

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

    def whole(self, about: About, wholes: Sequence[Whole]) -> Json:
        [whole], [finish] = wholes, finishes(wholes)
        output = items_of_whole(about, whole, finish)
        response = response_body(about, status_of(finish), output, finish=finish, completed_at=self._clock())
        self._keep(about, response)
        return response

    def writer(self, about: About) -> _Writer:
        return _Writer(about, lambda response: self._keep(about, response), self._clock)

    def error(self, error: MlxtpError, status: int) -> Json:
        return error_body(error.detail, error.code.value, status, getattr(error, "param", None))

    def _parse(self, body: bytes) -> Ask:
        return parse(body, self._store)

    def _keep(self, about: About, response: Json) -> None:
        wanted: Wanted = about.ask.dialect
        if wanted.input is not None:
            self._store.put(response, wanted.input)


def listed(items: Sequence[Json], query: QueryParams) -> Json:
    """One page of a list: `limit` of them, from behind `after` on, the newest first unless `order` is asc."""
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

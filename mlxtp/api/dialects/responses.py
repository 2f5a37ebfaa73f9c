"""OpenAI's newer dialect: items instead of messages, named events, answers that later requests continue."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...admission_counter import AdmissionCounter
from ...errors import Code, MlxtpError, RequestError
from ...text.conversation import Call, GenerationRequest
from ...text.transcript import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    ContentDelta,
    Finish,
    ReasoningDelta,
    Scored,
    WholeAnswer,
)
from ..adapter import SSE, About, AnswerWriter, Json, Operation, compact, error_status, named_event
from ..generation import Adapter, Generation, Handler
from ..guard import address_of
from ..request_body import MOST_TOKENS, Schema, checked, in_range, shown
from ..request_context import current
from ..sockets import PATH, SOCKET, Socket
from ..streaming import AnswerStream
from . import openai as answers
from .request_parts import ClientTool, TextReader, called
from .responses_background import BackgroundResponse, over, replayed
from .responses_items import CALLS, call_item, compaction_content, listed, object_in, search_call
from .responses_request import (
    CompactRequest,
    ReasoningSettings,
    ResponseRequest,
    ResponsesAnswerOptions,
    parse,
    parse_compact,
    parse_turn,
)
from .responses_store import MOST_READERS, MOST_READERS_OF_ONE, ResponseStore, StoredResponse

# --- items of an answer -----------------------------------------------------------------------------------

# `opened` (after an item is announced), `more`, and `closed` (before the whole item) return events without
# their numbers and the item's place. `json` returns the item, without content if it is "in_progress".


class TextOutput:
    """The model's text, or its thoughts, as an item."""

    def __init__(self, kind: Literal["message", "reasoning"], place: str) -> None:
        self.kind = kind
        self.id = f"msg_{place}" if kind == "message" else f"rs_{place}"
        self._part = "output_text" if kind == "message" else "reasoning_text"
        self._text: list[str] = []
        self._logprobs: list[Json] = []

    def more(self, text: str, logprobs: Sequence[Json] = ()) -> Json:
        self._text.append(text)
        self._logprobs += logprobs
        return self._event(f"{self._part}.delta", delta=text, **self._scores(logprobs))

    def opened(self) -> list[Json]:
        return [self._event("content_part.added", part=self._whole("", ()))]

    def closed(self) -> list[Json]:
        text, logprobs = "".join(self._text), self._logprobs
        return [
            self._event(f"{self._part}.done", text=text, **self._scores(logprobs)),
            self._event("content_part.done", part=self._whole(text, logprobs)),
        ]

    def json(self, status: str) -> Json:
        content = [] if status == "in_progress" else [self._whole("".join(self._text), self._logprobs)]
        about: Json = {"role": "assistant", "status": status}
        if self.kind == "reasoning":
            about = {"status": status, "summary": []}
        return {"type": self.kind, "id": self.id, **about, "content": content}

    def _whole(self, text: str, logprobs: Sequence[Json]) -> Json:
        annotations: Json = {"annotations": []} if self.kind == "message" else {}
        return {"type": self._part, "text": text, **annotations, **self._scores(logprobs)}

    def _scores(self, logprobs: Sequence[Json]) -> Json:
        return {"logprobs": list(logprobs)} if self.kind == "message" else {}

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "item_id": self.id, "content_index": 0} | fields


_FORMS: Mapping[str, tuple[str, str, str, str]] = {  # item, prefix of its id, its events, their field
    "function": ("function_call", "fc", "response.function_call_arguments", "arguments"),
    "custom": ("custom_tool_call", "ctc", "response.custom_tool_call_input", "input"),
    "tool_search": ("tool_search_call", "tsc", "", "arguments"),
}


class ToolCallOutput:
    """A call as an item. Custom tools get its text, others its arguments. Searches have no events."""

    def __init__(self, place: str, call_id: str, tool: ClientTool) -> None:
        self.kind, prefix, self._events, self._field = _FORMS[tool.kind]
        self.id = f"{prefix}_{place}"
        self._call_id = call_id
        self._tool = tool
        self._reader = TextReader() if tool.kind == "custom" else None
        self._text: list[str] = []

    def more(self, arguments: str) -> list[Json]:
        text = arguments if self._reader is None else self._reader.push(arguments)
        self._text.append(text)
        return self._event("delta", delta=text) if text else []

    def opened(self) -> list[Json]:
        return []

    def closed(self) -> list[Json]:
        name = {"name": self._tool.name} if self.kind == "function_call" else {}
        return self._event("done", **name, **{self._field: "".join(self._text)})

    def json(self, status: str) -> Json:
        text = "".join(self._text)
        if self.kind == "tool_search_call":
            item = search_call(self._call_id, object_in(text) or {}, status)
        else:
            call = Call(self._call_id, self._tool.name, text)
            item = call_item(self.kind, call, status, self._tool.namespace)
        return {"type": self.kind, "id": self.id} | item

    def _event(self, step: str, **fields: Any) -> list[Json]:
        return [{"type": f"{self._events}.{step}", "item_id": self.id} | fields] if self._events else []


def tool_call(about: About, place: str, call_id: str, name: str) -> ToolCallOutput:
    """Return the item of a call. `name` is the model's name for the tool; the item has the client's."""
    return ToolCallOutput(place, call_id, called(name, about.ask.dialect.tools))


def logprobs(about: About, scores: Sequence[Scored]) -> list[Json]:
    """Return scores in the shape of `output_text`: `bytes` is an empty list where there are none."""
    content: list[Json] = answers.logprobs(scores, about.names)["content"]
    for each in content:
        for row in (each, *each["top_logprobs"]):
            row["bytes"] = row["bytes"] or []
    return content


# --- whole answers ----------------------------------------------------------------------------------------


def place(about: About, index: int) -> str:
    """Return the last part of the id of output number `index`."""
    return f"{about.id}_{index}"


def items_of_whole(about: About, whole: WholeAnswer) -> list[Json]:
    """Return the output of an answer that is not streamed. Only the last item can be cut off."""
    items: list[TextOutput | ToolCallOutput] = []
    if whole.reasoning:
        items.append(TextOutput("reasoning", place(about, 0)))
        items[-1].more(whole.reasoning)
    if whole.text or speaks(whole.finish, bool(whole.reasoning), bool(whole.calls)):
        message = TextOutput("message", place(about, len(items)))
        message.more(whole.text, logprobs(about, _of_text(about, whole)))
        items.append(message)
    for call in whole.calls:
        items.append(tool_call(about, place(about, len(items)), call.id, call.name))
        items[-1].more(call.arguments)
    return [item.json("completed") for item in items[:-1]] + [items[-1].json(status_of(whole.finish))]


def compaction_of_whole(about: About, whole: WholeAnswer) -> list[Json]:
    """Return a summary, the model's text or else its thoughts, as an item. A note marks a cut-off summary.

    Raises MlxtpError if the model has written nothing, because the client would lose the conversation.
    """
    summary = whole.text.strip() or whole.reasoning.strip()
    if not summary:
        raise MlxtpError("the model wrote no summary; the conversation is as it was", Code.INTERNAL)
    return [_compaction(about, summary + "\n[cut off here]" * (whole.finish.reason == "length"))]


def _compaction(about: About, summary: str) -> Json:
    content = compaction_content(summary)
    return {"type": "compaction", "id": f"cmp_{place(about, 0)}", "encrypted_content": content}


def speaks(finish: Finish, thought: bool, called: bool) -> bool:
    """Return True if an answer without text needs an empty message, since clients look for its text."""
    return not called and not (thought and finish.reason == "length")


def status_of(finish: Finish) -> str:
    """Return the status of a response, and of the last of its items."""
    return "incomplete" if finish.reason == "length" else "completed"


def scores_of_first(about: About, text: str, scores: Sequence[Scored]) -> Sequence[Scored]:
    """Return the scores from the first `text` after thoughts on, without the thoughts'."""
    start = b"".join(_pieces(about, scores)).rfind(text.encode())
    return _overlapping(about, scores, start, None) if start >= 0 else scores


def _of_text(about: About, whole: WholeAnswer) -> Sequence[Scored]:
    """Return the scores of the text alone, not of thoughts before it or calls after it."""
    if not (whole.reasoning or whole.calls):
        return whole.scores
    text = whole.text.encode()
    start = b"".join(_pieces(about, whole.scores)).find(text, len(whole.reasoning.encode()))
    end = start + len(text) if whole.calls else None
    return _overlapping(about, whole.scores, start, end) if start >= 0 else whole.scores


def _pieces(about: About, scores: Sequence[Scored]) -> list[bytes]:
    return [bytes(about.names(token)[1] or ()) for token, _ in scores]


def _overlapping(about: About, scores: Sequence[Scored], start: int, end: int | None) -> list[Scored]:
    """Return the scores of tokens that overlap the bytes from `start` to `end`, and of empty ones."""
    kept: list[Scored] = []
    at = 0
    for piece, scored in zip(_pieces(about, scores), scores, strict=True):
        if (kept or at + len(piece) > start) and (end is None or at < end):
            kept.append(scored)
        at += len(piece)
    return kept


# --- the response around its items ------------------------------------------------------------------------


class ResponseWriter(AnswerWriter):
    """Writer of one answer as events. `keep` stores the whole response at the end.

    `kept`: the answer goes on in the background, so that `keep` stores each status, a failure, too.
    """

    def __init__(
        self,
        about: About,
        keep: Callable[[Json], None],
        clock: Callable[[], float],
        kept: StoredResponse | None = None,
    ) -> None:
        self.kept = kept
        self._status = "in_progress" if kept is None else "queued"
        self._about = about
        self._keep = keep
        self._clock = clock
        self._number = 0
        self._output: list[Json] = []
        self._item: TextOutput | ToolCallOutput | None = None
        self._late: list[Scored] = []  # scores of tokens that may still turn out not to be text
        self._finish: Finish | None = None

    def open(self) -> bytes:
        response = response_body(self._about, self._status, ())
        kinds = ("response.created", f"response.{self._status}")
        return b"".join([self._sent({"type": kind, "response": response}) for kind in kinds])

    def begin(self) -> bytes:
        if self.kept is None:
            return b""
        self._status = "in_progress"
        response = response_body(self._about, self._status, ())
        self._keep(response)
        return self._sent({"type": "response.in_progress", "response": response})

    def write(self, event: AnswerEvent) -> bytes:
        match event:
            case ReasoningDelta(text=text):
                return self._think(text)
            case ContentDelta(text=text, scores=scores):
                return self._say(text, scores)
            case CallBegan(id=id_, name=name):
                return self._begin(tool_call(self._about, self._place(), id_, name))
            case CallArguments(text=text):
                assert isinstance(self._item, ToolCallOutput)
                return b"".join(map(self._sent, self._item.more(text)))
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
        if self.kept is not None:
            self._keep(response)
        return before + self._sent({"type": "response.failed", "response": response})

    def idle(self, more: Json) -> bytes:
        response = response_body(self._about, self._status, self._output)
        return self._numbered({"type": f"response.{self._status}", "response": response} | more)

    def _think(self, text: str) -> bytes:
        before = b""
        if self._kind != "reasoning":
            before = self._begin(TextOutput("reasoning", self._place()))
        assert isinstance(self._item, TextOutput)
        return before + self._sent(self._item.more(text))

    def _say(self, text: str, scores: Sequence[Scored]) -> bytes:
        """Write text. Scores without text belong to thoughts, to calls, or to the end of the answer."""
        if not text:
            self._late += scores if self._kind == "message" else ()
            return b""
        before = b""
        if self._kind != "message":
            if self._item is not None:
                scores = scores_of_first(self._about, text, scores)
            before = self._begin(TextOutput("message", self._place()))
        return before + self._more(text, scores)

    @property
    def _kind(self) -> str:
        return "" if self._item is None else self._item.kind

    def _more(self, text: str, scores: Sequence[Scored]) -> bytes:
        assert isinstance(self._item, TextOutput)
        scores = [*self._late, *scores]
        self._late = []
        return self._sent(self._item.more(text, logprobs(self._about, scores)))

    def _finished(self, finish: Finish) -> bytes:
        self._finish = finish
        kinds = {self._kind, *[item["type"] for item in self._output]}
        before = b""
        if "message" not in kinds and speaks(finish, "reasoning" in kinds, not kinds.isdisjoint(CALLS)):
            before = self._begin(TextOutput("message", self._place()))
        elif self._late:
            before = self._more("", ())
        return before + self._end(status_of(finish))

    def _place(self) -> str:
        return place(self._about, len(self._output) + (self._item is not None))

    def _begin(self, item: TextOutput | ToolCallOutput) -> bytes:
        before = self._end("completed")
        self._item, self._late = item, []
        added = {"type": "response.output_item.added", "item": item.json("in_progress")}
        return before + b"".join([self._sent(event) for event in (added, *item.opened())])

    def _end(self, status: str) -> bytes:
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
        """Encode an event with its number and, for an item's event, the item's place."""
        return self._numbered(event if self._item is None else event | {"output_index": len(self._output)})

    def _numbered(self, event: Json) -> bytes:
        numbered = event | {"sequence_number": self._number}
        self._number += 1
        return named_event(numbered)


class CompactionWriter(ResponseWriter):
    """Writer of a summary as events. The response is complete even if its summary, an item, was cut off."""

    _added: Json | None = None

    def begin(self) -> bytes:
        self._whole = WholeAnswer()
        self._added = _compaction(self._about, "")
        return super().begin() + self._of_item("response.output_item.added", {"item": self._added})

    def write(self, event: AnswerEvent) -> bytes:
        self._whole.see(event)
        match event:
            case ContentDelta(text=text) if text:
                return self._of_item("response.compaction.compacting", {"item_id": f"cmp_{self._place()}"})
            case Finish():
                self._output = compaction_of_whole(self._about, self._whole)
                self._finish = replace(event, reason="stop")
                return self._of_item("response.output_item.done", {"item": self._output[0]})
        return b""

    def fail(self, error: MlxtpError) -> bytes:
        done = b""
        if self._added is not None and not self._output:
            self._output = [self._added]
            done = self._of_item("response.output_item.done", {"item": self._added})
        return done + super().fail(error)

    def _of_item(self, kind: str, more: Json) -> bytes:
        return self._sent({"type": kind, "output_index": 0} | more)


# --- the response -----------------------------------------------------------------------------------------


def response_body(
    about: About,
    status: str,
    output: Sequence[Json],
    *,
    finish: Finish | None = None,
    error: MlxtpError | None = None,
    completed_at: float | None = None,
) -> Json:
    """Return the response with this status."""
    wanted: ResponsesAnswerOptions = about.ask.dialect
    request, settings, used = wanted.request, about.ask.options.settings, about.sampling
    reasoning = request.reasoning or ReasoningSettings()
    return {
        "id": f"resp_{about.id}",
        "object": "response",
        "created_at": int(about.created),
        "status": status,
        "background": bool(request.background),
        "completed_at": int(completed_at) if completed_at is not None else None,
        "error": None if error is None else _error(error),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": about.model,
        "output": list(output),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": _text(request.prompt_cache_key),
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": _text(request.safety_identifier),
        "service_tier": "default",
        "store": request.kept,
        "temperature": settings.get("temperature", 1.0 if used is None else used.temperature),
        "text": {"format": wanted.format, "verbosity": (request.text and request.text.verbosity) or "medium"},
        "tool_choice": wanted.tool_choice,
        "tools": wanted.repeated_tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": settings.get("top_p", 1.0 if used is None else used.top_p),
        "presence_penalty": settings.get("presence_penalty", 0.0),
        "frequency_penalty": settings.get("frequency_penalty", 0.0),
        "truncation": request.truncation or "disabled",
        "usage": None if finish is None else _usage(about, finish),
        "user": _text(request.user),
        "metadata": request.metadata or {},
    }


def history_body(about: About, output: Sequence[Json], finish: Finish) -> Json:
    """Return a new history: the user's messages that stay, and the summary in `output`."""
    wanted: ResponsesAnswerOptions = about.ask.dialect
    users = [{"id": f"msg_{place(about, i)}"} | item for i, item in enumerate(wanted.users, 1)]
    return {
        "id": f"resp_{about.id}",
        "object": "response.compaction",
        "created_at": int(about.created),
        "output": [*users, *output],
        "usage": _usage(about, finish),
    }


def _usage(about: About, finish: Finish) -> Json:
    """Return the counts of tokens. `cache_write_tokens` is 0, as writing to a cache costs nothing."""
    prompt, end = about.prompt_tokens[0], finish.end
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": end.cached, "cache_write_tokens": 0},
        "output_tokens": end.generated,
        "output_tokens_details": {"reasoning_tokens": finish.thought},
        "total_tokens": prompt + end.generated,
    }


def _error(error: MlxtpError) -> Json:
    """Return an error. `code` is one of this dialect's few, `type` is ours."""
    code = "rate_limit_exceeded" if error_status(error) == 429 else "server_error"
    return {"code": code, "message": error.detail, "type": error.code.value, "param": None}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


# --- the adapter ------------------------------------------------------------------------------------------


ONE_PATH = f"{PATH}/{{response_id}}"
#: Items on one page of a response's input: the most, and without `limit`.
MOST_LISTED, LISTED = 100, 20


class Responses(Adapter):
    """The adapter of `/v1/responses`. Each has its own store."""

    prefixes = (PATH,)
    names: Mapping[str, str] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }

    def __init__(self, store: ResponseStore | None = None, clock: Callable[[], float] = time.time) -> None:
        self._store = ResponseStore() if store is None else store
        self._clock = clock
        self._readers = AdmissionCounter(MOST_READERS, MOST_READERS_OF_ONE)

    @property
    def endpoints(self) -> Mapping[Operation, Handler]:
        create = Operation("POST", PATH, "Answer a conversation", ResponseRequest, SSE)
        summarize = Operation("POST", f"{PATH}/compact", "Summarize a conversation", CompactRequest)
        counts, items = f"{PATH}/input_tokens", f"{ONE_PATH}/input_items"
        retrieve = Operation("GET", ONE_PATH, "A response, or its events", stream=SSE, query=RetrieveQuery)
        return {
            create: partial(self._answer, parse),
            Operation("GET", PATH, "Open a WebSocket for response.create", always=426): self._open,
            summarize: partial(self._answer, parse_compact),
            Operation("POST", counts, "Count the tokens of an input", ResponseRequest): self._count,
            retrieve: self._retrieve,
            Operation("DELETE", ONE_PATH, "Forget a response"): self._delete,
            Operation("POST", f"{ONE_PATH}/cancel", "Cancel a background response"): self._cancel,
            Operation("GET", items, "The input of a response", query=ItemsQuery): self._input_items,
        }

    async def _answer(
        self, read: Callable[..., GenerationRequest], generation: Generation, request: Request
    ) -> Response:
        if (socket := request.scope.get(SOCKET)) is not None:
            read = partial(parse_turn, socket=socket.id)
        read = partial(read, store=self._store, client=_client())
        return await generation.answer(self, request, read, slow=True)  # a short body may name a long one

    async def _open(self, _generation: Generation, request: Request) -> Response:
        """Admit a WebSocket, whose first request this is."""
        socket: Socket | None = request.scope.get(SOCKET)
        if socket is None:
            words = f"GET {PATH} opens a WebSocket; POST creates a response, GET {PATH}/ID reads one"
            raise RequestError(words, Code.METHOD_NOT_ALLOWED, status=426)
        if why := socket.admit(_counted(request)):
            raise RequestError(f"{why}; close one", Code.OVERLOADED, status=429)
        socket.forget = partial(self._store.delete, _client(), socket.id)
        return Response(status_code=101)

    async def _retrieve(self, generation: Generation, request: Request) -> Response:
        kept = self._asked(request)
        query = checked(RetrieveQuery, dict(request.query_params), "")
        if not query.stream:
            return Response(kept.body, media_type="application/json")
        if kept.events is None:
            words = "only responses created with background and stream have events to read again"
            raise RequestError(f"stream: {words}; leave it out", param="stream")
        if why := self._readers.admit(client := _counted(request)):
            words = f"{why}: at most {MOST_READERS} streams of kept events are open on this Mac"
            words += f", {MOST_READERS_OF_ONE} of one client; close one"
            raise RequestError(words, Code.OVERLOADED, status=429)
        reading = AsyncExitStack()
        reading.callback(self._readers.release, client)
        return replayed(kept, query.starting_after, generation.keep_alive_s, reading)

    async def _delete(self, _generation: Generation, request: Request) -> Response:
        kept = self._asked(request)
        self._store.delete(*kept.key)
        return JSONResponse({"id": kept.id, "object": "response", "deleted": True})

    async def _cancel(self, _generation: Generation, request: Request) -> Response:
        kept = self._asked(request)
        if kept.cancel is not None:
            kept.cancel()
            await over(kept)
        elif not kept.background:
            words = f"the response {kept.id} was not created with background true, so it ends with its client"
            raise RequestError(words)
        return Response(kept.body, media_type="application/json")

    async def _input_items(self, _generation: Generation, request: Request) -> Response:
        kept = self._asked(request)
        query = checked(ItemsQuery, dict(request.query_params), "")
        page = await asyncio.to_thread(page_of, kept, query)
        return Response(page, media_type="application/json")

    async def _count(self, generation: Generation, request: Request) -> Response:
        tokens = await generation.count(request, partial(parse, store=self._store, client=_client()))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    def _asked(self, request: Request) -> StoredResponse:
        """Return the response that a path names. Raises RequestError 404."""
        return self._store.find(_client(), request.path_params["response_id"])

    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        [whole] = wholes
        wanted: ResponsesAnswerOptions = about.ask.dialect
        finish = replace(whole.finish, reason="stop") if wanted.compacts else whole.finish
        output = (compaction_of_whole if wanted.compacts else items_of_whole)(about, whole)
        if wanted.compacts == "history":
            return history_body(about, output, finish)
        response = response_body(about, status_of(finish), output, finish=finish, completed_at=self._clock())
        self._keep(about, None, response)
        return response

    def writer(self, about: About) -> ResponseWriter:
        wanted: ResponsesAnswerOptions = about.ask.dialect
        kind, kept = CompactionWriter if wanted.compacts else ResponseWriter, None
        if wanted.request.background and wanted.input is not None:
            queued, events = response_body(about, "queued", ()), bool(wanted.request.stream)
            kept = self._store.start(wanted.client, queued["id"], wanted.input, queued, events=events)
        return kind(about, partial(self._keep, about, kept), self._clock, kept)

    def streamed(self, writer: AnswerWriter, stream: AnswerStream) -> Response:
        assert isinstance(writer, ResponseWriter)
        return stream if writer.kept is None else BackgroundResponse(self._store, writer.kept, stream)

    def _keep(self, about: About, kept: StoredResponse | None, response: Json) -> None:
        wanted: ResponsesAnswerOptions = about.ask.dialect
        if kept is not None:
            self._store.record(kept, response=response)
        elif wanted.input is not None:
            self._store.put(wanted.client, response["id"], wanted.input, response, wanted.socket)


def _counted(request: Request) -> str:
    """Return the client that open connections count for: the hash of its key, else its address."""
    account = current()
    return address_of(request.client) if account is None else account.key_hash or account.origin


def _client() -> str:
    """Return the hash of the current request's key; "" without one. No later key has the same."""
    account = current()
    return account.key_hash if account is not None else ""


class _Query(Schema, strict=False):
    """The part of a URL behind its question mark, which is text."""


class RetrieveQuery(_Query):
    stream: bool | None = None
    starting_after: Annotated[int, in_range(-1, MOST_TOKENS)] = -1  # the number of an event


class ItemsQuery(_Query):
    limit: Annotated[int, in_range(1, MOST_LISTED)] = LISTED
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def page_of(kept: StoredResponse, query: ItemsQuery) -> bytes:
    """Return some items of a response's input, as JSON. Raises RequestError for an unknown `after`."""
    items = listed(kept.id, json.loads(kept.input))[:: 1 if query.order == "asc" else -1]
    ids = [item["id"] for item in items]
    if query.after is not None and query.after not in ids:
        raise RequestError(f"after: {shown(query.after)} is no item of this input", param="after")
    start = 0 if query.after is None else ids.index(query.after) + 1
    data = items[start : start + query.limit]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    more = start + query.limit < len(items)
    return compact({"object": "list", "data": data, **ends, "has_more": more})

"""The Anthropic dialect: `POST /v1/messages`, whole and streamed, and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...errors import Code, MlxtpError, RequestError
from ...text.transcript import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    ContentDelta,
    Finish,
    ReasoningDelta,
    WholeAnswer,
)
from ..adapter import SSE, About, Json, Operation
from ..backend import ModelInfo, StoredModelInfo
from ..generation import Generation
from ..http_errors import error_status
from ..request_context import current
from .anthropic_request import (
    AnthropicAnswerOptions,
    CountRequest,
    MessagesRequest,
    parse_count,
    parse_messages,
)

# --- answers ----------------------------------------------------------------------------------------------


SIGNATURE = "mlxtp"  # signature of every thinking block; proves nothing, but clients drop blocks without one

OVERLOADED_STATUS = 529

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _stop(about: About, finish: Finish) -> dict[str, str | None]:
    reason, most = _STOP_REASONS[finish.reason], about.ask.options.max_tokens
    if finish.stopped_by is not None:
        reason = "stop_sequence"
    elif finish.reason == "length" and most is not None and finish.end.generated < most:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": finish.stopped_by}


def _usage(prompt: int, cached: int, generated: int) -> Json:
    """Return counts of tokens. Cached ones are not part of `input_tokens`."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def _message_body(about: About, content: Sequence[Json], stop: Mapping[str, str | None], usage: Json) -> Json:
    return {
        "id": f"msg_{about.id}",
        "type": "message",
        "role": "assistant",
        "model": _asked(about).model or about.model,
        "content": content,
        **stop,
        "usage": usage,
    }


def _asked(about: About) -> AnthropicAnswerOptions:
    asked = about.ask.dialect
    assert isinstance(asked, AnthropicAnswerOptions)
    return asked


def _content(answer: WholeAnswer, hide_thoughts: bool) -> list[Json]:
    """Return the blocks of a whole answer. Leave out a call that the budget cut off: half an input must not
    pass for one.

    The stop reason `max_tokens` reports that something is missing.
    """
    blocks: list[Json] = []
    if answer.reasoning:
        thinking = "" if hide_thoughts else answer.reasoning
        blocks.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    cut = answer.finish is not None and answer.finish.reason == "length"
    for call in answer.calls:
        input_ = _input(call.arguments)
        if input_ is None and cut and call is answer.calls[-1]:
            break
        input_ = {"arguments": call.arguments} if input_ is None else input_  # the model's mistake is visible
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": input_})
    return blocks


def _input(arguments: str) -> Json | None:
    """Return the object, or None for text that is not JSON of an object."""
    try:
        input_ = json.loads(arguments)
        json.dumps(input_, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return input_ if isinstance(input_, dict) else None


def whole_body(about: About, answer: WholeAnswer) -> Json:
    """Return the whole answer to a request that does not stream."""
    finish = answer.finish
    assert finish is not None
    usage = _usage(about.prompt_tokens[0], finish.end.cached, finish.end.generated)
    content = _content(answer, _asked(about).hide_thoughts)
    return _message_body(about, content, _stop(about, finish), usage)


class MessageWriter:
    """Writer of the events of one stream, as bytes."""

    def __init__(self, about: About) -> None:
        self._about = about
        self._hide_thoughts = _asked(about).hide_thoughts
        self._open = ""  # the type of the block that is open
        self._index = -1  # its number
        self._finish: Finish | None = None

    def open(self) -> bytes:
        """Return nothing: a message begins with the length of its prompt."""
        return b""

    def begin(self) -> bytes:
        """Return the message without content. The number of cached tokens is known only at the end."""
        nothing = {"stop_reason": None, "stop_sequence": None}
        message = _message_body(self._about, [], nothing, _usage(self._about.prompt_tokens[0], 0, 0))
        return _event({"type": "message_start", "message": message}) + _PING

    def write(self, event: AnswerEvent) -> bytes:
        match event:
            case ContentDelta(text=text):
                return self._said(text)
            case ReasoningDelta(text=text):
                return self._thought(text)
            case CallBegan(id=id_, name=name):
                return self._begin({"type": "tool_use", "id": id_, "name": name, "input": {}})
            case CallArguments(text=text):
                return self._delta("input_json_delta", "partial_json", text) if text else b""
            case Finish():
                self._finish = event
                return self._end()

    def close(self) -> bytes:
        assert self._finish is not None
        end = self._finish.end
        usage = _usage(self._about.prompt_tokens[0], end.cached, end.generated)
        last = {"type": "message_delta", "delta": _stop(self._about, self._finish), "usage": usage}
        return _event(last) + _event({"type": "message_stop"})

    def fail(self, error: MlxtpError) -> bytes:
        return _event(error_body(error, error_status(error)))

    def idle(self, more: Json) -> bytes:
        """Return a ping, which has no room for more. Clients accept it before the message, too."""
        return _PING

    def _said(self, text: str) -> bytes:
        if not text:
            return b""
        begun = b"" if self._open == "text" else self._begin({"type": "text", "text": ""})
        return begun + self._delta("text_delta", "text", text)

    def _thought(self, text: str) -> bytes:
        if not text:
            return b""
        begun = b"" if self._open == "thinking" else self._begin(_NO_THOUGHT)
        return begun if self._hide_thoughts else begun + self._delta("thinking_delta", "thinking", text)

    def _begin(self, block: Json) -> bytes:
        ended = self._end()
        self._index += 1
        self._open = block["type"]
        return ended + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _end(self) -> bytes:
        """Return the end of the open block, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return b""
        signature = self._delta("signature_delta", "signature", SIGNATURE) if kind == "thinking" else b""
        return signature + _event({"type": "content_block_stop", "index": self._index})

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":%b}}\n\n'
        ) % (self._index, kind.encode(), field.encode(), json.dumps(text).encode())


_NO_THOUGHT = {"type": "thinking", "thinking": "", "signature": ""}


def _event(data: Json) -> bytes:
    """Return one server-sent event. ASCII only, so that no client breaks lines at U+2028."""
    text = json.dumps(data, separators=(",", ":"))
    return f"event: {data['type']}\ndata: {text}\n\n".encode()


_PING = _event({"type": "ping"})

# --- errors and models ------------------------------------------------------------------------------------

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def error_body(error: MlxtpError, status: int) -> Json:
    """Return an error. Overload is `overloaded_error` at any status, so that clients wait and retry."""
    other = "invalid_request_error" if status < 500 else "api_error"
    kind = "overloaded_error" if error.code is Code.OVERLOADED else _ERROR_TYPES.get(status, other)
    return {
        "type": "error",
        "error": {"type": kind, "message": error.detail},
        "request_id": request_id(),
    }


def request_id() -> str:
    """Return the id of the current request. The log has the same id without `req_`."""
    account = current()
    return f"req_{uuid.uuid4().hex if account is None else account.id}"


def model_body(model: ModelInfo | StoredModelInfo) -> Json:
    """Return one model, in the shape of Anthropic's `GET /v1/models/{id}`."""
    created = datetime.fromtimestamp(model.created, UTC)
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.context,
        "max_tokens": model.context,
    }


def models_body(models: Sequence[ModelInfo | StoredModelInfo]) -> Json:
    """Return all models on one page, in the shape of Anthropic's `GET /v1/models`."""
    return {
        "data": [model_body(model) for model in models],
        "has_more": False,
        "first_id": models[0].id if models else None,
        "last_id": models[-1].id if models else None,
    }


# --- the adapter ------------------------------------------------------------------------------------------


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

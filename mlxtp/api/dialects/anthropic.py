"""The Anthropic dialect: `POST /v1/messages`, whole and streamed, and `/v1/messages/count_tokens`.

Unknown fields, betas and `cache_control` are ignored. What is understood but cannot be done is refused with
`not_supported`, never passed over in silence. Source of the shapes: the types of Anthropic's client library.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...errors import Code, MlxtpError, RequestError
from ..account import current
from ..adapter import SSE, About, Json
from ..ask import AUTO, NONE, REQUIRED, Ask, Call, Conversation, Options, Role, Tool, Turn
from ..backend import ModelInfo, Stored
from ..errors import error_status
from ..events import CallArguments, CallBegan, Event, Finish, Said, Thought, Whole
from ..generation import Generation
from ..openapi import Operation
from ..schema import Schema, checked, in_range, not_supported, parsed, shown
from .anthropic_shapes import AnthropicError, AnthropicMessage, TokenCount

SIGNATURE = "mlxtp"
"""Of every thinking block. It proves nothing; clients drop blocks that have none."""

OVERLOADED_STATUS = 529

_BILLING = "x-anthropic-billing-header:"
_MOST_TOKENS = 2**31 - 1
_MOST_MESSAGES = 100_000  # as in the API


# --- what a request may say. None means absent, everywhere ------------------------------------------------


class InputMessage(Schema):
    role: str
    content: Any


class Metadata(Schema):
    user_id: str | None = None


class Thinking(Schema):
    """`budget_tokens` is checked and no more: `max_tokens` alone bounds thoughts and answer together."""

    type: str
    budget_tokens: Annotated[int, in_range(1, _MOST_TOKENS)] | None = None
    display: str | None = None


class ToolChoice(Schema):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CustomTool(Schema):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: Json


class OutputConfig(Schema):
    format: Json | None = None


class Format(Schema):
    type: str
    schema_: Annotated[Json, Field(alias="schema")]


class CountRequest(Schema):
    """The body of `POST /v1/messages/count_tokens`: all that becomes part of the prompt."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)]
    model: str | None = None
    system: Any = None
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Json | None = None  # what older clients call output_config.format
    mcp_servers: list[Any] | None = None


class MessagesRequest(CountRequest):
    """The body of `POST /v1/messages`."""

    max_tokens: Annotated[int, in_range(0, _MOST_TOKENS)]
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: Annotated[float, in_range(0, 1)] | None = None
    top_p: Annotated[float, in_range(0, 1)] | None = None
    top_k: Annotated[int, in_range(0, _MOST_TOKENS)] | None = None
    metadata: Metadata | None = None


class _Text(Schema):
    text: str


class _Thought(Schema):
    thinking: str


class _ToolUse(Schema):
    id: str
    name: str
    input: Json


class _ToolResult(Schema):
    tool_use_id: str
    content: Any = None
    is_error: bool | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What the answer repeats, and how. `model`: the client's own name for it, or None for ours."""

    model: str | None = None
    hide_thoughts: bool = False


# --- requests ---------------------------------------------------------------------------------------------


def parse_messages(body: bytes) -> Ask:
    """The request. Raises RequestError that names the field, the reason and the value."""
    request = parsed(MessagesRequest, body)
    ask = _ask(request)
    if request.max_tokens == 0:
        raise not_supported(
            "max_tokens 0 (to fill a cache without an answer) is not supported; send at least 1", "max_tokens"
        )
    if request.messages[-1].role == "assistant":
        raise not_supported(
            "the last message is the assistant's: an answer that goes on from it is not supported; "
            "end with a message of the user",
            f"messages[{len(request.messages) - 1}].role",
        )
    options = Options(
        max_tokens=request.max_tokens,
        cut_to_fit=True,  # Claude Code asks for 32,000 tokens whatever the model
        stop=tuple(request.stop_sequences or ()),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        format=_format(request),
    )
    user = request.metadata.user_id if request.metadata else None
    return replace(ask, options=options, stream=bool(request.stream), user=user or "")


def parse_count(body: bytes) -> Ask:
    """A request whose prompt is counted only. Raises RequestError."""
    return _ask(parsed(CountRequest, body))


def _ask(request: CountRequest) -> Ask:
    """All of it that becomes part of the prompt."""
    if request.mcp_servers:
        raise not_supported(
            "mcp_servers is not supported: this server calls no other; leave it out", "mcp_servers"
        )
    theirs = request.model is not None and request.model.startswith("claude-")
    thinking = request.thinking or Thinking(type="")
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ()))
    conversation = Conversation(
        turns=_turns(request),
        tools=tools,
        tool_choice=_tool_choice(request),
        parallel=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
        thinking=_thinking(request.thinking),
    )
    asked = Asked(request.model if theirs else None, thinking.display == "omitted")
    return Ask(None if theirs else request.model, conversation, dialect=asked)


_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def _thinking(thinking: Thinking | None) -> bool | None:
    if thinking is None:
        return None
    if thinking.type not in _THINKING:
        raise _no_such(thinking.type, _THINKING, "thinking.type")
    return _THINKING[thinking.type]


_CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE, "tool": ""}


def _tool_choice(request: CountRequest) -> str:
    choice = request.tool_choice
    if choice is None:
        return AUTO
    if choice.type not in _CHOICES:
        raise _no_such(choice.type, _CHOICES, "tool_choice.type")
    if choice.type in ("any", "tool") and not request.tools:
        raise RequestError(f"tool_choice {shown(choice.type)} needs tools beside it", param="tool_choice")
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if not choice.name:
        raise RequestError("tool_choice.name is missing: which tool?", param="tool_choice.name")
    if choice.name in (AUTO, NONE, REQUIRED):
        raise not_supported(
            f"tool_choice.name: a tool called {shown(choice.name)} cannot be chosen by name; rename it",
            "tool_choice.name",
        )
    return choice.name


def _tool(given: Json, where: str) -> Tool:
    kind = given.get("type")
    if kind not in (None, "custom"):
        raise not_supported(
            f"{where}: tools of type {shown(kind)} are not supported, only custom ones with an input_schema",
            f"{where}.type",
        )
    tool = checked(CustomTool, given, where)
    return Tool(tool.name, tool.description or "", tool.input_schema)


def _format(request: CountRequest) -> Json | None:
    """As OpenAI's `response_format`."""
    given, where = request.output_format, "output_format"
    if request.output_config and request.output_config.format is not None:
        given, where = request.output_config.format, "output_config.format"
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise not_supported(
            f"{where}.type {shown(given.get('type'))} is not supported, only json_schema", f"{where}.type"
        )
    schema = checked(Format, given, where).schema_
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _turns(request: CountRequest) -> tuple[Turn, ...]:
    """System prompt and messages. Neighbours of one role become one turn, as many templates want it."""
    called: dict[str, str] = {}
    turns = [] if request.system is None else _system(request.system, "system")
    for i, message in enumerate(request.messages):
        turns += _message(message, f"messages[{i}]", called)
    joined: list[Turn] = []
    for role, group in groupby(turns, key=lambda turn: turn.role):
        run = list(group)
        joined += run if role == "tool" else [_together(role, run)]
    return tuple(joined)


def _message(message: InputMessage, where: str, called: dict[str, str]) -> list[Turn]:
    """`called` has the names of all calls so far, by id."""
    content = f"{where}.content"
    match message.role:
        case "user":
            return _user(_blocks(message.content, content), called)
        case "assistant":
            return [_assistant(_blocks(message.content, content), called)]
        case "system":
            return _system(message.content, content)
    raise _no_such(message.role, ("user", "assistant", "system"), f"{where}.role")


Blocks = Sequence[tuple[str, Json, str]]
"""Type, block and where it stands."""


def _user(blocks: Blocks, called: Mapping[str, str]) -> list[Turn]:
    """What tools answered comes first: it belongs to the calls before."""
    results, texts = [], []
    for kind, block, where in blocks:
        if kind == "text":
            texts.append(checked(_Text, block, where).text)
        elif kind == "tool_result":
            results.append(_result(checked(_ToolResult, block, where), where, called))
        else:
            raise _unfit(kind, where, "a user's message", "text, tool_result")
    return [*results, Turn("user", _joined(texts))] if texts or not results else results


def _result(result: _ToolResult, where: str, called: Mapping[str, str]) -> Turn:
    id_ = result.tool_use_id
    if id_ not in called:
        raise RequestError(
            f"{where}.tool_use_id: no tool_use block before it has the id {shown(id_)}",
            param=f"{where}.tool_use_id",
        )
    content = "" if result.content is None else result.content
    text = _joined(_texts(_blocks(content, f"{where}.content"), "a tool_result"))
    if result.is_error:
        text = f"Error: {text}"
    return Turn("tool", text, call_id=id_, name=called[id_])


def _assistant(blocks: Blocks, called: dict[str, str]) -> Turn:
    texts, thoughts, calls = [], [], []
    for kind, block, where in blocks:
        if kind == "text":
            texts.append(checked(_Text, block, where).text)
        elif kind == "thinking":
            thoughts.append(checked(_Thought, block, where).thinking)
        elif kind == "tool_use":
            use = checked(_ToolUse, block, where)
            called[use.id] = use.name
            calls.append(Call(use.id, use.name, json.dumps(use.input, ensure_ascii=False)))
        elif kind != "redacted_thinking":  # only whoever wrote it can read it
            raise _unfit(kind, where, "an assistant's message", "text, thinking, redacted_thinking, tool_use")
    return Turn("assistant", _joined(texts), _joined(thoughts), tuple(calls))


def _system(content: object, where: str) -> list[Turn]:
    """A system prompt, unless it is empty: without the line with which Claude Code begins. Its hash differs
    from request to request, so that no prompt would begin like the one before.
    """
    texts = _texts(_blocks(content, where), "a system prompt")
    lasting = _joined(text.partition("\n")[2] if text.startswith(_BILLING) else text for text in texts)
    return [Turn("system", lasting)] if lasting else []


def _texts(blocks: Blocks, whose: str) -> list[str]:
    texts = []
    for kind, block, where in blocks:
        if kind != "text":
            raise _unfit(kind, where, whose, "text")
        texts.append(checked(_Text, block, where).text)
    return texts


def _blocks(content: object, where: str) -> Blocks:
    if isinstance(content, str):
        return [("text", {"text": content}, where)]
    if not isinstance(content, list):
        raise RequestError(
            f"{where} should be a string or a list of blocks, got {shown(content)}", param=where
        )
    blocks = []
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            expected = '{"type": "text", "text": "..."}'
            raise RequestError(
                f"{where}[{i}] should be a block such as {expected}, got {shown(block)}",
                param=f"{where}[{i}]",
            )
        blocks.append((block["type"], block, f"{where}[{i}]"))
    return blocks


def _joined(texts: Iterable[str]) -> str:
    return "\n".join(text for text in texts if text)


def _together(role: Role, turns: Sequence[Turn]) -> Turn:
    calls = tuple(call for turn in turns for call in turn.calls)
    return Turn(role, _joined(turn.text for turn in turns), _joined(turn.reasoning for turn in turns), calls)


def _unfit(kind: str, where: str, whose: str, allowed: str) -> RequestError:
    return not_supported(
        f"{where}: blocks of type {shown(kind)} are not supported in {whose}, only {allowed}", where
    )


def _no_such(value: str, allowed: Iterable[str], where: str) -> RequestError:
    return RequestError(f"{where}: {shown(value)} is none of {', '.join(allowed)}", param=where)


# --- answers ----------------------------------------------------------------------------------------------

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _stop(about: About, finish: Finish) -> dict[str, str | None]:
    reason, most = _STOP_REASONS[finish.reason], about.ask.options.max_tokens
    if finish.stopped_by is not None:
        reason = "stop_sequence"
    elif finish.reason == "length" and most is not None and finish.end.generated < most:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": finish.stopped_by}


def _usage(prompt: int, cached: int, generated: int) -> Json:
    """In tokens. Cached ones are no `input_tokens`."""
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


def _asked(about: About) -> Asked:
    asked = about.ask.dialect
    assert isinstance(asked, Asked)
    return asked


def _content(answer: Whole, hide_thoughts: bool) -> list[Json]:
    """The blocks of a whole answer. A call that the budget cut off is none: half an input must not be taken
    for the input. The stop reason `max_tokens` says that something is missing.
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
    """The object, or None if the text is none that JSON has."""
    try:
        input_ = json.loads(arguments)
        json.dumps(input_, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return input_ if isinstance(input_, dict) else None


class MessageWriter:
    """The events of one stream, as bytes."""

    def __init__(self, about: About) -> None:
        self._about = about
        self._hide_thoughts = _asked(about).hide_thoughts
        self._prompt = about.prompt_tokens[0]
        self._open = ""  # the type of the block that is open
        self._index = -1  # its number
        self._finish: Finish | None = None

    def open(self) -> bytes:
        """The message without content. How much of the prompt was cached is known at the end only."""
        nothing = {"stop_reason": None, "stop_sequence": None}
        message = _message_body(self._about, [], nothing, _usage(self._prompt, 0, 0))
        return _event({"type": "message_start", "message": message}) + self.idle()

    def write(self, event: Event) -> bytes:
        match event:
            case Said(text=text):
                return self._said(text)
            case Thought(text=text):
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
        usage = _usage(self._prompt, end.cached, end.generated)
        last = {"type": "message_delta", "delta": _stop(self._about, self._finish), "usage": usage}
        return _event(last) + _event({"type": "message_stop"})

    def fail(self, error: MlxtpError) -> bytes:
        return _event(error_body(error, error_status(error)))

    def idle(self) -> bytes:
        return _event({"type": "ping"})

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
        """The end of the block that is open, if one is."""
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
    """One server-sent event. ASCII only, so that no client breaks lines at U+2028."""
    text = json.dumps(data, separators=(",", ":"))
    return f"event: {data['type']}\ndata: {text}\n\n".encode()


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
    """What is full is `overloaded_error` whatever the status; a client that waits is right."""
    other = "invalid_request_error" if status < 500 else "api_error"
    kind = "overloaded_error" if error.code is Code.OVERLOADED else _ERROR_TYPES.get(status, other)
    return {
        "type": "error",
        "error": {"type": kind, "message": error.detail},
        "request_id": _request_id(),
    }


def _request_id() -> str:
    """The log has the same without `req_`."""
    account = current()
    return f"req_{uuid.uuid4().hex if account is None else account.id}"


def model_body(model: ModelInfo | Stored) -> Json:
    """One model, as Anthropic's `GET /v1/models/{id}` shows it."""
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


def models_body(models: Sequence[ModelInfo | Stored]) -> Json:
    """All of them on one page, as Anthropic's `GET /v1/models` lists them."""
    return {
        "data": [model_body(model) for model in models],
        "has_more": False,
        "first_id": models[0].id if models else None,
        "last_id": models[-1].id if models else None,
    }


# --- the adapter ------------------------------------------------------------------------------------------


class Anthropic:
    """What clients of Anthropic's API speak, Claude Code among them. Their base URL ends before `/v1`."""

    prefixes: tuple[str, ...] = ("/v1/messages",)
    names: Mapping[str, str] = MappingProxyType(
        {
            "stop": "stop_sequences",
            "response_format": "output_config.format",
            "function.name": "name",
            "function.parameters": "input_schema",
        }
    )
    media_type = SSE
    operations = (
        Operation(
            "POST", "/v1/messages", "Answer a chat", MessagesRequest, AnthropicMessage, AnthropicError, SSE
        ),
        Operation(
            "POST", "/v1/messages/count_tokens", "Count a prompt", CountRequest, TokenCount, AnthropicError
        ),
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

    def whole(self, about: About, wholes: Sequence[Whole]) -> Json:
        [answer] = wholes
        finish = answer.finish
        assert finish is not None
        usage = _usage(about.prompt_tokens[0], finish.end.cached, finish.end.generated)
        content = _content(answer, _asked(about).hide_thoughts)
        return _message_body(about, content, _stop(about, finish), usage)

    def writer(self, about: About) -> MessageWriter:
        return MessageWriter(about)

    def error(self, error: MlxtpError, status: int) -> Json:
        return error_body(error, status)


def _with_id(response: Response) -> Response:
    response.headers["request-id"] = _request_id()
    return response


ANTHROPIC = Anthropic()

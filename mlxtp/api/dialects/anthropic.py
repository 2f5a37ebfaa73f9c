"""The Anthropic dialect: `POST /v1/messages`, whole and streamed, and `/v1/messages/count_tokens`.

Unknown fields, betas and `cache_control` are ignored. The shapes follow Anthropic's client library.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...errors import Code, MlxtpError, RequestError
from ...text.chat_template import joined
from ...text.conversation import (
    AUTO,
    NONE,
    REQUIRED,
    Call,
    ChatMessage,
    Conversation,
    GenerationOptions,
    GenerationRequest,
    Role,
    Tool,
)
from ...text.transcript import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    ContentDelta,
    Finish,
    ReasoningDelta,
    WholeAnswer,
)
from ..adapter import SSE, About, AnswerWriter, Json, Operation, compact, error_status, named_event
from ..answer_shapes import NO_ITEMS, fields, rules
from ..backend import ModelInfo, StoredModelInfo
from ..generation import Adapter, Generation, Handler
from ..request_body import (
    MOST_MESSAGES,
    BodySchema,
    Integer,
    Schema,
    checked,
    in_range,
    none_of,
    not_supported,
    parsed,
    shown,
)
from ..request_context import current
from ..sampling import given_settings, with_settings
from .request_parts import (
    MOST_TOKENS,
    Parameters,
    RoleName,
    are_parts,
    arguments_text,
    check_parts,
    content_rule,
    content_text,
    continued,
    lines,
    log_left_out,
    newest,
    part_text,
    role_of,
    thought_text,
)

_BILLING = "x-anthropic-billing-header:"


# --- schema of a request. None means absent, everywhere ---------------------------------------------------


_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE, "tool": ""}


class AnthropicInputMessage(Schema):
    model_config = rules(content_rule("tool_result"))

    role: RoleName
    content: Any = None


class Metadata(Schema):
    user_id: str | None = None


class Thinking(Schema):
    """`budget_tokens` is checked and otherwise unused: `max_tokens` bounds thoughts and answer together."""

    type: Annotated[str, WithJsonSchema({"enum": [*_THINKING]})]
    budget_tokens: Annotated[Integer, in_range(1, MOST_TOKENS)] | None = None
    display: str | None = None


class ToolChoice(Schema):
    type: Annotated[str, WithJsonSchema({"enum": [*_CHOICES]})]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicTool(Schema):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: Parameters = None


class Format(Schema):
    type: Annotated[str, WithJsonSchema({"const": "json_schema"})]
    schema_: Annotated[Json, Field(alias="schema")]


AnyFormat = Annotated[Json | None, WithJsonSchema({"anyOf": [Format.model_json_schema(), {"type": "null"}]})]


class OutputConfig(Schema):
    format: AnyFormat = None


_CUSTOM = {"allOf": [AnthropicTool.model_json_schema(), fields({"type": {"enum": [None, "custom"]}})]}
_OTHER = fields({"type": {"type": "string", "not": {"const": "custom"}}})  # run elsewhere, and left out
_TOOLS: Json = {"type": "array", "items": {"anyOf": [_CUSTOM, _OTHER]}, "contains": _CUSTOM}
_ANY: Json = {"anyOf": [NO_ITEMS, _TOOLS]}
_FREE = fields({"type": {"enum": ["auto", "none"]}}) | {"type": ["object", "null"]}


class CountRequest(BodySchema):
    """The body of `POST /v1/messages/count_tokens`: all parts of the prompt."""

    model_config = rules(
        ({"mcp_servers": NO_ITEMS}, {"tools": _TOOLS}),
        ({"tool_choice": _FREE}, {"tools": _TOOLS}),
    )

    messages: Annotated[
        list[AnthropicInputMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    ]
    model: str | None = None
    system: str | list[Any] | None = None
    tools: Annotated[Annotated[list[Json], Field(fail_fast=True)] | None, WithJsonSchema(_ANY)] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: AnyFormat = None  # older clients' name of output_config.format
    mcp_servers: list[Any] | None = None


@with_settings("anthropic")
class MessagesRequest(CountRequest):
    """The body of `POST /v1/messages`."""

    api = "messages"

    max_tokens: Annotated[Integer, in_range(0, MOST_TOKENS)]
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    metadata: Metadata | None = None


@dataclass(frozen=True, slots=True)
class AnthropicAnswerOptions:
    """Options of the answer. `model`: the client's own name for it, or None for ours."""

    model: str | None = None
    hide_thoughts: bool = False


# --- from a body to a request. Pure ----------------------------------------------------------------------


def parse_messages(body: bytes) -> GenerationRequest:
    """Return the request. Raises RequestError that names the field, the reason and the value."""
    request = parsed(MessagesRequest, body)
    ask = _ask(request)
    options = GenerationOptions(
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
        settings=given_settings(request, "anthropic"),
        format=_format(request),
    )
    user = request.metadata.user_id if request.metadata else None
    return replace(ask, options=options, stream=bool(request.stream), user=user or "")


def parse_count(body: bytes) -> GenerationRequest:
    """Return a request whose prompt is only counted. Raises RequestError."""
    request = parsed(CountRequest, body)
    return replace(_ask(request), options=GenerationOptions(format=_format(request)))


def _ask(request: CountRequest) -> GenerationRequest:
    """Return the request with only the parts that go into the prompt."""
    theirs = request.model is not None and request.model.startswith("claude-")
    thinking = request.thinking
    turns, tools, choice = _turns(request), _tools(request), _tool_choice(request)
    if thinking is not None and thinking.type not in _THINKING:
        raise none_of(thinking.type, _THINKING, "thinking.type")
    conversation = Conversation(
        turns,
        tools,
        choice,
        parallel=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
        thinking=None if thinking is None else _THINKING[thinking.type],
    )
    if request.messages[-1].role == "assistant":
        conversation = _continued(conversation)
    hides = thinking is not None and thinking.display == "omitted"
    asked = AnthropicAnswerOptions(request.model if theirs else None, hides)
    model = None if theirs else request.model
    return GenerationRequest(model, conversation, dialect=asked, ignored=request.ignored)


def _continued(conversation: Conversation) -> Conversation:
    """Return the conversation whose answer continues the last message, in Anthropic's limits."""
    last = conversation.messages[-1]
    if last.text != last.text.rstrip():
        words = "final assistant content cannot end with trailing whitespace"
    elif conversation.thinking and not last.reasoning and last.text:
        words = "when thinking is enabled, a final assistant message must start with a thinking block"
    else:
        return continued(conversation)
    raise RequestError(f"messages: {words}", param="messages")


def _tool_choice(request: CountRequest) -> str:
    choice = request.tool_choice
    if choice is None:
        return AUTO
    if choice.type not in _CHOICES:
        raise none_of(choice.type, _CHOICES, "tool_choice.type")
    if choice.type in ("any", "tool") and not request.tools:
        raise RequestError(f"tool_choice {shown(choice.type)} needs tools", param="tool_choice")
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


def _tools(request: CountRequest) -> tuple[Tool, ...]:
    """Return the tools that a model may call, without tools that only Anthropic's servers run.

    Refuse such a tool if alone or chosen: Claude Code would take invented text for results from the web.
    """
    tools: list[Tool] = []
    theirs = [("mcp_servers", "", "mcp_servers")] if request.mcp_servers else []
    for i, given in enumerate(request.tools or ()):
        kind, where = given.get("type"), f"tools[{i}]"
        if kind in (None, "custom"):
            tool = checked(AnthropicTool, given, where)
            tools.append(Tool(tool.name, tool.description or "", tool.input_schema))
        else:
            theirs.append((str(kind), str(given.get("name")), f"{where}.type"))
    chosen = request.tool_choice and request.tool_choice.name
    for kind, name, where in theirs:
        if not tools or name == chosen:
            raise not_supported(
                f"{where.removesuffix('.type')}: tools of type {shown(kind)} are not supported, only custom "
                "ones with an input_schema",
                where,
            )
        log_left_out("tools", kind)
    return tuple(tools)


def _format(request: CountRequest) -> Json | None:
    """Return the format in the shape of OpenAI's `response_format`."""
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


def _turns(request: CountRequest) -> tuple[ChatMessage, ...]:
    """Return the turns. Join consecutive messages of one role, as many templates require."""
    called: dict[str, str] = {}
    messages, last = request.messages, len(request.messages) - 1
    check_parts(request.system, *[message.content for message in messages])
    turns = _system(request.system or "")
    own = newest(["tool" if _results(message) else message.role for message in messages])
    for i, message in enumerate(messages):
        role, mark = role_of(message.role, f"messages[{i}].role", last=i == last)
        if i == own:
            text = content_text(message.content, f"messages[{i}].content", strict=True)
            turns.append(ChatMessage("user", text))
        else:
            turns += _message(message, role, mark, called)
    if not turns:
        raise RequestError("messages has nothing but empty system messages", param="messages")
    return tuple(joined(turns, "\n"))


def _message(
    message: AnthropicInputMessage, role: Role, mark: str, called: dict[str, str]
) -> list[ChatMessage]:
    """Return the turns of one message. `called` has the names of all calls so far, by id.

    Tool results go first, right after their calls.
    """
    if role == "system":
        return _system(message.content)
    results = [_result(block, called) for block in _results(message)]
    if role == "assistant":
        return [*results, _assistant(_blocks(message.content), called)]
    text = lines([mark, _said(_blocks(message.content))])
    return [*results, ChatMessage(role, text)] if text or not results else results


def _result(result: Json, called: Mapping[str, str]) -> ChatMessage:
    """Return a tool's result. The client may have dropped its call."""
    text = content_text(result.get("content", ""))
    if result.get("is_error"):
        text = f"Error: {text}"
    call_id = str(result.get("tool_use_id") or "")
    return ChatMessage("tool", text, call_id=call_id, name=called.get(call_id, ""))


def _assistant(blocks: Sequence[Json], called: dict[str, str]) -> ChatMessage:
    calls = [
        Call(str(use.get("id") or ""), str(use.get("name") or ""), arguments_text(use.get("input")))
        for use in blocks
        if use.get("type") == "tool_use"
    ]
    called |= {call.id: call.name for call in calls}
    thoughts = thought_text([block for block in blocks if block.get("type") == "thinking"])
    return ChatMessage("assistant", _said(blocks), thoughts, tuple(calls))


def _system(content: object) -> list[ChatMessage]:
    """Return a system prompt, if not empty, without Claude Code's first line.

    The hash in that line changes with every request, so no prompt would share a prefix with the last.
    """
    texts = map(part_text, _blocks(content))
    lasting = lines(text.partition("\n")[2] if text.startswith(_BILLING) else text for text in texts)
    return [ChatMessage("system", lasting)] if lasting else []


def _blocks(content: object) -> list[Json]:
    given = content if isinstance(content, list) and are_parts(content) else [content]
    return [each if isinstance(each, dict) else {"type": "text", "text": part_text(each)} for each in given]


def _results(message: AnthropicInputMessage) -> list[Json]:
    return [block for block in _blocks(message.content) if block.get("type") == "tool_result"]


def _said(blocks: Sequence[Json]) -> str:
    """Return the words in blocks, without calls and results."""
    return lines(part_text(block) for block in blocks if block.get("type") not in ("tool_use", "tool_result"))


# --- answers ----------------------------------------------------------------------------------------------


SIGNATURE = "mlxtp"  # on every thinking block; proves nothing, but clients drop blocks without a signature

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
        "model": about.ask.dialect.model or about.model,
        "content": content,
        **stop,
        "usage": usage,
    }


def _content(answer: WholeAnswer, hide_thoughts: bool) -> list[Json]:
    """Return the blocks of a whole answer. The stop reason `max_tokens` reports a call that is left out."""
    blocks: list[Json] = []
    if answer.reasoning:
        thinking = "" if hide_thoughts else answer.reasoning
        blocks.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.complete_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return blocks


def _input(arguments: str) -> Json:
    """Return a call's arguments as an object, with their text in it if Python cannot read or write them."""
    try:
        input_: Json = json.loads(arguments)
        json.dumps(input_, allow_nan=False)
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return input_


class MessageWriter(AnswerWriter):
    def __init__(self, about: About) -> None:
        self._about = about
        self._hide_thoughts = about.ask.dialect.hide_thoughts
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
        return named_event({"type": "message_start", "message": message}) + _PING

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
        return named_event(last) + named_event({"type": "message_stop"})

    def fail(self, error: MlxtpError) -> bytes:
        return named_event(error_body(error, error_status(error)))

    def idle(self, more: Json) -> bytes:
        """Return a ping, which cannot hold `more`. Clients accept it before the message, too."""
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
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return ended + named_event(start)

    def _end(self) -> bytes:
        kind, self._open = self._open, ""
        if not kind:
            return b""
        signature = self._delta("signature_delta", "signature", SIGNATURE) if kind == "thinking" else b""
        return signature + named_event({"type": "content_block_stop", "index": self._index})

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":%b}}\n\n'
        ) % (self._index, kind.encode(), field.encode(), compact(text))


_NO_THOUGHT = {"type": "thinking", "thinking": "", "signature": ""}
_PING = named_event({"type": "ping"})

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
    return {"type": "error", "error": {"type": kind, "message": error.detail}, "request_id": request_id()}


def request_id() -> str:
    """Return the id of the current request. The log has the same id without `req_`."""
    account = current()
    return f"req_{uuid.uuid4().hex if account is None else account.id}"


def model_body(model: ModelInfo | StoredModelInfo) -> Json:
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


class Anthropic(Adapter):
    """Adapter for clients of Anthropic's API, such as Claude Code. Their base URL ends before `/v1`."""

    prefixes = ("/v1/messages",)
    names: Mapping[str, str] = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "function.name": "name",
        "function.parameters": "input_schema",
    }
    too_long = "prompt is too long: {tokens} tokens > {most} maximum"

    @property
    def endpoints(self) -> Mapping[Operation, Handler]:
        return {
            Operation("POST", "/v1/messages", "Answer a chat", MessagesRequest, SSE): self._messages,
            Operation("POST", "/v1/messages/count_tokens", "Count a prompt", CountRequest): _counted,
        }

    async def _messages(self, generation: Generation, request: Request) -> Response:
        try:
            return _with_id(await generation.answer(self, request, parse_messages))
        except RequestError as error:
            if error.code is Code.OVERLOADED:
                error.status = OVERLOADED_STATUS
            raise

    def whole(self, about: About, wholes: Sequence[WholeAnswer]) -> Json:
        [answer] = wholes
        end = answer.finish.end
        usage = _usage(about.prompt_tokens[0], end.cached, end.generated)
        content = _content(answer, about.ask.dialect.hide_thoughts)
        return _message_body(about, content, _stop(about, answer.finish), usage)

    def writer(self, about: About) -> MessageWriter:
        return MessageWriter(about)

    def error(self, error: MlxtpError, status: int) -> Json:
        return error_body(error, status)


async def _counted(generation: Generation, request: Request) -> Response:
    return _with_id(JSONResponse({"input_tokens": await generation.count(request, parse_count)}))


def _with_id(response: Response) -> Response:
    response.headers["request-id"] = request_id()
    return response


ANTHROPIC = Anthropic()

"""The Anthropic dialect: schema of a request, and its conversion to a `GenerationRequest`. Pure.

Unknown fields, betas and `cache_control` are ignored. Fields that are understood but not supported are
refused with `not_supported`, never silently ignored. Source of the shapes: the types of Anthropic's client
library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any

from pydantic import Field

from ...errors import RequestError
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
from ..adapter import Json
from ..request_body import Schema, checked, in_range, not_supported, parsed, shown
from .request_parts import log_left_out

_BILLING = "x-anthropic-billing-header:"
_MOST_TOKENS = 2**31 - 1
_MOST_MESSAGES = 100_000  # as in the API


# --- schema of a request. None means absent, everywhere ---------------------------------------------------


class AnthropicInputMessage(Schema):
    role: str
    content: Any


class Metadata(Schema):
    user_id: str | None = None


class Thinking(Schema):
    """`budget_tokens` is only checked: `max_tokens` alone bounds thoughts and answer together."""

    type: str
    budget_tokens: Annotated[int, in_range(1, _MOST_TOKENS)] | None = None
    display: str | None = None


class ToolChoice(Schema):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicTool(Schema):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: Json


class OutputConfig(Schema):
    format: Json | None = None


class Format(Schema):
    type: str
    schema_: Annotated[Json, Field(alias="schema")]


class CountRequest(Schema):
    """The body of `POST /v1/messages/count_tokens`: all parts of the prompt."""

    messages: Annotated[
        list[AnthropicInputMessage], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)
    ]
    model: str | None = None
    system: Any = None
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Json | None = None  # older clients' name of output_config.format
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
class AnthropicAnswerOptions:
    """Options of the answer. `model`: the client's own name for it, or None for ours."""

    model: str | None = None
    hide_thoughts: bool = False


# --- from a body to a request
# ----------------------------------------------------------------------------------


def parse_messages(body: bytes) -> GenerationRequest:
    """Return the request. Raises RequestError that names the field, the reason and the value."""
    request = parsed(MessagesRequest, body)
    ask = _ask(request)
    if request.max_tokens == 0:
        raise not_supported(
            "max_tokens 0 (to fill a cache without an answer) is not supported; send at least 1", "max_tokens"
        )
    if request.messages[-1].role == "assistant":
        raise not_supported(
            "the last message is the assistant's: to continue it is not supported; "
            "end with a message of the user",
            f"messages[{len(request.messages) - 1}].role",
        )
    options = GenerationOptions(
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
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
    thinking = request.thinking or Thinking(type="")
    conversation = Conversation(
        messages=_turns(request),
        tools=_tools(request),
        tool_choice=_tool_choice(request),
        parallel=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
        thinking=_thinking(request.thinking),
    )
    asked = AnthropicAnswerOptions(request.model if theirs else None, thinking.display == "omitted")
    return GenerationRequest(None if theirs else request.model, conversation, dialect=asked)


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


def _tools(request: CountRequest) -> tuple[Tool, ...]:
    """Return the tools that a model may call. Leave out those that only Anthropic's servers run.

    Refuse them when alone or chosen. Claude Code searches the web by such a request and would take invented
    text for results.
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
    turns = [] if request.system is None else _system(request.system, "system")
    for i, message in enumerate(request.messages):
        turns += _message(message, f"messages[{i}]", called)
    joined: list[ChatMessage] = []
    for role, group in groupby(turns, key=lambda turn: turn.role):
        run = list(group)
        joined += run if role == "tool" else [_together(role, run)]
    return tuple(joined)


def _message(message: AnthropicInputMessage, where: str, called: dict[str, str]) -> list[ChatMessage]:
    """Return the turns of one message. `called` has the names of all calls so far, by id."""
    content = f"{where}.content"
    match message.role:
        case "user":
            return _user(_blocks(message.content, content), called)
        case "assistant":
            return [_assistant(_blocks(message.content, content), called)]
        case "system":
            return _system(message.content, content)
    raise _no_such(message.role, ("user", "assistant", "system"), f"{where}.role")


Blocks = Sequence[tuple[str, Json, str]]  # type, block and its place in the request


def _user(blocks: Blocks, called: Mapping[str, str]) -> list[ChatMessage]:
    """Return the turns of a user's message. Results of tools come first: they belong to the calls before."""
    results, texts = [], []
    for kind, block, where in blocks:
        if kind == "text":
            texts.append(checked(_Text, block, where).text)
        elif kind == "tool_result":
            results.append(_result(checked(_ToolResult, block, where), where, called))
        else:
            raise _unfit(kind, where, "a user's message", "text, tool_result")
    return [*results, ChatMessage("user", _joined(texts))] if texts or not results else results


def _result(result: _ToolResult, where: str, called: Mapping[str, str]) -> ChatMessage:
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
    return ChatMessage("tool", text, call_id=id_, name=called[id_])


def _assistant(blocks: Blocks, called: dict[str, str]) -> ChatMessage:
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
        elif kind != "redacted_thinking":  # only its maker can decrypt it
            raise _unfit(kind, where, "an assistant's message", "text, thinking, redacted_thinking, tool_use")
    return ChatMessage("assistant", _joined(texts), _joined(thoughts), tuple(calls))


def _system(content: object, where: str) -> list[ChatMessage]:
    """Return a system prompt, unless it is empty, without Claude Code's first line.

    The hash in that line differs from request to request, so that no prompt would share a prefix with the one
    before.
    """
    texts = _texts(_blocks(content, where), "a system prompt")
    lasting = _joined(text.partition("\n")[2] if text.startswith(_BILLING) else text for text in texts)
    return [ChatMessage("system", lasting)] if lasting else []


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


def _together(role: Role, turns: Sequence[ChatMessage]) -> ChatMessage:
    calls = tuple(call for turn in turns for call in turn.calls)
    return ChatMessage(
        role, _joined(turn.text for turn in turns), _joined(turn.reasoning for turn in turns), calls
    )


def _unfit(kind: str, where: str, whose: str, allowed: str) -> RequestError:
    return not_supported(
        f"{where}: blocks of type {shown(kind)} are not supported in {whose}, only {allowed}", where
    )


def _no_such(value: str, allowed: Iterable[str], where: str) -> RequestError:
    return RequestError(f"{where}: {shown(value)} is none of {', '.join(allowed)}", param=where)

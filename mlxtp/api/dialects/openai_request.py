"""The OpenAI dialect: schema of a chat request, and its conversion to a `GenerationRequest`. Pure.

Unknown fields are ignored. Fields that are understood but not supported are refused with `not_supported`,
never silently ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    GenerationRequest,
    Role,
)
from ..adapter import Json
from ..generation import MAX_CHOICES
from ..request_body import Schema, in_range, not_supported, parsed, shown
from .request_parts import MOST_TOKENS, ClientTool, Tuning, log_left_out, text_arguments, text_parameters


class Function(Schema):
    """The function of a tool call."""

    name: str
    arguments: str | Json | None = None


class CustomCallInput(Schema):
    name: Annotated[str, Field(min_length=1)]
    input: str


class ToolCallInput(Schema):
    id: str | None = None
    type: str | None = None
    function: Function | None = None
    custom: CustomCallInput | None = None


class MessageInput(Schema):
    role: str
    content: Any = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: list[ToolCallInput] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class ToolFunction(Schema):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: Json | None = None


class CustomTool(Schema):
    """A tool that takes plain text."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    format: Json | None = None


class OfferedTool(Schema):
    type: str
    function: ToolFunction | None = None
    custom: CustomTool | None = None


class StreamOptions(Schema):
    include_usage: bool | None = None


class ChatRequest(Tuning):
    """The body of `POST /v1/chat/completions`. None means absent, everywhere."""

    # the list of errors is bounded
    messages: Annotated[list[MessageInput], Field(min_length=1, fail_fast=True)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, in_range(1, MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, in_range(1, MOST_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, in_range(1, MOST_TOKENS)] | None = None
    response_format: Json | None = None
    user: Any = None
    # scores of its tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, in_range(0, 20)] | None = None
    # tools, and thinking
    tools: Annotated[list[OfferedTool], Field(fail_fast=True)] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Json | None = None
    # refused by `_check_supported`
    functions: list[Any] | None = None
    function_call: str | Json | None = None
    modalities: list[Any] | None = None
    audio: Any = None

    @property
    def budget(self) -> int | None:
        """The client's limit of tokens in the answer; None without one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


@dataclass(frozen=True, slots=True)
class OpenAIAnswerOptions:
    """Options of the answer. `custom`: names of the tools that take plain text."""

    include_usage: bool
    custom: frozenset[str]


# --- from a body to a request
# ----------------------------------------------------------------------------------


def parse_chat(body: bytes) -> GenerationRequest:
    """Return the checked request. Raises RequestError that names the field, the reason and the value."""
    request = parsed(ChatRequest, body)
    if request.max_tokens and request.max_completion_tokens not in (None, request.max_tokens):
        raise RequestError(
            f"max_tokens ({request.max_tokens}) and max_completion_tokens "
            f"({request.max_completion_tokens}) are the same setting: send one of them",
            param="max_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        raise RequestError(
            f"top_logprobs {request.top_logprobs} needs logprobs true beside it", param="top_logprobs"
        )
    _check_supported(request)
    tools = _tools(request.tools or ())
    asked = OpenAIAnswerOptions(
        request.include_usage, frozenset(tool.name for tool in tools if tool.kind == "custom")
    )
    conversation = Conversation(
        turns(request.messages),
        tuple(tool.function(tool.name) for tool in tools),
        tool_choice(request.tool_choice),
        request.parallel_tool_calls is not False,
        None if request.reasoning_effort is None else request.reasoning_effort != "none",
        _template_options(request),
    )
    user = request.user if isinstance(request.user, str) else ""
    options = request.options(
        n=request.n or 1,
        max_tokens=request.budget,
        logprobs=(request.top_logprobs or 0) if request.logprobs else -1,
        format_=request.response_format,
    )
    return GenerationRequest(request.model, conversation, options, bool(request.stream), user, asked)


def turns(messages: Sequence[MessageInput]) -> tuple[ChatMessage, ...]:
    """Return a conversation's turns: `developer` becomes `system`, parts of text are joined."""
    found: list[ChatMessage] = []
    names: dict[str, str] = {}
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = _role(message.role, where)
        if message.function_call:
            raise not_supported(
                f"{where}.function_call is the older form: send tool_calls", f"{where}.function_call"
            )
        calls = tuple(
            _call(call, f"{where}.tool_calls[{j}]") for j, call in enumerate(message.tool_calls or ())
        )
        if calls and role != "assistant":
            raise RequestError(
                f"{where}.tool_calls: only the assistant calls tools, not role {shown(message.role)}",
                param=f"{where}.tool_calls",
            )
        if role == "tool" and message.tool_call_id is None:
            raise RequestError(f"{where}.tool_call_id is missing", param=f"{where}.tool_call_id")
        names |= {call.id: call.name for call in calls}
        call_id = message.tool_call_id or ""
        reasoning = message.reasoning_content or message.reasoning
        found.append(
            ChatMessage(
                role,
                _content(message, where),
                reasoning if isinstance(reasoning, str) and role == "assistant" else "",
                calls,
                call_id if role == "tool" else "",
                (message.name or names.get(call_id, "")) if role == "tool" else "",
            )
        )
    return tuple(found)


def tool_choice(given: str | Mapping[str, Any] | None) -> str:
    """Return the choice in `Conversation`'s form. Raises RequestError."""
    match given:
        case None:
            return AUTO
        case "auto" | "none" | "required":
            return {"auto": AUTO, "none": NONE, "required": REQUIRED}[given]
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "custom",
            "custom": {"name": str(name)},
        } if name not in ("", AUTO, NONE, REQUIRED):
            return name
        case {"type": "allowed_tools"}:
            raise not_supported(
                'tool_choice of the type "allowed_tools" is not supported: offer only these tools',
                "tool_choice",
            )
        case other:
            expected = '"auto", "none", "required" or {"type": "function", "function": {"name": "..."}}'
            raise RequestError(f"tool_choice: expected {expected}, got {shown(other)}", param="tool_choice")


#: Variables that mlxtp sets in a template; clients may set the others.
_OWN_VARIABLES = ("messages", "tools", "tokenize", "add_generation_prompt", "chat_template", "return_dict")


def _template_options(request: ChatRequest) -> Json:
    options = request.chat_template_kwargs or {}
    for name in options:
        if name in _OWN_VARIABLES or not name.isidentifier():
            raise RequestError(
                f"chat_template_kwargs.{name} cannot be set", param=f"chat_template_kwargs.{name}"
            )
    if request.reasoning_effort is not None:
        return {"reasoning_effort": request.reasoning_effort} | options
    return options


def _check_supported(request: ChatRequest) -> None:
    called = request.function_call not in (None, "none", "auto")
    other = set(map(str, request.modalities or ())) - {"text"}
    wants: tuple[tuple[str, bool, str], ...] = (
        ("functions", bool(request.functions), "is the older form: send tools"),
        ("function_call", called, "is the older form: send tool_choice"),
        ("modalities", bool(other), "is not supported: answers are text"),
        ("audio", request.audio is not None, "is not supported: answers are text"),
    )
    for name, wanted, why in wants:
        if wanted:
            raise not_supported(f"{name} {shown(getattr(request, name))} {why}", name)


_ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip


def _role(role: str, where: str) -> Role:
    if role == "function":
        raise not_supported(f'{where}: role "function" is the older form: send role "tool"', f"{where}.role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role: {shown(role)} is none of {', '.join(_ROLES)}", param=f"{where}.role"
        )
    return _ROLES[role]


def _call(call: ToolCallInput, where: str) -> Call:
    if call.type == "custom" and call.custom is not None:
        return Call(call.id or "", call.custom.name, text_arguments(call.custom.input))
    if call.type not in (None, "function", "custom"):
        raise not_supported(
            f"{where}.type {shown(call.type)} is not supported, only function and custom", f"{where}.type"
        )
    if call.function is None:
        field = f"{where}.{call.type or 'function'}"
        raise RequestError(f"{field} is missing", param=field)
    arguments = call.function.arguments
    text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
    return Call(call.id or "", call.function.name, text or "{}")


def _tools(given: Sequence[OfferedTool]) -> list[ClientTool]:
    """Return the tools that a model may call; the provider's own are left out."""
    tools: list[ClientTool] = []
    for i, tool in enumerate(given):
        match tool:
            case OfferedTool(type="function", function=ToolFunction() as function):
                tools.append(ClientTool(function.name, function.description or "", function.parameters))
            case OfferedTool(type="custom", custom=CustomTool() as custom):
                parameters = text_parameters(custom.format)
                tools.append(ClientTool(custom.name, custom.description or "", parameters, "custom"))
            case OfferedTool(type="function" | "custom" as kind):
                where = f"tools[{i}].{kind}"
                raise RequestError(f"{where} is missing", param=where)
            case _:
                log_left_out("tools", tool.type)
    return tools


def _content(message: MessageInput, where: str) -> str:
    where = f"{where}.content"
    match message.content:
        case str(text):
            return text
        case list(parts):
            return "\n".join([_part(part, f"{where}[{i}]") for i, part in enumerate(parts)])
        case None if message.role == "assistant":
            return ""
        case other:
            raise RequestError(
                f"{where}: expected a string or a list of text parts, got {shown(other)}", param=where
            )


def _part(part: object, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind)} if kind not in ("text", "refusal"):
            raise not_supported(f"{where}: parts of type {kind!r} are not supported, only text", where)
        case _:
            expected = '{"type": "text", "text": "..."}'
            raise RequestError(f"{where}: expected {expected}, got {shown(part)}", param=where)

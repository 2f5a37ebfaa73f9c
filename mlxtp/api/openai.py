"""The OpenAI dialect: what a request may say. Pure.

Unknown fields are ignored. What is understood but cannot be done is refused with `not_supported`, never
passed over in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from ..errors import Code, RequestError
from .backend import ModelInfo

Json = dict[str, Any]

_MOST_TOKENS = 2**31 - 1
_SHOWN = 80  # characters of a refused value that go back to the client


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Message(_Schema):
    role: str
    content: Any = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class StreamOptions(_Schema):
    include_usage: bool | None = None


def _range(low: float, high: float) -> AfterValidator:
    """A number from `low` to `high`; NaN is none."""

    def check(value: float) -> float:
        if not low <= value <= high:
            raise PydanticCustomError("range", f"should be from {low} to {high}")
        return value

    return AfterValidator(check)


class ChatRequest(_Schema):
    """The body of `POST /v1/chat/completions`. None means absent, everywhere."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]  # errors take memory, too
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, _range(1, 16)] | None = None
    # how long
    max_tokens: Annotated[int, _range(1, _MOST_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, _range(1, _MOST_TOKENS)] | None = None
    min_tokens: Annotated[int, _range(0, _MOST_TOKENS)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    # how a token is chosen
    temperature: Annotated[float, _range(0, 2)] | None = None
    top_p: Annotated[float, _range(0, 1)] | None = None
    top_k: Annotated[int, _range(-1, _MOST_TOKENS)] | None = None
    min_p: Annotated[float, _range(0, 1)] | None = None
    xtc_probability: Annotated[float, _range(0, 1)] | None = None
    xtc_threshold: Annotated[float, _range(0, 0.5)] | None = None
    seed: int | None = None
    presence_penalty: Annotated[float, _range(-2, 2)] | None = None
    frequency_penalty: Annotated[float, _range(-2, 2)] | None = None
    repetition_penalty: Annotated[float, _range(0.01, 100)] | None = None
    logit_bias: dict[str, Annotated[float, _range(-100, 100)]] | None = None
    response_format: Json | None = None
    # for whom, and until when
    user: Any = None
    deadline_s: Annotated[float, _range(0.001, 86_400)] | None = None
    # what is told of it
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _range(0, 20)] | None = None
    # refused by `_check_supported`
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: str | Json | None = None
    function_call: str | Json | None = None

    @property
    def budget(self) -> int | None:
        """The most tokens the answer may have, as far as the client said."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


# --- requests ---------------------------------------------------------------------------------------------


def parse_chat(body: bytes) -> ChatRequest:
    """The checked request. Raises RequestError that names the field, the reason and the value."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
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
    return request


def chat_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """`role` and `content` as chat templates take them: plain text, `developer` read as `system`."""
    return [
        {"role": _role(message.role, f"messages[{i}]"), "content": _content(message, f"messages[{i}]")}
        for i, message in enumerate(messages)
    ]


def find_model(name: str | None, models: Sequence[ModelInfo]) -> ModelInfo:
    """Exact id, then alias, then `default` (or no name at all): the first. Raises RequestError 404."""
    for model in models:
        if name == model.id:
            return model
    for model in models:
        if name in model.aliases:
            return model
    if models and name in (None, "", "default"):
        return models[0]
    known = ", ".join(model.id for model in models) or "none"
    raise RequestError(
        f"the model {shown(name)} does not exist here; available: {known}",
        Code.MODEL_NOT_FOUND,
        status=404,
        param="model",
    )


def check_may_fit(messages: Sequence[Mapping[str, str]], longest_token: int, model: ModelInfo) -> None:
    """Refuse what cannot fit before it is tokenized: that takes seconds in which nothing else runs.

    `longest_token` is in characters. Raises RequestError with the numbers.
    """
    characters = sum(len(message["content"]) for message in messages)
    if characters > longest_token * model.context:
        raise RequestError(
            f"the messages have {characters} characters; the model's context of {model.context} tokens "
            f"holds at most {longest_token * model.context}",
            Code.CONTEXT_OVERFLOW,
            param="messages",
        )


def token_budget(asked: int | None, prompt: Sequence[int], model: ModelInfo) -> int:
    """How many tokens the answer may have; without a wish, as many as fit. Raises RequestError."""
    if not prompt:
        raise RequestError("these messages make an empty prompt", param="messages")
    if max(prompt) >= model.vocabulary:
        raise RequestError(
            f"the prompt has token {max(prompt)}, but the model knows only {model.vocabulary} tokens: "
            "its tokenizer and its weights do not belong together",
            Code.MODEL_INVALID,
            param="messages",
        )
    if len(prompt) + (asked or 1) <= model.context:
        return asked or model.context - len(prompt)
    wish = f"max_tokens {asked}" if asked else "at least 1 token of answer"
    raise RequestError(
        f"the prompt has {len(prompt)} tokens; with {wish} that makes {len(prompt) + (asked or 1)}, "
        f"more than the model's context of {model.context} tokens",
        Code.CONTEXT_OVERFLOW,
        param="max_tokens" if asked and len(prompt) < model.context else "messages",
    )


def _check_supported(request: ChatRequest) -> None:
    tools_wanted = request.tool_choice not in (None, "none", "auto")
    wants: tuple[tuple[str, bool, str], ...] = (
        ("tools", bool(request.tools), "leave them out"),
        ("functions", bool(request.functions), "leave them out"),
        ("tool_choice", tools_wanted, 'send "none" or leave it out'),
        ("function_call", request.function_call not in (None, "none", "auto"), "leave it out"),
    )
    for name, wanted, advice in wants:
        if wanted:
            value = shown(getattr(request, name))
            raise _not_supported(f"{name} {value} is not supported yet; {advice}", name)


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def _role(role: str, where: str) -> str:
    if role in ("tool", "function"):
        raise _not_supported(f"{where}: role {role!r} (tool calling) is not supported yet", f"{where}.role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role: {shown(role)} is none of {', '.join(_ROLES)}", param=f"{where}.role"
        )
    return _ROLES[role]


def _content(message: Message, where: str) -> str:
    if message.tool_calls or message.function_call:
        raise _not_supported(f"{where}: tool calls are not supported yet; leave them out", where)
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
        case {"type": str(kind)} if kind != "text":
            raise _not_supported(f"{where}: parts of type {kind!r} are not supported, only text", where)
        case _:
            expected = '{"type": "text", "text": "..."}'
            raise RequestError(f"{where}: expected {expected}, got {shown(part)}", param=where)


def _not_supported(detail: str, param: str) -> RequestError:
    return RequestError(detail, Code.NOT_SUPPORTED, param=param)


def _refusal(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    param = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in _field_path(first["loc"])
    ).removeprefix(".")
    if first["type"] == "missing":
        return RequestError(f"{param} is missing", param=param)
    if not param:
        return RequestError(f"the body must be a JSON object, got {shown(first['input'])}")
    what = first["msg"].removeprefix("Input ")
    return RequestError(f"{param} {what}, got {shown(first['input'])}", param=param)


_UNION_BRANCHES = {"str", "list[str]", "dict[str,any]"}


def _field_path(location: tuple[int | str, ...]) -> list[int | str]:
    """Without the names pydantic gives to the branches of a union, which are no fields."""
    return [part for part in location if part not in _UNION_BRANCHES]


def shown(value: object) -> str:
    """A refused value as the client sees it."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"

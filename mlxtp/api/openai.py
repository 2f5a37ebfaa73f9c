"""The OpenAI dialect: what a request may say, and what an answer looks like. Pure.

Unknown fields are ignored. What is understood but cannot be done is refused with `not_supported`, never
passed over in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import Code, GroupError, LinkError, MlxtpError, RequestError
from .backend import Health, ModelInfo

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


_Finite = Field(allow_inf_nan=False)


class ChatRequest(_Schema):
    """The body of `POST /v1/chat/completions`. None means absent, everywhere."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    # without effect while decoding is greedy
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    seed: int | None = None
    # checked by `_check_supported`
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, Annotated[float, _Finite]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stop: str | list[str] | None = None
    response_format: Json | None = None
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
        f"the model {_shown(name)} does not exist here; available: {known}",
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
        ("temperature", bool(request.temperature), "decoding is greedy: send temperature 0 or leave it out"),
        ("n", request.n not in (None, 1), "one answer a request: send n 1, or the request several times"),
        ("stop", bool(request.stop and any(request.stop)), "leave it out and cut the answer in the client"),
        ("tools", bool(request.tools), "leave them out"),
        ("functions", bool(request.functions), "leave them out"),
        ("tool_choice", tools_wanted, 'send "none" or leave it out'),
        ("function_call", request.function_call not in (None, "none", "auto"), "leave it out"),
        (
            "response_format",
            request.response_format is not None and request.response_format.get("type") != "text",
            'send {"type": "text"} and ask for the format in the prompt',
        ),
        ("logprobs", bool(request.logprobs), "leave it out"),
        ("top_logprobs", bool(request.top_logprobs), "leave it out"),
        ("logit_bias", bool(request.logit_bias), "leave it out"),
        ("presence_penalty", bool(request.presence_penalty), "send 0 or leave it out"),
        ("frequency_penalty", bool(request.frequency_penalty), "send 0 or leave it out"),
        ("repetition_penalty", request.repetition_penalty not in (None, 1.0), "send 1 or leave it out"),
    )
    for name, wanted, advice in wants:
        if wanted:
            value = _shown(getattr(request, name))
            raise _not_supported(f"{name} {value} is not supported yet; {advice}", name)


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def _role(role: str, where: str) -> str:
    if role in ("tool", "function"):
        raise _not_supported(f"{where}: role {role!r} (tool calling) is not supported yet", f"{where}.role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role: {_shown(role)} is none of {', '.join(_ROLES)}", param=f"{where}.role"
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
                f"{where}: expected a string or a list of text parts, got {_shown(other)}", param=where
            )


def _part(part: object, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise _not_supported(f"{where}: parts of type {kind!r} are not supported, only text", where)
        case _:
            expected = '{"type": "text", "text": "..."}'
            raise RequestError(f"{where}: expected {expected}, got {_shown(part)}", param=where)


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
        return RequestError(f"the body must be a JSON object, got {_shown(first['input'])}")
    what = first["msg"].removeprefix("Input ")
    return RequestError(f"{param} {what}, got {_shown(first['input'])}", param=param)


_UNION_BRANCHES = {"str", "list[str]", "dict[str,any]"}


def _field_path(location: tuple[int | str, ...]) -> list[int | str]:
    """Without the names pydantic gives to the branches of a union, which are no fields."""
    return [part for part in location if part not in _UNION_BRANCHES]


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


# --- answers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Completion:
    """What all chunks of one answer have in common. `created` in seconds since 1970."""

    id: str
    created: int
    model: str


def usage(prompt: int, completion: int, cached: int = 0) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def completion_body(completion: Completion, text: str, finish_reason: str, counts: Json) -> Json:
    """The whole answer to a request that does not stream."""
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return _head(completion, "chat.completion") | {"choices": [choice], "usage": counts}


class ChunkWriter:
    """The events of one stream, as bytes. Only the text of a chunk is new, so only that is encoded."""

    def __init__(self, completion: Completion, include_usage: bool) -> None:
        self._completion = completion
        self._include_usage = include_usage
        before, after = self._chunk({"content": "\0"}, None).split(json.dumps("\0").encode())
        self._before, self._after = before, after

    def role(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def text(self, text: str) -> bytes:
        return self._before + json.dumps(text).encode() + self._after

    def end(self, finish_reason: str, counts: Json) -> bytes:
        """The last chunk, the usage if it was asked for, and `[DONE]`."""
        last = self._chunk({}, finish_reason)
        if self._include_usage:
            last += sse(_head(self._completion, "chat.completion.chunk") | {"choices": [], "usage": counts})
        return last + b"data: [DONE]\n\n"

    def _chunk(self, delta: Json, finish_reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = _head(self._completion, "chat.completion.chunk") | {"choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return sse(chunk)


def sse(data: Json) -> bytes:
    """One server-sent event. ASCII only, so that no client breaks lines at U+2028."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def model_body(model: ModelInfo) -> Json:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "mlxtp",
        "context_length": model.context,
        "max_model_len": model.context,
    }


def models_body(models: Sequence[ModelInfo]) -> Json:
    return {"object": "list", "data": [model_body(model) for model in models]}


def health_body(health: Health) -> Json:
    return {
        "status": "ok" if health.ready else "unavailable",
        "state": health.state,
        "epoch": health.epoch,
        "world_size": health.world_size,
        "backend": health.backend,
        "model": health.model,
        "reason": health.reason,
        "ready": health.ready,
        "open_requests": health.open_requests,
        "ranks": [dict(rank) for rank in health.ranks],
    }


def error_status(error: MlxtpError) -> int:
    """The HTTP status: a lost group is being formed again, so the client may come back."""
    if isinstance(error, RequestError):
        return error.status
    come_back = isinstance(error, GroupError | LinkError) or error.code in (
        Code.NOT_READY,
        Code.SHUTTING_DOWN,
    )
    return 503 if come_back else 500


def error_body(message: str, code: str, status: int, param: str | None = None) -> Json:
    kind = (
        "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body_of(error: MlxtpError) -> Json:
    return error_body(error.detail, error.code.value, error_status(error), getattr(error, "param", None))


def _head(completion: Completion, object_: str) -> Json:
    return {
        "id": completion.id,
        "object": object_,
        "created": completion.created,
        "model": completion.model,
    }

"""Ollama's request schema, and its conversion to a `GenerationRequest`. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from ...errors import RequestError
from ...text.conversation import Call, ChatMessage, Conversation, GenerationOptions, GenerationRequest, Tool
from ..adapter import Json
from ..answer_shapes import NO_ITEMS, NULL, rules
from ..backend import ModelInfo
from ..request_body import MOST_MESSAGES, BodySchema, Integer, Schema, in_range, not_supported, parsed, shown
from ..sampling import given_settings, with_settings
from .request_parts import (
    MOST_TOKENS,
    NOT_USER,
    Parameters,
    RoleName,
    Unused,
    arguments_text,
    check_parts,
    content_rule,
    content_text,
    continued,
    lines,
    newest,
    role_of,
    thought_text,
)

T = TypeVar("T")

LATEST = ":latest"
ThinkLevel = Literal["low", "medium", "high", "max"]
THINK_LEVELS: tuple[str, ...] = get_args(ThinkLevel)


# --- schema of a request ----------------------------------------------------------------------------------


def _plain(value: T) -> T:
    """Refuse numbers too large for a float, which the parser reads as infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("plain", "should have ordinary numbers only") from None
    return value


def _stop_strings(value: object) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise PydanticCustomError("stop", "should be a string or a list of strings")
    return tuple(given)


#: A duration in Go's format, such as "1h30m".
_DURATION = re.compile(r"[-+]?(?:0|(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:ns|us|µs|μs|ms|s|m|h))+)")
_Duration = Annotated[str, Field(pattern=f"^{_DURATION.pattern}$")]
_PARTS = re.compile(r"([0-9.]+)([a-zµμ]+)")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MOST_DURATION = 64  # characters
_FOREVER_S = 1e9  # seconds; a longer time counts as endless


def _keep_alive(value: object) -> float | None:
    """Return seconds; -1 for an endless duration, negative or very long; None if absent."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:  # noqa: PLR0124
        return float(value) if 0 <= value < _FOREVER_S else -1.0
    if isinstance(value, str) and len(value) <= _MOST_DURATION and _DURATION.fullmatch(value):
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PARTS.findall(value))
        return _keep_alive(-seconds if value.startswith("-") else seconds)
    raise PydanticCustomError("keep_alive", 'should be a number of seconds or a duration such as "5m"')


KeepAlive = Annotated[float | None, PlainValidator(_keep_alive, float | _Duration | None)]


def _think(value: object) -> bool | str | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value in THINK_LEVELS:
        return value
    raise PydanticCustomError("think", f"should be true, false or one of {', '.join(THINK_LEVELS)}")


def _format(value: object) -> Json | None:
    """Return the format in the shape of `GenerationOptions.format`."""
    if value is None or value == "":
        return None
    if value == "json":
        return {"type": "json_object"}
    if isinstance(value, dict):
        return {"type": "json_schema", "json_schema": {"schema": _plain(value)}}
    raise PydanticCustomError("format", 'should be "json" or a JSON schema (an object)')


@with_settings("ollama")
class OllamaOptions(BodySchema):
    """Supported fields of `options`."""

    api = "options"

    num_predict: Annotated[Integer, in_range(-MOST_TOKENS, MOST_TOKENS)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop_strings, str | list[str] | None)] = ()
    seed: Integer | None = None
    num_ctx: Integer | None = None  # changes nothing


class OllamaCalledFunction(Schema):
    name: str | None = None
    arguments: Annotated[Any, AfterValidator(_plain)] = None


class OllamaToolCall(Schema):
    function: OllamaCalledFunction
    id: str | None = None


class OllamaMessage(Schema):
    model_config = rules((*content_rule(), {"content": NULL}), ({"role": NOT_USER}, {"images": NO_ITEMS}))

    role: RoleName
    content: Any = None
    thinking: Any = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaToolCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    name: str | None = None  # the older name of tool_name
    tool_call_id: str | None = None


class OllamaFunction(Schema):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: Annotated[Parameters, AfterValidator(_plain)] = None


class OllamaTool(Schema):
    function: OllamaFunction
    type: str | None = None


class OllamaBody(BodySchema):
    """Fields of both endpoints."""

    api = "ollama"

    model: str | None = None
    stream: bool | None = None
    format: Annotated[Json | None, PlainValidator(_format, Literal["", "json"] | Json | None)] = None
    think: Annotated[bool | str | None, PlainValidator(_think, bool | ThinkLevel | None)] = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, in_range(0, 20)] | None = None


class OllamaChat(OllamaBody):
    """The body of `POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MOST_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(fail_fast=True)] | None = None


class OllamaGenerate(OllamaBody):
    """The body of `POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Unused = None
    template: Unused = None
    context: Unused = None
    images: Unused = None


class OllamaShow(Schema):
    """The body of `POST /api/show`; `name` is the former name of `model`."""

    model: str | None = None
    name: str | None = None


# --- from a body to a request. Pure ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OllamaAnswerOptions:
    """Options of the answer. `model` is the client's own name for it."""

    chat: bool
    model: str
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """Time of a request's arrival (of `time.perf_counter_ns`), and the models loaded then."""

    at_ns: int
    models: Sequence[ModelInfo]


class NoPrompt(Exception):
    """Signal that the request has no prompt and only loads or unloads the model."""

    def __init__(self, asked: OllamaAnswerOptions, keep_s: float | None) -> None:
        super().__init__(asked, keep_s)
        self.asked = asked
        self.keep_s = keep_s


def parse_chat(arrival: Arrival, body: bytes) -> GenerationRequest:
    """Parse a chat. Raises RequestError that names the field, and NoPrompt when there are no messages."""
    chat = parsed(OllamaChat, body)
    asked = OllamaAnswerOptions(True, chat.model or "", arrival.at_ns)
    if not chat.messages:
        raise NoPrompt(asked, chat.keep_alive)
    conversation = Conversation(_turns(chat.messages), _tools(chat.tools or ()))
    if conversation.messages[-1].role == "assistant":
        conversation = continued(conversation)
    return _ask(chat, asked, arrival, _thinking(conversation, chat))


def parse_generate(arrival: Arrival, body: bytes) -> GenerationRequest:
    """Parse a prompt. Raises RequestError that names the field, and NoPrompt when there is no prompt."""
    generate = parsed(OllamaGenerate, body)
    asked = OllamaAnswerOptions(False, generate.model or "", arrival.at_ns)
    _check_supported(generate)
    if not generate.prompt:
        raise NoPrompt(asked, generate.keep_alive)
    if generate.raw:
        return _ask(generate, asked, arrival, (generate.prompt,))
    system = (ChatMessage("system", generate.system),) if generate.system else ()
    conversation = Conversation((*system, ChatMessage("user", generate.prompt)))
    return _ask(generate, asked, arrival, _thinking(conversation, generate))


def served_name(name: str, models: Sequence[ModelInfo]) -> str:
    """Return `name` without ":latest", which Ollama's clients add, unless it names a model."""
    if any(name == model.id or name in model.aliases for model in models):
        return name
    return name.removesuffix(LATEST)


def _ask(
    body: OllamaBody, asked: OllamaAnswerOptions, arrival: Arrival, prompt: Conversation | tuple[str, ...]
) -> GenerationRequest:
    return GenerationRequest(
        model=served_name(asked.model, arrival.models),
        prompt=prompt,
        options=_options(body),
        stream=body.stream is not False,
        dialect=asked,
        keep_s=body.keep_alive,
        ignored=body.ignored + (body.options.ignored if body.options else ()),
    )


def _options(body: OllamaBody) -> GenerationOptions:
    given = body.options or OllamaOptions()
    budget = given.num_predict or 0
    return GenerationOptions(
        max_tokens=budget if budget > 0 else None,  # -1 and -2 set no limit, nor does 0 with Ollama
        stop=given.stop,
        settings=given_settings(given, "ollama"),
        seed=None if given.seed == -1 else given.seed,  # -1 is Ollama's value for a random seed
        format=body.format,
        logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
    )


def _thinking(conversation: Conversation, body: OllamaBody) -> Conversation:
    """Set the thinking options. The template gets a level under gpt-oss's name for it."""
    if isinstance(body.think, str):
        level = {"reasoning_effort": body.think}
        return replace(conversation, thinking=True, needs_thinking=True, template_options=level)
    return replace(conversation, thinking=body.think, needs_thinking=bool(body.think))


def _check_supported(body: OllamaGenerate) -> None:
    wants: tuple[tuple[str, object, str], ...] = (
        ("images", body.images, "only text is understood"),
        ("suffix", body.suffix, "text cannot be written into a gap; send the prompt alone"),
        ("template", body.template, "the model has its own; with raw true, the prompt is used unchanged"),
        ("context", body.context, "tokens of an earlier answer are not accepted; send messages to /api/chat"),
    )
    for name, value, why in wants:
        if value:
            raise not_supported(f"{name} is not supported: {why}", name)
    if body.raw and body.system:
        raise RequestError("system has no place in a prompt that is used unchanged (raw)", param="system")
    if body.raw and body.think:
        raise RequestError("think does nothing to a prompt that is used unchanged (raw)", param="think")


def _turns(messages: Sequence[OllamaMessage]) -> tuple[ChatMessage, ...]:
    """Return the turns. Number calls without ids, and match them to results by name or order.

    A number has nine letters and digits; Mistral's templates accept nothing else.
    """
    turns: list[ChatMessage] = []
    unanswered: list[Call] = []
    count = 0
    check_parts(*[part for each in messages for part in (each.content, each.thinking, each.images)])
    roles = [message.role.lower() for message in messages]
    own = newest(roles)
    for i, message in enumerate(messages):
        role, mark = role_of(roles[i], f"messages[{i}].role", last=i == len(messages) - 1)
        text = lines([mark, _text(message, f"messages[{i}]", own=i == own)])
        calls: list[Call] = []
        for each in message.tool_calls or ():
            arguments = arguments_text(each.function.arguments)
            calls.append(Call(each.id or f"call{count:05d}", each.function.name or "", arguments))
            count += 1
        if role == "tool":
            call = _answered(message, unanswered)
            turns.append(ChatMessage(role, text, call_id=call.id, name=call.name))
        else:
            turns.append(ChatMessage(role, text, thought_text(message.thinking), tuple(calls)))
            unanswered += calls
    return tuple(turns)


def _text(message: OllamaMessage, where: str, *, own: bool) -> str:
    if message.images and own:
        raise not_supported(f"{where}.images is not supported: only text is understood", f"{where}.images")
    images = [{"type": "image"}] * len(message.images or ())
    content = "" if message.content is None else message.content
    return lines([content_text(content, f"{where}.content", strict=own), content_text(images)])


def _answered(message: OllamaMessage, unanswered: list[Call]) -> Call:
    """Return the call that a "tool" message answers, and remove it from `unanswered`."""
    id_, name = message.tool_call_id or "", message.tool_name or message.name or ""
    for call in unanswered:
        if (call.id == id_) if id_ else (name in ("", call.name)):
            unanswered.remove(call)
            return Call(call.id, name or call.name, "")
    return Call(id_, name, "")


def _tools(specs: Sequence[OllamaTool]) -> tuple[Tool, ...]:
    for i, spec in enumerate(specs):
        if spec.type not in (None, "", "function"):
            where = f"tools[{i}].type"
            raise not_supported(f"{where} {shown(spec.type)} is not supported, only function", where)
    functions = [spec.function for spec in specs]
    return tuple([Tool(each.name, each.description or "", each.parameters) for each in functions])

"""The body of `POST /v1/responses`: what it may say, and what it asks for. Pure.

Unknown fields are ignored. What is understood but cannot be done is refused with `not_supported`. Three
wishes are taken for what they can mean here: any `reasoning.effort` but "none" lets the model think, and
most models know no other degrees; with any `reasoning.summary` the thoughts themselves are shown;
`truncation` "auto" cuts nothing off, because a conversation that does not fit is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from ...errors import RequestError
from ..ask import AUTO, NONE, REQUIRED, Ask, Conversation, Tool
from ..schema import Schema, checked, in_range, not_supported, parsed, shown, wrong
from .responses_items import items_of, pieces, turns_of, worth_keeping
from .responses_store import ResponseStore, encoded
from .tuning import MOST_TOKENS, Tuning

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    LOGPROBS,
    # what there is never anything of, and thoughts are not encrypted
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip
_MOST_PAIRS, _MOST_KEY_CHARS, _MOST_VALUE_CHARS = 16, 64, 512  # of metadata, as in OpenAI's API
_MOST_PIECES = 20_000  # items of a conversation, and their parts


class Reasoning(Schema):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextSettings(Schema):
    format: Json | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionTool(Schema):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ResponseRequest(Tuning):
    """The body of `POST /v1/responses`."""

    input: Any = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, in_range(1, MOST_TOKENS)] | None = None
    max_tool_calls: int | None = None
    tools: list[Json] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, in_range(0, 20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    # refused where they ask for something
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None

    @property
    def kept(self) -> bool:
        return self.store is not False


@dataclass(frozen=True, slots=True)
class Wanted:
    """A checked request, as its answer needs it, without what nobody understands.

    `input` is a JSON list, in which the items of earlier answers are, too; None where it is not to be kept.
    """

    request: ResponseRequest
    input: bytes | None
    tools: tuple[FunctionTool, ...]
    tool_choice: Json | str
    format: Json


def parse(body: bytes, store: ResponseStore) -> Ask:
    """Raises RequestError that names the field, the reason and the value."""
    request = parsed(ResponseRequest, body)
    _check_supported(request)
    _check_metadata(request.metadata or {})
    _check_finite(request)
    logprobs = _logprobs(request)
    before = _before(request, store)
    _check_count(len(before), len(request.input) if isinstance(request.input, list) else 1)
    items = [*before, *_items(request, store)]
    _check_count(sum(map(pieces, before)), sum(map(pieces, items[len(before) :])))
    tools = tuple([_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())])
    _check_names(tools)
    offered, choice = _tool_choice(request.tool_choice, tools)
    conversation = Conversation(
        turns_of(request.instructions, items, len(before)),
        tuple([Tool(tool.name, tool.description or "", tool.parameters) for tool in offered]),
        choice,
        request.parallel_tool_calls is not False,
        _thinking(request.reasoning),
        _template_options(request.reasoning),
    )
    given = request.text.format if request.text is not None else None
    format_ = None if given is None else _understood(given)
    options = request.options(
        max_tokens=request.max_output_tokens, logprobs=logprobs, format_=_format(format_)
    )
    wanted = Wanted(
        request,
        encoded(worth_keeping(items), store.most_bytes) if request.kept else None,
        tools,
        _shown_choice(request.tool_choice),
        format_ or {"type": "text"},
    )
    return Ask(request.model, conversation, options, bool(request.stream), _user(request), wanted)


def _check_supported(request: ResponseRequest) -> None:
    verbosity = request.text.verbosity if request.text is not None else None
    wants: tuple[tuple[str, bool, object, str], ...] = (
        ("background", bool(request.background), True, "leave it out, and stream the answer"),
        (
            "conversation", bool(request.conversation), request.conversation,
            "send previous_response_id, or the whole conversation as input",
        ),
        ("prompt", bool(request.prompt), request.prompt, "no prompts are kept here; send instructions"),
        (
            "context_management", bool(request.context_management), request.context_management,
            "nothing is left out of a conversation here; leave it out",
        ),
        ("moderation", bool(request.moderation), request.moderation, "leave it out"),
        (
            "text.verbosity", verbosity in {"low", "high"}, verbosity,
            "leave it out, and say in the instructions how long the answer should be",
        ),
    )  # fmt: skip
    for name, wanted, value, advice in wants:
        if wanted:
            raise not_supported(f"{name} {shown(value)} is not supported; {advice}", name)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    longest_key = max(map(len, metadata), default=0)
    longest_value = max(map(len, metadata.values()), default=0)
    for what, length, most in (
        ("pairs", len(metadata), _MOST_PAIRS),
        ("characters in a key", longest_key, _MOST_KEY_CHARS),
        ("characters in a value", longest_value, _MOST_VALUE_CHARS),
    ):
        if length > most:
            raise RequestError(f"metadata has {length} {what}; at most {most}", param="metadata")


def _check_finite(request: ResponseRequest) -> None:
    """What the answer repeats has to be JSON, which knows neither NaN nor Infinity."""
    given = {
        "tools": request.tools,
        "tool_choice": request.tool_choice,
        "text.format": request.text.format if request.text is not None else None,
    }
    for name, value in given.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise RequestError(f"{name}: NaN and Infinity are not valid in JSON", param=name) from None


def _logprobs(request: ResponseRequest) -> int:
    for i, name in enumerate(request.include or ()):
        if name not in _INCLUDABLE:
            raise RequestError(
                f"include[{i}]: {shown(name)} is none of {', '.join(_INCLUDABLE)}", param=f"include[{i}]"
            )
    if LOGPROBS in (request.include or ()):
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError(
            f'top_logprobs {request.top_logprobs} needs include ["{LOGPROBS}"] beside it',
            param="top_logprobs",
        )
    return -1


def _before(request: ResponseRequest, store: ResponseStore) -> list[Json]:
    """The items of the answer from which this one goes on."""
    if request.previous_response_id is None:
        return []
    return store.get(request.previous_response_id, "previous_response_id").items()


def _check_count(before: int, given: int) -> None:
    """Whatever a conversation has is read again by each request that goes on from it, however short."""
    if before + given > _MOST_PIECES:
        earlier = f" after {before} of previous_response_id," if before else ""
        raise RequestError(
            f"input has {given} items and parts of them,{earlier} and at most {_MOST_PIECES} are taken",
            param="input",
        )


def _items(request: ResponseRequest, store: ResponseStore) -> list[Json]:
    named: dict[str, Json] = {}

    def find(id_: str, where: str) -> Json:
        if id_ not in named:
            named[id_] = store.item(id_, where)
        return named[id_]

    match request.input:
        case str() | list():
            return items_of(request.input, find)
        case None:
            raise RequestError("input is missing", param="input")
        case other:
            raise wrong("input", "a string or a list of items", other)


def _tool(given: Json, where: str) -> FunctionTool:
    kind = given.get("type")
    if isinstance(kind, str) and kind != "function":
        raise not_supported(
            f"{where}: {shown(kind)} is not supported: no tools are run here, and only those of type "
            '"function" are passed on to the model',
            f"{where}.type",
        )
    if kind is None:
        raise RequestError(f"{where}.type is missing", param=f"{where}.type")
    if kind != "function":
        raise wrong(f"{where}.type", '"function"', kind)
    tool = checked(FunctionTool, given, where)
    if tool.parameters is not None and tool.parameters.get("type", "object") != "object":
        where += ".parameters.type"
        raise wrong(where, 'a schema of an "object"', tool.parameters["type"])
    return tool


def _check_names(tools: Sequence[FunctionTool]) -> None:
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            where = f"tools[{i}].name"
            raise RequestError(f"{where}: there are two tools named {shown(tool.name)}", param=where)
        seen.add(tool.name)


def _tool_choice(given: object, tools: tuple[FunctionTool, ...]) -> tuple[tuple[FunctionTool, ...], str]:
    """The tools that are offered, and the choice among them as `Conversation` has it."""
    match given:
        case None | "auto":
            return tools, AUTO
        case "none":
            return tools, NONE
        case "required":
            return _some(tools, "tool_choice"), REQUIRED
        case {"type": "function", "name": str(name)} if name not in (AUTO, NONE, REQUIRED):
            _named(name, tools, "tool_choice.name")
            return tools, name
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = {_allowed(tool, tools, i).name for i, tool in enumerate(allowed)}
            offered = tuple([tool for tool in tools if tool.name in names])
            if mode == "auto":
                return offered, AUTO
            return _some(offered, "tool_choice.tools"), REQUIRED
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise not_supported(
                f'tool_choice: {shown(kind)} is not supported, only "function" and "allowed_tools"',
                "tool_choice",
            )
        case _:
            expected = '"auto", "none", "required" or {"type": "function", "name": "..."}'
            raise wrong("tool_choice", expected, given)


def _allowed(given: object, tools: Sequence[FunctionTool], index: int) -> FunctionTool:
    where = f"tool_choice.tools[{index}]"
    match given:
        case {"type": "function", "name": str(name)}:
            return _named(name, tools, f"{where}.name")
        case _:
            raise wrong(where, '{"type": "function", "name": "..."}', given)


def _named(name: str, tools: Sequence[FunctionTool], where: str) -> FunctionTool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise RequestError(f"{where}: there is no tool named {shown(name)}", param=where)


def _some(tools: tuple[FunctionTool, ...], where: str) -> tuple[FunctionTool, ...]:
    if not tools:
        raise RequestError(f"{where}: a call is required, but there are no tools to call", param=where)
    return tools


def _shown_choice(given: Any) -> Json | str:
    """A choice that was checked, without what nobody understands."""
    match given:
        case {"type": "function", "name": name}:
            return {"type": "function", "name": name}
        case {"type": "allowed_tools", "mode": mode, "tools": allowed}:
            tools = [{"type": "function", "name": tool["name"]} for tool in allowed]
            return {"type": "allowed_tools", "mode": mode, "tools": tools}
        case _:
            return str(given or AUTO)


_OF_FORMATS: Mapping[str, Sequence[str]] = {
    "text": (), "json_object": ("schema",), "json_schema": ("name", "description", "strict", "schema"),
    "regex": ("pattern",), "grammar": ("grammar",), "lark": ("grammar",),
}  # fmt: skip


def _understood(given: Json) -> Json:
    """A format without what nobody understands; one of a kind that there is not as it is."""
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _OF_FORMATS:
        return given
    return {name: given[name] for name in ("type", *_OF_FORMATS[kind]) if name in given}


def _format(given: Json | None) -> Json | None:
    """As chat has it: there, the schema lies one level deeper."""
    match given:
        case {"type": "json_schema", "schema": dict(schema), **rest}:
            known = ("name", "description", "strict")
            named = {key: rest[key] for key in known if key in rest}
            return {"type": "json_schema", "json_schema": named | {"schema": schema}}
        case {"type": "json_schema", **rest}:
            raise wrong("text.format.schema", "a JSON schema, an object", rest.get("schema"))
        case _:
            return given


def _thinking(reasoning: Reasoning | None) -> bool | None:
    return None if reasoning is None or reasoning.effort is None else reasoning.effort != "none"


def _template_options(reasoning: Reasoning | None) -> Json:
    """For the templates of models that do have degrees."""
    return {} if reasoning is None or reasoning.effort is None else {"reasoning_effort": reasoning.effort}


def _user(request: ResponseRequest) -> str:
    return next((user for user in (request.user, request.safety_identifier) if isinstance(user, str)), "")

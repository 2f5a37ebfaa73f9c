"""The body of `POST /v1/responses`: its schema, and its conversion to a `GenerationRequest`.

Four fields mean less than at OpenAI: any `reasoning.effort` except "none" lets the model think, any
`reasoning.summary` shows the thoughts, `truncation` "auto" cuts nothing, `text.verbosity` has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema

from ...errors import RequestError
from ...text.conversation import NONE, ChatMessage, Conversation, GenerationOptions, GenerationRequest
from ..adapter import Json, compact
from ..answer_shapes import NO_SCORES, NOT_TRUE, rules
from ..request_body import (
    Integer,
    Schema,
    check_finite,
    in_range,
    missing,
    none_of,
    not_supported,
    parsed,
    shown,
    wrong,
)
from .request_parts import (
    MOST_TOKENS,
    ROLES,
    OpenAIBody,
    Tools,
    Unused,
    continued,
    log_left_out,
    template_options,
    tool_choice,
    unfold,
)
from .responses_items import (
    CALLS,
    COMPACT,
    OUTPUTS,
    TOOLS,
    items_of,
    listed,
    pieces,
    read_tools,
    repeated_choice,
    still_meant,
    tools_of_items,
    turns_of,
    users_of,
    worth_keeping,
)
from .responses_store import ResponseStore as ResponseStore

# --- the body ---------------------------------------------------------------------------------------------


LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    LOGPROBS,
    # always empty here; thoughts are not encrypted
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip
_INCLUDE = {"anyOf": [{"type": "array", "items": {"enum": [*_INCLUDABLE]}}, {"type": "null"}]}
_MOST_PAIRS, _MOST_KEY_CHARS, _MOST_VALUE_CHARS = 16, 64, 512  # of metadata, as in OpenAI's API
_MOST_PIECES = 20_000  # items of a conversation, and their parts


class ReasoningSettings(Schema):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextSettings(Schema):
    format: Json | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


_KINDS: Json = {"type": {"type": "string"}, "role": {"enum": [*ROLES]}}
_ITEM = {"type": "object", "properties": _KINDS, "anyOf": [{"required": [name]} for name in _KINDS]}
_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}]}
_FIRST: Json = {"input": _INPUT, "previous_response_id": {"type": "string"}}


class Wish(OpenAIBody):
    """Fields of requests for a response."""

    api = "responses"

    model_config = rules(
        tuple({name: each} for name, each in _FIRST.items()),
        ({"top_logprobs": NO_SCORES}, {"include": {"type": "array", "contains": {"const": LOGPROBS}}}),
        ({"background": NOT_TRUE}, {"store": {"enum": [None, True]}}),
    )

    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[Integer, in_range(1, MOST_TOKENS)] | None = None
    max_tool_calls: Integer | None = None
    tools: Annotated[list[Json] | None, WithJsonSchema(TOOLS)] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    chat_template_kwargs: Json | None = None
    include: Annotated[list[str] | None, WithJsonSchema(_INCLUDE)] = None
    top_logprobs: Annotated[Integer, in_range(0, 20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    background: bool | None = None
    # refused if set
    conversation: Unused = None
    prompt: Unused = None
    moderation: Unused = None
    context_management: Any = None  # changes nothing: no conversation is compacted unless the client says so

    @property
    def kept(self) -> bool:
        return self.store is not False

    @property
    def users(self) -> tuple[Any, ...]:
        return self.user, self.safety_identifier


class CompactRequest(Wish):
    """The body of `POST /v1/responses/compact`."""

    model: str


class ResponseRequest(Wish):
    """The body of `POST /v1/responses`."""

    input: Annotated[Any, WithJsonSchema(_INPUT)]


class SocketRequest(ResponseRequest):
    """A message on a WebSocket. Its answer is always a stream."""

    type: Literal["response.create"]
    generate: bool | None = None


@dataclass(frozen=True, slots=True)
class ResponsesAnswerOptions:
    """A checked request, for its answer, without unknown fields.

    `input` is a JSON list that includes the items of earlier answers; None if the client wants none kept.
    `socket`: only this WebSocket may continue the answer; empty for any request of the client.
    `compacts`: the answer is a summary, as an item of a response or, after `users`, as a new history.
    """

    request: Wish
    client: str
    input: bytes | None
    tools: Tools
    repeated_tools: Sequence[Json]
    tool_choice: Json | str
    format: Json
    compacts: Literal["", "item", "history"] = ""
    users: Sequence[Json] = ()
    socket: str = ""


def parse_compact(body: bytes, store: ResponseStore, client: str) -> GenerationRequest:
    """Return the request for a new history: a conversation that ends with a trigger. Raises RequestError."""
    request = parsed(CompactRequest, body)
    given = request.input
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    elif given is None and request.previous_response_id is not None:
        given = []
    if isinstance(given, list):
        given = [*given, {"type": "compaction_trigger"}]
    changed = {"input": given, "stream": False, "background": False}
    ask = _ask(request.model_copy(update=changed), store, client)
    return replace(ask, dialect=replace(ask.dialect, compacts="history"))


def parse(body: bytes, store: ResponseStore, client: str) -> GenerationRequest:
    """Return the request of a client. Raises RequestError that names the field, the reason and the value."""
    return _ask(parsed(ResponseRequest, body), store, client)


def parse_turn(body: bytes, store: ResponseStore, client: str, socket: str) -> GenerationRequest:
    """Return the request in a message on a WebSocket. Raises RequestError."""
    request = parsed(SocketRequest, body)
    for name, value in (("background", request.background), ("generate", request.generate is False)):
        if value:
            words = f"{name} {shown(getattr(request, name))} is not supported on a WebSocket; leave it out"
            raise not_supported(words, name)
    return _ask(request.model_copy(update={"stream": True}), store, client, socket)


def _ask(request: Wish, store: ResponseStore, client: str, socket: str = "") -> GenerationRequest:
    _check_supported(request)
    _check_metadata(request.metadata or {})
    _check_finite(request)
    logprobs = _logprobs(request)
    earlier = request.previous_response_id
    before = [] if earlier is None else store.items(client, earlier, socket)
    _check_count(len(before), len(request.input) if isinstance(request.input, list) else 1)
    items = [*before, *_items(request, store, client, socket)]
    if before:
        _check_answers(before, items[len(before) :])
    _check_count(sum(map(pieces, before)), sum(map(pieces, items[len(before) :])))
    given_tools, repeated = read_tools(request.tools or (), "tools")
    tools = unfold([*given_tools, *tools_of_items(items, len(before), given_tools)])
    items = still_meant(items)
    continues = _continues(request.input)
    if continues:
        items[-1] |= {"begun": True}  # the answer's text goes on in it
    offered, choice = tool_choice(request.tool_choice, tools)
    effort = request.reasoning.effort if request.reasoning is not None else None
    conversation = Conversation(
        turns_of(request.instructions, items, tools),
        tuple([tool.function(name) for name, tool in offered.items()]),
        choice,
        request.parallel_tool_calls is not False,
        None if effort is None else effort != "none",
        template_options(request.chat_template_kwargs or {}, effort),
    )
    given = request.text.format if request.text is not None else None
    format_ = None if given is None else _understood(given)
    wanted = ResponsesAnswerOptions(
        request,
        client,
        compact(worth_keeping(items)) if request.kept or socket else None,
        tools,
        repeated,
        repeated_choice(request.tool_choice),
        format_ or {"type": "text"},
        socket="" if request.kept else socket,
    )
    own = GenerationOptions(1, request.max_output_tokens, format=_format(format_), logprobs=logprobs)
    ask = request.generation(conversation, own, wanted)
    if request.background:
        ask = replace(ask, stream=True)  # its events, or their end, are kept
    match request.input:
        case [*_, {"type": "compaction_trigger"}]:
            return _compacting(ask, conversation, items)
    return replace(ask, prompt=continued(conversation)) if continues else ask


def _continues(given: Any) -> bool:
    """Return True if the last item is the beginning of the answer: a message that is not called complete."""
    match given:
        case [*_, {"role": "assistant", **last}]:
            return last.get("type", "message") == "message" and last.get("status") != "completed"
    return False


def _compacting(
    ask: GenerationRequest, conversation: Conversation, items: Sequence[Json]
) -> GenerationRequest:
    """Return the request for a summary. It keeps tools and thoughts, so the prompt begins like the last."""
    messages = (*conversation.messages, ChatMessage("user", COMPACT))
    left = still_meant([*items, {"type": "compaction"}])[:-1]
    wanted: ResponsesAnswerOptions = ask.dialect
    return replace(
        ask,
        prompt=replace(conversation, messages=messages, tool_choice=NONE),
        options=replace(ask.options, stop=(), format=None, logprobs=-1),
        dialect=replace(
            wanted,
            input=None if wanted.input is None else compact(left),
            compacts="item",
            users=users_of(left, len(compact(items))),
        ),
    )


def _check_supported(request: Wish) -> None:
    whole = "send previous_response_id, or the whole conversation as input"
    wants = (
        ("conversation", request.conversation, whole),
        ("prompt", request.prompt, "no prompts are kept here; send instructions"),
        ("moderation", request.moderation, "leave it out"),
    )
    for name, value, advice in wants:
        if value:
            raise not_supported(f"{name} {shown(value)} is not supported; {advice}", name)
    if request.background and not request.kept:
        raise RequestError("store false keeps no background response; leave it out", param="store")
    if request.context_management:
        log_left_out("context_management", "compaction")


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


def _check_finite(request: Wish) -> None:
    """Refuse NaN and Infinity in fields that the answer repeats; JSON has neither."""
    check_finite(request.tools, "tools")
    check_finite(request.tool_choice, "tool_choice")
    check_finite(request.text.format if request.text is not None else None, "text.format")


def _logprobs(request: Wish) -> int:
    for i, name in enumerate(request.include or ()):
        if name not in _INCLUDABLE:
            raise none_of(name, _INCLUDABLE, f"include[{i}]")
    if LOGPROBS in (request.include or ()):
        return request.top_logprobs or 0
    if request.top_logprobs:
        words = f'top_logprobs {request.top_logprobs} needs include ["{LOGPROBS}"]'
        raise RequestError(words, param="top_logprobs")
    return -1


def _check_count(before: int, given: int) -> None:
    """Limit the items of a conversation: every later request, however short, reads them again."""
    if before + given > _MOST_PIECES:
        earlier = f" after {before} of previous_response_id," if before else ""
        raise RequestError(
            f"input has {given} items and parts of them,{earlier} and at most {_MOST_PIECES} are taken",
            param="input",
        )


def _check_answers(before: Sequence[Json], given: Sequence[Json]) -> None:
    """Refuse a call's output without its call, after a response whose calls are all known here."""
    calls = {item["call_id"] for item in (*before, *given) if item["type"] in CALLS}
    outputs = [item["call_id"] for item in given if item["type"] in OUTPUTS and item["call_id"]]
    lost = next((id_ for id_ in outputs if id_ not in calls), None)
    if lost is not None and not any(item["type"] == "compaction" for item in before):
        words = f"input has an output of the call {shown(lost)}, which previous_response_id does not have"
        raise RequestError(words, param="input")


def _items(request: Wish, store: ResponseStore, client: str, socket: str) -> list[Json]:
    unnamed: dict[str, dict[str, Json]] = {}  # items of answers; each answer is read once

    def find(id_: str, where: str) -> Json:
        """Take the item, so that a short body cannot refer to a long item many times."""
        answer = f"resp_{id_.partition('_')[2].rpartition('_')[0]}"  # an item's id contains its answer's
        if answer not in unnamed:
            unnamed[answer] = {}
            with suppress(RequestError):  # told below
                kept = store.find(client, answer, socket=socket)
                items = [*listed(kept.id, json.loads(kept.input)), *json.loads(kept.body)["output"]]
                unnamed[answer] = {item["id"]: item for item in items}
        if id_ not in unnamed[answer]:
            raise RequestError(
                f"{where}: the item {shown(id_)} is not known here, or is named twice: {store.bounds}. "
                "A client that makes its own references sends items with store false",
                param=where,
            )
        return unnamed[answer].pop(id_)

    match request.input:
        case str() | list():
            return items_of(request.input, find)
        case None:
            raise missing("input")
        case other:
            raise wrong("input", "a string or a list of items", other)


_OF_FORMATS: Mapping[str, Sequence[str]] = {
    "text": (), "json_object": ("schema",), "json_schema": ("name", "description", "strict", "schema"),
    "regex": ("pattern",), "grammar": ("grammar",), "lark": ("grammar",),
}  # fmt: skip


def _understood(given: Json) -> Json:
    """Return a known format without unknown keys, and an unknown format unchanged."""
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _OF_FORMATS:
        return given
    return {name: given[name] for name in ("type", *_OF_FORMATS[kind]) if name in given}


def _format(given: Json | None) -> Json | None:
    """Return the format in chat's shape, with the schema one level deeper."""
    match given:
        case {"type": "json_schema", "schema": dict(schema), **rest}:
            known = ("name", "description", "strict")
            named = {key: rest[key] for key in known if key in rest}
            return {"type": "json_schema", "json_schema": named | {"schema": schema}}
        case {"type": "json_schema", **rest}:
            raise wrong("text.format.schema", "a JSON schema, an object", rest.get("schema"))
        case _:
            return given

"""Work and memory for a request grow no faster than the request, whichever part of it grows."""

from __future__ import annotations

import copy
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxtp.api.backend import ModelInfo
from mlxtp.api.dialects import anthropic, completions, ollama_request, openai, responses_request
from mlxtp.api.dialects.ollama_request import Arrival
from mlxtp.api.dialects.responses_request import ResponseStore
from mlxtp.api.prompts import Prompts, places
from mlxtp.api.sampling import guidance, shaping, stop_strings
from mlxtp.errors import RequestError
from mlxtp.text.answers import StopFinder
from mlxtp.text.calls import CallReader
from mlxtp.text.conversation import Conversation, GenerationRequest
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text

from ..text.test_call_style import HEAD, XML_CALL
from .conftest import TOOLS_TEMPLATE, byte_level, save
from .test_app_mutated_bodies import ASKED, BODIES, Place

pytestmark = pytest.mark.slow

Json = dict[str, Any]
Parse = Callable[[bytes], GenerationRequest]
SMALL, LARGE = 200, 2000  # elements of the container that grows
FLOOR_S, FLOOR_BYTES = 0.5, 8 << 20  # below which nothing is judged
MOST_TIMES = 50  # as much for ten times as many; squared work is 100
TRIES = 3

_STORE, _ARRIVAL = ResponseStore(), Arrival(0, ())
PARSERS: dict[str, Parse] = {
    "/v1/chat/completions": openai.parse_chat,
    "/v1/completions": completions.parse,
    "/v1/responses": lambda body: responses_request.parse(body, _STORE, ""),
    "/v1/messages": anthropic.parse_messages,
    "/v1/messages/count_tokens": anthropic.parse_count,
    "/api/chat": partial(ollama_request.parse_chat, _ARRIVAL),
    "/api/generate": partial(ollama_request.parse_generate, _ARRIVAL),
}
_PART = {"$ref": "#/$defs/part"}
RICH: Json = {
    "type": "object",
    "properties": {"a": {"anyOf": [_PART, {"type": "string"}]}, "b": {"enum": ["x", "y"]}, "c": _PART},
    "required": ["a", "b"],
    "allOf": [_PART],
    "patternProperties": {"^p": {"type": "array", "prefixItems": [{"oneOf": [_PART]}]}},
    "$defs": {"part": {"properties": {"d": {"type": ["string", "null"]}}, "required": ["d"]}},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": RICH}}
RICH_BODIES: list[tuple[str, Json]] = [
    ("/v1/chat/completions", {"response_format": {"type": "json_object", "schema": RICH}}),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required", "logit_bias": {"5": 1}}),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Text]:
    """Text of models whose calls are JSON, and tags. No schema is relaxed: a process of its own does that."""
    found = []
    for template in (TOOLS_TEMPLATE, HEAD.replace("{{ CALL }}", XML_CALL).replace("{{ THINK }}", "")):
        found.append(Text(LocalRenderer.load(save(byte_level(), tmp_path_factory.mktemp("model"), template))))
        found[-1].relaxed = lambda tools, _nullable: tools
    return found


def prepare(text: Text, parse: Parse, body: bytes) -> None:
    """All that an agent does before a request goes to the engine, in its own process."""
    ask = parse(body)
    model = ModelInfo("tiny", (), Path(), 1 << 20, 0, (1,), 340)
    held = guidance(ask, text, model.eos)
    shaping(ask.options, model.vocabulary, held.grammar, held.banned)
    StopFinder(stop_strings(ask.options.stop) or ("x",)).push("hello")
    written = Prompts().written(ask, text, model, guided=bool(held.grammar[0]), client="")
    if isinstance(ask.prompt, Conversation):
        tail = str(written.texts[0])
        places(text, ask.prompt, tail, text.encoded(tail, special=False))
        if held.calls is not None:
            CallReader(held.calls, ask.prompt.tools, held.forced).markers  # noqa: B018 - it makes a table


def cost(text: Text, parse: Parse, body: Json) -> tuple[float, int]:
    """Return CPU seconds and the peak of memory, in bytes, for a request that may be refused."""
    data = json.dumps(body).encode()
    tracemalloc.start()
    begun = time.process_time()
    try:
        prepare(text, parse, data)
    except RequestError:
        pass
    finally:
        spent, (_, peak) = time.process_time() - begun, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return spent, peak


def grows_too_fast(text: Text, parse: Parse, grown: Callable[[int], Json]) -> str:
    """Return why the cost of a request grows faster than it; empty: it does not.

    Time is measured again where it is suspicious, so that noise fails no test.
    """
    for _attempt in range(TRIES):
        many_s, many_bytes = cost(text, parse, grown(LARGE))
        if many_s < FLOOR_S and many_bytes < FLOOR_BYTES:
            return ""
        few_s, few_bytes = cost(text, parse, grown(SMALL))
        if many_bytes > max(MOST_TIMES * few_bytes, FLOOR_BYTES):
            return f"memory: {few_bytes >> 10} KiB, {many_bytes >> 10} KiB"
        if many_s < max(FLOOR_S, MOST_TIMES * few_s):
            return ""
    return f"time: {few_s:.3f} s, {many_s:.3f} s"


def containers(value: object, at: Place = ()) -> Iterator[Place]:
    """Yield the place of each list and object that is not empty."""
    if isinstance(value, dict | list) and value:
        yield at
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from containers(part, (*at, key))


def with_more(body: Json, at: Place, alike: bool, count: int) -> Json:
    """Return a body whose container at a place has `count` elements, all alike or with names of their own."""
    made: Any = {"": copy.deepcopy(body)}
    holder, (*before, key) = made, ("", *at)
    for step in before:
        holder = holder[step]
    found = holder[key]
    if isinstance(found, dict):
        parts = list(found.items())
        more = {f"{parts[i % len(parts)][0]}{i}": parts[i % len(parts)][1] for i in range(count)}
        holder[key] = found | more
    else:
        parts = [found[i % len(found)] for i in range(count)]
        holder[key] = parts if alike else [own(part, i) for i, part in enumerate(parts)]
    return made[""]


def own(value: Any, number: int) -> Any:
    """Return an element with a name and ids of its own."""
    if isinstance(value, str):
        return f"{value}{number}"
    if isinstance(value, dict):
        return {
            key: own(part, number) if key in _NAMES or isinstance(part, dict) else part
            for key, part in value.items()
        }
    return value


_NAMES = ("name", "id", "tool_call_id", "tool_use_id", "call_id")


@pytest.mark.parametrize("path", PARSERS)
def test_no_container_of_a_request_is_worth_more_than_its_size(texts: list[Text], path: str) -> None:
    faults = {}
    bodies = [(texts[0], max(BODIES[path], key=lambda body: len(json.dumps(body))))]
    bodies += [(texts[1], {"messages": [ASKED]} | body) for where, body in RICH_BODIES if where == path]
    for text, body in bodies:
        for at in containers(body):
            for alike in (True, False) if at and isinstance(at[-1], str) else (False,):
                if why := grows_too_fast(text, PARSERS[path], partial(with_more, body, at, alike)):
                    faults[at, alike] = why
    assert faults == {}


def held_to(schema: Json) -> Json:
    return {"messages": [ASKED], "response_format": {"type": "json_object", "schema": schema}}


def calling(schema: Json) -> Json:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
    return {"messages": [ASKED], "tools": [tool], "tool_choice": "required"}


def nested_choices(count: int) -> Json:
    """References to lists of references, four deep, and the last to a long list of values."""
    lists = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * (count // 8)} for i in range(4)}
    last = {"4": {"enum": [f"v{i}" for i in range(count // 8)]}}
    return calling(
        {"properties": {"a": {"$ref": "#/$defs/0"}, "b": {"$ref": "#/$defs/3"}}, "$defs": lists | last}
    )


def answers(count: int) -> Json:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(count)]}


def results(count: int) -> Json:
    """Results of one message's calls, with signs that JSON writes in another way."""
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}] * count
    told = [{"role": "tool", "tool_call_id": "c", "content": f'"{i}\n'} for i in range(count)]
    return {"messages": [ASKED, {"role": "assistant", "tool_calls": calls}, *told]}


def periodic(count: int) -> Json:
    """A user's words that take squared time to be found from the end of what follows them."""
    letters = "a" * 20 * count
    told = {"role": "assistant", "content": letters * 2}
    return {"messages": [{"role": "user", "content": f"ab{letters}"}, told]}


TOGETHER: dict[str, Callable[[int], Json]] = {
    "references to no pointer": lambda n: held_to({"anyOf": [{"$ref": "a1"}] * n}),
    "one name spelt in many ways": lambda n: held_to(
        {
            "anyOf": [
                {"$ref": "#/$defs/" + f"{i:012b}".replace("0", "%2561").replace("1", "a")} for i in range(n)
            ],
            "$defs": {"a" * 12: {"anyOf": [{"type": "null"}] * n}},
        }
    ),
    "references into a list": lambda n: held_to(
        {"allOf": [{"$ref": f"#/$defs/l/anyOf/{i}"} for i in range(n)], "$defs": {"l": {"anyOf": [{}] * n}}}
    ),
    "properties of a long name": lambda n: held_to(
        {"properties": {"p" * 40 * n: {"properties": {f"a{i}": {"type": "null"} for i in range(n)}}}}
    ),
    "required properties": lambda n: calling(
        {"properties": {f"p{i}": {} for i in range(n)}, "required": [f"p{i}" for i in range(n)]}
    ),
    "nested choices": nested_choices,
    "answers": answers,
    "results of calls": results,
    "periodic words": periodic,
}


@pytest.mark.parametrize("what", TOGETHER)
def test_parts_that_grow_together_are_not_multiplied(texts: list[Text], what: str) -> None:
    found = [grows_too_fast(text, openai.parse_chat, TOGETHER[what]) for text in texts]
    assert found == ["", ""]


def test_a_request_has_a_limit_of_messages() -> None:
    with pytest.raises(RequestError, match=r"at most 10000 .* not 10001"):
        openai.parse_chat(json.dumps(answers(10_001)).encode())

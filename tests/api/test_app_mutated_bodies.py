"""A thousand bodies that no client sends on purpose, to every endpoint of every dialect that takes one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
import pytest

from mlxtp.api.adapter import Operation
from mlxtp.api.app import adapters

from .conftest import MAX_BODY_BYTES, WAIT_S, Server
from .dialects.shapes import read_answer

pytestmark = [pytest.mark.slow, pytest.mark.fault]

Json = dict[str, Any]
ROUNDS, BODIES_A_ROUND = 10, 100
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather in a city", "parameters": SCHEMA}
ASKED = {"role": "user", "content": "hello"}
MADE = {"name": "weather", "arguments": '{"city": "Oslo"}'}
CALLED = {"id": "call_1", "type": "function", "function": MADE}
SAMPLING = {"temperature": 0.5, "top_p": 0.9}
VERDICT = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "7 degrees"}
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}

PATCHED: Json = {"name": "patch", "input": "x"}
CHAT: tuple[Json, ...] = (
    {"model": "default", "messages": [ASKED], "max_tokens": 5, "seed": 7, "stop": ["x"], "n": 2, **SAMPLING},
    {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "call_1", "content": "7 degrees"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {"messages": [ASKED], "stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"5": 1}},
    {"messages": [ASKED], "response_format": VERDICT, "logprobs": True, "top_logprobs": 2},
    {
        "messages": [
            ASKED,
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": PATCHED}]},
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ],
        "tools": [{"type": "custom", "custom": {"name": "patch"}}, {"type": "web_search"}],
        "tool_choice": {"type": "custom", "custom": {"name": "patch"}},
    },
)
MESSAGES: tuple[Json, ...] = (
    {
        "model": "claude-sonnet-4-5", "max_tokens": 9, "messages": [ASKED],
        "stop_sequences": ["x"],
        "top_k": 3, "metadata": {"user_id": "me"},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, **SAMPLING,
    },
    {
        "max_tokens": 9,
        "stream": True,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            ASKED,
            {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "Well"}, TOOL_USE]},
            {"role": "user", "content": [RESULT]},
        ],
        "tools": [{"name": "weather", "description": "The weather in a city", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    },
    {
        "max_tokens": 9, "messages": [ASKED],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
)  # fmt: skip
RESPONSES: tuple[Json, ...] = (
    {
        "model": "default", "input": "hello", "instructions": "Be brief.", "max_output_tokens": 20,
        "metadata": {"for": "me"}, "store": False, "reasoning": {"effort": "low"}, **SAMPLING,
    },
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "7 degrees"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "auto",
        "stream": True,
    },
    {"input": "hello", "text": {"format": {"type": "json_schema", "name": "verdict", "schema": SCHEMA}}},
    {
        "input": [
            {"role": "developer", "content": "Be brief."},
            {"type": "reasoning", "id": "r", "content": None,
             "summary": [{"type": "summary_text", "text": "s"}]},
            ASKED,
        ],
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "truncation": "auto", "user": "me",
        "include": ["message.output_text.logprobs"], "top_logprobs": 2, "parallel_tool_calls": True,
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {
            "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]
        },
        "stop": ["x"], "logit_bias": {"7": 1}, "seed": 3, "max_tool_calls": 2, "safety_identifier": "me",
    },
    {
        "input": [
            {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "exec"}]},
            ASKED,
            {"type": "web_search_call", "id": "w", "status": "completed"},
            {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "q"}},
            {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": [
                {"type": "namespace", "name": "there", "tools": [{"type": "function", **FUNCTION}]}]},
            {"type": "custom_tool_call", "call_id": "c2", "name": "exec", "namespace": "n", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c2",
             "output": [{"type": "input_image", "image_url": "u"}]},
        ],
        "tools": [
            {"type": "namespace", "name": "here", "tools": [{"type": "function", **FUNCTION}]},
            {"type": "tool_search", "execution": "client", "parameters": SCHEMA},
            {"type": "web_search", "external_web_access": True},
            {"type": "custom", "name": "patch",
             "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
        ],
        "tool_choice": {"type": "custom", "name": "patch"}, "text": {"verbosity": "low"}, "store": True,
    },
)  # fmt: skip
BODIES: Mapping[str, tuple[Json, ...]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": (
        {"model": "default", "prompt": "hello", "max_tokens": 5, "logprobs": 2, **SAMPLING},
        {"prompt": ["hello", "world"], "max_tokens": 5, "stream": True, "n": 2, "echo": True},
        {"prompt": [[70, 71], [72]], "max_tokens": 5, "stop": "x"},
        {
            "prompt": "hello", "best_of": 1, "suffix": None, "logit_bias": {"7": 1}, "seed": 1, "user": "me",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}, "deadline_s": 10,
        },
    ),
    "/v1/responses": RESPONSES,
    "/v1/responses/compact": [{"model": "default"} | body for body in RESPONSES],
    "/v1/responses/input_tokens": tuple({**each, "stream": False} for each in RESPONSES),
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/api/chat": (
        {"model": "default", "messages": [ASKED], "options": {"num_predict": 5, "stop": ["x"], **SAMPLING}},
        {
            "model": "default",
            "messages": [
                ASKED,
                {"role": "assistant", "content": "", "thinking": "hm", "images": [],
                 "tool_calls": [{"id": "x", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
                {"role": "tool", "tool_name": "weather", "tool_call_id": "x", "content": "7 degrees"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "stream": False,
            "keep_alive": "5m",
        },
        {
            "model": "default", "messages": [ASKED], "format": SCHEMA, "think": False,
            "logprobs": True, "top_logprobs": 1,
            "options": {"top_k": 4, "min_p": 0.1, "seed": 3, "repeat_penalty": 1.1, "presence_penalty": 0.1,
                        "frequency_penalty": 0.1, "num_ctx": 100},
        },
    ),
    "/api/generate": (
        {"model": "default", "prompt": "hello", "system": "Be brief.", "options": {"num_predict": 5}},
        {"model": "default", "prompt": "hello", "raw": True, "stream": False, "keep_alive": 60},
        {
            "prompt": "hello", "suffix": "", "template": "", "context": [], "images": [], "format": "json",
            "stream": False,
        },
    ),
    "/api/show": ({"model": "default"}, {"name": "default", "verbose": True}),
    "/v1/chat/completions/input_tokens": ({"messages": [ASKED]},),
    "/v1/tokenize": (
        {"model": "default", "prompt": "hello", "return_token_strs": True},
        {"messages": [ASKED], "tools": [{"type": "function", "function": FUNCTION}],
         "add_special_tokens": True},
        {"content": "hello", "with_pieces": True},
    ),
    "/v1/detokenize": ({"tokens": [70, 71]},),
    "/apply-template": ({"messages": [ASKED], "add_generation_prompt": False},),
}  # fmt: skip
"""Good ones, for each endpoint that takes a body: what is changed below."""

VECTORS = ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/api/embed", "/api/embeddings")
"""Paths that a model of texts does not answer."""
OPERATIONS: Mapping[str, Operation] = {
    operation.path: operation
    for adapter in adapters()
    for operation in adapter.endpoints
    if operation.method == "POST" and operation.body is not None and operation.path not in VECTORS
}
ANSWERED = [path for path, operation in OPERATIONS.items() if operation.stream]
"""Paths that a model answers; of the others, something is only reported."""
REFUSING: Mapping[str, Operation] = {
    operation.path: operation
    for adapter in adapters()
    for operation in adapter.endpoints
    if operation.method == "POST" and operation.body is None
}
"""Operations that take a body and refuse any."""


Place = tuple[str | int, ...]
_HERE = "@@ here @@"
ODD = (
    "null", "true", "0", "-1", "2.5", "-0.0", "1e400", "-1e-400", "9" * 400, "1" + "0" * 30, "NaN",
    "-Infinity",
    '""', '"x"', '"auto"', '"json_schema"', '"http://[::1"', r'"\u0000"', r'"\ud800"',
    r'"\udfff\ud800 \ud83d"',
    '"\u202e\u0301\U0001f600\u2028\ufeff"', '"' + "é" * 20_000 + '"', "[]", "{}", "[null]",
    '[""]', '{"": ""}',
    '{"type": "text"}', '{"type": "object", "properties": {"a": {"$ref": "#"}}}', '{"$ref": "#/nowhere"}',
    '{"type": ["string", 7], "minLength": -1}', "[" * 150 + "]" * 150, '{"a":' * 3000 + "1" + "}" * 3000,
    "[" + "0," * 5000 + "0]", '{"__class__": "x", "__init__": 1}',
)  # fmt: skip
CONTENT_TYPES = (
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/xml",
    "application/json; charset=utf-16", "application/json; charset=", "x", "",
)  # fmt: skip


def places(value: object, at: Place = ()) -> Iterator[Place]:
    """Return the place of each part of a body."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*at, key)
            yield from places(part, (*at, key))


def changed(value: Any, at: Place, change: Callable[[Any, str | int], None]) -> Any:
    """A copy in which `change` was given what holds this place, and the place in it."""
    copy = json.loads(json.dumps(value))
    holder = copy
    for key in at[:-1]:
        holder = holder[key]
    change(holder, at[-1])
    return copy


def anywhere(random: Random, body: Json, change: Callable[[Any, str | int], None]) -> str:
    """The body with a change of one of its parts."""
    return json.dumps(changed(body, random.choice(list(places(body))), change))


def other_value(random: Random, body: Json) -> bytes:
    spoilt = anywhere(random, body, lambda holder, key: holder.__setitem__(key, _HERE))
    return spoilt.replace(f'"{_HERE}"', random.choice(ODD)).encode()


def left_out(random: Random, body: Json) -> bytes:
    return anywhere(random, body, lambda holder, key: holder.__delitem__(key)).encode()


def wrapped(random: Random, body: Json) -> bytes:
    wrap = random.choice([lambda part: [part], lambda part: {"value": part}, lambda part: [[part], part]])
    return anywhere(random, body, lambda holder, key: holder.__setitem__(key, wrap(holder[key]))).encode()


def swapped(random: Random, body: Json) -> bytes:
    """A part stands where another one belongs."""
    one, other = random.choices(list(places(body)), k=2)
    part: Any = body
    for key in other:
        part = part[key]
    return json.dumps(changed(body, one, lambda holder, key: holder.__setitem__(key, part))).encode()


def twice(random: Random, body: Json) -> bytes:
    """A name that stands there again, with another value."""
    name = json.dumps(random.choice(list(body)))
    return f"{json.dumps(body)[:-1]}, {name}: {random.choice(ODD)}}}".encode()


def much(random: Random, body: Json) -> bytes:
    lists = [at for at in places(body) if isinstance(at[-1], int)] or [("messages",)]
    at = random.choice(lists)

    def repeat(holder: Any, key: str | int) -> None:
        if isinstance(holder, list) and isinstance(key, int):
            holder[key:key] = [holder[key]] * random.choice([1, 50, 500])

    return json.dumps(changed(body, at, repeat)).encode()


def unknown(random: Random, body: Json) -> bytes:
    name = random.choice(["extra", "x-y", "", "n", "stream", "suffix", "images", "context"])
    return json.dumps({**body, name: _HERE}).replace(f'"{_HERE}"', random.choice(ODD)).encode()


def cut(random: Random, body: Json) -> bytes:
    whole = json.dumps(body).encode()
    return whole[: random.randrange(len(whole))]


def flipped(random: Random, body: Json) -> bytes:
    whole = bytearray(json.dumps(body).encode())
    for _ in range(random.choice([1, 5])):
        whole[random.randrange(len(whole))] = random.randrange(256)
    return bytes(whole)


def encoded(random: Random, body: Json) -> bytes:
    text = json.dumps(body)
    return random.choice(
        [
            text.encode("utf-16"),
            text.encode("utf-8-sig"),
            text.encode().replace(b"hello", b"\xed\xa0\x80"),  # a surrogate alone
            text.encode().replace(b"hello", b"\xff\xfe"),
            b"\x1f\x8b" + text.encode(),
            b"data=" + text.encode(),
            b"[" + text.encode() + b"]",
            random.choice(ODD).encode(),
            b" " * 1000 + text.encode() + b"\n" * 1000,
            b"",
        ]
    )


SPOIL = (
    other_value, other_value, other_value, left_out, left_out, wrapped, swapped, twice, much, unknown, cut,
    flipped, encoded,
)  # fmt: skip


@pytest.fixture
def client(roomy: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=roomy.url, timeout=WAIT_S, trust_env=False) as found:
        yield found


def test_there_are_bodies_for_every_endpoint_that_takes_one() -> None:
    assert BODIES.keys() == OPERATIONS.keys()


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, all_ in BODIES.items() for body in all_])
def test_what_is_spoilt_below_was_good(client: httpx.Client, path: str, body: Json) -> None:
    """Else everything would be refused for one and the same reason."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "error" not in response.text or "/v1/responses" in path, response.text


@dataclass
class Tally:
    answered: int = 0
    refused: int = 0


def judge(response: httpx.Response, operation: Operation, tally: Tally) -> None:
    """Answered in the published shape, or refused in that of the dialect; never the server's own fault."""
    assert "internal error" not in response.text, response.text
    refused = response.status_code != 200
    assert not refused or 400 <= response.status_code < 500, (response.status_code, response.text)
    is_json = response.headers["content-type"] == "application/json"
    assert is_json or not refused
    if is_json:
        read_answer(f"{operation.method} {operation.path}", response.status_code, response.content)
    tally.refused += refused
    tally.answered += not refused


def try_out(client: httpx.Client, path: str, sent: bytes, tally: Tally, kind: str = "") -> None:
    try:
        response = client.post(path, content=sent, headers={"content-type": kind} if kind else {})
        judge(response, OPERATIONS[path], tally)
    except Exception as error:
        error.add_note(f"{path}, {kind!r}: {sent[:600]!r}")
        raise


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.chaos) for n in range(1, ROUNDS))])
def test_no_body_is_too_much(client: httpx.Client, number: int) -> None:
    random, tally = Random(number), Tally()
    for turn in range(BODIES_A_ROUND):
        path = list(BODIES)[turn % len(BODIES)]
        sent = random.choice(SPOIL)(random, random.choice(BODIES[path]))
        kind = "application/json" if random.random() < 0.9 else random.choice(CONTENT_TYPES)
        try_out(client, path, sent, tally, kind)
    assert tally.answered > 10
    assert tally.refused > 30


def usually(path: str) -> Any:
    """Two dialects stand for all but in `make chaos`."""
    marks = () if path in ("/v1/chat/completions", "/v1/messages") else pytest.mark.chaos
    return pytest.param(path, marks=marks)


@pytest.mark.parametrize("path", [usually(path) for path in ANSWERED])
def test_no_odd_part_of_a_body_is_a_bug(client: httpx.Client, path: str) -> None:
    """Each part in turn, at any depth: left out, and twice something odd."""
    random, tally = Random(path), Tally()
    for body in BODIES[path]:
        for at in places(body):
            odd = changed(body, at, lambda holder, key: holder.__setitem__(key, _HERE))
            without = changed(body, at, lambda holder, key: holder.__delitem__(key))
            instead = [json.dumps(odd).replace(f'"{_HERE}"', each) for each in random.sample(ODD, 2)]
            for sent in (json.dumps(without), *instead):
                try_out(client, path, sent.encode(), tally)
    assert min(tally.answered, tally.refused) > 0


@pytest.mark.parametrize("path", BODIES)
def test_what_is_no_json_object_or_too_large_is_refused(client: httpx.Client, path: str) -> None:
    bodies = [b"", b"{", b"\xff", b"[1]", b'"x"', b"null", b"[" * 10_000, rb'{"user": "\ud800"}']
    bodies += [b'{"user": ' + b"9" * 5000 + b"}", b"{" + b" " * MAX_BODY_BYTES]
    tally = Tally()
    for sent in bodies:
        response = client.post(path, content=sent)
        judge(response, OPERATIONS[path], tally)
        assert len(response.text) < 400, "it is not sent back"
    assert response.status_code == 413
    assert (tally.answered, tally.refused) == (0, len(bodies))


@pytest.mark.parametrize("path", REFUSING)
def test_what_is_not_served_is_refused_with_any_body(client: httpx.Client, path: str) -> None:
    tally = Tally()
    bodies = [b"", b"{", b"\xff\x00", json.dumps(CHAT[0]).encode(), *(odd.encode() for odd in ODD)]
    for body in bodies:
        where = path.replace("{digest}", "sha256:0").replace("{rest}", "speech").replace("{id}", "resp_1")
        judge(client.post(where, content=body), REFUSING[path], tally)
    assert (tally.answered, tally.refused) == (0, len(bodies))

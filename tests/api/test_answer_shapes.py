"""Answers as `/openapi.json` describes them: with each field that they have, and no other."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import jsonschema_rs
import pytest
from starlette.requests import Request

from mlxtp.api.adapter import document
from mlxtp.api.answer_shapes import ANSWERS, EVENTS, schema
from mlxtp.api.app import HEALTH, adapters
from mlxtp.api.field_names import HEADER
from mlxtp.api.generation import Generation
from mlxtp.api.vectors import VectorAnswer
from mlxtp.errors import Code, RequestError

from . import conftest
from .conftest import Server, then
from .test_app_mutated_bodies import ASKED, BODIES, FUNCTION, SCHEMA, VECTORS

Json = dict[str, Any]
OPERATIONS = [each for adapter in adapters() for each in adapter.endpoints if each.summary]
DESCRIBED = document([HEALTH, *OPERATIONS], "1")["paths"]
PLAIN = [label for label in ANSWERS if label.startswith("GET") and "{response_id}" not in label]


def closed(part: Any) -> Any:
    """A schema in which objects have no fields but those that are described."""
    if isinstance(part, dict):
        more = {"additionalProperties": False} if "properties" in part else {}
        return {name: closed(each) for name, each in part.items()} | more
    return [closed(each) for each in part] if isinstance(part, list) else part


def check(label: str, response: httpx.Response) -> int:
    """Check an answer, or each event of a stream; return how many."""
    method, path = label.split(" ")
    answers = DESCRIBED[path.replace(":path", "")][method.lower()]["responses"]
    kind = response.headers["content-type"].partition(";")[0]
    described = answers["200" if response.status_code == 200 else f"{response.status_code // 100}XX"]
    content = described["content"][kind]
    wanted = jsonschema_rs.validator_for(closed(content.get("x-itemSchema") or content["schema"]))
    found = list(events(response.text)) if "x-itemSchema" in content else [response.json()]
    for each in found:
        problems = [f"{error.instance_path}: {error.message}" for error in wanted.iter_errors(each)]
        assert problems == [], each
    return len(found)


def events(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            yield json.loads(data)


def ask(server: Server, label: str, body: Any = None, **headers: str) -> httpx.Response:
    method, path = label.replace("{id}", "tiny").split(" ")
    return server.ask(method, path, body, **headers)


def test_every_operation_that_answers_is_described() -> None:
    served = {
        f"{each.method} {each.path.replace(':path', '')}" for each in (HEALTH, *OPERATIONS) if not each.always
    }
    assert served == ANSWERS.keys()


@pytest.mark.parametrize("label", PLAIN)
def test_facts_are_as_described(server: Server, label: str) -> None:
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        assert check(label, ask(server, label, **headers)) == 1


@pytest.mark.parametrize("path", BODIES)
def test_answers_and_events_are_as_described(roomy: Server, path: str) -> None:
    label = f"POST {path}"
    for body in BODIES[path]:
        for stream in (False, True):
            options = {} if stream else {"stream_options": None}
            answer = ask(roomy, label, body | {"stream": stream} | options)
            assert answer.status_code == 200, answer.text
            assert check(label, answer) >= 1
    assert check(label, ask(roomy, label, {"messages": 5, "input": 5, "prompt": 5, "model": 5})) == 1
    roomy.backend.ready = False
    assert check(label, ask(roomy, label, BODIES[path][0])) == 1


@pytest.mark.parametrize("path", VECTORS)
@pytest.mark.parametrize("more", [{}, {"encoding_format": "base64", "return_documents": True}])
def test_vectors_are_as_described(
    roomy: Server, path: str, more: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def vectors(
        _self: Generation, request: Request, parse: Any, _asked: Any
    ) -> tuple[Any, VectorAnswer, AsyncExitStack]:
        answer = VectorAnswer("m", (struct.pack("<2f", 0.5, 1.0),), 3)
        return parse(await request.body()), answer, AsyncExitStack()

    monkeypatch.setattr(Generation, "vectors", vectors)
    body = {"model": "m", "input": "a", "query": "a", "documents": ["b"], "rid": "x"}
    answer = ask(roomy, f"POST {path}", body | more)
    assert answer.status_code == 200, answer.text
    assert "rid" in answer.headers[HEADER].split(", ")
    assert check(f"POST {path}", answer) == 1


def test_kept_responses_are_as_described(roomy: Server) -> None:
    kept = ask(roomy, "POST /v1/responses", {"input": "hello", "background": True, "stream": True})
    assert check("POST /v1/responses", kept) > 2
    id_ = next(events(kept.text))["response"]["id"]
    one = "/v1/responses/{response_id}"
    for method, more, query in (
        ("GET", "", "?stream=true"), ("GET", "", ""), ("GET", "/input_items", ""), ("POST", "/cancel", ""),
        ("DELETE", "", ""), ("DELETE", "", ""),
    ):  # fmt: skip
        answer = ask(roomy, f"{method} {one}{more}{query}".replace("{response_id}", id_))
        if query:
            assert [*events(answer.text)] == [*events(kept.text)]
        else:
            check(f"{method} {one}{more}", answer)


CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
CALLING: dict[str, Json] = {
    "/v1/chat/completions": {
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
    },
    "/v1/responses": {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    "/v1/messages": {"tools": [{"name": "weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"prompt_logprobs": 1, "return_token_ids": True}),
        ("/v1/completions", {"prompt_logprobs": 1, "return_token_ids": True}),
        ("/v1/completions", {"echo": True, "logprobs": 1}),
    ],
)
def test_scores_of_a_prompt_are_as_described(roomy: Server, path: str, more: Json) -> None:
    body = {"messages": [ASKED], "prompt": "hello", "max_tokens": 2} | more
    answer = ask(roomy, f"POST {path}", body)
    assert answer.status_code == 200, answer.text
    assert check(f"POST {path}", answer) == 1


@pytest.mark.parametrize("path", CALLING)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_as_described(
    roomy: Server, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roomy.backend, "words", roomy.ids(CALL))
    body = {name: [ASKED] for name in ("input", "messages")} | {"max_tokens": 99, "stream": stream}
    answer = ask(roomy, f"POST {path}", body | CALLING[path])
    assert check(f"POST {path}", answer) > 2 * stream
    assert "Oslo" in answer.text


@pytest.mark.parametrize("label", [label for label in EVENTS if label.startswith("POST")])
def test_a_stream_that_breaks_is_as_described(
    roomy: Server, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RequestError("lost", Code.LINK_LOST, status=503)

    monkeypatch.setattr(conftest, "says", lambda tokens, *_: then(tokens, fail))
    body = BODIES[label.split(" ")[1]][0] | {"stream": True, "logprobs": None}
    assert check(label, ask(roomy, label, body)) > 1


@pytest.mark.parametrize(
    ("shape", "right", "wrong"),
    [
        ({"a": int, "b?": (str, None)}, [{"a": 1}, {"a": 1, "b": None}], [{}, {"a": "1"}, {"a": 1, "b": 2}]),
        ([("x", None)], [[], ["x", None]], [["y"], {}]),
        ((int, {"id": [float]}), [5, {"id": [0.5]}], ["5", {"id": 5}]),
        ("x", ["x"], ["y"]),
        (dict, [{}, {"a": 1}], [[], "x"]),
        (Any, [1, None], []),
    ],
)
def test_a_shape_as_a_schema(shape: Any, right: list[Any], wrong: list[Any]) -> None:
    validator = jsonschema_rs.validator_for(schema(shape))
    assert [each for each in right if not validator.is_valid(each)] == []
    assert [each for each in wrong if validator.is_valid(each)] == []

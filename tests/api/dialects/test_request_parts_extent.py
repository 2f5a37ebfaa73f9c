from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from mlxtp.api.dialects import anthropic, completions, openai
from mlxtp.api.dialects.responses_request import ResponseRequest
from mlxtp.errors import RequestError
from mlxtp.text import json_limits
from mlxtp.text.json_limits import check_extent

from ..conftest import Server

Json = dict[str, Any]
Parse = Callable[[bytes], object]


def said(role: str, content: Any) -> Json:
    return {"role": role, "content": content}


ASKED = said("user", "hello")


def test_what_is_too_much_to_parse_is_said_in_numbers() -> None:
    for value, what in (
        ([[]] * 100_001, r"at least 1\d{5} objects and lists; at most 100000$"),
        ([{"a": 1, "b": 2, "c": 3}] * 90_000, r"at least 2\d{5} fields; at most 250000$"),
        ([1] * 1_200_000, r"at least 1\d{6} values; at most 1048576$"),
    ):
        with pytest.raises(RequestError, match=f"^the body has {what}") as told:
            check_extent(json.dumps(value).encode())
        assert told.value.status == 400
    with pytest.raises(RequestError, match=r"^input\[0\]\.arguments has at least \d+ objects") as told:
        check_extent("[" * 60_000, "[" * 60_000, where="input[0].arguments", param="input")
    assert told.value.param == "input"


def test_a_million_token_ids_are_not_too_much() -> None:
    check_extent(json.dumps({"prompt": [1] * 1_000_000, "n": 1}).encode())


@pytest.mark.parametrize("text", ["[{:,", '\\"[', "\\\\[{", '"[\\\\"[{\\"', '\\\\\\"{'])
def test_what_stands_in_strings_does_not_count(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces are cut anywhere: through strings, escapes and runs of backslashes."""
    monkeypatch.setattr(json_limits, "SHORT", 0)
    body = json.dumps({"a": text, text: [text]}).encode()
    for size in range(1, len(body) + 2):
        monkeypatch.setattr(json_limits, "_PIECE", size)
        for signs, exact in ((b"{[", 2), (b":", 2), (b",", 1)):
            monkeypatch.setattr(json_limits, "_BOUNDS", ((signs, exact, "of them"),))
            check_extent(body)
            monkeypatch.setattr(json_limits, "_BOUNDS", ((signs, exact - 1, "of them"),))
            with pytest.raises(RequestError, match=f"at least {exact} of them; at most {exact - 1}"):
                check_extent(body)


def refused(server: Server, path: str, body: bytes) -> Any:
    response = httpx.post(f"{server.url}/v1/{path}", content=body)
    assert response.status_code == 400
    assert "objects and lists; at most 100000" in response.json()["error"]["message"]
    return response.json()["error"]["param"]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_body_with_too_much_in_it(roomy: Server, path: str) -> None:
    assert refused(roomy, path, b'{"messages": ' + b"[" * 120_000) is None


def test_arguments_of_calls_count_together(roomy: Server) -> None:
    calls = [{"id": "a", "function": {"name": "f", "arguments": "[" * 60_000}}] * 2
    body: Any = {"messages": [ASKED, {"role": "assistant", "tool_calls": calls}, ASKED]}
    assert refused(roomy, "chat/completions", json.dumps(body).encode()) == "messages"
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": f'{{"a": {"[" * 120_000}'}
    assert refused(roomy, "responses", json.dumps({"input": [ASKED, call]}).encode()) == "input[1].arguments"


@pytest.mark.parametrize(
    "part",
    [
        '"include":[{}]'.format(",".join("1" * 999)),
        '"metadata":{{{}}}'.format(",".join(f'"{i}":1' for i in range(999))),
    ],
)
def test_a_list_or_an_object_ends_at_its_first_error(part: str) -> None:
    """It alone is reported, and a million take a GB."""
    with pytest.raises(ValidationError) as refused:
        ResponseRequest.model_validate_json(f'{{"model":"m","input":"x",{part}}}')
    assert refused.value.error_count() == 1


WRONG = [1] * 1_000_000
TOLD: Json = {"type": "tool_result", "content": [None] * 1_000_000}
MANY: list[tuple[Parse, Json]] = [
    (anthropic.parse_messages, {"max_tokens": 1, "messages": [said("user", WRONG)]}),
    (anthropic.parse_messages, {"max_tokens": 1, "messages": [said("assistant", WRONG), ASKED]}),
    (anthropic.parse_count, {"messages": [said("user", [TOLD])]}),
    (anthropic.parse_count, {"messages": [ASKED], "system": ["a"] * 1_000_000}),
    (openai.parse_chat, {"messages": [ASKED], "stop": WRONG}),
    (openai.parse_chat, {"messages": [{"role": "assistant", "reasoning": ["a"] * 1_000_000}, ASKED]}),
    (completions.parse, {"prompt": ["a"] * 1_000_000}),
]


@pytest.mark.parametrize(("parse", "body"), MANY)
def test_a_million_parts_are_refused_before_they_are_read(parse: Parse, body: Json) -> None:
    data = json.dumps(body).encode()
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        with pytest.raises(RequestError):
            parse(data)
    finally:
        sys.setprofile(None)
    assert calls < 1000

"""Laws of every endpoint that takes a body, in each dialect."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mlxtp.api.backend import Request
from mlxtp.errors import Code, RequestError

from .conftest import WAIT_S, Server
from .test_mutated_bodies import ANSWERED, BODIES, OPERATIONS

NEUTRAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "n": 1, "stop": [], "tools": [], "functions": [], "tool_choice": "auto", "function_call": "none",
        "response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0, "logit_bias": {},
    },
    "/v1/completions": {"n": 1, "best_of": 1, "suffix": "", "echo": False, "logprobs": None, "stop": ""},
    "/v1/responses": {
        "tools": [], "tool_choice": "auto", "background": False, "truncation": "disabled", "text": {},
        "include": [], "stop": [],
    },
    "/v1/messages": {
        "stop_sequences": [], "tools": [], "mcp_servers": [], "metadata": {}, "output_config": {},
        "thinking": {"type": "disabled"},
    },
    "/api/chat": {"tools": [], "options": {}, "format": "", "think": False, "logprobs": False},
    "/api/generate": {
        "system": "", "suffix": "", "template": "", "context": [], "images": [], "options": {}, "format": "",
    },
}  # fmt: skip
"""Values that ask for nothing."""


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=WAIT_S, trust_env=False)


def send(server: Server, path: str, content: bytes) -> httpx.Response:
    return httpx.post(server.url + path, content=content, timeout=WAIT_S, trust_env=False)


def words_of(refused: httpx.Response) -> str:
    error = refused.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


def plain(path: str) -> dict[str, Any]:
    """The required fields of a request alone."""
    least = ("messages", "input", "prompt", "max_tokens")
    body = {name: value for name, value in BODIES[path][0].items() if name in least}
    return body if path.startswith("/v1/") else body | {"model": "default"}


def asked(server: Server, path: str, body: dict[str, Any]) -> list[Request]:
    """The backend's request, but for the seed that was drawn."""
    server.backend.requests.clear()
    response = post(server, path, body)
    assert response.status_code == 200, response.text
    return [replace(each, sampling=replace(each.sampling, seed=0)) for each in server.backend.requests]


@pytest.mark.parametrize("path", BODIES)
def test_null_is_absent_in_every_optional_field(roomy: Server, path: str) -> None:
    body, fields = plain(path), OPERATIONS[path].body
    assert fields is not None
    nulls = {name: None for name, field in fields.model_fields.items() if not field.is_required()}
    assert asked(roomy, path, nulls | body) == asked(roomy, path, body)


@pytest.mark.parametrize("path", NEUTRAL)
def test_what_asks_for_nothing_changes_nothing(roomy: Server, path: str) -> None:
    body = plain(path)
    assert asked(roomy, path, body | NEUTRAL[path]) == asked(roomy, path, body)


@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_ready_says_when_to_come_back(roomy: Server, path: str) -> None:
    roomy.backend.ready = False
    for body in BODIES[path]:
        response = post(roomy, path, body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert "30 % read" in response.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("unready", "state"), [("loading", "loading"), ("idle", "starting")])
def test_what_is_starting_says_so_in_words_and_fields(
    roomy: Server, path: str, unready: str, state: str
) -> None:
    roomy.backend.ready, roomy.backend.unready = False, unready
    roomy.backend.starting = "org/tiny is loading (40 %)"
    response = post(roomy, path, BODIES[path][0])
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    error = response.json()["error"]
    words = "mlxtp is starting: org/tiny is loading (40 %). Try again in a few seconds."
    assert words == (error if path.startswith("/api/") else error["message"])
    if path not in ("/v1/messages", "/v1/messages/count_tokens") and not path.startswith("/api/"):
        assert (error["code"], error["state"]) == ("not_ready", state)


@pytest.mark.parametrize("path", ANSWERED)
def test_what_is_full_says_when_to_come_back(roomy: Server, path: str) -> None:
    roomy.backend.most_open = 0
    for body in BODIES[path]:
        response = post(roomy, path, body)
        assert response.status_code == (529 if path == "/v1/messages" else 429)
        assert response.headers["retry-after"] == "5"


@pytest.mark.parametrize("path", ANSWERED)
def test_what_was_too_late_is_not_tried_again(roomy: Server, path: str) -> None:
    roomy.backend.refusal = RequestError("too late", Code.DEADLINE, status=504)
    response = post(roomy, path, plain(path))
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")


@pytest.mark.parametrize("path", BODIES)
def test_half_a_character_is_called_so(server: Server, path: str) -> None:
    whole = json.dumps({"note": "hello"} | plain(path))
    for half in ("\\ud83d", "\\ude00", "\\ud83d\\ud83d", "\\ud83d\\n"):
        refused = send(server, path, whole.replace("hello", f"hello {half}").encode())
        assert refused.status_code == 400
        assert f"has half a character, {half[:6]}, which is no text" in words_of(refused)
    assert "JSON" not in words_of(refused)
    refused = send(server, path, b'{"\\ud83d": 1, ' + whole.encode()[1:])
    assert (refused.status_code, words_of(refused).split(",")[0]) == (
        400,
        "the name of a field has half a character",
    )


def test_half_a_character_is_found_in_its_field(server: Server) -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "a \ud83d b"}]}
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = plain(path) | {"messages": [{"role": "user", "content": "hello \U0001f600"}, turn]}
        words = words_of(send(server, path, json.dumps(body).encode()))
        assert words.startswith("messages[1].content[0].text has half a character, \\ud83d,")


@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_utf_8_is_called_so(server: Server, path: str) -> None:
    whole = json.dumps({"note": "hello"} | plain(path)).encode()
    for odd in (b"\xff", b"\xed\xa0\xbd", b"\xc3"):
        body = whole.replace(b"hello", odd)
        refused = send(server, path, body)
        what = f"the body is not UTF-8: byte {body.index(odd)} is 0x{odd[0]:02x}"
        assert (refused.status_code, words_of(refused)) == (400, what)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_an_empty_list_is_called_empty(server: Server, path: str) -> None:
    refused = post(server, path, plain(path) | {"messages": []})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "messages is empty")

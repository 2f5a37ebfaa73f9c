"""Laws of every endpoint that takes a body, in each dialect."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mlxtp.api import generation
from mlxtp.api.backend import DeploymentHealth
from mlxtp.api.generation import PRIORITY
from mlxtp.api.request_body import zstd
from mlxtp.errors import Code, RequestError
from mlxtp.text.conversation import ChatMessage, Conversation
from mlxtp.text.tokenizer import Text
from mlxtp.wire.messages import Generate

from ..reference import conversation_ids
from .conftest import (
    BYTE_FALLBACK,
    MAX_BODY_BYTES,
    ROOM,
    SECOND,
    SECOND_VOCABULARY,
    WAIT_S,
    FakeAnswer,
    Loaded,
    Server,
)
from .test_app_mutated_bodies import ANSWERED, BODIES, OPERATIONS

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
        "thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"},
    },
    "/api/chat": {"tools": [], "options": {}, "format": "", "think": False, "logprobs": False},
    "/api/generate": {
        "system": "", "suffix": "", "template": "", "context": [], "images": [], "options": {}, "format": "",
    },
}  # fmt: skip
"""Values that ask for nothing."""


def post(server: Server, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=headers, timeout=WAIT_S, trust_env=False)


def send(server: Server, path: str, content: bytes, encoding: str = "") -> httpx.Response:
    headers = {"content-encoding": encoding} if encoding else {}
    return httpx.post(server.url + path, content=content, headers=headers, timeout=WAIT_S, trust_env=False)


def words_of(refused: httpx.Response) -> str:
    error = refused.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


def plain(path: str) -> dict[str, Any]:
    """The required fields of a request alone."""
    least = ("messages", "input", "prompt", "max_tokens", "tokens", *["model"] * path.endswith("/compact"))
    body = {name: value for name, value in BODIES[path][0].items() if name in least}
    return body if path.startswith("/v1/") else body | {"model": "default"}


def asked(server: Server, path: str, body: dict[str, Any]) -> list[Generate]:
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
@pytest.mark.parametrize(("unready", "state"), [("loading", "loading"), ("idle", "starting")])
def test_what_is_not_ready_says_so_in_words_and_fields(
    roomy: Server, path: str, unready: str, state: str
) -> None:
    roomy.backend.ready, roomy.backend.unready = False, unready
    for body in BODIES[path]:
        response = post(roomy, path, body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert "30 % read" in response.text
    roomy.backend.starting = "org/tiny is loading (40 %)"
    response = post(roomy, path, BODIES[path][0])
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    words = "mlxtp is starting: org/tiny is loading (40 %). Try again in a few seconds."
    assert words_of(response) == words
    if not path.startswith(("/v1/messages", "/api/")):
        error = response.json()["error"]
        assert (error["code"], error["state"]) == ("not_ready", state)


@pytest.mark.parametrize("path", ANSWERED)
def test_what_is_full_or_too_late_says_whether_to_come_back(roomy: Server, path: str) -> None:
    roomy.backend.most_open = 0
    for body in BODIES[path]:
        response = post(roomy, path, body)
        assert response.status_code == (529 if path == "/v1/messages" else 429)
        assert response.headers["retry-after"] == "5"
    roomy.backend.refusal = RequestError("too late", Code.DEADLINE, status=504)
    response = post(roomy, path, plain(path))
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")


BUDGETS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": ({}, {"max_tokens": 10 * ROOM}, {"max_completion_tokens": 10 * ROOM}),
    "/v1/completions": ({"max_tokens": 10 * ROOM},),
    "/v1/responses": ({}, {"max_output_tokens": 10 * ROOM}),
    "/v1/messages": ({"max_tokens": 10 * ROOM},),
    "/api/chat": ({}, {"options": {"num_predict": 10 * ROOM}}),
    "/api/generate": ({}, {"options": {"num_predict": 10 * ROOM}}),
}


@pytest.mark.parametrize(("path", "budget"), [(path, each) for path in BUDGETS for each in BUDGETS[path]])
def test_a_budget_that_does_not_fit_is_as_large_as_fits(
    roomy: Server, path: str, budget: dict[str, Any]
) -> None:
    body = {name: value for name, value in plain(path).items() if name != "max_tokens"}
    [wanted] = asked(roomy, path, body | budget)
    assert len(wanted.tokens) + wanted.max_tokens == ROOM


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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_mistake_in_messages_is_called_by_its_place(server: Server, path: str) -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "a \ud83d b"}]}
    body = plain(path) | {"messages": [{"role": "user", "content": "hello \U0001f600"}, turn]}
    words = words_of(send(server, path, json.dumps(body).encode()))
    assert words.startswith("messages[1].content[0].text has half a character, \\ud83d,")
    assert words_of(post(server, path, plain(path) | {"messages": []})) == "messages is empty"


@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_utf_8_is_called_so(server: Server, path: str) -> None:
    whole = json.dumps({"note": "hello"} | plain(path)).encode()
    for odd in (b"\xff", b"\xed\xa0\xbd", b"\xc3"):
        body = whole.replace(b"hello", odd)
        refused = send(server, path, body)
        what = f"the body is not UTF-8: byte {body.index(odd)} is 0x{odd[0]:02x}"
        assert (refused.status_code, words_of(refused)) == (400, what)


@pytest.mark.parametrize("path", BODIES)
def test_a_compressed_body_is_read_within_the_limit(roomy: Server, path: str) -> None:
    body = json.dumps(plain(path)).encode()

    def sent(data: bytes, encoding: str) -> tuple[int, str]:
        found = send(roomy, path, data, encoding)
        return found.status_code, "" if found.status_code == 200 else words_of(found)

    for data, encoding in (
        (gzip.compress(body), "gzip"),
        (zlib.compress(body), "Deflate"),
        (body, "identity"),
    ):
        assert sent(data, encoding) == (200, "")
    assert sent(zstd.compress(body), "zstd") == (200, "")
    assert sent(gzip.compress(body) + b"more", "gzip") == (
        400,
        "the body has 4 bytes more after its gzip stream",
    )
    large_window = zstd.compress(b" " * 2**24, options={zstd.CompressionParameter.window_log: 24})
    assert sent(large_window, "zstd")[0] == 400
    assert sent(body, "zstd")[0] == sent(zstd.compress(body)[:-2], "zstd")[0] == 400
    status, words = sent(body, "br")
    assert status == 415
    assert words == 'content-encoding "br" is not read; send plain JSON, or gzip, deflate or zstd'
    status, words = sent(body, "gzip")
    assert status == 400
    assert words.startswith("the body is not gzip, as its content-encoding says: ")
    assert sent(gzip.compress(body)[:-9], "gzip") == (400, "the body ends in the middle of its gzip stream")
    large = sent(gzip.compress(b" " * (MAX_BODY_BYTES + 1)), "gzip")
    assert large == (413, f"the body is larger than {MAX_BODY_BYTES} bytes")


@pytest.mark.parametrize("path", ANSWERED)
def test_a_header_names_the_class_of_a_request(roomy: Server, path: str) -> None:
    for name in ("interactive", "batch"):
        assert post(roomy, path, plain(path), **{PRIORITY: name}).status_code == 200
    assert post(roomy, path, plain(path)).status_code == 200
    assert [request.batch for request in roomy.backend.requests] == [False, True, False]
    refused = post(roomy, path, plain(path), **{PRIORITY: "high"})
    words = 'x-mlxtp-priority: expected interactive or batch, got "high"'
    assert (refused.status_code, words_of(refused)) == (400, words)
    assert len(roomy.backend.requests) == 3


CHAT = "/v1/chat/completions"
SAID = "wide world, hello"
GROUP = "x-mlxtp-group"


@pytest.fixture
def two(roomy: Server, loaded: dict[str, Loaded], monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server of two models, with a tokenizer each. Answers are tokens of the second one's."""
    second = loaded[BYTE_FALLBACK]
    roomy.backend.second_text = second.text
    words = tuple(second.tokenizer.encode(SAID, add_special_tokens=False).ids)
    monkeypatch.setattr(roomy.backend, "words", words)
    return roomy


def short(path: str) -> dict[str, Any]:
    """The least of a body, whose prompt is one word."""
    turns = [{"role": "user", "content": "hello"}]
    given = {"prompt": "hello", "input": "hello", "messages": turns, "max_tokens": 9, "tokens": [70]}
    return {name: given[name] for name in plain(path) if name in given} | {"stream": False}


def prompt_of(path: str, text: Text) -> tuple[int, ...]:
    if path == "/v1/completions":
        return tuple(text.encoded("hello", special=True))
    return tuple(conversation_ids(text, Conversation((ChatMessage("user", "hello"),))))


@pytest.mark.parametrize("path", ANSWERED)
def test_a_name_picks_the_model_with_its_own_tokens_and_settings(two: Server, path: str) -> None:
    first_text, second_text = two.backend.loaded_text, two.backend.second_text
    assert second_text is not None
    for name in ("org/tiny", "tiny", "default"):
        [wanted] = asked(two, path, short(path) | {"model": name})
        assert (two.backend.whose[-1].model, wanted.tokens) == ("org/tiny", prompt_of(path, first_text))
    for name in (SECOND, "second"):
        two.backend.requests.clear()
        answer = post(two, path, short(path) | {"model": name})
        assert SAID in answer.text, answer.text
        [wanted] = two.backend.requests
        assert (two.backend.whose[-1].model, wanted.tokens) == (SECOND, prompt_of(path, second_text))
        assert wanted.sampling.temperature == 0.5


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/v1/messages/count_tokens"])
def test_tokens_are_counted_by_the_model_that_is_named(two: Server, path: str) -> None:
    for name, text in ((SECOND, two.backend.second_text), ("tiny", two.backend.loaded_text)):
        assert text is not None
        answer = post(two, path, short(path) | {"model": name})
        assert answer.json()["input_tokens"] == len(prompt_of(path, text))


def test_a_token_id_is_one_of_the_model_that_is_named(two: Server) -> None:
    body = short("/v1/completions") | {"prompt": [SECOND_VOCABULARY]}
    assert post(two, "/v1/completions", body | {"model": "tiny"}).status_code == 200
    refused = post(two, "/v1/completions", body | {"model": SECOND})
    assert f"a token id from 0 to {SECOND_VOCABULARY - 1}" in words_of(refused)


@pytest.mark.parametrize("path", BODIES)
def test_a_model_that_is_not_served_is_answered_with_those_that_are(two: Server, path: str) -> None:
    refused = post(two, path, short(path) | {"model": "org/none"})
    assert refused.status_code == 404
    assert words_of(refused).endswith(f"does not exist here; available: org/tiny, {SECOND}")


@pytest.mark.parametrize("path", BODIES)
def test_a_deployment_that_is_loading_says_so_beside_one_that_serves(two: Server, path: str) -> None:
    two.backend.deployments = (
        DeploymentHealth("org/tiny", "org/tiny", "ready", pinned=True, ready=True),
        DeploymentHealth("/models/big", "big", "loading", pinned=True, ready=False, reason="40 % read"),
    )
    for name in ("big", "/models/big"):
        refused = post(two, path, short(path) | {"model": name})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert words_of(refused) == f"{name} is not ready (state loading): 40 % read"
    assert words_of(post(two, path, short(path) | {"model": "x"})).endswith(f"org/tiny, {SECOND}, big")


@pytest.mark.parametrize("anthropic", [False, True])
def test_every_model_is_in_the_lists(two: Server, anthropic: bool) -> None:
    headers = {"anthropic-version": "2023-06-01"} if anthropic else {}

    def found(path: str) -> Any:
        answer = httpx.get(two.url + path, headers=headers, timeout=WAIT_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert [row["id"] for row in found("/v1/models")["data"]] == ["org/tiny", SECOND]
    assert found(f"/v1/models/{SECOND}")["id"] == found("/v1/models/second")["id"] == SECOND
    for path in ("/api/tags", "/api/ps"):
        assert [row["name"] for row in found(path)["models"]] == ["org/tiny", SECOND]
    two.backend.deployments = tuple(
        DeploymentHealth(name, model, "ready", pinned=True, ready=True)
        for name, model in (("org/tiny", "org/tiny"), ("/models/second", SECOND))
    )
    sizes = [row["size"] for row in found("/api/ps")["models"]]
    assert sizes == [len("org/tiny"), len("/models/second")], "each has the memory of its own ranks"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ANSWERED)
def test_an_answer_names_the_group_that_began_it(two: Server, path: str, stream: bool) -> None:
    for name, model in (("default", "org/tiny"), (SECOND, SECOND)):
        answer = post(two, path, short(path) | {"model": name, "stream": stream})
        assert (answer.status_code, answer.headers[GROUP]) == (200, f"{model}#0")


@pytest.mark.parametrize("path", ANSWERED)
def test_a_stream_that_begins_before_its_group_is_known_names_none(
    two: Server, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "ACCEPT_S", 0.05)
    two.backend.judge = lambda: asyncio.sleep(0.3)
    answer = post(two, path, short(path) | {"model": "default", "stream": True})
    assert (answer.status_code, answer.headers.get(GROUP)) == (200, None)


def test_the_id_of_a_group_is_ascii_in_a_header(two: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeAnswer, "group", property(lambda _: "/home/日本\r\nx#1", lambda _, __: None))
    answer = post(two, CHAT, short(CHAT))
    assert answer.headers[GROUP] == "/home/%E6%97%A5%E6%9C%AC%0D%0Ax#1"

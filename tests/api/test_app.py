"""Real clients against a real server on loopback; only the model is played."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types import Model
from openai.types.chat import ChatCompletionChunk

from mlxtp.api import catalog
from mlxtp.api.backend import DeploymentHealth, Tokens
from mlxtp.errors import Code, GroupError, MlxtpError

from .conftest import CONTEXT, WAIT_S, Server, forever, says, then
from .dialects.shapes import OpenAIError, read

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ANSWER = " The 日本語 world 😀\n\u2028end"


def post(server: Server, body: Any = None, **kwargs: Any) -> httpx.Response:
    if body is not None:
        kwargs["json"] = body
    return httpx.post(f"{server.url}/v1/chat/completions", timeout=WAIT_S, trust_env=False, **kwargs)


def get(server: Server, path: str, **kwargs: Any) -> httpx.Response:
    return httpx.get(server.url + path, timeout=WAIT_S, trust_env=False, **kwargs)


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "default", "messages": HELLO} | fields


def data_of(response: httpx.Response) -> list[str]:
    """The data of every event, comments left out."""
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a complete answer, each checked as a strict parser does."""
    *chunks, done = data_of(response)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    for chunk in chunks:
        read(ChatCompletionChunk, chunk)
    assert len({(chunk["id"], chunk["created"]) for chunk in parsed}) == 1
    assert {chunk["model"] for chunk in parsed} == {"org/tiny"}
    return parsed


def assert_error(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    read(OpenAIError, response.content)
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == code
    return error


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_whole_answer(server: Server) -> None:
    tokens = server.ids(ANSWER)
    server.backend.script = says([*tokens, 1], step=3)
    answer = server.client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=100)
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "org/tiny"
    assert answer.created > 1_700_000_000
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    request = server.backend.request
    assert server.tokenizer.decode(request.tokens, skip_special_tokens=False) == (
        "<s><|user|>hello<|assistant|>"
    )
    assert request.max_tokens == 100
    prompt, answered = len(request.tokens), len(tokens) + 1
    assert answer.usage
    assert answer.usage.to_dict() == {
        "prompt_tokens": prompt,
        "completion_tokens": answered,
        "total_tokens": prompt + answered,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "reasoning_tokens": 0,
        },
    }


def test_a_streamed_answer(server: Server) -> None:
    server.backend.script = says(server.ids(ANSWER), reason="length")
    stream = server.client.chat.completions.create(model="default", messages=HELLO, stream=True)
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert not any("\ufffd" in (delta.content or "") for delta in deltas)
    assert len(deltas) > 10
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert server.backend.request.max_tokens == CONTEXT - len(server.backend.request.tokens)


def test_usage_streams_in_one_trailer_when_asked_for(server: Server) -> None:
    tokens = server.ids(ANSWER)
    server.backend.script = says(tokens)
    *chunks, trailer = chunks_of(post(server, ask(stream=True, stream_options={"include_usage": True})))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert trailer["choices"] == []
    assert trailer["usage"]["completion_tokens"] == len(tokens)
    assert trailer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    without = chunks_of(post(server, ask(stream=True)))
    assert ["usage" in chunk for chunk in without] == [False] * len(chunks)


def test_an_empty_answer_still_has_its_role(server: Server) -> None:
    server.backend.script = says([1])
    first, last = chunks_of(post(server, ask(stream=True)))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    ended = {"finish_reason": "stop", "stop_reason": None, "matched_stop": None}
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None} | ended
    assert post(server, ask()).json()["choices"][0]["message"]["content"] == ""


def test_half_a_character_at_the_end_is_dropped(server: Server) -> None:
    letter, emoji = server.ids("x"), server.ids("\U0001f9ff")
    assert len(emoji) > 1
    server.backend.script = says(letter + emoji[:-1], reason="length")
    assert post(server, ask()).json()["choices"][0]["message"]["content"] == "x"
    streamed = chunks_of(post(server, ask(stream=True)))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed) == "x"


def test_a_text_body_is_read_as_json(server: Server) -> None:
    server.backend.script = says([1])
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        content = json.dumps(ask()).encode()
        assert post(server, content=content, headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_fit_is_refused_in_tokens_before_a_stream_begins(server: Server, stream: bool) -> None:
    words = [{"role": "user", "content": "hello " * 20_000}]  # long enough for the thread
    error = assert_error(post(server, ask(messages=words, stream=stream)), 400, "context_length_exceeded")
    tokens = len(server.ids("hello " * 20_000)) + 3
    assert error["message"] == (
        f"This model's maximum context length is 200 tokens. However, your messages resulted in {tokens} "
        "tokens. Please reduce the length of the messages."
    )
    assert server.backend.requests == []


def test_what_cannot_fit_by_far_is_refused_without_tokenizing_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "QUICK_CHARACTERS", 100_000)
    monkeypatch.setattr(server.backend.loaded_text, "encoded", None)
    words = [{"role": "user", "content": "a" * 120_000}]
    error = assert_error(post(server, ask(messages=words)), 400, "context_length_exceeded")
    assert "resulted in more than " in error["message"]


def test_the_models_that_can_be_served(server: Server) -> None:
    [model] = server.client.models.list().data
    room = {"context_length": CONTEXT, "max_model_len": CONTEXT, "supported_features": []}
    name = {"id": "org/tiny", "root": "org/tiny"}
    row = {**name, "object": "model", "created": 1234, "owned_by": "mlxtp", **room}
    assert row.items() <= model.model_dump().items()
    read(Model, json.dumps(row))
    for name in ("org/tiny", "tiny", "default"):
        assert get(server, f"/v1/models/{name}").json() == row
    assert get(server, "/v1/models/").json() == get(server, "/v1/models").json()
    with pytest.raises(openai.NotFoundError, match="available: org/tiny") as caught:
        server.client.models.retrieve("org/other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    server.backend.ready = False
    assert get(server, "/v1/models").json() == {"object": "list", "data": []}


def test_health_says_what_is_going_on(server: Server) -> None:
    response = get(server, "/health")
    assert response.status_code == 200
    state = {"status": "ok", "state": "ready", "ready": True, "reason": None, "model": "tiny"}
    group = {"epoch": 3, "world_size": 2, "backend": "ring", "ranks": [{"rank": 0, "alive": True}]}
    assert response.json() == state | group | {"open_requests": 0, "deployments": []}
    server.backend.ready = False
    response = get(server, "/health")
    assert (response.status_code, response.headers["retry-after"]) == (503, "7")
    assert (response.json()["status"], response.json()["reason"]) == ("unavailable", "30 % read")


READY = DeploymentHealth("org/tiny", "org/tiny", "ready", pinned=True, ready=True, groups_ready=1)
LOADING = DeploymentHealth("/models/big", "big", "loading", pinned=False, ready=False, reason="40 % read")


def test_health_tells_of_every_deployment_and_of_one(server: Server) -> None:
    server.backend.deployments = (READY, replace(LOADING, groups_wanted=0, expires_s=9.5))
    whole = get(server, "/health")
    assert (whole.status_code, whole.json()["state"]) == (200, "ready")
    assert whole.json()["deployments"] == [
        {
            "name": "org/tiny", "model": "org/tiny", "state": "ready", "pinned": True, "ready": True,
            "reason": None, "groups_ready": 1, "groups_wanted": 1, "expires_s": None,
        },
        {
            "name": "/models/big", "model": "big", "state": "loading", "pinned": False, "ready": False,
            "reason": "40 % read", "groups_ready": 0, "groups_wanted": 0, "expires_s": 9.5,
        },
    ]  # fmt: skip
    for name in ("org/tiny", "tiny", "gpt-x", "default", ""):
        one = get(server, f"/health?model={name}")
        assert (one.status_code, one.json()["model"]) == (200, "org/tiny")
    for name in ("/models/big", "big"):
        one = get(server, f"/health?model={name}")
        assert (one.status_code, one.headers["retry-after"]) == (503, "7")
        assert (one.json()["state"], one.json()["reason"]) == ("loading", "40 % read")
    unknown = get(server, "/health?model=none")
    assert_error(unknown, 404, "model_not_found")
    assert "available: org/tiny, big" in unknown.text


def test_health_of_the_default_says_what_is_going_on_where_nothing_is_wanted(server: Server) -> None:
    server.backend.ready = False
    assert get(server, "/health?model=default").status_code == 503
    assert_error(get(server, "/health?model=org/tiny"), 404, "model_not_found")


def broken_off(server: Server) -> Any:
    async def script() -> Any:
        yield Tokens(tuple(server.ids("ab")))

    return script


BREAKS: dict[str, tuple[Callable[[Server], Any], int]] = {
    "rank_lost": (lambda server: then(server.ids("ab"), fail_with(GroupError("rank 1 is gone"))), 503),
    "deadline_exceeded": (lambda server: then([], fail_with(MlxtpError("too late", Code.DEADLINE))), 504),
    "internal": (lambda server: then(server.ids("ab"), fail_with(ZeroDivisionError("secret"))), 500),
    "cancelled": (lambda server: says(server.ids("ab"), reason="cancel"), 503),
    "without an end": (broken_off, 503),
}


@pytest.mark.parametrize("how", BREAKS)
def test_an_answer_that_breaks_off_never_looks_complete(
    server: Server, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    script, status = BREAKS[how]
    server.backend.script = script(server)
    *_, last = data_of(post(server, ask(stream=True)))
    error = json.loads(last)["error"]
    whole = post(server, ask())
    assert_error(whole, status, error["code"])
    assert error["code"] == how or status == 503
    assert whole.headers.get("x-should-retry") == ("false" if status == 504 else None)
    assert "secret" not in whole.text + last
    until(lambda: how != "internal" or "secret" in caplog.text)


def test_places_are_named_where_caches_cannot_be_cut(server: Server) -> None:
    post(server, ask())
    server.backend.checkpoints = True
    post(server, ask())
    cut, whole = server.backend.requests
    assert cut.places == ()
    assert 0 < min(whole.places) <= max(whole.places) < len(whole.tokens)


def test_who_asks_and_until_when_reaches_the_backend(server: Server) -> None:
    post(server, ask(user="alice", deadline_s=2.5))
    post(server, ask())
    named, plain = server.backend.whose
    assert (named.client, named.user, named.deadline_s) == ("127.0.0.1", "alice", 2.5)
    assert (plain.client, plain.user, plain.deadline_s) == ("127.0.0.1", "", 0.0)
    assert_error(post(server, ask(deadline_s=0)), 400, "invalid_request")


@pytest.mark.parametrize("target", [b"*", b"mailto:somebody@localhost"])
def test_a_target_that_is_no_path_is_not_found(server: Server, target: bytes) -> None:
    with connect(server) as sock:
        sock.sendall(b"OPTIONS %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % target)
        head, _, body = read_until(sock, b"}}").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert json.loads(body)["error"]["message"] == f"OPTIONS {target.decode()}: Not Found"


def test_every_error_has_the_same_shape(server: Server) -> None:
    assert_error(get(server, "/v1/nothing"), 404, "not_found")
    assert_error(get(server, "/v1/models/x/y"), 404, "model_not_found")
    response = get(server, "/v1/chat/completions")
    assert_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert httpx.put(f"{server.url}/v1/responses/x").headers["allow"] == "DELETE, GET, HEAD"
    refused = post(server, ask(chat_template_kwargs={"mood": 1}))
    assert "no mood is known" in assert_error(refused, 400, "invalid_request")["message"]


def test_a_body_too_large_is_refused(server: Server) -> None:
    assert_error(post(server, content=iter([b"x" * 40_000] * 10)), 413, "invalid_request")
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
    with connect(server) as sock:  # far too large: refused without reading it
        sock.sendall(request)
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_bug_shows_no_traceback(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.backend.refusal = ZeroDivisionError("secret")
    response = post(server, ask())
    assert_error(response, 500, "internal")
    assert "secret" not in response.text
    until(lambda: "secret" in caplog.text)  # logged after it was answered


def fail_with(error: Exception) -> Any:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("first", [False, True])
def test_a_lost_group_is_an_error_event_and_no_done(server: Server, first: bool) -> None:
    tokens = server.ids("ab") if first else []
    server.backend.script = then(tokens, fail_with(GroupError("rank 1 is gone")))
    response = post(server, ask(stream=True))
    *chunks, error = data_of(response)
    assert response.status_code == 200
    assert len(chunks) == (2 if first else 0)  # the role and the text
    told = {"message": "rank 1 is gone", "type": "server_error", "param": None, "code": "rank_lost"}
    assert json.loads(error)["error"] == told
    with pytest.raises(openai.APIError, match="rank 1 is gone"):
        list(server.client.chat.completions.create(model="tiny", messages=HELLO, stream=True))


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)


def send(sock: socket.socket, stream: bool, **fields: Any) -> None:
    body = json.dumps(ask(stream=stream, **fields)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)


def read_until(sock: socket.socket, wanted: bytes, times: int = 1) -> bytes:
    read = b""
    while read.count(wanted) < times:
        part = sock.recv(4096)
        assert part, f"closed after {read!r}"
        read += part
    return read


def test_headers_a_comment_and_empty_chunks_come_before_the_first_token(keep_alive_server: Server) -> None:
    keep_alive_server.backend.script = then([], forever)
    with connect(keep_alive_server) as sock:
        send(sock, stream=True)
        read = read_until(sock, b"data: ", times=3)
    assert read.startswith(b"HTTP/1.1 200 ")
    assert b"content-type: text/event-stream" in read
    assert b": mlxtp\n\n" in read
    assert keep_alive_server.backend.all_closed()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled(server: Server, stream: bool, first: bool, reset: bool) -> None:
    server.backend.script = then(server.ids("ab") if first else [], forever)
    with connect(server) as sock:
        send(sock, stream)
        if stream:
            read_until(sock, b'"content":"a' if first else b": mlxtp")
        assert server.backend.began.wait(WAIT_S)
        assert not server.backend.answers[0].closed.is_set()
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert server.backend.all_closed()
    assert not server.backend.finished
    assert get(server, "/health").status_code == 200


def test_a_client_that_stops_reading_and_leaves_is_cancelled(server: Server) -> None:
    tokens = server.ids("hello ")

    async def endless() -> Any:
        while True:
            yield Tokens(tuple(tokens * 2000))

    server.backend.script = endless
    with connect(server) as sock:
        send(sock, stream=True)
        read_until(sock, b"data: ")
        assert not server.backend.answers[0].closed.wait(0.2)  # the server waits for us, it does not give up
    assert server.backend.all_closed()


def test_the_connection_serves_the_next_request(server: Server) -> None:
    server.backend.script = says(server.ids("ab"))
    with httpx.Client(base_url=server.url, trust_env=False, timeout=WAIT_S) as client:
        for stream in (False, True, False):
            assert client.post("/v1/chat/completions", json=ask(stream=stream)).status_code == 200
        [connection] = client._transport._pool.connections  # type: ignore[attr-defined]
        assert "Request Count: 3" in connection.info()

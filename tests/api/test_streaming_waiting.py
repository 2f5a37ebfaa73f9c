"""Streams without a token yet: events that count as life, and answers that begin before they are known."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from mlxtp.api import generation
from mlxtp.api.adapter import About
from mlxtp.api.backend import Progress, StreamEnd
from mlxtp.api.dialects.openai import OpenAIChat, parse_chat
from mlxtp.api.streaming import LoadingStream
from mlxtp.errors import Code, RequestError
from mlxtp.text.transcript import AnswerEvent, ContentDelta, Finish

from ..live_cluster import SLOWNESS
from .conftest import BYTE_LEVEL, WAIT_S, FakeBackend, Loaded, Server, forever, says, serving, then
from .test_generation_loading import Turns

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hello"}]
ANSWER = "A whole answer."
PREFILL = Progress("prefill", 400, 100, 250, 1500)
SHOWN = {"total": 400, "cache": 100, "processed": 250, "time_ms": 1500}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 50},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "hello"},
}
Judge = Callable[[], Awaitable[None]]


@contextmanager
def events(server: Server, path: str, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The JSON of each event or line of a stream."""
    body = {"model": "tiny", "stream": True, **BODIES[path], **fields}
    with httpx.stream("POST", server.url + path, json=body, timeout=WAIT_S, trust_env=False) as response:
        assert response.status_code == 200, response.read()
        lines = (line.removeprefix("data: ") for line in response.iter_lines())
        yield (json.loads(line) for line in lines if line.startswith("{"))


def slowly(server: Server, wait_s: float) -> Callable[[], Any]:
    """An answer whose first token takes a while."""

    async def script() -> Any:
        await asyncio.sleep(wait_s)
        async for event in says([*server.ids(ANSWER), 1])():
            yield event

    return script


@pytest.fixture
def server(keep_alive_server: Server) -> Server:
    return keep_alive_server


@pytest.fixture
def late(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[Judge], None]:
    """Set what has to be awaited until rank 0 accepts; streams begin long before."""
    monkeypatch.setattr(generation, "ACCEPT_S", 0.1)
    server.backend.script = says([*server.ids(ANSWER), 1])

    def set_(judge: Judge) -> None:
        server.backend.judge = judge

    return set_


async def in_a_moment() -> None:
    await asyncio.sleep(0.8)


def test_idle_chunks_of_a_chat_are_empty_and_tell_the_progress(server: Server) -> None:
    server.backend.script, server.backend.progress = then([], forever), PREFILL
    with events(server, "/v1/chat/completions", stream_options={"include_usage": True}) as chunks:
        first, second = islice(chunks, 2)
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert second["choices"][0]["delta"] == {}
    assert second.keys() == {"id", "object", "created", "model", "choices", "usage", "prompt_progress"}
    assert (first["id"], first["object"], first["usage"]) == (second["id"], "chat.completion.chunk", None)
    assert first["prompt_progress"] == second["prompt_progress"] == SHOWN
    assert server.backend.all_closed()


def test_idle_chunks_of_a_completion_have_no_text(server: Server) -> None:
    server.backend.script, server.backend.progress = then([], forever), Progress("queued")
    with events(server, "/v1/completions") as chunks:
        first, second = islice(chunks, 2)
    assert first["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": None}]
    assert (first["state"], first["object"]) == ("queued", "text_completion")
    assert first == second


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_after_its_finish_reason_a_choice_is_not_in_idle_chunks(server: Server, path: str) -> None:
    server.backend.scripts = [says(server.ids("a")), then([], forever)]
    with events(server, path, n=2) as chunks:
        ended = next(chunk for chunk in chunks if chunk["choices"][0]["finish_reason"])
        idle = next(chunks)
    assert (ended["choices"][0]["index"], idle["choices"][0]["index"]) == (0, 1)


def test_idle_events_of_a_response_are_numbered_on(server: Server) -> None:
    server.backend.script, server.backend.progress = then(server.ids("a"), forever), PREFILL
    with events(server, "/v1/responses", instructions="be") as found:
        created, progress, item, part, delta, *idle = islice(found, 7)
    assert [each["type"] for each in (created, progress, item, part, delta)] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.delta",
    ]  # fmt: skip
    assert [each["sequence_number"] for each in idle] == [5, 6]
    assert idle[0] == progress | {"sequence_number": 5, "prompt_progress": SHOWN}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_idle_lines_are_empty_pieces(server: Server, path: str) -> None:
    server.backend.script, server.backend.progress = then([], forever), PREFILL
    with events(server, path) as lines:
        line = next(lines)
    text = line["message"]["content"] if path == "/api/chat" else line["response"]
    assert (text, line["done"], line["prompt_progress"]) == ("", False, SHOWN)


def test_while_tokens_come_there_is_no_progress(server: Server) -> None:
    server.backend.script = then(server.ids("a"), forever)
    with events(server, "/v1/chat/completions") as chunks:
        *_, idle = islice(chunks, 3)
    assert idle.keys() == {"id", "object", "created", "model", "choices"}
    assert idle["choices"][0]["delta"] == {}


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_follows_the_last_part(fails: bool) -> None:
    async def answer() -> AsyncGenerator[AnswerEvent]:
        yield ContentDelta(0, "hello")
        if fails:
            raise RequestError("no more")
        yield Finish(0, "stop", StreamEnd("stop", 2))

    async def asked() -> AsyncGenerator[AnswerEvent]:
        return answer()

    async def story() -> None:
        ask = parse_chat(json.dumps({"model": "tiny", "messages": HELLO}).encode())
        about = About("0" * 32, 1.0, "tiny", (1,), (), lambda _token: ("", None), ask)
        waiting = LoadingStream(OpenAIChat(), about, asyncio.create_task(asked()), Progress)
        alive = [bool(waiting.idle()) async for _ in waiting.parts()]
        assert alive == [True, True, True, False]  # opened, begun, a text, the end

    asyncio.run(story())


def is_idle(path: str, event: dict[str, Any]) -> bool:
    """Return True for an event of the dialect's own kind that only says that the answer is on its way."""
    match path:
        case "/v1/chat/completions":
            return bool(event["choices"]) and not event["choices"][0]["delta"].get("content")
        case "/v1/completions":
            return bool(event["choices"]) and not event["choices"][0]["text"]
        case "/v1/responses":
            return bool(event["type"] == "response.in_progress")
        case "/v1/messages":
            return bool(event["type"] == "ping")
        case _:
            return not event["done"] and not text_of(path, event)


def text_of(path: str, event: dict[str, Any]) -> str:
    """The piece of the answer in an event."""
    match path:
        case "/v1/chat/completions":
            found = event["choices"][0]["delta"].get("content") if event["choices"] else ""
        case "/v1/completions":
            found = event["choices"][0]["text"] if event["choices"] else ""
        case "/v1/responses":
            found = event["delta"] if event["type"] == "response.output_text.delta" else ""
        case "/v1/messages":
            found = event["delta"].get("text") if event["type"] == "content_block_delta" else ""
        case "/api/chat":
            found = event["message"]["content"]
        case _:
            found = event["response"]
    return found or ""


@pytest.fixture(scope="module")
def lively_running(loaded: dict[str, Loaded]) -> Iterator[Server]:
    """A server whose streams are never silent for more than a moment."""
    byte_level = loaded[BYTE_LEVEL]
    with serving(FakeBackend(byte_level.text), byte_level.tokenizer, keep_alive_s=0.05) as server:
        yield server


@pytest.mark.parametrize("state", ["loading", "not accepted", "prefill"])
@pytest.mark.parametrize("path", BODIES)
def test_each_dialect_shows_life_in_each_state_before_the_first_text(
    lively_running: Server, monkeypatch: pytest.MonkeyPatch, path: str, state: str
) -> None:
    monkeypatch.setattr(generation, "ACCEPT_S", 0.02)
    backend, come, turns = lively_running.backend, threading.Event(), Turns()
    backend.__init__(backend.loaded_text)  # type: ignore[misc]
    answer = says([*lively_running.ids(ANSWER), 1])

    async def wait() -> None:
        await asyncio.to_thread(come.wait, WAIT_S)

    async def slow() -> Any:
        await wait()
        async for event in answer():
            yield event

    backend.script = slow if state == "prefill" else answer
    if state == "not accepted":
        backend.judge = wait
    if state == "loading":
        backend.take_turn = turns.take
    idle, text = 0, ""
    with events(lively_running, path) as found:
        for event in found:
            idle += is_idle(path, event)
            text += text_of(path, event)
            assert not text or come.is_set()
            if idle == 3:  # one of them may be the answer's own beginning
                come.set()
                for turn in turns.turns:
                    turn.tell("")
    assert come.is_set()
    assert text == ANSWER


PATIENCE_S = 1.2 * SLOWNESS  # more than twice the keep-alive
PREFILL_S = 2.5 * SLOWNESS
IMPATIENT = httpx.Timeout(WAIT_S, read=PATIENCE_S)


def at_once(*readers: Callable[[], None]) -> None:
    """Run all readers beside each other, since each one waits through a prefill."""
    with ThreadPoolExecutor(len(readers)) as threads:
        for reading in [threads.submit(reader) for reader in readers]:
            reading.result()


def test_openai_reads_through_a_late_acceptance_and_a_long_prefill(
    server: Server, late: Callable[[Judge], None]
) -> None:
    late(in_a_moment)
    server.backend.progress, server.backend.script = PREFILL, slowly(server, PREFILL_S)
    client = server.client.with_options(timeout=IMPATIENT)
    chat = client.chat.completions

    def chunks() -> None:
        chunks: list[Any] = list(chat.create(model="tiny", messages=HELLO, stream=True))  # type: ignore[arg-type]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
        assert chunks[1].prompt_progress == SHOWN

    def a_whole_chat() -> None:
        with chat.stream(model="tiny", messages=HELLO) as stream:  # type: ignore[arg-type]
            assert stream.get_final_completion().choices[0].message.content == ANSWER

    def a_completion() -> None:
        pieces = client.completions.create(model="tiny", prompt="hello", stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == ANSWER

    def a_response() -> None:
        with client.responses.stream(model="tiny", input="hello") as answer:
            kinds = [event.type for event in answer]
            assert answer.get_final_response().output_text == ANSWER
        assert kinds.count("response.created") == 1
        assert kinds.count("response.in_progress") >= 4

    at_once(chunks, a_whole_chat, a_completion, a_response)


def test_anthropic_and_ollama_read_through_a_late_acceptance_and_a_long_prefill(
    server: Server, late: Callable[[Judge], None]
) -> None:
    late(in_a_moment)
    server.backend.progress, server.backend.script = PREFILL, slowly(server, PREFILL_S)

    def a_message() -> None:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S)
        with client.messages.stream(model="tiny", max_tokens=50, messages=HELLO) as stream:  # type: ignore[arg-type]
            assert stream.get_final_text() == ANSWER
            assert stream.get_final_message().usage.input_tokens > 0

    def lines() -> None:
        lines = list(ollama.Client(server.url, timeout=IMPATIENT).chat("tiny", HELLO, stream=True))
        assert "".join(line.message.content or "" for line in lines) == ANSWER

    at_once(a_message, lines)


@pytest.mark.parametrize("path", BODIES)
def test_what_came_before_the_acceptance_and_what_came_after_is_one_answer(
    server: Server, late: Callable[[Judge], None], path: str
) -> None:
    late(in_a_moment)
    with events(server, path) as found:
        seen = list(found)
    assert "".join(text_of(path, each) for each in seen) == ANSWER
    if path.startswith("/api/"):
        assert [each["done"] for each in seen] == [False] * (len(seen) - 1) + [True]
    elif path != "/v1/messages":
        wholes = [each.get("response", each) for each in seen]
        for name in ("id", "created_at" if path == "/v1/responses" else "created", "model"):
            assert len({each[name] for each in wholes if "object" in each}) == 1
    if path == "/v1/responses":
        assert [each["sequence_number"] for each in seen] == list(range(len(seen)))
        assert [each["type"] for each in seen].count("response.created") == 1
        assert seen[-1]["response"]["usage"]["input_tokens"] > 0
    if path == "/v1/messages":
        kinds = [each["type"] for each in seen]
        start = kinds.index("message_start")
        assert set(kinds[:start]) == {"ping"}
        assert seen[start]["message"]["usage"]["input_tokens"] > 0


def test_an_echo_waits_for_the_acceptance(server: Server, late: Callable[[Judge], None]) -> None:
    late(in_a_moment)
    with events(server, "/v1/completions", echo=True) as chunks:
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"hello{ANSWER}"


@pytest.mark.parametrize("path", BODIES)
def test_a_refusal_that_comes_late_is_the_last_event(
    server: Server, late: Callable[[Judge], None], path: str
) -> None:
    async def refuse() -> None:
        await asyncio.sleep(0.7)
        raise RequestError("response_format: no such schema", Code.BAD_REQUEST, param="response_format")

    late(refuse)
    with events(server, path) as found:
        *_, last = found
    field = {"/v1/responses": "text.format", "/api/chat": "format", "/api/generate": "format"}.get(path, "")
    assert f"{field}: no such schema" in json.dumps(last)
    assert last.get("type") in {None, "error", "response.failed"}
    assert "finish_reason" not in json.dumps(last)


def test_a_refusal_that_comes_soon_has_its_status(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "ACCEPT_S", WAIT_S)

    async def refuse() -> None:
        await asyncio.sleep(0.1)
        raise RequestError("no such grammar", Code.BAD_REQUEST)

    server.backend.judge = refuse
    with pytest.raises(openai.BadRequestError, match="no such grammar"):
        server.client.responses.create(model="tiny", input="hello", stream=True)


def test_a_client_that_leaves_after_its_stream_began_is_cancelled(
    server: Server, late: Callable[[Judge], None]
) -> None:
    late(forever)
    with events(server, "/v1/responses") as found:
        next(found)
    assert server.backend.began.wait(WAIT_S)
    assert server.backend.all_closed()


def test_a_client_that_leaves_before_its_headers_is_cancelled(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "ACCEPT_S", WAIT_S)
    server.backend.judge = forever
    body = json.dumps({"model": "tiny", "stream": True, **BODIES["/v1/responses"]})
    url = httpx.URL(server.url)
    with closing(http.client.HTTPConnection(url.host, url.port, timeout=WAIT_S)) as connection:
        connection.request("POST", "/v1/responses", body, {"Content-Type": "application/json"})
        assert server.backend.began.wait(WAIT_S)
    assert server.backend.all_closed()

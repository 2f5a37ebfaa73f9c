"""Requests whose model has yet to be loaded: they wait, hear how far it is, are answered or refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlxtp.api.backend import StoredModelInfo
from mlxtp.errors import Code, RequestError

from .conftest import WAIT_S, Server, forever, meanwhile, says, then

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hello"}]
ANSWER = "A whole answer."


@dataclass
class FakeTurn:
    """The turn comes when the test says so, or never does."""

    model: str = ""
    come: bool = False
    what: str = "loading 10 %"
    closed: threading.Event = field(default_factory=threading.Event)
    _news: list[str | RequestError] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def progress(self) -> str:
        return self.what

    async def wait(self) -> AsyncIterator[str]:
        while not self.come:
            yield self.what
            await self._arrived.wait()
            self._arrived.clear()
            while self._news:
                news = self._news.pop(0)
                if isinstance(news, RequestError):
                    raise news
                self.what, self.come = news, not news

    def close(self) -> None:
        self.closed.set()

    def tell(self, *news: str | RequestError) -> None:
        """Another word of how far it is, an empty one that its turn has come, or why it never will."""

        def arrive() -> None:
            self._news += news
            self._arrived.set()

        self.loop.call_soon_threadsafe(arrive)


@dataclass
class Turns:
    """The turns that were taken, in order, and for which model."""

    taken: list[tuple[str | None, float]] = field(default_factory=list)
    turns: list[FakeTurn] = field(default_factory=list)
    model: str = ""
    waited_for: threading.Event = field(default_factory=threading.Event)

    def take(self, name: str | None, within_s: float) -> FakeTurn:
        self.taken.append((name, within_s))
        self.turns.append(FakeTurn(self.model))
        self.waited_for.set()
        return self.turns[-1]

    def wait(self) -> FakeTurn:
        assert self.waited_for.wait(WAIT_S)
        return self.turns[-1]


@pytest.fixture
def server(keep_alive_server: Server) -> Server:
    return keep_alive_server


@pytest.fixture
def turns(server: Server) -> Turns:
    turns = Turns()
    server.backend.take_turn = turns.take
    server.backend.script = says([*server.ids(ANSWER), 1])
    return turns


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO} | fields


@contextmanager
def streamed(server: Server, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream, after its headers."""
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body(stream=True, **fields), timeout=WAIT_S) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield response.iter_lines()


def next_of(lines: Iterator[str], wanted: str) -> str:
    """The first event that contains it."""
    return next(line for line in lines if line.startswith("data:") and wanted in line)


def test_a_stream_begins_at_once_and_says_how_far_the_model_is(server: Server, turns: Turns) -> None:
    with streamed(server) as lines:
        turn = turns.wait()
        chunks = [json.loads(next_of(lines, "loading 10 %")[5:]) for _ in range(2)]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas == [{"role": "assistant", "content": ""}, {}]
        turn.tell("loading 40 %")
        assert json.loads(next_of(lines, "loading 40 %")[5:])["state"] == "loading 40 %"
        assert server.backend.requests == []
        turn.tell("")
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert sum('finish_reason":"stop' in line for line in rest) == 1
    assert turn.closed.wait(WAIT_S)


def test_a_real_client_sees_nothing_of_it_but_the_answer(server: Server, turns: Turns) -> None:
    turns.model = "org/tiny"
    with meanwhile(lambda: turns.wait().tell("loading 90 %", "")):
        create: Any = server.client.chat.completions.create
        chunks = list(create(model="/a/folder", messages=HELLO, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert {chunk.model for chunk in chunks} == {"org/tiny"}
    assert turns.taken == [("/a/folder", 0.0)]


@pytest.mark.parametrize(("asked", "shown"), [("/a/folder", "/a/folder"), (None, "default")])
def test_the_model_has_one_name_before_it_is_loaded_and_after(
    server: Server, turns: Turns, asked: str | None, shown: str
) -> None:
    wanted = {"model": asked, "input": "hello", "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=wanted, timeout=WAIT_S) as response:
        lines = response.iter_lines()
        names = {json.loads(next_of(lines, "loading")[5:])["response"]["model"]}
        turns.wait().model = "org/tiny"
        turns.wait().tell("")
        names.add(json.loads(next_of(lines, "response.completed")[5:])["response"]["model"])
    assert names == {shown}


def create(server: Server) -> Any:
    return server.client.chat.completions.create(model="tiny", messages=HELLO)  # type: ignore[arg-type]


def test_a_plain_client_simply_waits(server: Server, turns: Turns) -> None:
    with meanwhile(lambda: create(server)) as answers:
        turn = turns.wait()
        assert server.backend.requests == []
        turn.tell("")
    assert [answer.choices[0].message.content for answer in answers] == [ANSWER]
    assert turn.closed.wait(WAIT_S)


BROKEN = RequestError(
    "org/new could not be loaded: no weights", Code.MODEL_INVALID, status=400, param="model"
)


def test_a_stream_whose_model_cannot_be_loaded_ends_with_the_reason(server: Server, turns: Turns) -> None:
    with streamed(server) as lines:
        turn = turns.wait()
        next_of(lines, "loading")
        turn.tell(BROKEN)
        error = [line for line in lines if line.startswith("data:")][-1]
    assert BROKEN.detail in error
    assert "model_invalid" in error
    assert turn.closed.wait(WAIT_S)
    assert server.backend.requests == []


def test_a_plain_request_whose_model_cannot_be_loaded_is_refused_with_the_reason(
    server: Server, turns: Turns
) -> None:
    with meanwhile(lambda: turns.wait().tell(BROKEN)), pytest.raises(openai.BadRequestError) as caught:
        create(server)
    assert (caught.value.code, caught.value.param) == ("model_invalid", "model")
    assert turns.turns[0].closed.wait(WAIT_S)


def test_what_is_wrong_with_a_request_is_said_in_the_stream_when_its_headers_are_gone(
    server: Server, turns: Turns
) -> None:
    with streamed(server, messages=[{"role": "user", "content": "hello " * 1000}]) as lines:
        next_of(lines, "loading")
        turns.wait().tell("")
        error = [line for line in lines if line.startswith("data:")][-1]
    assert "context_length_exceeded" in error
    assert "maximum context length is 200 tokens" in error
    assert turns.turns[0].closed.wait(WAIT_S)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_no_longer_waits(server: Server, turns: Turns, stream: bool) -> None:
    with httpx.Client(timeout=WAIT_S) as client:
        helper = threading.Thread(target=_ask_and_leave, args=(client, server, stream))
        helper.start()
        turn = turns.wait()
        if stream:
            helper.join(WAIT_S)
        client.close()
        assert turn.closed.wait(WAIT_S)
        helper.join(WAIT_S)
    assert server.backend.requests == []


def _ask_and_leave(client: httpx.Client, server: Server, stream: bool) -> None:
    url = f"{server.url}/v1/chat/completions"
    if stream:
        with client.stream("POST", url, json=body(stream=True)):
            return
    with pytest.raises(httpx.HTTPError):
        client.post(url, json=body(), timeout=0.5)


def test_the_turn_lasts_as_long_as_the_answer(server: Server, turns: Turns) -> None:
    server.backend.script = then(server.ids(ANSWER), forever)
    with streamed(server) as lines:
        turn = turns.wait()
        turn.tell("")
        next_of(lines, "A")
        assert not turn.closed.is_set()
        assert server.backend.answers
    assert turn.closed.wait(WAIT_S)
    assert server.backend.all_closed()


def test_the_time_that_a_request_may_take_includes_its_wait(server: Server, turns: Turns) -> None:
    with streamed(server, deadline_s=9.0) as lines:
        turns.wait().tell("")
        list(lines)
    assert turns.taken == [("tiny", 9.0)]
    assert 0 < server.backend.whose[0].deadline_s < 9.0
    turns.waited_for.clear()
    with streamed(server) as lines:
        turns.wait().tell("")
        list(lines)
    assert server.backend.whose[1].deadline_s == 0


def test_what_would_be_loaded_is_listed_behind_what_is(server: Server) -> None:
    server.backend.stored = (
        StoredModelInfo("org/tiny", Path("/loaded"), 1, 1),
        StoredModelInfo("org/other", Path("/other"), 4096, 1_700_000_000),
    )
    listed = server.client.models.list().data
    assert [model.id for model in listed] == ["org/tiny", "org/other"]
    other = server.client.models.retrieve("org/other")
    assert (other.id, other.created) == ("org/other", 1_700_000_000)
    assert other.model_extra
    assert other.model_extra["context_length"] == 4096
    with pytest.raises(openai.NotFoundError, match="available: org/tiny"):
        server.client.models.retrieve("org/none")
    server.backend.ready = False  # what there is may be there in a minute
    assert server.client.models.retrieve("org/other").id == "org/other"
    with pytest.raises(openai.InternalServerError, match="30 % read"):
        server.client.models.retrieve("org/tiny:none")

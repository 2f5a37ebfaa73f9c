"""A long prefill looks alive to each official parser: it sees events, not comments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from ..live_cluster import SLOWNESS
from .actor import stage

PREFILL_S = 3 * SLOWNESS  # 15 times the keep-alive
USER: Any = [{"role": "user", "content": 'DO say "hello"'}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stage(first_token_s=PREFILL_S, keep_alive_s=0.2) as found:
        yield found.url


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def whole_chat(url: str) -> list[Any]:
    with client(url).chat.completions.stream(model="actor", messages=USER) as stream:
        return [stream.get_final_completion().choices[0].message.content]


def whole_response(url: str) -> list[Any]:
    with client(url).responses.stream(model="actor", input=USER) as events:
        events.until_done()
        return [events.get_final_response().output_text]


def pings(url: str) -> list[Any]:
    body = {"model": "actor", "messages": USER, "max_tokens": 50, "stream": True}
    with httpx.stream("POST", f"{url}/v1/messages", json=body, timeout=30) as answer:
        return [line for line in answer.iter_lines() if line.startswith("event:")]


def whole_message(url: str) -> list[Any]:
    library = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=30)
    with library.messages.stream(model="actor", messages=USER, max_tokens=50) as stream:
        return [stream.get_final_text()]


EVENTS: dict[str, Callable[[str], Any]] = {
    "chat": lambda url: client(url).chat.completions.create(model="actor", messages=USER, stream=True),
    "completions": lambda url: client(url).completions.create(model="actor", prompt="hello", stream=True),
    "responses": lambda url: client(url).responses.create(model="actor", input="hello", stream=True),
    "ollama chat": lambda url: ollama.Client(url).chat("actor", USER, stream=True),
    "ollama generate": lambda url: ollama.Client(url).generate("actor", "hello", stream=True),
}
WHOLES = {"a chat": whole_chat, "a response": whole_response, "a message": whole_message}
STREAMS = EVENTS | WHOLES | {"pings": pings}


@pytest.fixture(scope="module")
def streams(url: str) -> dict[str, list[Any]]:
    """The events of every stream, read at once."""
    with ThreadPoolExecutor(len(STREAMS)) as threads:
        return dict(zip(STREAMS, threads.map(lambda start: list(start(url)), STREAMS.values()), strict=True))


@pytest.mark.parametrize("name", EVENTS)
def test_the_parser_sees_events_during_the_prefill(streams: dict[str, Any], name: str) -> None:
    assert len(streams[name]) > 5  # the answer itself has three at most


def test_events_of_responses_are_numbered_without_a_gap(streams: dict[str, list[Any]]) -> None:
    events = streams["responses"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert [event.type for event in events].count("response.in_progress") > 2


@pytest.mark.parametrize("name", WHOLES)
def test_the_answer_is_the_same_with_keep_alives(streams: dict[str, list[Any]], name: str) -> None:
    assert streams[name] == ["hello"]


def test_the_answer_of_ollama_is_the_same_with_keep_alives(streams: dict[str, list[Any]]) -> None:
    assert "".join(part.message.content or "" for part in streams["ollama chat"]) == "hello"


def test_anthropic_pings_are_events(streams: dict[str, list[Any]]) -> None:
    events = streams["pings"]
    assert set(events[: events.index("event: message_start")]) <= {"event: ping"}
    assert events.count("event: ping") > 2

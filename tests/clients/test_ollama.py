"""Ollama's client library against two live ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import ollama
import pytest

from ..live_cluster import WAIT_S, Cluster, until
from ..reference import random_text
from .test_anthropic import LONG
from .test_openai import SCHEMA, SECRET, TOOL, user


@pytest.fixture(scope="module")
def client(two_ranks: Cluster) -> ollama.Client:
    return ollama.Client(host=two_ranks.url, timeout=WAIT_S)


def test_what_is_served(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == "tiny"
    assert [each.model for each in client.ps().models] == ["tiny"]
    shown = client.show("tiny")
    assert shown.modelinfo
    with pytest.raises(ollama.ResponseError, match="nobody") as refused:
        client.show("nobody")
    assert refused.value.status_code == 404


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "default"])
def test_a_whole_answer_and_a_streamed_one(client: ollama.Client, name: str) -> None:
    fields: dict[str, Any] = {"model": name, "messages": user(f"Repeat exactly: {SECRET}")}
    whole = client.chat(**fields)
    assert whole.message.content == SECRET
    assert (whole.done, whole.done_reason) == (True, "stop")
    parts = list(client.chat(stream=True, **fields))
    assert "".join(part.message.content or "" for part in parts) == SECRET
    assert len(parts) > 5
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count


def test_a_prompt_without_a_conversation(client: ollama.Client) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": f"Repeat exactly: {SECRET}"}
    assert client.generate(**fields).response == SECRET
    assert "".join(part.response for part in client.generate(stream=True, **fields)) == SECRET


def test_a_conversation_in_which_a_tool_was_called(client: ollama.Client) -> None:
    """Ollama's API cannot have a call forced; what it brings back has to be taken."""
    call: Any = {"function": {"name": "look_up", "arguments": {"n": 5, "ok": True}}}
    told: Any = [
        *user("Look up 5."),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "look_up", "content": "7"},
        *user(f"Repeat exactly: {SECRET}"),
    ]
    answer = client.chat(model="tiny", messages=told, tools=[TOOL])
    assert answer.done_reason == "stop"
    assert answer.message.role == "assistant"
    assert (answer.prompt_eval_count or 0) > (
        client.chat(model="tiny", messages=told[-1:]).prompt_eval_count or 0
    )


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_follows_a_schema(client: ollama.Client, stream: bool) -> None:
    fields: dict[str, Any] = {
        "model": "tiny", "messages": user("A number and a word, please."), "format": SCHEMA,
        "options": {"temperature": 1.5, "seed": 4},
    }  # fmt: skip
    if stream:
        text = "".join(part.message.content or "" for part in client.chat(stream=True, **fields))
    else:
        text = client.chat(**fields).message.content or ""
    found = json.loads(text)
    assert found.keys() == {"n", "ok"}
    assert 0 <= found["n"] <= 99


def test_where_an_answer_stops(client: ollama.Client) -> None:
    count = user("Count from 1 to 60.")
    cut = client.chat(model="tiny", messages=count, options={"num_predict": 5})
    assert (cut.done_reason, cut.eval_count) == ("length", 5)
    stopped = client.chat(model="tiny", messages=count, options={"stop": ["nothing", " 4"]})
    assert (stopped.done_reason, stopped.message.content) == ("stop", "1 2 3")


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"model": "gpt-9"}, 404, "gpt-9"),
        ({"options": {"temperature": -1}}, 400, "temperature"),
        ({"messages": user("x" * 50_000)}, 400, "4096"),
        ({"messages": [{"role": "user", "content": "look", "images": ["AAAA"]}]}, 400, "images"),
        ({"think": True}, 400, "think"),
        ({"format": {"type": "no such type"}}, 400, ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_in_words(
    client: ollama.Client, fields: dict[str, Any], status: int, named: str, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": user("hello")} | fields
    with pytest.raises(ollama.ResponseError, match=named or ".") as refused:
        list(client.chat(stream=stream, **asked))  # type: ignore[call-overload]
    assert refused.value.status_code == status
    assert refused.value.error


def test_who_leaves_is_not_decoded_for(client: ollama.Client, two_ranks: Cluster) -> None:
    before = two_ranks.idle()
    stream = client.chat(model="tiny", messages=user("Go on."), format=LONG, stream=True)
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    until(lambda: two_ranks.health()["open_requests"] == 0, "the abandoned request ends")
    assert 0 < (two_ranks.idle() - before).emitted[0] < 1600


@pytest.mark.chaos
def test_many_at_once_get_each_their_own(client: ollama.Client) -> None:
    secrets = [random_text(Random(number), 12) for number in range(32)]

    def ask(secret: str) -> str | None:
        return client.chat(model="tiny", messages=user(f"Repeat exactly: {secret}")).message.content

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, secrets)) == secrets

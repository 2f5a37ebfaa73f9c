"""Anthropic's client library against two live ranks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel, Field

from ..live_cluster import WAIT_S, Cluster, until
from ..reference import random_text
from .test_openai import SCHEMA, SECRET, user

LONG: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 9},
    "minItems": 800,
    "maxItems": 800,
}
"""An answer of some 1600 tokens, even if the model would end it."""
TOOL: Any = {"name": "look_up", "description": "Looks up", "input_schema": SCHEMA}
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.fixture(scope="module")
def client(two_ranks: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=two_ranks.url, api_key="none", max_retries=0, timeout=WAIT_S) as found:
        yield found


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 200, "messages": user(text)} | fields


def final(client: anthropic.Anthropic, **fields: Any) -> Any:
    """Return the library's message of a stream."""
    with client.messages.stream(**fields) as stream:
        return stream.get_final_message()


def as_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "schema": schema}}


def test_models(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").type == "model"
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        client.models.retrieve("nobody")


def test_a_whole_answer_and_a_streamed_one(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**asked(f"Repeat exactly: {SECRET}"))
    (block,) = message.content
    assert block.type == "text"
    assert block.text == SECRET
    assert (message.stop_reason, message.model) == ("end_turn", "tiny")
    with client.messages.stream(**asked(f"Repeat exactly: {SECRET}")) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert "".join(pieces) == SECRET
    assert len(pieces) > 5
    assert streamed.usage.output_tokens == message.usage.output_tokens


def test_the_names_of_anthropics_models_mean_the_one_that_is_loaded(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**asked(f"Repeat exactly: {SECRET}", model="claude-any-model"))
    assert message.model == "claude-any-model"
    assert message.content[0].to_dict() == {"type": "text", "text": SECRET}


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": user("Count from 1 to 5."), "system": "Be brief."}
    counted = client.messages.count_tokens(**fields).input_tokens
    usage = client.messages.create(max_tokens=50, **fields).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted > 10


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, pytest.param({"type": "tool", "name": "look_up"}, marks=pytest.mark.chaos)]
)
def test_a_tool_that_must_be_called(client: anthropic.Anthropic, choice: Any) -> None:
    fields = asked("Look up 5.", tools=[TOOL], tool_choice=choice)
    message = client.messages.create(**fields)
    assert message.stop_reason == "tool_use"
    use = message.content[-1]
    assert use.type == "tool_use"
    assert use.name == "look_up"
    assert isinstance(use.input, dict)
    assert use.input.keys() == {"n", "ok"}
    streamed = final(client, **fields).content[-1]
    assert (streamed.name, streamed.input) == (use.name, use.input)
    told = [
        *fields["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": SECRET}]},
    ]
    after = client.messages.create(**asked("", tools=[TOOL], tool_choice={"type": "none"}, messages=told))
    assert after.stop_reason == "end_turn"
    assert after.content[0].type == "text"


def test_an_answer_that_follows_a_schema(client: anthropic.Anthropic) -> None:
    class Answer(BaseModel):
        n: int = Field(ge=0, le=99)
        ok: bool

    fields = asked(
        "A number and a word, please.", output_config=as_schema(SCHEMA), extra_body={"temperature": 1}
    )
    for message in (client.messages.create(**fields), final(client, **fields)):
        assert Answer.model_validate_json(message.content[0].text)


@pytest.mark.parametrize("get", [lambda client, **fields: client.messages.create(**fields), final])
def test_where_an_answer_stops(client: anthropic.Anthropic, get: Any) -> None:
    cut = get(client, **asked("Count from 1 to 60.", max_tokens=5))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 5)
    stopped = get(client, **asked("Count from 1 to 60.", stop_sequences=["nothing", " 4"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " 4")
    assert stopped.content[0].text == "1 2 3"


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"model": "gpt-9"}, anthropic.NotFoundError, "gpt-9"),
        ({"extra_body": {"temperature": 1.5}}, anthropic.BadRequestError, "from 0"),
        ({"messages": user("x" * 50_000)}, anthropic.BadRequestError, "4096"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, anthropic.BadRequestError, "image"),
        ({"output_config": as_schema({"type": "no such type"})}, anthropic.BadRequestError, ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_in_words(
    client: anthropic.Anthropic,
    fields: dict[str, Any],
    error: type[anthropic.APIStatusError],
    named: str,
    stream: bool,
) -> None:
    with pytest.raises(error, match=named or ".") as refused:
        client.messages.create(**asked("hello", stream=stream, **fields))
    body = refused.value.body
    assert isinstance(body, dict)
    assert body["type"] == "error"
    assert body["error"]["message"]


def test_who_leaves_is_not_decoded_for(client: anthropic.Anthropic, two_ranks: Cluster) -> None:
    before = two_ranks.idle()
    with client.messages.stream(**asked("Go on.", max_tokens=2500, output_config=as_schema(LONG))) as stream:
        next(iter(stream.text_stream))
    until(lambda: two_ranks.health()["open_requests"] == 0, "the abandoned request ends")
    assert 0 < (two_ranks.idle() - before).emitted[0] < 1600


@pytest.mark.chaos
def test_many_at_once_get_each_their_own(client: anthropic.Anthropic) -> None:
    secrets = [random_text(Random(number), 12) for number in range(32)]

    def ask(secret: str) -> Any:
        return client.messages.create(**asked(f"Repeat exactly: {secret}")).content[0].to_dict()["text"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, secrets)) == secrets

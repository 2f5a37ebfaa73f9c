"""Anthropic's client library against two live ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from ..live_cluster import WAIT_S, Cluster
from .test_openai import SCHEMA, SECRET, user

TOOL: Any = {"name": "look_up", "description": "Looks up", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def client(two_ranks: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=two_ranks.url, api_key="none", max_retries=0, timeout=WAIT_S) as found:
        yield found


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 200, "messages": user(text)} | fields


def test_a_whole_answer_and_a_streamed_one(client: anthropic.Anthropic) -> None:
    message: Any = client.messages.create(**asked(f"Repeat exactly: {SECRET}"))
    assert [block.text for block in message.content] == [SECRET]
    assert (message.stop_reason, message.model) == ("end_turn", "tiny")
    with client.messages.stream(**asked(f"Repeat exactly: {SECRET}")) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert "".join(pieces) == SECRET
    assert len(pieces) > 5
    assert streamed.usage.output_tokens == message.usage.output_tokens


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, pytest.param({"type": "tool", "name": "look_up"}, marks=pytest.mark.chaos)]
)
def test_a_tool_that_must_be_called(client: anthropic.Anthropic, choice: Any) -> None:
    fields = asked("Look up 5.", tools=[TOOL], tool_choice=choice)
    message: Any = client.messages.create(**fields)
    use = message.content[-1]
    assert (message.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "look_up")
    assert use.input.keys() == {"n", "ok"}
    with client.messages.stream(**fields) as stream:
        streamed: Any = stream.get_final_message().content[-1]
    assert (streamed.name, streamed.input) == (use.name, use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": SECRET}
    told = [*fields["messages"], {"role": "assistant", "content": message.content}]
    told.append({"role": "user", "content": [result]})
    after = client.messages.create(**asked("", tools=[TOOL], tool_choice={"type": "none"}, messages=told))
    assert (after.stop_reason, after.content[0].type) == ("end_turn", "text")

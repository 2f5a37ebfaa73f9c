"""Ollama's client library against two live ranks."""

from __future__ import annotations

from typing import Any

import ollama
import pytest

from ..live_cluster import WAIT_S, Cluster, until
from .test_openai import SECRET, TOOL, user

LONG: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 9},
    "minItems": 800,
    "maxItems": 800,
}
"""An answer of some 1600 tokens, even if the model would end it."""


@pytest.fixture(scope="module")
def client(two_ranks: Cluster) -> ollama.Client:
    return ollama.Client(host=two_ranks.url, timeout=WAIT_S)


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


def test_who_leaves_is_not_decoded_for(client: ollama.Client, two_ranks: Cluster) -> None:
    before = two_ranks.idle()
    stream = client.chat(model="tiny", messages=user("Go on."), format=LONG, stream=True)
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    until(lambda: two_ranks.health()["open_requests"] == 0, "the abandoned request ends")
    assert 0 < (two_ranks.idle() - before).emitted[0] < 1600

"""Ollama's client library against two live ranks."""

from __future__ import annotations

from typing import Any

import ollama
import pytest

from ..live_cluster import WAIT_S, Cluster
from .test_openai import SECRET, user


@pytest.fixture(scope="module")
def client(two_ranks: Cluster) -> ollama.Client:
    return ollama.Client(host=two_ranks.url, timeout=WAIT_S)


def test_a_whole_answer_and_a_streamed_one(client: ollama.Client) -> None:
    fields: dict[str, Any] = {"model": "tiny:latest", "messages": user(f"Repeat exactly: {SECRET}")}
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

"""Requests as programs send them, over the templates of families: every text of them is in the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mlxtp.api.dialects import anthropic, ollama_request, openai, responses_request
from mlxtp.api.dialects.ollama_request import Arrival
from mlxtp.api.dialects.responses_request import ResponseStore
from mlxtp.text.conversation import Conversation
from mlxtp.text.tokenizer import Text

from ..text.templates import TEMPLATES, text_of
from .replay import recordings

PARSERS = {
    "/v1/chat/completions": openai.parse_chat,
    "/v1/messages": anthropic.parse_messages,
    "/v1/responses": lambda body: responses_request.parse(body, ResponseStore(), ""),
    "/api/chat": lambda body: ollama_request.parse_chat(Arrival(0, ()), body),
}
REQUESTS = [each for group in ("plain", "codex", "structured") for each in recordings(group)]
#: Fields of bodies whose strings are no words for the model.
NO_WORDS = frozenset({"role", "type", "id", "tool_use_id", "tool_call_id", "call_id", "signature", "status"})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Text]:
    return {name: text_of(name, tmp_path_factory.mktemp("model")) for name in TEMPLATES}


def strings(value: Any) -> Iterator[str]:
    """Yield the strings in a part of a body."""
    match value:
        case str():
            yield value
        case list():
            for each in value:
                yield from strings(each)
        case dict():
            for key, each in value.items():
                if key not in NO_WORDS:
                    yield from strings(each)


def words(text: str) -> str:
    """Return a text without what templates and dialects write in ways of their own."""
    return "".join(json.dumps(text, ensure_ascii=False)[1:-1].replace("\\n", "").replace("\\", "").split())


@pytest.mark.parametrize("recording", REQUESTS)
def test_every_text_of_a_recorded_request_is_in_the_prompt(texts: dict[str, Text], recording: Any) -> None:
    body = recording["body"]
    asked = PARSERS[recording["path"]](json.dumps(body).encode()).prompt
    assert isinstance(asked, Conversation)
    history = [body.get("system"), body.get("instructions"), body.get("messages"), body.get("input")]
    sent = [words(each) for part in history for each in strings(part)]
    for name, text in texts.items():
        prompt = words(text.rendered(asked))
        assert [each for each in sent if each not in prompt] == [], name
        assert all(
            words(tool.name) in prompt and words(tool.description) in prompt for tool in asked.tools
        ), name

"""Structured output ends: a rambling model cannot go on behind the last property, nor past its budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from .actor import Stage, stage

SCHEMA: dict[str, Any] = {  # as pydantic writes it
    "title": "Answer",
    "type": "object",
    "properties": {
        "answer": {"title": "Answer", "type": "integer"},
        "word": {"title": "Word", "type": "string"},
        "tags": {"title": "Tags", "type": "array", "items": {"type": "string"}},
    },
    "required": ["answer", "word", "tags"],
}
VALUES = {"answer": 9, "word": "nine", "tags": ["a", "b"]}
BUDGET = 300
USER: Any = [{"role": "user", "content": f"DO json {json.dumps(VALUES)}"}]
LONG: Any = [{"role": "user", "content": f"DO json {json.dumps(VALUES | {'word': 'x' * 2000})}"}]
CHAT_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def rambling() -> Iterator[Stage]:
    with stage(rambles=True, context=4096) as found:
        yield found


def by_openai(found: Stage) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0)


def by_anthropic(found: Stage, messages: Any, **more: Any) -> Any:
    library = anthropic.Anthropic(base_url=found.url, api_key="none", max_retries=0)
    return library.messages.create(model="actor", messages=messages, max_tokens=BUDGET, **more)


def choice_of(found: Stage, messages: Any = USER, **more: Any) -> Any:
    create: Any = by_openai(found).chat.completions.create
    return create(model="actor", messages=messages, max_tokens=BUDGET, **more).choices[0]


Asked = tuple[str, Any]


def chat(found: Stage, messages: Any = USER) -> Asked:
    choice = choice_of(found, messages, response_format=CHAT_FORMAT)
    return choice.message.content, choice.finish_reason


def responses(found: Stage, messages: Any = USER) -> Asked:
    format_: Any = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
    asked: Any = {"input": messages, "text": format_, "max_output_tokens": BUDGET}
    answer = by_openai(found).responses.create(model="actor", **asked)
    return answer.output_text, answer.incomplete_details and answer.incomplete_details.reason


def messages_(found: Stage, messages: Any = USER) -> Asked:
    output: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = by_anthropic(found, messages, extra_body={"output_config": output})
    return message.content[0].text, message.stop_reason


def ollama_chat(found: Stage, messages: Any = USER) -> Asked:
    library = ollama.Client(host=found.url)
    line = library.chat("actor", messages, format=SCHEMA, options={"num_predict": BUDGET})
    return line.message.content or "", line.done_reason


@pytest.mark.parametrize(
    ("ask", "cut"),
    [(chat, "length"), (responses, "max_output_tokens"), (messages_, "max_tokens"), (ollama_chat, "length")],
)
def test_a_string_that_would_not_fit_is_closed_and_the_answer_says_that_it_was_cut(
    rambling: Stage, ask: Any, cut: str
) -> None:
    """A rambling model goes on with the array, which has no end of its own."""
    text, reason = ask(rambling, LONG)
    assert set(json.loads(text)) == set(VALUES)
    assert reason == cut


def test_an_answer_that_ends_by_itself_was_not_cut() -> None:
    with stage(context=4096) as found:
        assert chat(found)[1] == "stop"


def test_there_is_no_loose_whitespace(rambling: Stage) -> None:
    loose = [{"role": "user", "content": 'DO json {  "answer"  :  9,\n\n "word":"nine", "tags": []}'}]
    text, _ = chat(rambling, loose)
    separators = ((", ", ": "), (",", ":"))
    found = json.loads(text)
    assert text in [json.dumps(found, ensure_ascii=False, separators=each) for each in separators]

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
USER: Any = [{"role": "user", "content": f"DO call it {json.dumps(VALUES)} DO json {json.dumps(VALUES)}"}]
LONG: Any = [{"role": "user", "content": f"DO json {json.dumps(VALUES | {'word': 'x' * 2000})}"}]
CHAT_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def rambling() -> Iterator[Stage]:
    with stage(rambles=True, context=4096) as found:
        yield found


def chat(found: Stage, **more: Any) -> Any:
    library = openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0)
    return library.chat.completions.create(model="actor", **({"messages": USER} | more)).choices[0]


def begins_as_told(found: Any) -> bool:
    """The array alone has no end of its own: a rambling model goes on with it."""
    return set(found) == set(VALUES) and found["answer"] == 9 and found["word"] == "nine"


def test_a_chat(rambling: Stage) -> None:
    text = chat(rambling, response_format=CHAT_FORMAT, max_tokens=BUDGET).message.content
    assert begins_as_told(json.loads(text))


def test_a_forced_call(rambling: Stage) -> None:
    tool = {"type": "function", "function": {"name": "it", "parameters": SCHEMA}}
    choice = {"type": "function", "function": {"name": "it"}}
    message = chat(rambling, tools=[tool], tool_choice=choice, max_tokens=BUDGET).message
    assert begins_as_told(json.loads(message.tool_calls[0].function.arguments))


def test_responses(rambling: Stage) -> None:
    library = openai.OpenAI(base_url=f"{rambling.url}/v1", api_key="none", max_retries=0)
    format_: Any = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
    answer = library.responses.create(model="actor", input=USER, text=format_, max_output_tokens=BUDGET)
    assert begins_as_told(json.loads(answer.output_text))


def test_messages(rambling: Stage) -> None:
    library = anthropic.Anthropic(base_url=rambling.url, api_key="none", max_retries=0)
    tool: Any = {"name": "it", "input_schema": SCHEMA}
    choice: Any = {"type": "tool", "name": "it"}
    asked: Any = {"model": "actor", "messages": USER, "max_tokens": BUDGET}
    [block] = library.messages.create(**asked, tools=[tool], tool_choice=choice).content
    assert begins_as_told(block.input)


def test_ollama(rambling: Stage) -> None:
    library = ollama.Client(host=rambling.url)
    answer = library.chat("actor", USER, format=SCHEMA, options={"num_predict": BUDGET})
    assert begins_as_told(json.loads(answer.message.content or ""))


def test_a_string_that_would_not_fit_is_closed_and_the_answer_says_that_it_was_cut(rambling: Stage) -> None:
    """In the words of each dialect."""
    found = chat(rambling, messages=LONG, response_format=CHAT_FORMAT, max_tokens=BUDGET)
    assert set(json.loads(found.message.content)) == set(VALUES)
    assert found.finish_reason == "length"

    library = openai.OpenAI(base_url=f"{rambling.url}/v1", api_key="none", max_retries=0)
    format_: Any = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
    answer = library.responses.create(model="actor", input=LONG, text=format_, max_output_tokens=BUDGET)
    assert set(json.loads(answer.output_text)) == set(VALUES)
    assert answer.incomplete_details is not None
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")

    output: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    claude = anthropic.Anthropic(base_url=rambling.url, api_key="none", max_retries=0)
    message = claude.messages.create(
        model="actor", messages=LONG, max_tokens=BUDGET, extra_body={"output_config": output}
    )
    assert set(json.loads(message.content[0].text)) == set(VALUES)  # type: ignore[union-attr]
    assert message.stop_reason == "max_tokens"

    line = ollama.Client(host=rambling.url).chat(
        "actor", LONG, format=SCHEMA, options={"num_predict": BUDGET}
    )
    assert set(json.loads(line.message.content or "")) == set(VALUES)
    assert line.done_reason == "length"


def test_an_answer_that_ends_by_itself_was_not_cut() -> None:
    with stage(context=4096) as found:
        assert chat(found, response_format=CHAT_FORMAT, max_tokens=BUDGET).finish_reason == "stop"


def test_there_is_no_loose_whitespace(rambling: Stage) -> None:
    loose = [{"role": "user", "content": 'DO json {  "answer"  :  9,\n\n "word":"nine", "tags": []}'}]
    text = chat(rambling, messages=loose, response_format=CHAT_FORMAT, max_tokens=BUDGET).message.content
    found = json.loads(text)
    tight = (
        json.dumps(found, ensure_ascii=False),
        json.dumps(found, ensure_ascii=False, separators=(",", ":")),
    )
    assert text in tight

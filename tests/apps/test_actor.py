"""The actor itself: it does what the prompt dictates, obeys grammars, and counts what a cache would reuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from ..text.templates import TEMPLATES
from .actor import Stage, stage, with_template

WORD = {"type": "object", "properties": {"word": {"type": "string"}}}
LOOK: Any = {"type": "function", "function": {"name": "look_up", "parameters": WORD}}
CLOSED: Any = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "word": {"type": "string", "maxLength": 9}},
    "required": ["answer"],
    "additionalProperties": False,
}


def client(found: Stage) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat(found: Stage, *messages: Any, **more: Any) -> Any:
    return client(found).chat.completions.create(model="actor", messages=list(messages), **more).choices[0]


def test_a_forced_call_follows_the_rest_of_a_schema_whose_pattern_looks_ahead(acting: Stage) -> None:
    key = {"type": "string", "pattern": "^(?!-)[a-z-]+$", "maxLength": 8}
    parameters = {"type": ["object", "null"], "properties": {"key": key}, "required": ["key", "why"]}
    tool: Any = {"type": "function", "function": {"name": "look_up", "parameters": parameters}}
    for wished, found in [("a-b", "a-b"), ("longer than this", None)]:
        asked = user(f"DO call look_up {json.dumps({'key': wished, 'why': [1]})}")
        answer = chat(acting, asked, tools=[tool], tool_choice="required")
        arguments = json.loads(answer.message.tool_calls[0].function.arguments)
        assert arguments.keys() == {"key", "why"}
        assert arguments["key"] == found or (found is None and len(arguments["key"]) <= 8)


@pytest.mark.parametrize(
    ("words", "expected"),
    [('DO json {"answer": 9}', {"answer": 9}), ("Anything", {"answer": 0}), ('DO json {"else": 1}', None)],
)
def test_an_answer_follows_its_schema(acting: Stage, words: str, expected: Any) -> None:
    format_: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": CLOSED}}
    found = json.loads(chat(acting, user(words), response_format=format_).message.content)
    assert found == (expected or {"answer": 0})


def test_a_rambling_actor_ends_where_the_schema_ends() -> None:
    format_: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": CLOSED}}
    with stage(rambles=True, context=4096) as found:
        answer = chat(found, user('DO json {"answer": 9}'), response_format=format_)
        assert json.loads(answer.message.content)["answer"] == 9
        any_object: Any = {"type": "json_object"}
        assert chat(found, user('DO json {"a": 1}'), response_format=any_object).message.content == '{"a": 1}'


@pytest.mark.parametrize("name", ["qwen", "mistral", "gpt-oss", "kimi", "minimax", "lfm2", "gemma4"])
def test_it_speaks_as_models_of_other_templates_do(tmp_path: Path, name: str) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES[name][0])
    with stage(folder=with_template(template, tmp_path / "model")) as acting:
        messages: list[Any] = [user('DO call look_up {"word": "zebra"}')]
        for turn in ("FALCON", "EAGLE"):
            first = chat(acting, *messages, tools=[LOOK])
            [call] = first.message.tool_calls
            assert call.function.name == "look_up"
            assert json.loads(call.function.arguments)["word"].startswith("zebra")
            messages += [first.message.model_dump(exclude_none=True)]
            messages += [{"role": "tool", "tool_call_id": call.id, "content": turn}]
            second = chat(acting, *messages, tools=[LOOK])
            assert turn in second.message.content
            messages += [second.message.model_dump(exclude_none=True)]
            messages += [user('And now DO call look_up {"word": "zebras"}')]

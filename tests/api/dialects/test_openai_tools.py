"""Tools and thoughts over HTTP: the real client library, a real server; only the model is played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxtp.text.conversation import Tool, tool_json
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text

from ..conftest import TEMPLATE, Server, byte_level, save, says
from ..test_app import HELLO
from .test_openai_chat import create, refuse

ADD = Tool("add", "Adds", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
TOOLS = [tool_json(ADD)]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def answers_with(server: Server, text: str, reason: str = "stop", step: int = 1) -> None:
    server.backend.context = 4000  # what the model is told of tools is long, letter by letter
    server.backend.script = says(server.ids(text), reason, step)


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_among_words(server: Server, stream: bool, step: int) -> None:
    answers_with(server, f"Sure. {CALL}\n{CALL}", step=step)
    if stream:
        choice = put_together(create(server, tools=TOOLS, stream=True))
    else:
        choice = create(server, tools=TOOLS).choices[0].model_dump()
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Sure.")
    calls = choice["message"]["tool_calls"]
    assert [(call["type"], call["function"]) for call in calls] == [
        ("function", {"name": "add", "arguments": '{"a": 1}'})
    ] * 2
    assert len({call["id"] for call in calls}) == 2


def put_together(stream: Any) -> dict[str, Any]:
    """A streamed choice in the shape of a whole one, by the rules that clients go by."""
    text, calls, reason = "", list[dict[str, Any]](), None
    for chunk in stream:
        (choice,) = chunk.choices
        assert reason is None
        text += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls):
                assert (bool(part.id), part.type) == (True, "function")
                function = {"name": part.function.name, "arguments": ""}
                calls.append({"id": part.id, "type": part.type, "function": function})
            assert part.index == len(calls) - 1
            calls[-1]["function"]["arguments"] += part.function.arguments or ""
        reason = choice.finish_reason
    return {"finish_reason": reason, "message": {"content": text, "tool_calls": calls}}


PATCH = '*** Begin "Patch"\n+größer 😀\n'
CUSTOM: Any = {"type": "custom", "custom": {"name": "patch", "description": "Edits files"}}


def custom_call() -> str:
    arguments = json.dumps({"input": PATCH})
    return f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'


def test_a_custom_tool_is_called_with_plain_text(server: Server) -> None:
    answers_with(server, f"{custom_call()}\n{CALL}")
    message = create(server, tools=[*TOOLS, CUSTOM]).choices[0].message
    patch, add = message.tool_calls
    assert (patch.type, patch.custom.name, patch.custom.input) == ("custom", "patch", PATCH)
    assert (add.type, add.function.name) == ("function", "add")
    result: Any = {"role": "tool", "tool_call_id": patch.id, "content": "done"}
    create(server, messages=[*HELLO, message.model_dump(exclude_none=True), result], tools=[*TOOLS, CUSTOM])
    prompt = server.tokenizer.decode(server.backend.requests[-1].tokens)
    assert f'{{"name": "patch", "arguments": {json.dumps({"input": PATCH}, ensure_ascii=False)}}}' in prompt


def test_the_text_of_a_custom_tool_is_streamed(server: Server) -> None:
    answers_with(server, f"{custom_call()}\n{CALL}")
    stream: Any = server.client.chat.completions.create(  # whose types know no custom calls in chunks
        model="tiny", messages=HELLO, tools=[*TOOLS, CUSTOM], stream=True
    )
    parts: list[Any] = [part for chunk in stream for part in chunk.choices[0].delta.tool_calls or ()]
    first, *more = [part for part in parts if part.index == 0]
    assert (first.type, first.custom) == ("custom", {"name": "patch", "input": ""})
    assert first.id
    assert len(more) > 4
    assert "".join(part.custom["input"] for part in more) == PATCH
    assert "".join(part.function.arguments for part in parts if part.index == 1) == '{"a": 1}'


def test_the_model_is_told_of_tools_and_of_what_they_returned(server: Server) -> None:
    answers_with(server, "2")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    turns = [*HELLO, asked, {"role": "tool", "tool_call_id": "c", "content": "two"}]
    create(server, messages=turns, tools=TOOLS)
    prompt = server.backend.loaded_text.decoded(server.backend.request.tokens)
    assert json.dumps(tool_json(ADD)) in prompt
    assert CALL in prompt
    assert "<tool_response>\ntwo\n</tool_response>" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_none_is_none(server: Server, stream: bool) -> None:
    """No token of this model begins a call, so that none can be banned."""
    answers_with(server, f"Sure. {CALL}\n{CALL} Really.")
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False}
    if stream:
        choice = put_together(create(server, stream=True, **fields))
    else:
        choice = create(server, **fields).choices[0].model_dump()
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "Sure.Really.")
    assert not choice["message"]["tool_calls"]
    assert "You can call" in server.backend.loaded_text.decoded(server.backend.request.tokens)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_must_come_has_a_grammar(server: Server, choice: Any) -> None:
    answers_with(server, CALL)
    found = create(server, tools=TOOLS, tool_choice=choice).choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.tool_calls[0].function.arguments == '{"a": 1}'
    assert server.backend.request.shaping.grammar_kind == "lark"
    server.backend.judge = refuse
    with pytest.raises(openai.BadRequestError, match="has no end") as caught:
        create(server, tools=TOOLS, tool_choice=choice)
    assert caught.value.param == "tools"


def test_a_call_that_the_budget_cut_is_a_length(server: Server) -> None:
    cut = CALL.index("1}}")
    answers_with(server, CALL[:cut], "length")
    choice = create(server, tools=TOOLS).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    answers_with(server, f"{CALL}{CALL[:cut]}", "length")
    [call] = create(server, tools=TOOLS).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1}


def test_a_stream_shows_a_call_that_the_budget_cut_up_to_there(server: Server) -> None:
    answers_with(server, CALL[: CALL.index("1}}")], "length")
    chunks = [chunk.choices[0] for chunk in create(server, tools=TOOLS, stream=True) if chunk.choices]
    pieces = [call.function.arguments for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert "".join(filter(None, pieces)) == '{"a": '
    assert len(pieces) > 3, "they are streamed while they come"
    assert chunks[-1].finish_reason == "length"


def test_thoughts_are_told_apart(thinker: Server) -> None:
    answers_with(thinker, "<think>hm</think>hello")
    answer = create(thinker)
    message = answer.choices[0].message
    assert (message.reasoning, message.reasoning_content, message.content) == ("hm", "hm", "hello")
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < thought < answer.usage.completion_tokens
    *_, trailer = create(thinker, stream=True, stream_options={"include_usage": True})
    assert trailer.usage.completion_tokens_details.reasoning_tokens == thought
    deltas = [chunk.choices[0].delta for chunk in create(thinker, stream=True)]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, "") for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "hello"


ODD = {"type": "function", "function": {"name": "f", "parameters": "object"}}


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"tools": TOOLS * 2}, "tools", "same name"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.name", '"x"'),
        ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format", "together with tools"),
        ({"tools": [ODD]}, "tools[0].function.parameters", '"object"'),
    ],
)
def test_tools_that_cannot_be(server: Server, fields: dict[str, Any], param: str, named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named) as caught:
        create(server, **{"tools": TOOLS} | fields)
    assert caught.value.param == param
    assert server.backend.requests == []


def test_a_format_beside_tools_that_may_not_be_called(server: Server) -> None:
    answers_with(server, "{}")
    create(server, tools=TOOLS, tool_choice="none", response_format={"type": "json_object"})
    assert server.backend.request.shaping.grammar_kind == "json_schema"


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "none"}, {"tools": [], "text": {"format": {"type": "json_object"}}}, {}],
    ids=["tools that may not be called", "no thoughts under a format", "tools"],
)
def test_what_is_counted_is_the_prompt_that_would_be_sent(
    server: Server, tmp_path: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = f"{TEMPLATE}{{% if enable_thinking is not defined %}}<think>{{% endif %}}"
    text = Text(LocalRenderer.load(save(byte_level(), tmp_path, template)))
    monkeypatch.setattr(server.backend, "loaded_text", text)  # the server is other tests', too
    answers_with(server, "yes")
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]
    asked = {"model": "tiny", "input": "hello", "tools": tools} | fields
    counted = server.client.responses.input_tokens.count(**asked)
    server.client.responses.create(**asked)
    assert counted.input_tokens == len(server.backend.request.tokens)

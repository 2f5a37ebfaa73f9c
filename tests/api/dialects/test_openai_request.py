from __future__ import annotations

import json
from typing import Any

import pytest

from mlxtp.api.dialects import openai
from mlxtp.api.sampling import SETTINGS
from mlxtp.errors import Code, RequestError
from mlxtp.text.conversation import Call, ChatMessage, Conversation, GenerationRequest, Tool

HELLO = [{"role": "user", "content": "hello"}]


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO} | fields).encode()


def parse(**fields: Any) -> GenerationRequest:
    return openai.parse_chat(body(**fields))


def talk(**fields: Any) -> Conversation:
    prompt = parse(**fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def turns(*given: dict[str, Any]) -> tuple[ChatMessage, ...]:
    return talk(messages=list(given)).messages


# --- what is accepted -------------------------------------------------------------------------------------


def test_a_whole_float_is_an_integer() -> None:
    options = parse(max_tokens=40.0, seed=7.0).options
    assert (repr(options.max_tokens), repr(options.seed)) == ("40", "7")
    assert "max_tokens" in refusal(max_tokens=40.5).detail


def test_unknown_fields_are_ignored() -> None:
    assert parse(user={"id": "1"}) == parse()
    assert parse(user="me", cache_prompt=True, keep_alive=5, messages=[HELLO[0] | {"x": 1}])


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("n", 1, 16), ("max_tokens", 1, 2**31 - 1), ("min_tokens", 0, 2**31 - 1), ("temperature", 0, 2),
        ("top_p", 0, 1), ("top_k", -1, 2**31 - 1), ("min_p", 0, 1), ("xtc_probability", 0, 1),
        ("xtc_threshold", 0, 0.5), ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2),
        ("repetition_penalty", 0.01, 100),
    ],
)  # fmt: skip
def test_the_ends_of_a_range_belong_to_it_and_what_lies_beyond_is_told_the_range(
    field: str, least: float, most: float
) -> None:
    for value in (least, most):
        options = parse(**{field: value}).options
        assert (options.settings[field] if field in SETTINGS else getattr(options, field)) == value
    for value in (least - 1, most + 1):
        error = refusal(**{field: value})
        assert error.param == field
        assert error.detail == f"{field} should be from {least} to {most}, got {json.dumps(value)}"


def test_alternatives_without_log_probabilities_are_refused() -> None:
    assert parse(logprobs=True, top_logprobs=20).options.logprobs == 20
    for logprobs in (None, False):
        error = refusal(logprobs=logprobs, top_logprobs=2)
        assert (error.code, error.param) == (Code.BAD_REQUEST, "top_logprobs")


def test_the_two_names_of_the_budget_are_one_setting() -> None:
    assert parse().options.max_tokens is None
    assert parse(max_tokens=5).options.max_tokens == 5
    assert parse(max_completion_tokens=6).options.max_tokens == 6
    assert parse(max_tokens=5, max_completion_tokens=5).options.max_tokens == 5
    assert refusal(max_tokens=5, max_completion_tokens=6).param == "max_tokens"


def test_developer_is_system_and_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    assert turns(
        {"role": "developer", "content": "be"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": []},
    ) == (ChatMessage("system", "be"), ChatMessage("user", "a\nb"), ChatMessage("assistant", ""))


def test_calls_and_what_they_returned_are_kept_together() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    assert turns(HELLO[0], asked, {"role": "tool", "tool_call_id": "c1", "content": "2"})[1:] == (
        ChatMessage("assistant", "", "hm", (Call("c1", "add", '{"a": 1}'),)),
        ChatMessage("tool", "2", call_id="c1", name="add"),
    )


def test_tools_and_who_may_call_them() -> None:
    function = {"name": "add", "description": "Adds", "parameters": {"type": "object"}}
    asked = talk(
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "add"}},
        parallel_tool_calls=False,
    )
    assert asked.tools == (Tool("add", "Adds", {"type": "object"}),)
    assert (asked.tool_choice, asked.parallel) == ("add", False)
    assert [talk(tool_choice=choice).tool_choice for choice in (None, "none")] == ["auto", "none"]


def test_custom_tools_are_functions_of_one_string_and_hosted_tools_are_left_out() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: X"}}
    custom = {"type": "custom", "custom": {"name": "patch", "description": "Edits", "format": grammar}}
    asked = talk(
        tools=[{"type": "web_search"}, custom], tool_choice={"type": "custom", "custom": {"name": "patch"}}
    )
    [tool] = asked.tools
    assert (tool.name, tool.description, asked.tool_choice) == ("patch", "Edits", "patch")
    assert tool.parameters is not None
    text = tool.parameters["properties"]["input"]
    assert text["type"] == "string"
    assert text["description"].endswith("lark grammar:\nstart: X")


def test_a_custom_call_is_a_call_with_one_string() -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'a "b"\n'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert turns(HELLO[0], asked, {"role": "tool", "tool_call_id": "c1", "content": "2"})[1:] == (
        ChatMessage("assistant", "", "", (Call("c1", "patch", '{"input": "a \\"b\\"\\n"}'),)),
        ChatMessage("tool", "2", call_id="c1", name="patch"),
    )


def test_how_much_it_thinks_goes_to_the_template() -> None:
    assert (talk().thinking, talk(reasoning_effort="none").thinking) == (None, False)
    asked = talk(reasoning_effort="high", chat_template_kwargs={"style": 2})
    assert (asked.thinking, asked.template_options) == (True, {"reasoning_effort": "high", "style": 2})
    assert refusal(chat_template_kwargs={"messages": []}).param == "chat_template_kwargs.messages"


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]), ("function_call", {"name": "f"}), ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
    ],
)  # fmt: skip
def test_what_is_understood_but_not_done_is_never_passed_over(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert (error.code, error.param) == (Code.NOT_SUPPORTED, field)
    assert error.detail.startswith(f"{field} {json.dumps(value)} is ")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{}]}, "tools[0].type", Code.BAD_REQUEST),
        ({"tools": [{"type": "function"}]}, "tools[0].function", Code.BAD_REQUEST),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", Code.BAD_REQUEST),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", Code.BAD_REQUEST),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice",
            Code.NOT_SUPPORTED,
        ),
        ({"tool_choice": "required"}, "tool_choice", Code.BAD_REQUEST),
        ({"tool_choice": {"type": "function"}}, "tool_choice", Code.BAD_REQUEST),
        ({"tool_choice": "perhaps"}, "tool_choice", Code.BAD_REQUEST),
        ({"tool_choice": {"type": "function", "name": "auto"}}, "tool_choice", Code.BAD_REQUEST),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", Code.BAD_REQUEST),
    ],
)
def test_wrong_tools_are_named(fields: dict[str, Any], param: str, code: Code) -> None:
    error = refusal(**fields)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", "hello"), ("messages", None), ("model", 5), ("stream", "yes"),
        ("stream", 1), ("stream_options", []), ("max_tokens", 0), ("max_tokens", "10"), ("max_tokens", 1.5),
        ("max_tokens", True), ("max_completion_tokens", -1), ("temperature", -0.1), ("temperature", 2.1),
        ("temperature", "hot"), ("top_p", 1.1), ("top_k", -2), ("min_p", -1), ("seed", "x"), ("n", 0),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("logprobs", 1),
        ("top_logprobs", 21), ("stop", 5), ("logit_bias", []), ("tools", {}), ("tool_choice", 5),
        ("response_format", "json"), ("temperature", float("nan")),
        ("n", 1.5), ("n", True), ("seed", 1.5), ("seed", True), ("ignore_eos", 1), ("min_tokens", "5"),
        ("xtc_threshold", "x"), ("repetition_penalty", float("inf")),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert error.code == Code.BAD_REQUEST
    assert error.param == field
    assert error.detail.startswith(f"{field} ")
    assert str(json.dumps(value)) in error.detail


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hello", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
        ({"role": "king", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_a_wrong_message_is_named(message: Any, param: str) -> None:
    error = refusal(messages=[message])
    assert (error.code, error.param) == (Code.BAD_REQUEST, param)


def test_a_long_value_is_not_sent_back() -> None:
    assert len(refusal(model=["x" * 10_000]).detail) < 200

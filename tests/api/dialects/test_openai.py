from __future__ import annotations

import json
from typing import Any

import pytest

from mlxtp.api.adapter import About, error_status
from mlxtp.api.backend import StreamEnd
from mlxtp.api.dialects import openai
from mlxtp.api.dialects.openai import ChunkWriter
from mlxtp.api.sampling import SETTINGS
from mlxtp.errors import Code, GroupError, LinkError, LocalProtocolError, ModelError, RequestError
from mlxtp.text.conversation import Conversation, GenerationOptions, GenerationRequest
from mlxtp.text.tokenizer import Name
from mlxtp.text.transcript import ContentDelta, Finish, WholeAnswer

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


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"max_tokens": 5}, 5), ({"max_tokens": -1}, None), ({"max_completion_tokens": -1}, None),
     ({"n_predict": 7}, 7), ({"n_predict": -1}, None), ({"max_tokens": 5, "n_predict": 7}, 5)],
)  # fmt: skip
def test_a_limit_of_minus_1_is_none_and_has_another_name(fields: dict[str, Any], limit: int | None) -> None:
    assert parse(**fields).options.max_tokens == limit


def test_what_a_limit_may_be_is_told() -> None:
    for value in (0, -2, 2**31):
        error = refusal(max_tokens=value)
        assert error.detail == f"max_tokens should be from 1 to {2**31 - 1}, or -1, got {value}"


def test_other_names_of_settings() -> None:
    assert parse(repeat_penalty=1.5).options.settings == {"repetition_penalty": 1.5}
    assert parse(n_cmpl=2).options.n == 2


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("n", 1, 16), ("min_tokens", 0, 2**31 - 1), ("temperature", 0, 2),
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


def test_how_much_it_thinks_goes_to_the_template() -> None:
    assert (talk().thinking, talk(reasoning_effort="none").thinking) == (None, False)
    asked = talk(reasoning_effort="high", chat_template_kwargs={"style": 2})
    assert (asked.thinking, asked.template_options) == (True, {"reasoning_effort": "high", "style": 2})
    assert refusal(chat_template_kwargs={"messages": []}).param == "chat_template_kwargs.messages"


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


def test_a_hosted_tool_is_never_chosen() -> None:
    error = refusal(tools=[{"type": "web_search"}], tool_choice={"type": "web_search"})
    assert (error.code, error.param) == (Code.NOT_SUPPORTED, "tool_choice")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "auto"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ],
)
def test_wrong_tools_are_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.param, error.code) == (param, Code.BAD_REQUEST)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", "hello"), ("messages", None), ("model", 5), ("stream", "yes"), ("stream", 1),
        ("stream_options", []), ("max_tokens", "10"), ("max_tokens", 1.5), ("max_tokens", True),
        ("max_completion_tokens", -2), ("temperature", "hot"), ("temperature", float("nan")), ("seed", "x"),
        ("seed", 1.5), ("seed", True), ("logprobs", 1), ("top_logprobs", 21), ("stop", 5), ("logit_bias", []),
        ("tools", {}), ("tool_choice", 5), ("response_format", "json"), ("n", 1.5), ("n", True),
        ("ignore_eos", 1), ("min_tokens", "5"), ("xtc_threshold", "x"), ("repetition_penalty", float("inf")),
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
        ({"role": "user"}, "messages[0].content"),
        (HELLO[0] | {"tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls"),
    ],
)
def test_a_wrong_message_is_named(message: Any, param: str) -> None:
    error = refusal(messages=[message])
    assert (error.code, error.param) == (Code.BAD_REQUEST, param)


def test_a_long_value_is_not_sent_back() -> None:
    assert len(refusal(model=["x" * 10_000]).detail) < 200


HEAD = {"id": 'chatcmpl-i"\\u0000', "created": 5, "model": '"m\0'}


def name_of(token: int) -> Name:
    return (f'"{token}', (token,)) if token < 10 else ("<end>", None)


def about(n: int = 1, logprobs: int = -1, prompts: tuple[int, ...] = (7,)) -> About:
    ask = GenerationRequest(None, Conversation(()), GenerationOptions(n=n, logprobs=logprobs))
    return About('i"\\u0000', 5.9, '"m\0', prompts, (), name_of, ask)


def chunks_of(written: bytes) -> list[Any]:
    assert written.isascii()
    events = written.split(b"\n\n")
    assert events.pop() == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    return [json.loads(event[6:]) for event in events]


def test_chunks_are_ascii_and_decode_to_what_went_in() -> None:
    text = 'a"\n\u2028😀\\%b%d\0'
    for include_usage in (True, False):
        _, chunk = chunks_of(ChunkWriter(about(12), include_usage).write(ContentDelta(11, text)))
        choice = {"index": 11, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        usage = {"usage": None} if include_usage else {}
        assert chunk == HEAD | usage | {"object": "chat.completion.chunk", "choices": [choice]}


def whole() -> WholeAnswer:
    made = WholeAnswer()
    made.see(Finish(0, "stop", StreamEnd("stop", 1)))
    return made


def test_no_scores_are_not_the_same_as_none_wanted() -> None:
    bodies = [openai.completion_body(about(2, logprobs), [whole(), whole()]) for logprobs in (0, -1)]
    for body, expected in zip(bodies, ({"content": [], "refusal": None}, None), strict=True):
        assert [choice["logprobs"] for choice in body["choices"]] == [expected] * 2
        assert [choice["index"] for choice in body["choices"]] == [0, 1]


def test_a_lost_group_invites_to_come_back_a_bug_does_not() -> None:
    errors = [GroupError("x"), LinkError("x"), ModelError("x"), LocalProtocolError("x"), RequestError("x")]
    assert [error_status(error) for error in errors] == [503, 503, 500, 500, 400]

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxtp.api import openai
from mlxtp.api.backend import ModelInfo
from mlxtp.errors import Code, RequestError

HELLO = [{"role": "user", "content": "hello"}]


def parse(**fields: Any) -> openai.ChatRequest:
    return openai.parse_chat(json.dumps({"messages": HELLO} | fields).encode())


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        openai.chat_messages(parse(**fields).messages)
    assert caught.value.status == 400
    return caught.value


def messages(*given: dict[str, Any]) -> list[dict[str, str]]:
    return openai.chat_messages(parse(messages=list(given)).messages)


def info(id_: str = "org/tiny", *aliases: str, context: int = 100) -> ModelInfo:
    return ModelInfo(id_, aliases, Path(), context, 1234, (1,), 50)


# --- what is accepted -------------------------------------------------------------------------------------


def test_unknown_fields_are_ignored() -> None:
    assert parse(user="me", cache_prompt=True, keep_alive=5, messages=[HELLO[0] | {"x": 1}]).messages


def test_null_is_absent_in_every_optional_field() -> None:
    optional = set(openai.ChatRequest.model_fields) - {"messages"}
    assert parse(**dict.fromkeys(optional)) == parse()


def test_what_asks_for_nothing_is_accepted() -> None:
    neutral = {
        "n": 1, "stop": [], "tools": [], "functions": [], "tool_choice": "auto", "function_call": "none",
        "response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0, "logit_bias": {},
    }  # fmt: skip
    assert parse(**neutral)
    assert parse(stop="")
    assert parse(tool_choice="none")


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
        assert getattr(parse(**{field: value}), field) == value
    for value in (least - 1, most + 1):
        error = refusal(**{field: value})
        assert error.param == field
        assert error.detail == f"{field} should be from {least} to {most}, got {json.dumps(value)}"


def test_alternatives_without_log_probabilities_are_refused() -> None:
    assert parse(logprobs=True, top_logprobs=20).top_logprobs == 20
    for logprobs in (None, False):
        error = refusal(logprobs=logprobs, top_logprobs=2)
        assert (error.code, error.param) == (Code.BAD_REQUEST, "top_logprobs")


def test_the_two_names_of_the_budget_are_one_setting() -> None:
    assert parse().budget is None
    assert parse(max_tokens=5).budget == 5
    assert parse(max_completion_tokens=6).budget == 6
    assert parse(max_tokens=5, max_completion_tokens=5).budget == 5
    assert refusal(max_tokens=5, max_completion_tokens=6).param == "max_tokens"


def test_developer_is_system_and_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    assert messages(
        {"role": "developer", "content": "be"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": []},
    ) == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
    ]


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{}]), ("functions", [{"name": "f"}]), ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}), ("function_call", {"name": "f"}),
    ],
)  # fmt: skip
def test_what_is_understood_but_not_done_is_never_passed_over(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert (error.code, error.param) == (Code.NOT_SUPPORTED, field)
    assert f"{field} {json.dumps(value)} is not supported yet; " in error.detail


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []), ("messages", "hello"), ("messages", None), ("model", 5), ("stream", "yes"),
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
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
    ],
)
def test_a_wrong_message_is_named(message: Any, param: str) -> None:
    error = refusal(messages=[message])
    assert (error.code, error.param) == (Code.BAD_REQUEST, param)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "'tool'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "tool calls"),
    ],
)
def test_a_message_that_asks_for_more_than_text(message: Any, named: str) -> None:
    error = refusal(messages=[HELLO[0], message])
    assert error.code == Code.NOT_SUPPORTED
    assert named in error.detail
    assert (error.param or "").startswith("messages[1]")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"[1]", b'"x"', b"null", b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
     b"[" * 10_000],
)  # fmt: skip
def test_a_body_that_is_no_request(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        openai.parse_chat(body)
    assert caught.value.status == 400
    assert len(caught.value.detail) < 300


def test_a_long_value_is_not_sent_back() -> None:
    assert len(refusal(model=["x" * 10_000]).detail) < 200


# --- models and budgets -----------------------------------------------------------------------------------


def test_a_model_is_found_by_id_then_alias_then_default() -> None:
    models = [info("a", "b"), info("b", "c")]
    names = ["a", "b", "c", "default", None, ""]
    assert [openai.find_model(name, models).id for name in names] == ["a", "b", "b", "a", "a", "a"]


def test_an_unknown_model_is_a_404_that_says_what_there_is() -> None:
    with pytest.raises(RequestError, match=r'"gpt-9" does not exist here; available: org/tiny') as caught:
        openai.find_model("gpt-9", [info()])
    assert (caught.value.status, caught.value.code) == (404, Code.MODEL_NOT_FOUND)
    with pytest.raises(RequestError):
        openai.find_model("default", [])


def test_the_budget_is_what_was_asked_or_what_fits() -> None:
    model = info(context=100)
    assert openai.token_budget(None, [1] * 40, model) == 60
    assert openai.token_budget(None, [1] * 99, model) == 1
    assert openai.token_budget(60, [1] * 40, model) == 60


@pytest.mark.parametrize(
    ("asked", "prompt", "param"), [(61, 40, "max_tokens"), (None, 100, "messages"), (1, 120, "messages")]
)
def test_more_than_the_context_is_refused_with_the_numbers(
    asked: int | None, prompt: int, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        openai.token_budget(asked, [1] * prompt, info(context=100))
    assert (caught.value.code, caught.value.param) == (Code.CONTEXT_OVERFLOW, param)
    for number in (prompt, prompt + (asked or 1), 100):
        assert str(number) in caught.value.detail


def test_a_token_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(RequestError, match="token 50"):
        openai.token_budget(5, [1, 50], info())
    with pytest.raises(RequestError, match="empty prompt"):
        openai.token_budget(5, [], info())

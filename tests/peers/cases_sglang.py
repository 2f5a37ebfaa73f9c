"""What SGLang's tests of its OpenAI server and TGI's integration tests ask of a server, in own words."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import openai
import pytest
import requests
from stand_in import get_tokenizer

PROMPT = "The capital of France is"
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Repeat exactly: PARIS"}]


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


PLACE = schema(name={"type": "string", "maxLength": 9}, population={"type": "integer", "maximum": 999})
UNITS = {"type": "string", "enum": ["celsius", "fahrenheit"]}
ASKS = {"name": "get_current_weather", "parameters": schema(city={"type": "string"}, unit=UNITS)}
WEATHER = {"type": "function", "function": ASKS}
WHICH = {"type": "function", "function": {"name": "get_current_weather"}}


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": "tiny", "messages": ASKED, "temperature": 0, "max_tokens": 64} | fields
    return client.chat.completions.create(**given)


GRID = list(product((False, True), (None, 5), (False, True), (1, 2), (False, True), (False, True)))


@pytest.mark.parametrize(("echo", "logprobs", "several", "n", "ids", "stream"), GRID)
def test_completion(
    client: Any, echo: bool, logprobs: Any, several: bool, n: int, ids: bool, stream: bool
) -> None:
    tokens = get_tokenizer().encode(PROMPT)
    prompt: Any = tokens if ids else PROMPT
    prompts = 2 if several else 1
    found = client.completions.create(
        model="tiny", prompt=[prompt] * 2 if several else prompt, temperature=0, max_tokens=16,
        echo=echo, logprobs=logprobs, n=n, stream=stream,
        stream_options={"include_usage": True} if stream else None,
    )  # fmt: skip
    parts = list(found) if stream else [found]
    texts = [""] * n * prompts
    for choice in (choice for part in parts for choice in part.choices):
        texts[choice.index] += choice.text
        if logprobs and choice.text:
            assert choice.logprobs.tokens
            assert all(isinstance(each, dict) and each for each in choice.logprobs.top_logprobs[1:])
    assert all(text.startswith(PROMPT) == echo for text in texts)
    usage = parts[-1].usage
    assert usage.prompt_tokens in {len(tokens) * prompts, (len(tokens) + 1) * prompts}
    assert usage.completion_tokens > 0
    assert parts[0].id
    assert parts[0].created


@pytest.mark.parametrize(("logprobs", "n", "stream"), list(product((None, 5), (1, 2), (False, True))))
def test_chat(client: Any, logprobs: Any, n: int, stream: bool) -> None:
    fields = {"n": n, "stream": stream, "logprobs": bool(logprobs), "top_logprobs": logprobs}
    if not stream:
        answer = chat(client, **fields)
        assert [choice.message.role for choice in answer.choices] == ["assistant"] * n
        assert all(isinstance(choice.message.content, str) for choice in answer.choices)
        scored = [each for choice in answer.choices for each in (choice.logprobs.content if logprobs else ())]
    else:
        parts = list(chat(client, **fields, stream_options={"include_usage": True}))
        choices = [choice for part in parts for choice in part.choices]
        assert {choice.index for choice in choices if choice.delta.role == "assistant"} == set(range(n))
        assert sum(bool(choice.finish_reason) for choice in choices) == n
        assert parts[-1].usage.total_tokens > 0
        scored = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    assert bool(scored) == bool(logprobs)
    assert {len(each.top_logprobs) for each in scored} <= {5}


def test_usage_has_reasoning_tokens(client: Any) -> None:
    assert chat(client).usage.completion_tokens_details.reasoning_tokens == 0


NAMED = {"name": "place", "schema": PLACE}
FORMATS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": True}}},
    "tgi-object": {"response_format": {"type": "json_object", "value": PLACE}},
    "tgi-json": {"response_format": {"type": "json", "value": PLACE}},
    "tgi-schema": {"response_format": {"type": "json_schema", "value": NAMED}},
    "field": {"json_schema": PLACE},
    "regex": {"regex": r'\{"name": "[A-Z]{1,9}", "population": [0-9]{1,3}\}'},
    "ebnf": {"ebnf": 'root ::= "{\\"name\\": \\"A\\", \\"population\\": " [0-9] "}"'},
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_grammar_holds(client: Any, form: str) -> None:
    found = json.loads(chat(client, extra_body=FORMATS[form]).choices[0].message.content)
    assert isinstance(found["name"], str)
    assert isinstance(found["population"], int)


@pytest.mark.parametrize("fields", [{"regex": "("}, {"ebnf": "root ::= ("}, {"json_schema": "no schema"}])
def test_a_bad_grammar_is_refused(client: Any, fields: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, extra_body=fields)


@pytest.mark.parametrize("stream", [False, True])
def test_the_last_answer_is_continued(client: Any, stream: bool) -> None:
    asked = {"role": "user", "content": "Repeat exactly: FALCON-MERCURY"}
    messages = [asked, {"role": "assistant", "content": "FALCON-"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    found = chat(client, messages=messages, stream=stream, extra_body=flags)
    choices = [part.choices[0] for part in (found if stream else [found])]
    said = [(each.delta if stream else each.message).content or "" for each in choices]
    assert "".join(said) == "MERCURY"


@pytest.mark.parametrize("field", ["frequency_penalty", "presence_penalty", "top_p", "seed"])
def test_samplers_are_taken(client: Any, field: str) -> None:
    assert isinstance(chat(client, **{field: 1}).choices[0].message.content, str)


@pytest.mark.parametrize("stop", ["R", ["IS", "R"]])
def test_a_stop_ends_the_answer_before_it(client: Any, stop: Any) -> None:
    [choice] = chat(client, stop=stop).choices
    assert (choice.message.content, choice.finish_reason) == ("PA", "stop")


def test_what_stopped_it_is_told(client: Any) -> None:
    [choice] = chat(client, stop=["R"]).choices
    assert getattr(choice, "matched_stop", None) == "R" or getattr(choice, "stop_reason", None) == "R"


@pytest.mark.parametrize("length", [1, 5])
def test_max_tokens_end_it(client: Any, length: int) -> None:
    answer = chat(client, max_tokens=length, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", length)


def test_without_end_tokens_it_goes_on(client: Any) -> None:
    assert chat(client, max_tokens=40, extra_body={"ignore_eos": True}).usage.completion_tokens == 40


def test_a_bias_forces_a_token(client: Any) -> None:
    token = get_tokenizer().encode("Z", add_special_tokens=False)[-1]
    assert "Z" in chat(client, logit_bias={str(token): 100}, max_tokens=5).choices[0].message.content


LONG = {"messages": [{"role": "user", "content": "x " * 40000}]}
BAD = [LONG, {"top_p": 2}, {"temperature": -1}, {"messages": []}, {"n": 0}, {"max_tokens": 0}]


@pytest.mark.parametrize("fields", BAD)
def test_what_cannot_be_is_refused(client: Any, fields: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, **fields)


def test_models(client: Any) -> None:
    assert "tiny" in {model.id for model in client.models.list()}
    found = client.models.retrieve("tiny")
    assert found.id == found.root == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("absent")


@pytest.mark.parametrize("path", ["tokenize", "v1/tokenize"])
def test_tokens_are_counted(url: str, path: str) -> None:
    answer = requests.post(f"{url}/{path}", json={"model": "tiny", "prompt": PROMPT}, timeout=60).json()
    assert answer["count"] == len(answer["tokens"]) > 0
    assert answer["max_model_len"] > 0


@pytest.mark.parametrize(("choice", "stream"), list(product(["auto", "required", WHICH], (False, True))))
def test_a_tool_is_called(client: Any, choice: Any, stream: bool) -> None:
    messages = [{"role": "user", "content": "What is the weather in Dallas, in fahrenheit?"}]
    tools = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 200}
    found = chat(client, messages=messages, stream=stream, **tools)
    if stream:
        choices = [choice for part in found for choice in part.choices]
        pieces = [each for choice in choices for each in choice.delta.tool_calls or ()]
        name, words = pieces[0].function.name, "".join(each.function.arguments or "" for each in pieces)
        reason = choices[-1].finish_reason
    else:
        [call] = found.choices[0].message.tool_calls
        name, words, reason = call.function.name, call.function.arguments, found.choices[0].finish_reason
    assert (name, reason) == ("get_current_weather", "tool_calls")
    assert set(json.loads(words)) == {"city", "unit"}


@pytest.mark.parametrize("fields", [{"tool_choice": "none", "tools": [WEATHER]}, {}])
def test_no_tool_is_called(client: Any, fields: Any) -> None:
    assert not chat(client, **fields).choices[0].message.tool_calls


ABSENT = {"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [WEATHER]}
WRONG = [{"tool_choice": "required"}, {"tool_choice": WHICH}, {"tools": [{"type": "function"}]}, ABSENT]


@pytest.mark.parametrize("fields", WRONG)
def test_a_wrong_choice_is_refused(client: Any, fields: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, **fields)


def test_usage_of_each_chunk(client: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = list(chat(client, stream=True, stream_options=options))
    assert all(part.usage for part in parts)

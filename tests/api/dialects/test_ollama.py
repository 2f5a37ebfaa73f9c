"""Ollama's own client library, and a strict reader of every line, against a real server on loopback."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from pydantic import BaseModel

from mlxtp.api.backend import (
    DeploymentHealth,
    Health,
    ModelInfo,
    Sampling,
    Shaping,
    StreamEnd,
    TokenEvent,
    Tokens,
)
from mlxtp.api.catalog import read_card
from mlxtp.api.dialects.ollama_request import Arrival, parse_chat
from mlxtp.errors import Code, GroupError, RequestError
from mlxtp.text.conversation import Conversation
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text

from ..conftest import WAIT_S, FakeBackend, Server, byte_level, save, says, says_scored, score, serving, then
from ..test_app import fail_with
from . import ollama_shapes as shapes

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ANSWER = " The 日本語 world 😀\n\u2028end"
CONTEXT, VOCABULARY = 4096, 344
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
    "{% if reasoning_effort %}<|system|>effort {{ reasoning_effort }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}"
    "<tool_call>{{ tool_call.name }} {{ tool_call.arguments | tojson }} {{ call.id }}</tool_call>{% endfor %}"
    "{% if m.role == 'tool' %}={{ m.name }} {{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "quantization": {"group_size": 64, "bits": 4},
}


@dataclass
class Backend(FakeBackend):
    """A model that thinks and calls tools, in a folder of its own."""

    folder: Path = Path()
    memory: tuple[int, ...] = ()

    def models(self) -> tuple[ModelInfo, ...]:
        if not self.ready:
            return ()
        aliases = ("thinker", "tagged:latest")
        made, features = 1_700_000_000, self.loaded_text.features
        model = ModelInfo(
            "org/thinker", aliases, self.folder, CONTEXT, made, (1,), VOCABULARY, self.defaults, features
        )
        return (model,)

    def health(self, model: str = "") -> Health:
        ranks = tuple({"rank": i, "memory_bytes": each} for i, each in enumerate(self.memory))
        state, reason = ("ready", None) if self.ready else ("loading", "30 % read")
        return Health(state, 1, 1, "ring", "org/thinker", reason, self.ready, 0, ranks, "", self.deployments)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(MARKERS)
    folder = save(tokenizer, tmp_path_factory.mktemp("thinker"), TEMPLATE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model-1.safetensors").write_bytes(b"x" * 600)
    (folder / "model-2.safetensors").write_bytes(b"x" * 400)
    index = {"metadata": {"total_size": 1000, "total_parameters": 8_030_261_248}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    backend = Backend(Text(LocalRenderer.load(folder)), folder=folder)
    with serving(backend, tokenizer, keep_alive_s=0.5, retry_after_s=7) as server:
        yield server


@pytest.fixture
def thinker(thinking: Server) -> Server:
    """The running server with a fresh script."""
    backend = thinking.backend
    assert isinstance(backend, Backend)
    backend.__init__(backend.loaded_text, folder=backend.folder)  # type: ignore[misc]
    return thinking


@pytest.fixture
def client(thinker: Server) -> ollama.Client:
    return client_of(thinker)


def client_of(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url, timeout=WAIT_S, trust_env=False)


def post(server: Server, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
    if body is not None:
        kwargs["json"] = body
    return httpx.post(f"{server.url}/api/{path}", timeout=WAIT_S, trust_env=False, **kwargs)


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}/api/{path}", timeout=WAIT_S, trust_env=False)


def prompt(server: Server) -> str:
    """Return the model's prompt."""
    return str(server.tokenizer.decode(server.backend.request.tokens, skip_special_tokens=False))


def error_of(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return shapes.OllamaError.model_validate_json(response.content).error


SHAPES: dict[str, tuple[type[BaseModel], type[shapes.OllamaEnd]]] = {
    "chat": (shapes.OllamaChatLine, shapes.OllamaChatAnswer),
    "generate": (shapes.OllamaGenerateLine, shapes.OllamaGenerateAnswer),
}
COUNTS = {f"{part}_duration" for part in ("total", "load", "prompt_eval", "eval")}
COUNTS |= {"prompt_eval_count", "eval_count"}


def streamed(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """All lines of a complete answer, read strictly."""
    response = post(server, path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.content.isascii()
    *lines, end = response.text.split("\n")
    assert end == ""
    line, _ = SHAPES[path]
    read = [*[line.model_validate_json(each) for each in lines[:-1]], whole(path, lines[-1])]
    assert {each.model for each in read} == {body.get("model", "org/thinker")}  # type: ignore[attr-defined]
    return read


def whole(path: str, text: str) -> Any:
    """An answer, or the end of one, with all of its numbers."""
    answer = SHAPES[path][1].model_validate_json(text)
    assert answer.model_fields_set >= COUNTS
    for name in ("total_duration", "prompt_eval_count", "prompt_eval_duration", "eval_duration"):
        assert getattr(answer, name) > 0
    return answer


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "thinker", "messages": HELLO} | fields


# --- chat -------------------------------------------------------------------------------------------------


def test_a_whole_answer(thinker: Server, client: ollama.Client) -> None:
    tokens = thinker.ids(ANSWER)
    thinker.backend.script = says([*tokens, 1], step=3)
    answer = client.chat(model="thinker", messages=[{"role": "system", "content": "be"}, *HELLO])
    assert answer.message == ollama.Message(role="assistant", content=ANSWER)
    assert (answer.model, answer.done, answer.done_reason) == ("thinker", True, "stop")
    assert prompt(thinker) == "<s><|system|>be<|user|>hello<|assistant|>"
    request = thinker.backend.request
    assert (answer.prompt_eval_count, answer.eval_count) == (len(request.tokens), len(tokens) + 1)
    assert request.max_tokens == CONTEXT - len(request.tokens)
    assert whole("chat", post(thinker, "chat", ask(stream=False)).text).message.content == ANSWER


def test_a_streamed_answer(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.script = says(thinker.ids(ANSWER), reason="length")
    parts = list(client.chat(model="thinker", messages=HELLO, stream=True))
    assert "".join(part.message.content or "" for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [part.done_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert parts[-1].eval_count == len(thinker.ids(ANSWER))
    assert len(parts) > 5


def test_it_streams_unless_told_otherwise(thinker: Server) -> None:
    thinker.backend.script = says(thinker.ids(ANSWER))
    for body in (ask(), ask(stream=True), ask(stream=None)):
        *parts, last = streamed(thinker, "chat", body)
        assert "".join(part.message.content for part in parts) == ANSWER
        assert last.message == shapes.OllamaSaid(role="assistant", content="")
    assert post(thinker, "chat", ask(stream=False)).headers["content-type"] == "application/json"


def test_an_empty_answer_is_one_line(thinker: Server) -> None:
    thinker.backend.script = says([1])
    [last] = streamed(thinker, "chat", ask())
    assert (last.done_reason, last.eval_count) == ("stop", 1)


@pytest.mark.parametrize("stream", [True, False])
def test_durations_are_measured(thinker: Server, stream: bool) -> None:
    tokens = thinker.ids("hello wide world")
    before_s, between_s = 0.2, 0.1

    async def slow() -> AsyncIterator[TokenEvent]:
        await asyncio.sleep(before_s)
        yield Tokens(tuple(tokens[:1]))
        await asyncio.sleep(between_s)
        yield Tokens(tuple(tokens[1:]))
        yield StreamEnd("stop", len(tokens))

    thinker.backend.script = slow
    began = time.perf_counter()
    last = [json.loads(line) for line in post(thinker, "chat", ask(stream=stream)).text.splitlines()][-1]
    took_ns = (time.perf_counter() - began) * 1e9
    assert last["prompt_eval_duration"] >= before_s * 0.99e9
    assert last["eval_duration"] >= between_s * 0.99e9
    assert last["prompt_eval_duration"] + last["eval_duration"] == last["total_duration"]
    assert last["total_duration"] <= took_ns
    assert last["load_duration"] == 0


def test_messages_without_content_and_roles_in_capitals(thinker: Server) -> None:
    thinker.backend.script = says([1])
    messages = [{"role": "User", "content": "a"}, {"role": "assistant", "thinking": "hm"}, {"role": "user"}]
    streamed(thinker, "chat", ask(messages=messages))
    assert prompt(thinker) == "<s><|user|>a<|assistant|>[hm]<|user|><|assistant|>"


# --- generate ---------------------------------------------------------------------------------------------


def test_a_prompt_is_answered(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.script = says(thinker.ids(ANSWER))
    answer = client.generate(model="thinker", prompt="hello", system="be")
    assert answer.response == ANSWER
    assert (answer.model, answer.done, answer.done_reason) == ("thinker", True, "stop")
    assert answer.context is None
    assert prompt(thinker) == "<s><|system|>be<|user|>hello<|assistant|>"


def test_a_prompt_is_answered_in_a_stream(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.script = says(thinker.ids(ANSWER), reason="length")
    parts = list(client.generate(model="thinker", prompt="hello", stream=True))
    assert "".join(part.response or "" for part in parts) == ANSWER
    assert parts[-1].done_reason == "length"
    *lines, last = streamed(thinker, "generate", {"model": "thinker", "prompt": "hello"})
    assert "".join(line.response for line in lines) == ANSWER
    assert last.response == ""


def test_a_raw_prompt_is_continued(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.script = says(thinker.ids(" world<think>"))
    assert client.generate(model="thinker", prompt="hello", raw=True).response == " world"
    assert prompt(thinker) == "<s>hello"


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "}"), ("template", "{{ .Prompt }}"), ("context", [1, 2, 3]), ("images", ["aGVsbG8="])],
)
def test_what_cannot_be_done_to_a_prompt_is_refused_by_name(
    thinker: Server, client: ollama.Client, field: str, value: Any
) -> None:
    with pytest.raises(ollama.ResponseError, match=rf"^{field} is not supported") as refused:
        client.generate(model="thinker", prompt="hello", **{field: value})
    assert refused.value.status_code == 400
    thinker.backend.script = says([1])
    streamed(thinker, "generate", {"model": "thinker", "prompt": "hello", field: type(value)()})


def test_a_raw_prompt_takes_neither_system_nor_thinking(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"^system .*raw"):
        client.generate(model="thinker", prompt="hello", raw=True, system="be")
    with pytest.raises(ollama.ResponseError, match=r"^think .*raw"):
        client.generate(model="thinker", prompt="hello", raw=True, think=True)


# --- options ----------------------------------------------------------------------------------------------


def test_options_reach_the_engine(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.script = says([1])
    penalties = {"repeat_penalty": 1.1, "presence_penalty": 0.25, "frequency_penalty": -0.5}
    unused = {"num_ctx": 1_000_000, "mirostat": 1, "num_gpu": 99}
    drawn = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 7, "num_predict": 12}
    client.chat(model="thinker", messages=HELLO, options=ollama.Options(**drawn, **penalties, **unused))
    request = thinker.backend.request
    assert request.sampling == Sampling(0.5, 0.9, 40, seed=7)
    assert request.shaping == Shaping(1.1, 0.25, -0.5)
    assert request.max_tokens == 12
    streamed(thinker, "chat", ask(options={"min_p": 0.1, "top_k": 40.0, "unheard_of": [1], "seed": None}))
    again = thinker.backend.requests[1].sampling
    assert (again.min_p, again.top_k) == (0.1, 40)


@pytest.mark.parametrize("limit", [-1, -2, 0, None])
def test_less_than_one_token_is_no_limit(thinker: Server, client: ollama.Client, limit: int | None) -> None:
    thinker.backend.script = says([1])
    client.generate(model="thinker", prompt="hello", options={"num_predict": limit})
    assert thinker.backend.request.max_tokens == CONTEXT - len(thinker.backend.request.tokens)


def test_a_seed_of_minus_one_is_a_fresh_one(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.script = says([1])
    for _ in range(2):
        client.generate(model="thinker", prompt="hello", options={"seed": -1})
    first, second = thinker.backend.requests
    assert first.sampling.seed != second.sampling.seed


@pytest.mark.parametrize("stop", [" wide", [" wide", "nowhere"], ["", " wide"]])
def test_a_stop_string_ends_the_answer(thinker: Server, stop: Any) -> None:
    thinker.backend.script = says(thinker.ids("hello wide world"), reason="length")
    *parts, last = streamed(thinker, "chat", ask(options={"stop": stop}))
    assert "".join(part.message.content for part in parts) == "hello"
    assert last.done_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"options": {"temperature": -1}}, "options.temperature should be from 0 to 100, got -1"),
        ({"options": {"top_p": "x"}}, 'options.top_p should be a valid number, got "x"'),
        ({"options": {"top_k": 1.5}}, "options.top_k should be a valid integer"),
        ({"options": {"min_p": 2}}, "options.min_p should be from 0 to 1, got 2"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty should be from 0.01 to 100, got 0"),
        ({"options": {"stop": [1]}}, "options.stop should be a string or a list of strings, got [1]"),
        ({"options": {"stop": ["a"] * 17}}, "stop has 17 strings; it may have 0 to 16"),
        ({"options": []}, "options should be an object, got []"),
        ({"keep_alive": "soon"}, 'keep_alive should be a number of seconds or a duration such as "5m"'),
        ({"keep_alive": True}, "keep_alive should be"),
        ({"think": "hard"}, "think should be true, false or one of low, medium, high, max"),
        ({"format": "xml"}, 'format should be "json" or a JSON schema (an object), got "xml"'),
        ({"messages": [{"role": "robot", "content": "x"}]}, 'messages[0].role: "robot" is none of'),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: expected text or parts"),
        ({"messages": [*HELLO, {"role": "user", "images": ["aGk="]}]}, "messages[1].images is not supported"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name is missing"),
        ({"tools": [{"type": "web", "function": {"name": "a"}}]}, 'tools[0].type "web" is not supported'),
        ({"top_logprobs": 21}, "top_logprobs should be from 0 to 20, got 21"),
        ({"stream": "yes"}, 'stream should be a valid boolean, got "yes"'),
    ],
)
def test_a_wrong_field_is_named(thinker: Server, fields: dict[str, Any], said: str) -> None:
    assert said in error_of(post(thinker, "chat", ask(**fields)), 400)
    assert thinker.backend.requests == []


@pytest.mark.parametrize(
    ("keep_alive", "keep_s"),
    [
        (0, 0), (0.0, 0), (-1, -1), (-0.5, -1), (300, 300), (1.5, 1.5), ("0", 0), ("-0s", 0), ("5m", 300),
        ("-1m", -1), ("1h30m", 5400), ("1.5h", 5400), ("300ms", 0.3), ("+2s", 2), ("1µs", 1e-6), (1e300, -1),
        ("9999999h", -1), (None, None),
    ],
)  # fmt: skip
def test_how_long_the_model_stays_is_passed_on(thinker: Server, keep_alive: Any, keep_s: Any) -> None:
    thinker.backend.script = says([1])
    expected = keep_s if keep_s is None else pytest.approx(keep_s)
    assert len(streamed(thinker, "chat", ask(keep_alive=keep_alive))) == 1
    said = post(thinker, "generate", {"model": "thinker", "prompt": "hi", "keep_alive": keep_alive})
    assert said.status_code == 200
    assert thinker.backend.kept == [expected, expected]


HUGE_CALL = {"function": {"name": "a", "arguments": {"b": "HUGE"}}}
CALLED_WITH_HUGE = {"role": "assistant", "tool_calls": [HUGE_CALL]}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("format", {"format": {"minimum": "HUGE"}}),
        (
            "tools[0].function.parameters",
            {"tools": [{"function": {"name": "a", "parameters": {"b": "HUGE"}}}]},
        ),
        ("messages[0].tool_calls[0].function.arguments", {"messages": [CALLED_WITH_HUGE]}),
    ],
)
def test_a_number_that_json_cannot_hold_is_refused(
    thinker: Server, field: str, fields: dict[str, Any]
) -> None:
    content = json.dumps(ask(**fields)).replace('"HUGE"', "1e999").encode()
    said = error_of(post(thinker, "chat", content=content), 400)
    assert said.startswith(f"{field} should have ordinary numbers only")


# --- formats ----------------------------------------------------------------------------------------------


class Place(BaseModel):
    name: str
    people: int


def test_an_answer_held_to_a_schema(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.script = says(thinker.ids('{"name": "Ulm", "people": 128928}'))
    answer = client.chat(model="thinker", messages=HELLO, format=Place.model_json_schema())
    assert Place.model_validate_json(answer.message.content or "") == Place(name="Ulm", people=128928)
    shaping = thinker.backend.request.shaping
    assert shaping.grammar_kind == "json_schema"
    schema = json.loads(shaping.grammar)
    assert schema["properties"].keys() == {"name", "people"}
    assert schema["additionalProperties"] is False


def test_an_answer_held_to_json(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.script = says(thinker.ids("{}"))
    assert client.generate(model="thinker", prompt="hello", format="json").response == "{}"
    client.generate(model="thinker", prompt="hello", format="")
    assert [each.shaping.grammar_kind for each in thinker.backend.requests] == ["json_schema", ""]


def test_a_refused_grammar_is_called_as_the_client_calls_it(thinker: Server) -> None:
    async def judge() -> None:
        raise RequestError("response_format is no grammar", Code.BAD_REQUEST)

    thinker.backend.judge = judge
    said = error_of(post(thinker, "chat", ask(format={"type": "nothing"})), 400)
    assert said == "format is no grammar"


# --- thinking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_what_it_thinks_is_told_apart(thinker: Server, client: ollama.Client, path: str) -> None:
    thinker.backend.script = says(thinker.ids("hello wide</think> world"))
    asked: dict[str, Any] = {"messages": HELLO} if path == "chat" else {"prompt": "hello"}
    answer = getattr(client, path)(model="thinker", think=True, **asked)
    parts = list(getattr(client, path)(model="thinker", think=True, stream=True, **asked))
    [first, second] = [thinker.tokenizer.decode(each.tokens, skip_special_tokens=False)
                       for each in thinker.backend.requests]  # fmt: skip
    assert first == second == "<s><|user|>hello<|assistant|><think>"
    if path == "chat":
        assert (answer.message.thinking, answer.message.content) == ("hello wide", "world")
        thoughts = [(part.message.thinking or "", part.message.content or "") for part in parts]
    else:
        assert (answer.thinking, answer.response) == ("hello wide", "world")
        thoughts = [(part.thinking or "", part.response or "") for part in parts]
    assert "".join(thought for thought, _ in thoughts) == "hello wide"
    assert "".join(text for _, text in thoughts) == "world"
    assert all(not thought or not text for thought, text in thoughts)
    streamed(thinker, path, {"model": "thinker", "think": True} | asked)


@pytest.mark.parametrize(
    ("think", "asked"),
    [
        ("low", "<s><|system|>effort low<|user|>hello<|assistant|><think>"),
        (False, "<s><|user|>hello<|assistant|>"),
    ],
)
def test_how_hard_to_think_goes_to_the_template(
    thinker: Server, client: ollama.Client, think: Any, asked: str
) -> None:
    thinker.backend.script = says([1])
    client.chat(model="thinker", messages=HELLO, think=think)
    assert prompt(thinker) == asked


def test_a_model_that_does_not_think_says_so(server: Server) -> None:
    client = client_of(server)
    for think in (True, "high"):
        with pytest.raises(ollama.ResponseError, match="does not support thinking") as refused:
            client.chat(model="tiny", messages=HELLO, think=think)
        assert refused.value.status_code == 400
    server.backend.script = says([1])
    assert client.chat(model="tiny", messages=HELLO, think=False).done
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.chat(model="other", messages=HELLO, think=True)


# --- tools ------------------------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second

    Returns:
        their sum
    """
    return a + b


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def test_a_function_is_called_and_its_result_answered(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.scripts = [says([*thinker.ids("so" + CALL), 1]), says([*thinker.ids("3"), 1])]
    messages: list[Any] = list(HELLO)
    answer = client.chat(model="thinker", messages=messages, tools=[add])
    assert (answer.done_reason, answer.message.content) == ("stop", "so")
    assert answer.message.tool_calls
    [call] = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1, "b": 2})
    offered = json.loads(prompt(thinker).split("<|system|>")[1].split("<|user|>")[0])
    assert offered[0]["function"]["name"] == "add"
    assert offered[0]["function"]["parameters"]["required"] == ["a", "b"]

    result = str(add(**call.function.arguments))
    messages += [answer.message, {"role": "tool", "tool_name": "add", "content": result}]
    assert client.chat(model="thinker", messages=messages, tools=[add]).message.content == "3"
    asked = thinker.tokenizer.decode(thinker.backend.requests[1].tokens, skip_special_tokens=False)
    made = '<|assistant|>so<tool_call>add {"a": 1, "b": 2} call00000</tool_call>'
    assert f"{made}<|tool|>3=add call00000<|assistant|>" in asked


def test_calls_are_streamed_whole(thinker: Server, client: ollama.Client) -> None:
    text = f'so{CALL}<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>'
    thinker.backend.script = says([*thinker.ids(text), 1])
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
    parts = list(client.chat(model="thinker", messages=HELLO, tools=tools, stream=True))
    calls = [part.message.tool_calls[0].function for part in parts if part.message.tool_calls]
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1, "b": 2}), ("now", {})]
    assert "".join(part.message.content or "" for part in parts) == "so"
    lines = streamed(thinker, "chat", ask(tools=tools))
    found = [call for line in lines for call in line.message.tool_calls or []]
    assert [call.function.index for call in found] == [0, 1]
    assert len({call.id for call in found}) == 2
    whole = post(thinker, "chat", ask(tools=tools, stream=False)).json()["message"]
    assert [each["function"] for each in whole["tool_calls"]] == [
        call.function.model_dump() for call in found
    ]


def test_a_call_is_not_broken_by_its_scores(thinker: Server) -> None:
    tokens = thinker.ids(CALL)
    thinker.backend.script = says_scored(tokens)
    tools = [{"type": "function", "function": {"name": "add"}}]
    lines = streamed(thinker, "chat", ask(tools=tools, logprobs=True))
    [call] = [call for line in lines for call in line.message.tool_calls or []]
    assert call.function.arguments == {"a": 1, "b": 2}
    assert sum(len(line.logprobs or []) for line in lines) == len(tokens)


def test_the_score_of_a_token_without_bytes_has_no_field_for_them(thinker: Server) -> None:
    text = thinker.backend.text()
    assert text is not None
    special, words = next(iter(text.specials)), thinker.ids("hello")
    thinker.backend.script = says_scored([*words, special])
    rows = post(thinker, "chat", ask(stream=False, logprobs=True)).json()["logprobs"]
    assert ["bytes" in row for row in rows] == [True] * len(words) + [False]


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_was_cut_off_is_no_call_but_is_not_lost(thinker: Server, stream: bool) -> None:
    thinker.backend.script = says(thinker.ids(CALL[: CALL.index("1")]), reason="length")
    tools = [{"type": "function", "function": {"name": "add"}}]
    response = post(thinker, "chat", ask(tools=tools, stream=stream))
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert not any("tool_calls" in line["message"] for line in lines)
    assert "".join(line["message"]["content"] for line in lines) == '{"name": "add", "arguments": {"a": '
    assert lines[-1]["done_reason"] == "length"


def turns_of(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Id and name of the call that each "tool" message answers."""
    ask_ = parse_chat(Arrival(0, ()), json.dumps({"messages": messages}).encode())
    assert isinstance(ask_.prompt, Conversation)
    return [(turn.call_id, turn.name) for turn in ask_.prompt.messages if turn.role == "tool"]


def called(*names: str, **ids: str) -> dict[str, Any]:
    calls = [{"function": {"name": name}} | ({"id": ids[name]} if name in ids else {}) for name in names]
    return {"role": "assistant", "tool_calls": calls}


def test_results_find_their_calls() -> None:
    by_name = [called("a", "b"), {"role": "tool", "tool_name": "b"}, {"role": "tool", "tool_name": "a"}]
    assert turns_of(by_name) == [("call00001", "b"), ("call00000", "a")]
    in_order = [called("a", "b"), {"role": "tool"}, {"role": "tool"}]
    assert turns_of(in_order) == [("call00000", "a"), ("call00001", "b")]
    twice = [called("a", "a"), {"role": "tool", "tool_name": "a"}, {"role": "tool", "tool_name": "a"}]
    assert turns_of(twice) == [("call00000", "a"), ("call00001", "a")]
    by_id = [called("a", "b", a="x", b="y"), {"role": "tool", "tool_call_id": "y"}]
    assert turns_of(by_id) == [("y", "b")]
    unasked = [{"role": "tool", "tool_name": "a", "tool_call_id": "z"}, {"role": "tool"}]
    assert turns_of(unasked) == [("z", "a"), ("", "")]


# --- log-probabilities ------------------------------------------------------------------------------------


def test_log_probabilities(thinker: Server, client: ollama.Client) -> None:
    tokens = thinker.ids("hello wide world")
    thinker.backend.script = says_scored(tokens, top=2)
    answer = client.chat(model="thinker", messages=HELLO, logprobs=True, top_logprobs=2)
    assert answer.logprobs
    assert [row.logprob for row in answer.logprobs] == [score(i).logprob for i in range(len(tokens))]
    assert "".join(row.token for row in answer.logprobs) == "hello wide world"
    assert [len(row.top_logprobs or []) for row in answer.logprobs] == [2] * len(tokens)
    assert thinker.backend.request.logprobs == 2
    lines = streamed(thinker, "generate", {"model": "thinker", "prompt": "hello", "logprobs": True})
    assert sum(len(line.logprobs or []) for line in lines) == len(tokens)
    assert [each.logprobs for each in thinker.backend.requests] == [2, 0]


# --- loading ----------------------------------------------------------------------------------------------


def test_no_prompt_asks_whether_the_model_is_loaded(thinker: Server, client: ollama.Client) -> None:
    answer = client.generate(model="thinker:latest", keep_alive="10m")
    assert (answer.response, answer.done, answer.done_reason) == ("", True, "load")
    assert answer.model == "thinker:latest"
    said = client.chat(model="thinker")
    assert (said.message.content, said.done_reason) == ("", "load")
    [part] = list(client.chat(model="thinker", stream=True))
    assert part.done_reason == "load"
    assert thinker.backend.requests == []
    with pytest.raises(ollama.ResponseError) as refused:
        client.generate(model="other")
    assert refused.value.status_code == 404


@pytest.mark.parametrize("keep_alive", [0, "0s", "0"])
def test_no_client_unloads_the_model(client: ollama.Client, keep_alive: Any) -> None:
    for call in (client.generate, client.chat):
        with pytest.raises(ollama.ResponseError, match="`mlxtp unload`") as refused:
            call(model="thinker", keep_alive=keep_alive)
        assert refused.value.status_code == 400


@pytest.mark.parametrize("keep_alive", [0, "0s"])
def test_a_client_unloads_what_is_not_pinned(thinker: Server, client: ollama.Client, keep_alive: Any) -> None:
    name = "org/thinker"
    unpinned = DeploymentHealth(name, name, "ready", pinned=False, ready=True, expires_s=60.0)
    thinker.backend.deployments = (unpinned,)
    assert client.generate(model="thinker:latest", keep_alive=keep_alive).done_reason == "unload"
    assert client.chat(model="thinker", keep_alive="10m").done_reason == "load"
    assert thinker.backend.kept == [0, 600]
    thinker.backend.deployments = (replace(unpinned, pinned=True),)
    with pytest.raises(ollama.ResponseError, match="`mlxtp unload`"):
        client.generate(model="thinker", keep_alive=keep_alive)


def test_when_a_model_goes_is_told(thinker: Server, client: ollama.Client) -> None:
    stays = DeploymentHealth("org/thinker", "org/thinker", "ready", pinned=True, ready=True)
    thinker.backend.deployments = (stays,)
    [row] = client.ps().models
    assert row.expires_at is not None
    assert row.expires_at.year == 9999
    thinker.backend.deployments = (replace(stays, expires_s=60.0),)
    [row] = client.ps().models
    assert row.expires_at is not None
    assert 0 < (row.expires_at - datetime.now(UTC)).total_seconds() <= 60


def test_while_nothing_is_ready(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.ready = False
    assert "30 % read" in error_of(post(thinker, "chat", {"model": "thinker"}), 503)
    assert client.list().models == []
    assert client.ps().models == []
    assert get(thinker, "version").status_code == 200


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["org/thinker", "org/thinker:latest", "thinker", "thinker:latest", "tagged:latest", "default"]
)
def test_names_are_echoed(thinker: Server, client: ollama.Client, name: str) -> None:
    thinker.backend.script = says([1])
    assert client.chat(model=name, messages=HELLO).model == name
    assert [part.model for part in client.generate(model=name, prompt="hello", stream=True)] == [name]


@pytest.mark.parametrize(
    "name", ["other", "other:latest", "tagged", "thinker:7b", "latest", ":latest:latest"]
)
def test_an_unknown_model_is_a_404(client: ollama.Client, name: str) -> None:
    for call in (
        lambda: client.chat(model=name, messages=HELLO),
        lambda: list(client.chat(model=name, messages=HELLO, stream=True)),
        lambda: client.generate(model=name, prompt="hello"),
        lambda: client.show(name),
    ):
        with pytest.raises(ollama.ResponseError, match="available: org/thinker") as refused:
            call()
        assert refused.value.status_code == 404


# --- what is told of models -------------------------------------------------------------------------------


def test_the_list_of_models(thinker: Server, client: ollama.Client) -> None:
    [model] = client.list().models
    assert model.model == "org/thinker"
    assert model.size == 1000
    assert model.modified_at is not None
    assert model.modified_at.timestamp() == 1_700_000_000
    assert re.fullmatch("[0-9a-f]{64}", model.digest or "")
    assert model.details
    assert model.details.format == "safetensors"
    assert (model.details.family, model.details.families) == ("qwen3", ["qwen3"])
    assert (model.details.parameter_size, model.details.quantization_level) == ("8.0B", "4-bit")
    [row] = shapes.OllamaModels.model_validate_json(get(thinker, "tags").content).models
    assert row.name == row.model
    thinker.backend.script = says([1])
    assert client.chat(model=model.model, messages=HELLO).done


def test_the_running_models(thinker: Server, client: ollama.Client) -> None:
    assert shapes.OllamaRunningModels.model_validate_json(get(thinker, "ps").content)
    [model] = client.ps().models
    assert (model.name, model.model, model.context_length) == ("org/thinker", "org/thinker", CONTEXT)
    assert model.size == 1000
    assert model.expires_at is not None
    assert model.expires_at.year > 2100
    assert isinstance(thinker.backend, Backend)
    thinker.backend.memory = (3000, 2000)
    assert client.ps().models[0].size == 5000
    thinker.backend.memory = (3000, 0)  # one has not told yet
    assert client.ps().models[0].size == 1000


def test_a_model_is_shown(thinker: Server, client: ollama.Client, server: Server) -> None:
    shown = client.show("thinker:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert client_of(server).show("tiny").capabilities == ["completion"]
    assert shown.template == TEMPLATE
    assert shown.modelinfo == {
        "general.architecture": "qwen3",
        "general.basename": "org/thinker",
        "qwen3.context_length": CONTEXT,
        "qwen3.embedding_length": 64,
        "qwen3.block_count": 2,
        "qwen3.attention.head_count": 4,
    }
    assert shown.details
    assert shown.details.quantization_level == "4-bit"
    by_name = post(thinker, "show", {"name": "thinker"})
    assert (
        shapes.OllamaShown.model_validate_json(by_name.content).details.model_dump()
        == shown.details.model_dump()
    )


def test_openai_clients_find_the_same_capabilities(thinker: Server) -> None:
    [model] = httpx.get(f"{thinker.url}/v1/models", trust_env=False, timeout=WAIT_S).json()["data"]
    assert model["supported_features"] == ["tools", "reasoning"]


def test_its_parameters_are_lines_that_continue_reads(thinker: Server) -> None:
    thinker.backend.defaults = Sampling(temperature=0.6, top_k=20)
    parameters = post(thinker, "show", {"name": "thinker"}).json()["parameters"]
    pattern = re.compile(r'^(\S+)\s+((?:".*")|\S+)$')  # as in Continue's source
    found = [match.groups() if (match := pattern.match(line)) else None for line in parameters.split("\n")]
    assert found == [("num_ctx", str(CONTEXT)), ("temperature", "0.6"), ("top_k", "20")]


def test_what_a_folder_does_not_tell_is_not_made_up(tmp_path: Path) -> None:
    def card(config: Any = None, index: Any = '{"weight_map": {}}') -> Any:
        for name, value in (("config.json", config), ("model.safetensors.index.json", index)):
            (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
        return read_card(ModelInfo("m", (), tmp_path, 10, 0, (1,), 5))

    nothing = read_card(ModelInfo("m", (), tmp_path / "missing", 10, 0, (1,), 5))
    unknown = (nothing.family, nothing.parameters, nothing.quantization, nothing.weight_bytes)
    assert unknown == ("", "", "", 0)
    assert len(nothing.digest) == 64
    for config in ("{", "[]", {"model_type": 5, "quantization": {"bits": "4"}, "dtype": 3}):
        broken = card(config, {"metadata": {"total_parameters": "many"}})
        assert (broken.family, broken.parameters, broken.quantization) == ("", "", "")
    assert card({"torch_dtype": "bfloat16"}).quantization == "BF16"
    assert (
        card({"text_config": {"dtype": "float16", "hidden_size": 3}, "hidden_size": 4}).number("hidden_size")
        == 3
    )
    assert card({"quantization_config": {"quant_method": "mxfp4"}}).quantization == "mxfp4"
    counts = {950_000: "950.0K", 1_235_814_400: "1.2B", 999: "999", 0: ""}
    for count, said in counts.items():
        assert card({}, {"metadata": {"total_parameters": count}}).parameters == said
    before = card({"a": 1}).digest
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert card({"a": 1}).digest != before


def test_the_version_is_one_that_clients_take(thinker: Server) -> None:
    version = shapes.OllamaVersion.model_validate_json(get(thinker, "version").content).version
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


def test_probes(thinker: Server) -> None:
    for path in ("tags", "version", "ps"):
        response = httpx.head(f"{thinker.url}/api/{path}", timeout=WAIT_S, trust_env=False)
        assert (response.status_code, response.content) == (200, b"")


# --- what is not served -----------------------------------------------------------------------------------


ELSEWHERE, NO_EMBEDDINGS = "`mlxtp serve MODEL`", "no embeddings"


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (ELSEWHERE, lambda client, _: client.pull("llama3")),
        (ELSEWHERE, lambda client, _: list(client.pull("llama3", stream=True))),
        (ELSEWHERE, lambda client, _: client.push("thinker")),
        (ELSEWHERE, lambda client, _: client.create("mine", from_="thinker")),
        (ELSEWHERE, lambda client, _: client.copy("thinker", "mine")),
        (ELSEWHERE, lambda client, _: client.delete("thinker")),
        (ELSEWHERE, lambda client, blob: client.create_blob(blob)),
        (NO_EMBEDDINGS, lambda client, _: client.embed(model="thinker", input="hello")),
        (NO_EMBEDDINGS, lambda client, _: client.embeddings(model="thinker", prompt="hello")),
    ],
)
def test_what_is_not_served_is_said(client: ollama.Client, tmp_path: Path, words: str, call: Any) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(b"x" * 100)
    with pytest.raises(ollama.ResponseError, match=words) as refused:
        call(client, blob)
    assert refused.value.status_code == 400


def test_every_refusal_has_the_same_shape(thinker: Server) -> None:
    assert "/api/nothing" in error_of(get(thinker, "nothing"), 404)
    assert "/api/chat" in error_of(get(thinker, "chat"), 405)
    response = post(thinker, "chat", ask(), headers={"origin": "https://elsewhere.example"})
    assert "elsewhere.example" in error_of(response, 403)


# --- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GroupError("rank 1 is gone", Code.RANK_LOST), "rank 1 is gone"),
        (ValueError("a bug"), "internal error"),
    ],
)
def test_a_failure_in_the_middle_is_the_last_line(
    thinker: Server, client: ollama.Client, error: Any, said: str
) -> None:
    thinker.backend.script = then(thinker.ids("hello"), fail_with(error))
    heard: list[str] = []

    def hear() -> None:
        for part in client.chat(model="thinker", messages=HELLO, stream=True):
            heard.append(part.message.content or "")

    with pytest.raises(ollama.ResponseError, match=said):
        hear()
    assert "".join(heard) == "hello"
    *lines, last = [json.loads(line) for line in post(thinker, "chat", ask()).text.splitlines()]
    assert last.keys() == {"error"}
    assert said in last["error"]
    assert not any(line["done"] for line in lines)


def test_a_failure_of_a_whole_answer_has_a_status(thinker: Server) -> None:
    thinker.backend.script = then(thinker.ids("hello"), fail_with(GroupError("rank 1 is gone")))
    response = post(thinker, "chat", ask(stream=False))
    assert error_of(response, 503) == "rank 1 is gone"
    assert response.headers["retry-after"] == "7"


def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(thinker: Server) -> None:
    said = error_of(post(thinker, "generate", {"prompt": "x " * 5000}), 400)
    assert str(CONTEXT) in said

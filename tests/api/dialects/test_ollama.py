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
    response = post(thinker, "chat", ask(stream=False))
    assert response.headers["content-type"] == "application/json"
    assert whole("chat", response.text).message.content == ANSWER


@pytest.mark.parametrize("said", [{}, {"stream": True}, {"stream": None}])
def test_it_streams_unless_told_otherwise(thinker: Server, said: dict[str, Any]) -> None:
    thinker.backend.script = says(thinker.ids(ANSWER))
    *parts, last = streamed(thinker, "chat", ask(**said))
    assert "".join(part.message.content for part in parts) == ANSWER
    assert last.message == shapes.OllamaSaid(role="assistant", content="")


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
    assert last["load_duration"] == 1, "it was loaded before"


def test_messages_without_content_and_roles_in_capitals(thinker: Server) -> None:
    thinker.backend.script = says([1])
    messages = [{"role": "User", "content": "a"}, {"role": "assistant", "thinking": "hm"}, {"role": "user"}]
    streamed(thinker, "chat", ask(messages=messages))
    assert prompt(thinker) == "<s><|user|>a<|assistant|>[hm]<|user|><|assistant|>"


def test_a_prompt_is_answered(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.script = says(thinker.ids(ANSWER), reason="length")
    answer = client.generate(model="thinker", prompt="hello", system="be")
    assert (answer.response, answer.context) == (ANSWER, None)
    assert (answer.model, answer.done, answer.done_reason) == ("thinker", True, "length")
    assert prompt(thinker) == "<s><|system|>be<|user|>hello<|assistant|>"
    parts = list(client.generate(model="thinker", prompt="hello", stream=True))
    assert "".join(part.response or "" for part in parts) == ANSWER
    *lines, last = streamed(thinker, "generate", {"model": "thinker", "prompt": "hello"})
    assert "".join(line.response for line in lines) == ANSWER
    assert (last.response, last.done_reason) == ("", "length")


def test_a_raw_prompt_is_continued(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.script = says(thinker.ids(" world<think>"))
    assert client.generate(model="thinker", prompt="hello", raw=True).response == " world"
    assert prompt(thinker) == "<s>hello"


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "}"), ("template", "{{ .Prompt }}"), ("context", [1, 2, 3]), ("images", ["aGVsbG8="])],
)
def test_what_cannot_be_done_is_refused_by_name(
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
def test_less_than_one_token_is_no_limit_and_a_seed_of_minus_one_is_a_fresh_one(
    thinker: Server, client: ollama.Client, limit: int | None
) -> None:
    thinker.backend.script = says([1])
    for _ in range(2):
        client.generate(model="thinker", prompt="hello", options={"num_predict": limit, "seed": -1})
    first, second = thinker.backend.requests
    assert first.max_tokens == CONTEXT - len(first.tokens)
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
        ({"keep_alive": "1" * 60_000}, "keep_alive should be"),
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


HUGE = {"b": "HUGE"}
CALLED_WITH_HUGE = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": HUGE}}]}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("format", {"format": HUGE}),
        ("tools[0].function.parameters", {"tools": [{"function": {"name": "a", "parameters": HUGE}}]}),
        ("messages[0].tool_calls[0].function.arguments", {"messages": [CALLED_WITH_HUGE]}),
    ],
)
def test_a_number_that_json_cannot_hold_is_refused(thinker: Server, field: str, fields: Any) -> None:
    content = json.dumps(ask(**fields)).replace('"HUGE"', "1e999").encode()
    said = error_of(post(thinker, "chat", content=content), 400)
    assert said.startswith(f"{field} should have ordinary numbers only")


class Place(BaseModel):
    name: str
    people: int


def test_an_answer_held_to_a_schema_or_to_json(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.script = says(thinker.ids('{"name": "Ulm", "people": 128928}'))
    answer = client.chat(model="thinker", messages=HELLO, format=Place.model_json_schema())
    assert Place.model_validate_json(answer.message.content or "") == Place(name="Ulm", people=128928)
    schema = json.loads(thinker.backend.request.shaping.grammar)
    assert schema["properties"].keys() == {"name", "people"}
    assert schema["additionalProperties"] is False
    client.generate(model="thinker", prompt="hello", format="json")
    client.generate(model="thinker", prompt="hello", format="")
    kinds = [each.shaping.grammar_kind for each in thinker.backend.requests]
    assert kinds == ["json_schema", "json_schema", ""]


def test_a_refused_grammar_is_called_as_the_client_calls_it(thinker: Server) -> None:
    async def judge() -> None:
        raise RequestError("response_format is no grammar", Code.BAD_REQUEST)

    thinker.backend.judge = judge
    said = error_of(post(thinker, "chat", ask(format={"type": "nothing"})), 400)
    assert said == "format is no grammar"


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_what_it_thinks_is_told_apart(thinker: Server, client: ollama.Client, path: str) -> None:
    thinker.backend.script = says(thinker.ids("hello wide</think> world"))
    asked: dict[str, Any] = {"messages": HELLO} if path == "chat" else {"prompt": "hello"}
    answer = getattr(client, path)(model="thinker", think=True, **asked)
    assert prompt(thinker) == "<s><|user|>hello<|assistant|><think>"
    parts = streamed(thinker, path, {"model": "thinker", "think": True} | asked)
    first, second = thinker.backend.requests
    assert first.tokens == second.tokens
    field = "response"
    if path == "chat":
        answer, parts, field = answer.message, [part.message for part in parts], "content"
    assert (answer.thinking, answer[field]) == ("hello wide", "world")
    told = [(part.thinking or "", getattr(part, field)) for part in parts]
    assert ["".join(each) for each in zip(*told, strict=True)] == ["hello wide", "world"]
    assert all(not thought or not text for thought, text in told)


@pytest.mark.parametrize(
    ("think", "asked"),
    [
        ("low", "<s><|system|>effort low<|user|>hello<|assistant|><think>"),
        (False, "<s><|user|>hello<|assistant|>"),
    ],
)
def test_how_hard_to_think_goes_to_the_template(thinker: Server, think: Any, asked: str) -> None:
    thinker.backend.script = says([1])
    streamed(thinker, "chat", ask(think=think))
    assert prompt(thinker) == asked


def test_a_model_that_does_not_think_says_so(server: Server) -> None:
    client = client_of(server)
    for think in (True, "high"):
        with pytest.raises(ollama.ResponseError, match="does not support thinking") as refused:
            client.chat(model="tiny", messages=HELLO, think=think)
        assert refused.value.status_code == 400
    server.backend.script = says([1])
    assert client.chat(model="tiny", messages=HELLO, think=False).done
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.chat(model="other", messages=HELLO, think=True)


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


INTEGER = {"type": "integer"}
ARGUMENTS = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": ARGUMENTS}}


def test_a_function_is_called_and_its_result_answered(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.scripts = [says([*thinker.ids("so" + CALL), 1]), says([*thinker.ids("3"), 1])]
    messages: list[Any] = list(HELLO)
    answer = client.chat(model="thinker", messages=messages, tools=[ADD])
    assert (answer.done_reason, answer.message.content) == ("stop", "so")
    [call] = answer.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1, "b": 2})
    assert json.loads(prompt(thinker).split("<|system|>")[1].split("<|user|>")[0]) == [ADD]
    messages += [answer.message, {"role": "tool", "tool_name": "add", "content": "3"}]
    assert client.chat(model="thinker", messages=messages, tools=[ADD]).message.content == "3"
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
    none = {"role": "tool"}
    a, b = none | {"tool_name": "a"}, none | {"tool_name": "b"}
    assert turns_of([called("a", "b"), b, a]) == [("call00001", "b"), ("call00000", "a")]
    assert turns_of([called("a", "b"), none, none]) == [("call00000", "a"), ("call00001", "b")]
    assert turns_of([called("a", "a"), a, a]) == [("call00000", "a"), ("call00001", "a")]
    assert turns_of([called("a", "b", a="x", b="y"), none | {"tool_call_id": "y"}]) == [("y", "b")]
    assert turns_of([a | {"tool_call_id": "z"}, none]) == [("z", "a"), ("", "")]


def test_log_probabilities(thinker: Server, client: ollama.Client) -> None:
    tokens = [*thinker.ids("hello wide world"), next(iter(thinker.backend.loaded_text.specials))]
    thinker.backend.script = says_scored(tokens, top=2)
    answer = client.chat(model="thinker", messages=HELLO, logprobs=True, top_logprobs=2)
    rows = answer.logprobs or []
    assert [row.logprob for row in rows] == [score(i).logprob for i in range(len(tokens))]
    assert "".join(row.token for row in rows[:-1]) == "hello wide world"
    assert [len(row.top_logprobs or []) for row in rows] == [2] * len(tokens)
    lines = streamed(thinker, "generate", {"model": "thinker", "prompt": "hello", "logprobs": True})
    told = [row for line in lines for row in line.logprobs or []]
    assert ["bytes" in row.model_fields_set for row in told] == [True] * (len(tokens) - 1) + [False]
    assert [each.logprobs for each in thinker.backend.requests] == [2, 0]


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
def test_only_what_is_not_pinned_is_unloaded(thinker: Server, client: ollama.Client, keep_alive: Any) -> None:
    name = "org/thinker"
    unpinned = DeploymentHealth(name, name, "ready", pinned=False, ready=True, expires_s=60.0)
    for deployments in ((), (replace(unpinned, pinned=True),)):
        thinker.backend.deployments = deployments
        for call in (client.generate, client.chat):
            with pytest.raises(ollama.ResponseError, match="`mlxtp unload`") as refused:
                call(model="thinker", keep_alive=keep_alive)
            assert refused.value.status_code == 400
    assert name in post(thinker, "generate", {"keep_alive": keep_alive}).json()["error"]
    thinker.backend.deployments = (unpinned,)
    assert client.generate(model="thinker:latest", keep_alive=keep_alive).done_reason == "unload"
    assert client.chat(model="thinker", keep_alive="10m").done_reason == "load"
    assert thinker.backend.kept == [0, 600]


def test_while_nothing_is_ready(thinker: Server, client: ollama.Client) -> None:
    thinker.backend.ready = False
    assert "30 % read" in error_of(post(thinker, "chat", {"model": "thinker"}), 503)
    assert client.list().models == []
    assert client.ps().models == []
    assert get(thinker, "version").status_code == 200


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
        lambda: list(client.chat(model=name, messages=HELLO, stream=True)),
        lambda: client.generate(model=name, prompt="hello"),
        lambda: client.show(name),
    ):
        with pytest.raises(ollama.ResponseError, match="available: org/thinker") as refused:
            call()
        assert refused.value.status_code == 404


def test_the_list_of_models(thinker: Server, client: ollama.Client) -> None:
    [row] = shapes.OllamaModels.model_validate_json(get(thinker, "tags").content).models
    assert (row.name, row.model, row.size) == ("org/thinker", "org/thinker", 1000)
    details = row.details
    assert (details.format, details.family, details.families) == ("safetensors", "qwen3", ["qwen3"])
    assert (details.parameter_size, details.quantization_level) == ("8.0B", "4-bit")
    [model] = client.list().models
    assert model.modified_at is not None
    assert model.modified_at.timestamp() == 1_700_000_000


def test_the_running_models(thinker: Server, client: ollama.Client) -> None:
    assert shapes.OllamaRunningModels.model_validate_json(get(thinker, "ps").content)
    [model] = client.ps().models
    assert (model.name, model.model, model.context_length) == ("org/thinker", "org/thinker", CONTEXT)
    assert model.size == 1000
    stays = DeploymentHealth("org/thinker", "org/thinker", "ready", pinned=True, ready=True)
    expires = [model.expires_at]
    for expires_s in (None, 60.0):
        thinker.backend.deployments = (replace(stays, expires_s=expires_s),)
        expires.append(client.ps().models[0].expires_at)
    assert [each is not None and each.year == 9999 for each in expires] == [True, True, False]
    assert 0 < (expires[2] - datetime.now(UTC)).total_seconds() <= 60  # type: ignore[operator]
    assert isinstance(thinker.backend, Backend)
    for memory, size in (((3000, 2000), 5000), ((3000, 0), 1000)):  # one has not told yet
        thinker.backend.memory = memory
        assert client.ps().models[0].size == size


def test_a_model_is_shown(thinker: Server, client: ollama.Client, server: Server) -> None:
    shown = client.show("thinker:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert client_of(server).show("tiny").capabilities == ["completion"]
    [listed] = httpx.get(f"{thinker.url}/v1/models", trust_env=False, timeout=WAIT_S).json()["data"]
    assert listed["supported_features"] == ["tools", "reasoning"]
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
    thinker.backend.defaults = Sampling(temperature=0.6, top_k=20)
    by_name = shapes.OllamaShown.model_validate_json(post(thinker, "show", {"name": "thinker"}).content)
    assert by_name.details.model_dump() == shown.details.model_dump()
    pattern = re.compile(r'^(\S+)\s+((?:".*")|\S+)$')  # of a line that Continue reads, as in its source
    found = [pattern.findall(line) for line in by_name.parameters.split("\n")]
    assert found == [[("num_ctx", str(CONTEXT))], [("temperature", "0.6")], [("top_k", "20")]]


def test_what_a_folder_does_not_tell_is_not_made_up(tmp_path: Path) -> None:
    def card(config: Any = None, index: Any = '{"weight_map": {}}') -> Any:
        for name, value in (("config.json", config), ("model.safetensors.index.json", index)):
            (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
        return read_card(ModelInfo("m", (), tmp_path, 10, 0, (1,), 5))

    nothing = read_card(ModelInfo("m", (), tmp_path / "missing", 10, 0, (1,), 5))
    assert (nothing.family, nothing.parameters, nothing.quantization, nothing.weight_bytes) == ("", "", "", 0)
    assert len(nothing.digest) == 64
    for config in ("{", "[]", {"model_type": 5, "quantization": {"bits": "4"}, "dtype": 3}):
        broken = card(config, {"metadata": {"total_parameters": "many"}})
        assert (broken.family, broken.parameters, broken.quantization) == ("", "", "")
    assert card({"torch_dtype": "bfloat16"}).quantization == "BF16"
    assert card({"text_config": {"hidden_size": 3}, "hidden_size": 4}).number("hidden_size") == 3
    assert card({"quantization_config": {"quant_method": "mxfp4"}}).quantization == "mxfp4"
    for count, said in {950_000: "950.0K", 1_235_814_400: "1.2B", 999: "999", 0: ""}.items():
        assert card({}, {"metadata": {"total_parameters": count}}).parameters == said
    before = card({"a": 1}).digest
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert card({"a": 1}).digest != before


def test_clients_that_look_for_a_server_find_one_of_a_version_that_they_take(thinker: Server) -> None:
    version = shapes.OllamaVersion.model_validate_json(get(thinker, "version").content).version
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    for path in ("tags", "version", "ps"):
        response = httpx.head(f"{thinker.url}/api/{path}", timeout=WAIT_S, trust_env=False)
        assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("`mlxtp serve MODEL`", lambda client: client.pull("llama3")),
        ("`mlxtp serve MODEL`", lambda client: list(client.pull("llama3", stream=True))),
        ("`mlxtp serve MODEL`", lambda client: client.delete("thinker")),
        ("embeddings need an embedding", lambda client: client.embed(model="thinker", input="hello")),
    ],
)
def test_what_is_not_served_is_said(client: ollama.Client, words: str, call: Any) -> None:
    with pytest.raises(ollama.ResponseError, match=words) as refused:
        call(client)
    assert refused.value.status_code == 400


def test_every_refusal_has_the_same_shape(thinker: Server) -> None:
    assert "/api/nothing" in error_of(get(thinker, "nothing"), 404)
    assert "/api/chat" in error_of(get(thinker, "chat"), 405)
    assert str(CONTEXT) in error_of(post(thinker, "generate", {"prompt": "x " * 5000}), 400)
    response = post(thinker, "chat", ask(), headers={"origin": "https://elsewhere.example"})
    assert "elsewhere.example" in error_of(response, 403)


@pytest.mark.parametrize(
    ("error", "said"),
    [(GroupError("rank 1 is gone"), "rank 1 is gone"), (ValueError("a bug"), "internal error")],
)
def test_a_failure_in_the_middle_is_the_last_line(
    thinker: Server, client: ollama.Client, error: Any, said: str
) -> None:
    thinker.backend.script = then(thinker.ids("hello"), fail_with(error))
    stream = iter(client.chat(model="thinker", messages=HELLO, stream=True))
    assert next(stream).message.content == "hello"
    with pytest.raises(ollama.ResponseError, match=said):
        next(stream)
    *lines, last = [json.loads(line) for line in post(thinker, "chat", ask()).text.splitlines()]
    assert last.keys() == {"error"}
    assert said in last["error"]
    assert not any(line["done"] for line in lines)

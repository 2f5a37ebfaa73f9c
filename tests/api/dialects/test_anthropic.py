"""Anthropic's dialect: the real client library, a real server; only the model is played."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import types
from pydantic import BaseModel

from mlxtp.api.access_log import AccessLog
from mlxtp.api.adapter import About
from mlxtp.api.app import create_app
from mlxtp.api.backend import ModelInfo
from mlxtp.api.dialects.anthropic import ANTHROPIC, SIGNATURE, models_body, parse_count, parse_messages
from mlxtp.api.request_metrics import RequestMetrics
from mlxtp.errors import Code, GroupError, MlxtpError, RequestError
from mlxtp.text.conversation import Call, ChatMessage, Conversation, GenerationRequest
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text
from mlxtp.text.tool_grammar import log_once
from mlxtp.text.transcript import ContentDelta, ReasoningDelta

from ..conftest import WAIT_S, FakeBackend, Server, byte_level, on_loopback, save, says, then
from ..test_app import fail_with
from . import shapes

Get = Callable[..., Any]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ANSWER = " The 日本語 world 😀\n\u2028end"
CONTEXT = 4000
CHOICE = {"type": "tool"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}<|tool|>{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set tool_call = c.function %}"
    '<tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endfor %}<|assistant|>{% if enable_thinking %}<think>{% endif %}"
)


class Thinker(FakeBackend):
    def models(self) -> tuple[ModelInfo, ...]:
        return tuple(replace(model, context=CONTEXT, vocabulary=400) for model in super().models())


@dataclass
class AnthropicServer(Server):
    @property
    def claude(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=WAIT_S)

    def prompt(self, number: int = -1) -> str:
        """Return the model's last prompt."""
        prompt = self.backend.requests[number].tokens
        return str(self.tokenizer.decode(list(prompt), skip_special_tokens=False))

    def say(self, text: str, **end: Any) -> None:
        self.backend.script = says(self.ids(text), **end)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnthropicServer]:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    backend = Thinker(Text(LocalRenderer.load(save(tokenizer, tmp_path_factory.mktemp("thinker"), TEMPLATE))))
    app = create_app(backend, max_body_bytes=300_000, keep_alive_s=0.5, retry_after_s=7)
    with on_loopback(AccessLog(app, RequestMetrics(monotonic))) as port:
        yield AnthropicServer(backend, port, tokenizer)


@pytest.fixture
def server(running: AnthropicServer) -> AnthropicServer:
    running.backend.__init__(running.backend.loaded_text)  # type: ignore[misc]
    return running


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "claude-sonnet-5", "max_tokens": 100, "messages": HELLO} | fields


def post(server: Server, path: str = "/v1/messages", **kwargs: Any) -> httpx.Response:
    return httpx.post(server.url + path, timeout=WAIT_S, trust_env=False, **kwargs)


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def create(server: AnthropicServer, **fields: Any) -> Any:
    """The library's message, read strictly."""
    return shapes.read(types.Message, server.claude.messages.create(**body(**fields)).to_json())


def streamed(server: AnthropicServer, **fields: Any) -> Any:
    """The message that the library puts together from a stream."""
    with server.claude.messages.stream(**body(**fields)) as stream:
        return stream.get_final_message()


DELTAS = {
    "text": ("text_delta",),
    "thinking": ("thinking_delta", "signature_delta"),
    "tool_use": ("input_json_delta",),
}


def events_of(response: httpx.Response) -> list[Any]:
    """Every event, parsed strictly; its name is its type."""
    events = []
    assert response.text.endswith("\n\n")
    for part in response.text[:-2].split("\n\n"):
        name, data = part.split("\n")
        event = shapes.read(shapes.MessageEvent, data.removeprefix("data: ")).root
        assert name == f"event: {event.type}"
        events.append(event)
    return events


def complete(response: httpx.Response) -> list[Any]:
    """The events of a complete answer, in their legal order, without pings."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    start, ping, *events = events_of(response)
    assert (start.type, ping.type) == ("message_start", "ping")
    assert (start.message.content, start.message.stop_reason) == ([], None)
    events = [event for event in events if event.type != "ping"]
    *blocks, delta, stop = events
    assert (delta.type, stop.type) == ("message_delta", "message_stop")
    open_, index = "", -1
    for event in blocks:
        match event.type:
            case "content_block_start":
                assert not open_
                open_, index = event.content_block.type, index + 1
            case "content_block_stop":
                assert open_
                open_ = ""
            case _:
                assert event.delta.type in DELTAS[open_]
                assert all(event.delta.to_dict().values()), "none is empty"
        assert event.index == index
    assert not open_
    return [start, *events]


def test_a_whole_answer(server: AnthropicServer) -> None:
    server.say(ANSWER + "</s>", cached=4)
    message = create(server, system="be brief")
    assert (message.type, message.role, message.model) == ("message", "assistant", "claude-sonnet-5")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": ANSWER}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert server.prompt() == "<|system|>be brief<|user|>hello<|assistant|>"
    assert message.usage.to_dict() == {
        "input_tokens": len(server.backend.request.tokens) - 4,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(server.ids(ANSWER)) + 1,
    }
    assert server.backend.request.max_tokens == 100
    assert re.fullmatch("msg_[0-9a-f]{32}", message.id)


def test_the_events_of_a_stream(server: AnthropicServer) -> None:
    said = f"<think>let me see</think>hi{CALL}"
    server.say(said, cached=3)
    events = complete(post(server, json=body(tools=[WEATHER], stream=True)))
    prompt = len(server.backend.request.tokens)
    first, last = events[0].message.usage, events[-2].usage
    assert (first.input_tokens, first.cache_read_input_tokens, first.output_tokens) == (prompt, 0, 0)
    assert (last.input_tokens, last.cache_read_input_tokens) == (prompt - 3, 3)
    assert last.output_tokens == len(server.ids(said))
    thinking, text, use = streamed(server, tools=[WEATHER]).content
    assert (thinking.thinking, thinking.signature, text.text) == ("let me see", SIGNATURE, "hi")
    assert (use.name, use.input) == ("weather", {"city": "Köln"})
    assert sum(event.type == "content_block_delta" and event.index == 0 for event in events) > 3
    assert events[-2].delta.stop_reason == "tool_use"


@pytest.mark.parametrize("get", [create, streamed])
def test_an_answer_that_says_nothing_has_no_content(server: AnthropicServer, get: Get) -> None:
    server.say("</s>")
    message = get(server)
    assert (message.content, message.stop_reason) == ([], "end_turn")


def test_words_of_no_letters_open_no_block() -> None:
    about = About("0" * 32, 0.0, "m", (3,), (), lambda _: ("x", [120]), parse())
    writer = ANTHROPIC.writer(about)
    assert [writer.write(each) for each in (ContentDelta(0, ""), ReasoningDelta(0, ""))] == [b"", b""]


@pytest.mark.parametrize("get", [create, streamed])
def test_why_an_answer_ended(server: AnthropicServer, get: Get) -> None:
    server.say("one two", reason="length")
    assert get(server, max_tokens=len(server.ids("one two"))).stop_reason == "max_tokens"
    server.say("one two three")
    message = get(server, stop_sequences=["zzz", " two"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " two")
    assert message.content[0].text == "one"


@pytest.mark.parametrize("get", [create, streamed])
def test_a_budget_that_does_not_fit_is_as_large_as_fits(server: AnthropicServer, get: Get) -> None:
    room = CONTEXT - len(server.ids("<|user|>hello<|assistant|>"))
    server.backend.script = says(server.ids("x") * room, reason="length", step=1000)
    assert get(server, max_tokens=10_000).stop_reason == "model_context_window_exceeded"
    assert server.backend.request.max_tokens == room


def test_what_was_set_reaches_the_backend(server: AnthropicServer) -> None:
    server.say("x")
    chosen = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}  # the library has no names for them any more
    create(server, extra_body=chosen, metadata={"user_id": "alice"}, max_tokens=31)
    asked = server.backend.request
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.5, 0.9, 7)
    [whose] = server.backend.whose
    assert (whose.client, whose.user, asked.max_tokens) == ("127.0.0.1", "alice", 31)


@pytest.mark.parametrize("get", [create, streamed])
def test_thoughts_come_before_the_text(server: AnthropicServer, get: Get) -> None:
    server.say("let me see</think>\n\nhi")  # the template has begun the thought
    thinking, said = get(server, thinking={"type": "adaptive"}).content
    assert (thinking.thinking, thinking.signature, said.text) == ("let me see", SIGNATURE, "hi")
    assert server.prompt().endswith("<|assistant|><think>")
    thinking, said = get(server, thinking={"type": "adaptive", "display": "omitted"}).content
    assert (thinking.thinking, thinking.signature, said.text) == ("", SIGNATURE, "hi")
    server.say("hi")
    assert [block.type for block in get(server, thinking={"type": "disabled"}).content] == ["text"]
    assert server.prompt().endswith("<|assistant|>")


@pytest.mark.parametrize("get", [create, streamed])
def test_a_tool_is_called_and_its_answer_comes_back(server: AnthropicServer, get: Get) -> None:
    server.say(f"I look.{CALL}")
    message = get(server, tools=[WEATHER])
    said, use = message.content
    assert said.text == "I look."
    assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Köln"})
    assert message.stop_reason == "tool_use"
    assert '"name": "weather"' in server.prompt()
    assert WEATHER["description"] in server.prompt()
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [text("rain")]}
    told = {"role": "user", "content": [result, text("so?")]}
    server.say("It rains.")
    answer = get(server, tools=[WEATHER], messages=[*HELLO, message.to_param(), told])
    assert answer.content[0].text == "It rains."
    assert server.prompt().endswith(
        '<|user|>hello<|assistant|>I look.<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}'
        "</tool_call><|tool|>rain<|user|>so?<|assistant|>"
    )


@pytest.mark.parametrize("get", [create, streamed])
def test_several_calls(server: AnthropicServer, get: Get) -> None:
    server.say(f"{CALL}\n{CALL.replace('Köln', 'Bonn')}")
    cities = [use.input["city"] for use in get(server, tools=[WEATHER]).content]
    assert cities == ["Köln", "Bonn"]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    [only] = get(server, tools=[WEATHER], tool_choice=choice).content
    assert only.input == {"city": "Köln"}


def test_a_call_that_has_to_come(server: AnthropicServer) -> None:
    server.say(CALL)
    for choice in ({"type": "any"}, CHOICE | {"name": "weather"}):
        [use] = create(server, tools=[WEATHER], tool_choice=choice).content
        assert (use.name, use.input) == ("weather", {"city": "Köln"})
        assert server.backend.requests[-1].shaping.grammar_kind == "lark"
    message = create(server, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["text"]


def test_half_a_call_is_no_call_in_a_whole_answer(server: AnthropicServer) -> None:
    half = CALL + CALL[:-18]
    server.say(half, reason="length")
    most = len(server.ids(half))
    message = create(server, tools=[WEATHER], max_tokens=most)
    assert message.stop_reason == "max_tokens"
    assert [block.input for block in message.content] == [{"city": "Köln"}]
    events = complete(post(server, json=body(tools=[WEATHER], max_tokens=most, stream=True)))
    assert events[-2].delta.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        ('{"city": }', {"city": None}),
        ('{"city": NaN}', {"city": None}),
        ('{"city": 1e999}', {"arguments": '{"city": 1e999}'}),
    ],
)
def test_arguments_that_are_no_json_are_mended_or_shown(
    server: AnthropicServer, wrong: str, seen: Any
) -> None:
    server.say(f'<tool_call>{{"name": "weather", "arguments": {wrong}}}</tool_call>')
    message = create(server, tools=[WEATHER])
    assert message.stop_reason == "tool_use"
    assert [use.input for use in message.content] == [seen]


def test_an_answer_in_json(server: AnthropicServer) -> None:
    class City(BaseModel):
        name: str

    server.say('{"name": "Bonn"}')
    message = server.claude.messages.parse(**body(output_format=City))
    assert message.parsed_output == City(name="Bonn")
    asked = server.backend.request.shaping
    assert (asked.grammar_kind, json.loads(asked.grammar)["required"]) == ("json_schema", ["name"])


def test_tokens_are_counted_as_they_are_used(server: AnthropicServer) -> None:
    server.say("x")
    fields: dict[str, Any] = {"system": "be brief", "tools": [WEATHER], "messages": HELLO}
    count = server.claude.messages.count_tokens(model="claude-x", **fields)
    assert count.input_tokens == create(server, **fields).usage.input_tokens
    assert len(server.backend.requests) == 1
    response = post(server, "/v1/messages/count_tokens", json={"messages": HELLO})
    assert shapes.read(types.MessageTokensCount, response.content).input_tokens < count.input_tokens
    assert response.headers["request-id"].startswith("req_")


def test_which_model_answers(server: AnthropicServer) -> None:
    server.say("x")
    claude = "claude-opus-4-5-20251101"
    for name, shown in {claude: claude, "tiny": "org/tiny", "default": "org/tiny"}.items():
        assert create(server, model=name).model == shown
        assert streamed(server, model=name).model == shown


def test_models_are_listed_for_the_client_library(server: AnthropicServer) -> None:
    listed = models_body(server.backend.models())
    assert shapes.read(shapes.ANTHROPIC_MODELS, json.dumps(listed))
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "org/tiny", "org/tiny")
    assert shapes.read(shapes.ANTHROPIC_MODELS, json.dumps(models_body(()))).last_id is None
    [model] = server.claude.models.list()
    assert (model.id, model.display_name, model.created_at.timestamp()) == ("org/tiny", "org/tiny", 1234)
    assert (model.type, model.max_input_tokens) == ("model", CONTEXT)
    assert server.claude.models.retrieve("tiny") == model
    with pytest.raises(anthropic.NotFoundError, match="available: org/tiny") as unknown:
        server.claude.models.retrieve("other")
    assert unknown.value.type == "not_found_error"
    assert [model.object for model in server.client.models.list()] == ["model"]


def test_the_line_that_differs_each_time_is_no_part_of_the_prompt(server: AnthropicServer) -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"
    rest = "You are Claude Code."
    for hash_ in ("eb6c6", "0aaa9"):
        line = header.format(hash_)
        create(server, system=f"{line}\n{rest}")
        create(server, system=[text(line), text(rest) | {"cache_control": {"type": "ephemeral"}}])
    assert len({request.tokens for request in server.backend.requests}) == 1
    assert server.prompt() == f"<|system|>{rest}<|user|>hello<|assistant|>"


def assert_error(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = shapes.read(shapes.AnthropicError, response.content)
    assert error.error.type == kind
    assert response.headers["request-id"] == error.request_id == f"req_{response.headers['x-request-id']}"
    return error.error.message


def test_every_error_has_the_same_shape(server: AnthropicServer) -> None:
    unlimited = {key: value for key, value in body().items() if key != "max_tokens"}
    kind = "invalid_request_error"
    refused = post(server, json=unlimited, headers={"x-request-id": "mine"})
    assert assert_error(refused, 400, kind) == "max_tokens is missing"
    assert refused.headers["request-id"] == "req_mine", "the id that the log has"
    assert "not valid JSON" in assert_error(post(server, content=b"{"), 400, kind)
    assert "must be a JSON object" in assert_error(post(server, content=b"[]"), 400, kind)
    assert_error(post(server, content=b"x" * 300_001), 413, "request_too_large")
    assert_error(post(server, "/v1/messages/count_tokens", json={"messages": []}), 400, kind)
    long = [{"role": "user", "content": "hello " * 20_000}]
    words = assert_error(post(server, json=body(messages=long)), 400, kind)
    assert re.match(rf"prompt is too long: \d{{4,}} tokens > {CONTEXT} maximum", words), "as agents read it"
    assert_error(httpx.get(f"{server.url}/v1/messages", trust_env=False), 405, kind)
    assert_error(post(server, "/v1/messages/batches", json={}), 404, "not_found_error")
    server.backend.script = then([], fail_with(MlxtpError("too late", Code.DEADLINE)))
    assert assert_error(post(server, json=body()), 504, "timeout_error") == "too late"
    server.backend.ready = False
    assert "30 % read" in assert_error(post(server, json=body()), 503, "overloaded_error")
    assert len(server.backend.requests) == 1


def test_errors_of_others_speak_of_the_fields_of_this_dialect(server: AnthropicServer) -> None:
    stops = [str(i) for i in range(17)]
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences has 17 strings"):
        create(server, stop_sequences=stops)
    endless = json.dumps(body(tools=[WEATHER | {"input_schema": {"maximum": "?"}}])).replace('"?"', "1e999")
    refused = assert_error(post(server, content=endless), 400, "invalid_request_error")
    assert refused == "tools[0].input_schema: this is not a JSON schema"


@pytest.mark.parametrize("stream", [False, True])
def test_too_much_is_a_529_that_says_when_to_come_back(server: AnthropicServer, stream: bool) -> None:
    for status in (429, 503):
        server.backend.refusal = RequestError("full", Code.OVERLOADED, status=status)
        response = post(server, json=body(stream=stream))
        assert assert_error(response, 529, "overloaded_error") == "full"
        assert response.headers["retry-after"] == "7"
    with pytest.raises(anthropic.APIStatusError) as caught:
        streamed(server) if stream else create(server)
    assert caught.value.type == "overloaded_error"


@pytest.mark.parametrize("error", [GroupError("rank 1 is gone"), ZeroDivisionError("secret")])
def test_a_failure_in_the_middle_is_an_error_and_no_stop(server: AnthropicServer, error: Exception) -> None:
    server.backend.script = then(server.ids("ab"), fail_with(error))
    *events, last = events_of(post(server, json=body(stream=True)))
    begun = {"message_start", "ping", "content_block_start", "content_block_delta"}
    assert {event.type for event in events} == begun
    assert "secret" not in last.error.message
    with pytest.raises(anthropic.APIStatusError) as caught:
        streamed(server)
    kind = "overloaded_error" if isinstance(error, GroupError) else "api_error"
    assert caught.value.type == last.error.type == kind


def parse(**fields: Any) -> GenerationRequest:
    return parse_messages(json.dumps(body(**fields)).encode())


def conversation(**fields: Any) -> Conversation:
    prompt = parse(**fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def turns(*messages: dict[str, Any], **fields: Any) -> list[ChatMessage]:
    return list(conversation(messages=list(messages), **fields).messages)


USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bonn"}}


def test_unknown_fields_and_betas_are_ignored() -> None:
    plain = parse()
    cached = text("hello") | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    found = parse(
        messages=[{"role": "user", "content": [cached], "x": 1}], service_tier="auto", betas=["x"],
        context_management={"edits": []}, output_config={"effort": "high"}, mcp_servers=[],
    )  # fmt: skip
    assert plain == replace(found, ignored=())
    assert found.ignored == ("service_tier", "betas", "context_management")


def test_neighbours_of_one_role_are_one_turn() -> None:
    assert turns(
        {"role": "user", "content": "a"},
        {"role": "user", "content": [text("b"), text("c")]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("d")]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, USE]},
        {"role": "user", "content": "e"},
    ) == [
        ChatMessage("user", "a\nb\nc"),
        ChatMessage("assistant", "d", "hm", (Call("toolu_1", "weather", '{"city": "Bonn"}'),)),
        ChatMessage("user", "e"),
    ]


def test_what_the_system_says_may_come_later_too() -> None:
    assert turns(
        {"role": "system", "content": "b"},
        *HELLO,
        {"role": "system", "content": [text("c")]},
        system=[text("a")],
    ) == [ChatMessage("system", "a\nb"), ChatMessage("user", "hello"), ChatMessage("system", "c")]
    assert turns(*HELLO, system="") == [ChatMessage("user", "hello")]


def test_what_tools_answered_comes_before_what_the_user_says() -> None:
    asked = {"role": "assistant", "content": [USE, USE | {"id": "toolu_2", "name": "time"}]}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_2"},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no city", "is_error": True},
    ]
    assert turns(*HELLO, asked, {"role": "user", "content": [text("and?"), *results]})[2:] == [
        ChatMessage("tool", "", call_id="toolu_2", name="time"),
        ChatMessage("tool", "Error: no city", call_id="toolu_1", name="weather"),
        ChatMessage("user", "and?"),
    ]


def test_who_thinks() -> None:
    meant = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
    for kind, thinking in meant.items():
        assert conversation(thinking={"type": kind, "budget_tokens": 1024}).thinking is thinking
    assert conversation().thinking is None


def test_a_count_takes_a_format_and_what_no_answer_takes() -> None:
    given = {"type": "json_schema", "schema": {"type": "object"}}
    half = {"messages": [*HELLO, {"role": "assistant", "content": "I"}], "output_format": given}
    counted = parse_count(json.dumps(half).encode())
    assert counted.options.format is not None
    assert counted.options.format == parse(output_format=given).options.format
    assert isinstance(counted.prompt, Conversation)
    assert counted.prompt.messages[-1] == ChatMessage("assistant", "I")


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": 1.01}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages"),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "x", "input_schema": "y"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER | {"name": ""}]}, "tools[0].name"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [WEATHER], "tool_choice": CHOICE}, "tool_choice.name"),
        ({"tool_choice": CHOICE | {"name": "weather"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_a_mistake_names_its_field(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (Code.BAD_REQUEST, param)
    assert error.detail.startswith(param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"output_format": {"type": "xml"}}, "output_format.type"),
        ({"tools": [SEARCH]}, "tools[0].type"),
        ({"tools": [WEATHER, SEARCH], "tool_choice": CHOICE | {"name": "web_search"}}, "tools[1].type"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
        ({"tools": [WEATHER], "tool_choice": CHOICE | {"name": "auto"}}, "tool_choice.name"),
    ],
)
def test_what_is_understood_but_not_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (Code.NOT_SUPPORTED, param)


def test_a_prompt_may_be_read_ahead_without_an_answer(server: Server) -> None:
    body = post(server, json={"model": "tiny", "messages": HELLO, "max_tokens": 0}).json()
    assert (body["content"], body["stop_reason"], body["usage"]["output_tokens"]) == ([], "max_tokens", 0)


def test_hosted_tools_beside_others_are_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    caplog.set_level(logging.INFO, "mlxtp")
    editor = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
    servers = [{"type": "url", "url": "x", "name": "y"}]
    for _ in range(2):
        asked = conversation(tools=[SEARCH, WEATHER, editor], mcp_servers=servers)
        assert [tool.name for tool in asked.tools] == ["weather"]
    assert [line.split('"')[1] for line in caplog.messages] == [
        "mcp_servers", "web_search_20250305", "text_editor_20250728",
    ]  # fmt: skip

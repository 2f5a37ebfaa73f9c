"""`/v1/responses`: the real client library, a real server; only the model is played."""

from __future__ import annotations

import json
import threading
from typing import Any, get_args

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from mlxtp.api.backend import Sampling
from mlxtp.api.dialects import responses_request
from mlxtp.api.dialects.responses_request import ResponseStore, parse
from mlxtp.errors import GroupError, RequestError
from mlxtp.text.conversation import GenerationRequest

from ..conftest import CONTEXT, WAIT_S, Server, forever, says, says_scored, score, then
from ..test_app import assert_error, fail_with
from .conftest import impossible
from .shapes import read

TEXT = "hello wide world, 日本語 😀"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
WEATHER: dict[str, Any] = {
    "type": "function", "name": "weather", "description": "of a city", "strict": True,
    "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip
TIME = {"type": "function", "name": "time", "parameters": None, "strict": False, "description": None}


def create(server: Server, **fields: Any) -> Any:
    return server.client.responses.create(**({"model": "tiny", "input": "hello"} | fields))


def body_of(response: httpx.Response) -> dict[str, Any]:
    """The body of an answer, or the one at the end of its stream, strictly parsed."""
    streamed = response.headers["content-type"].startswith("text/event-stream")
    body: dict[str, Any] = events_of(response)[-1]["response"] if streamed else response.json()
    strict_response(body)
    return body


def http(server: Server, body: Any, path: str = "") -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses{path}", json=body, timeout=WAIT_S, trust_env=False)


def post(server: Server, **fields: Any) -> httpx.Response:
    return http(server, {"model": "tiny", "input": "hello"} | fields)


def prompts(server: Server) -> list[str]:
    """Return the model's prompts behind the descriptions of tools, in the order of the requests."""
    whole = [
        server.tokenizer.decode(request.tokens, skip_special_tokens=False)
        for request in server.backend.requests
    ]
    return ["<s>" + prompt.partition("<s>")[2] for prompt in whole]


EVENTS: dict[str, type[pydantic.BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(ResponseStreamEvent)[0])
}


def strict_response(body: Any) -> Response:
    """As the strictest of clients reads it: every field is there, none is unknown, each has its type."""
    response = read(Response, json.dumps(body))
    places = [item["id"] for item in body["output"]]
    assert len(set(places)) == len(places)
    if body["status"] in ("completed", "incomplete"):
        usage = body["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        states = [item["status"] for item in body["output"] if item["type"] != "compaction"]
        assert states == [*["completed"] * (len(places) - 1), body["status"]][: len(states)]
        assert body["completed_at"] >= body["created_at"]
    cut = {"reason": "max_output_tokens"} if body["status"] == "incomplete" else None
    assert body["incomplete_details"] == cut
    return response


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Every event of a stream, strictly parsed and numbered from 0 on. Comments are left out."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        read(EVENTS[event["type"]], json.dumps(event))
        if "response" in event:
            strict_response(event["response"])
        events.append(event)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
    assert_places(events)
    return events


def assert_places(events: list[dict[str, Any]]) -> None:
    """One item after the other, each opened and closed, and the response at the end has what was told."""
    done: list[Any] = []
    open_: dict[str, Any] | None = None
    signs_of_life = {"response.in_progress"}  # while the answer waits
    for event in (each for each in events[2:-1] if each["type"] not in signs_of_life):
        assert event["output_index"] == len(done)
        if event["type"] == "response.output_item.added":
            assert open_ is None
            open_ = event["item"]
            assert open_.get("status", "in_progress") == "in_progress"
        elif event["type"] == "response.output_item.done":
            assert open_ is not None
            assert event["item"]["id"] == open_["id"]
            done.append(event["item"])
            open_ = None
        else:
            assert open_ is not None
            assert event["item_id"] == open_["id"]
    assert open_ is None
    assert events[-1]["response"]["output"] == done


def deltas(events: list[dict[str, Any]], kind: str) -> str:
    return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")


def kinds_of(events: list[dict[str, Any]], index: int) -> list[str]:
    """What is told of an item, but for its deltas."""
    kinds = [event["type"] for event in events if event.get("output_index") == index]
    return [kind.removeprefix("response.") for kind in kinds if not kind.endswith("delta")]


def test_a_whole_answer(server: Server) -> None:
    tokens = server.ids(TEXT)
    server.backend.script = says([*tokens, 1], cached=3)
    body = post(server, instructions="be", metadata={"a": "b"}, user="me", temperature=0.5).json()
    response = strict_response(body)
    assert response.output_text == TEXT
    assert (response.status, response.model, response.instructions) == ("completed", "org/tiny", "be")
    assert (response.metadata, response.user, response.temperature) == ({"a": "b"}, "me", 0.5)
    assert response.id.startswith("resp_")
    assert response.usage is not None
    assert response.usage.input_tokens == len(server.backend.request.tokens)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens == len(tokens) + 1
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert prompts(server) == ["<s><|system|>be<|user|>hello<|assistant|>"]
    assert server.backend.whose[0].user == "me"
    assert create(server).output_text == TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_a_request_leaves_out_are_the_used_ones(server: Server, stream: bool) -> None:
    server.backend.defaults = Sampling(temperature=0.7, top_p=0.8)
    server.backend.script = says([*server.ids("hello"), 1])
    found = create(server, stream=stream)
    response = [*found][-1].response if stream else found
    assert (response.temperature, response.top_p) == (0.7, 0.8)
    assert (response.presence_penalty, response.frequency_penalty) == (0, 0)
    response = create(server, temperature=0.5, extra_body={"presence_penalty": 1.5})
    assert (response.temperature, response.presence_penalty) == (0.5, 1.5)


def test_settings_reach_the_backend(server: Server) -> None:
    response = create(
        server, temperature=0.5, top_p=0.9, max_output_tokens=20, top_logprobs=4, safety_identifier="me",
        include=["message.output_text.logprobs", "reasoning.encrypted_content"], truncation="auto",
        prompt_cache_key="k", service_tier="auto", parallel_tool_calls=False, max_tool_calls=3,
        extra_body={
            "top_k": 30, "seed": 7, "stop": "zzz", "min_tokens": 2, "logit_bias": {"7": 1}, "unknown": 1,
        },
    )  # fmt: skip
    request = server.backend.request
    assert request.sampling == Sampling(0.5, 0.9, 30, seed=7)
    assert (request.max_tokens, request.logprobs) == (20, 4)
    assert (request.shaping.min_tokens, request.shaping.bias_tokens) == (2, (7,))
    assert server.backend.whose[0].user == "me"
    assert (response.temperature, response.top_p) == (0.5, 0.9)


def test_a_conversation_as_items(thinker: Server) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [part("input_text", "a"), part("input_text", "b")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [part("reasoning_text", "hm")]},
        {
            "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [part("output_text", "c") | {"annotations": []}, {"type": "refusal", "refusal": "d"}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "2", "output": "two"},
        {"type": "function_call_output", "call_id": "1", "output": [part("input_text", "one")]},
        {"type": "message", "role": "user", "content": "e"},
    ]  # fmt: skip
    create(thinker, input=items, instructions="first", store=False)
    assert prompts(thinker) == [
        "<s><|system|>first\n\nbe<|user|>a\nb<|assistant|>(hm)c\nd"
        '!f{"x": 1}!g{}<|tool|>one<|tool|>two<|user|>e<|assistant|>'
    ]


def part(kind: str, said: str) -> dict[str, Any]:
    return {"type": kind, "text": said}


@pytest.mark.parametrize(
    ("reasoning", "seen"),
    [
        (None, ""), ({}, ""), ({"summary": "auto"}, ""), ({"effort": "none"}, "=False~none"),
        ({"effort": "high", "summary": "auto"}, "=True~high"), ({"effort": "minimal"}, "=True~minimal"),
    ],
)  # fmt: skip
def test_effort_decides_whether_the_model_thinks(thinker: Server, reasoning: Any, seen: str) -> None:
    create(thinker, reasoning=reasoning)
    assert prompts(thinker) == [f"<s><|user|>hello{seen}<|assistant|>"]


def test_the_template_gets_its_variables(thinker: Server) -> None:
    more = {"chat_template_kwargs": {"reasoning_effort": "odd"}}
    create(thinker, reasoning={"effort": "high"}, extra_body=more)
    assert prompts(thinker) == ["<s><|user|>hello=True~odd<|assistant|>"]
    for name in ("tools", "add_generation_prompt"):
        with pytest.raises(openai.BadRequestError, match=f"kwargs.{name} cannot be set"):
            create(thinker, extra_body={"chat_template_kwargs": {name: False}})


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_a_word_still_has_its_text(server: Server, stream: bool) -> None:
    [message] = body_of(post(server, stream=stream))["output"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "")


@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_streamed_answer(server: Server, step: int) -> None:
    tokens = server.ids(TEXT)
    server.backend.script = says(tokens, step=step)
    events = events_of(post(server, stream=True))
    assert kinds_of(events, 0) == [
        "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip
    assert deltas(events, "output_text") == TEXT
    last = events[-1]["response"]
    assert (events[-1]["type"], strict_response(last).output_text) == ("response.completed", TEXT)
    assert last["usage"]["output_tokens"] == len(tokens)
    first = events[0]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert {event["response"]["id"] for event in events if "response" in event} == {last["id"]}


def comparable(body: dict[str, Any]) -> str:
    """Without what differs between two answers."""
    text = json.dumps(body | {"created_at": 0, "completed_at": 0, "id": "resp_"})
    for item in body["output"]:
        text = text.replace(item["id"].split("_")[1], "").replace(item.get("call_id", "resp_"), "")
    return text.replace(body["id"].removeprefix("resp_"), "")


@pytest.mark.parametrize(
    "said", ["hello", "<think>hm</think>hello", f"<think>hm</think>hello{CALL}{CALL}", CALL, "<think>hm"]
)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stream_ends_with_what_a_whole_answer_is(thinker: Server, said: str, reason: str) -> None:
    thinker.backend.script = says(thinker.ids(said), reason, cached=2)
    whole, streamed = (body_of(post(thinker, tools=[WEATHER], stream=stream)) for stream in (False, True))
    assert comparable(streamed) == comparable(whole)


LOGPROBS = ["message.output_text.logprobs"]


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs(server: Server, top: int) -> None:
    tokens = server.ids(TEXT)
    server.backend.script = says_scored([*tokens, 1], 2, top)
    body = post(server, include=LOGPROBS, top_logprobs=top).json()
    strict_response(body)
    [part] = body["output"][0]["content"]
    assert [row["logprob"] for row in part["logprobs"]] == [
        score(at).logprob for at in range(len(tokens) + 1)
    ]
    assert b"".join(bytes(row["bytes"]) for row in part["logprobs"]).decode() == TEXT
    assert all(len(row["top_logprobs"]) == top for row in part["logprobs"])
    events = events_of(post(server, include=LOGPROBS, top_logprobs=top, stream=True))
    told = [row for event in events if event["type"].endswith("text.delta") for row in event["logprobs"]]
    assert told == part["logprobs"]
    assert [event["logprobs"] for event in events if event["type"].endswith("text.done")] == [told]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("step", "call"), [(1, CALL), (3, CALL), (5, ""), (100, "")])
def test_logprobs_are_those_of_the_text_alone(thinker: Server, stream: bool, step: int, call: str) -> None:
    thinker.backend.script = says_scored(thinker.ids(f"<think>hello</think>hello{call}"), step)
    message = body_of(post(thinker, tools=[WEATHER], include=LOGPROBS, stream=stream))["output"][1]
    told = b"".join(bytes(row["bytes"]) for row in message["content"][0]["logprobs"]).decode()
    assert message["content"][0]["text"] == "hello"
    assert told.startswith("hello")
    assert len(told) < len("hello<tool_call>")


def test_a_token_that_cannot_be_has_a_number_that_json_knows(server: Server) -> None:
    server.backend.script = impossible
    body = post(server, include=LOGPROBS, top_logprobs=2).json()
    [row] = body["output"][0]["content"][0]["logprobs"]
    assert (row["logprob"], row["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_an_item_of_their_own(thinker: Server, stream: bool) -> None:
    thinker.backend.script = says(thinker.ids("<think>hm, 日本</think>hello"))
    response = post(thinker, stream=stream)
    body = body_of(response)
    thoughts, message = body["output"]
    assert (thoughts["type"], message["type"]) == ("reasoning", "message")
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm, 日本"}]
    assert message["content"][0]["text"] == "hello"
    counted = body["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert counted == len(thinker.ids("hm, 日本</think>"))
    if stream:
        events = events_of(response)
        assert deltas(events, "reasoning_text") == "hm, 日本"
        assert kinds_of(events, 0) == [
            "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done",
            "output_item.done",
        ]  # fmt: skip


def test_a_call_is_streamed(thinker: Server) -> None:
    thinker.backend.script = says(thinker.ids(f"ok {CALL}"))
    events = events_of(post(thinker, tools=[WEATHER], stream=True))
    assert deltas(events, "function_call_arguments") == '{"city": "Bonn"}'
    assert sum(event["type"].endswith("arguments.delta") for event in events) > 1
    assert kinds_of(events, 1) == ["output_item.added", "function_call_arguments.done", "output_item.done"]
    [done] = [event for event in events if event["type"].endswith("arguments.done")]
    assert (done["arguments"], done["name"]) == ('{"city": "Bonn"}', "weather")
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "function_call"]


def allowed(mode: str, name: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name}]}


@pytest.mark.parametrize(
    ("choice", "offered", "grammar"),
    [
        ("auto", "+weather+time", ""), ("none", "+weather+time", ""), ("required", "+weather+time", "lark"),
        ({"type": "function", "name": "time"}, "+weather+time", "lark"),
        (allowed("auto", "time"), "+time", ""), (allowed("required", "weather"), "+weather", "lark"),
    ],
)  # fmt: skip
def test_the_choice_of_tools(thinker: Server, choice: Any, offered: str, grammar: str) -> None:
    body = body_of(post(thinker, tools=[WEATHER, TIME], tool_choice=choice))
    assert (body["tool_choice"], body["tools"]) == (choice, [WEATHER, TIME])
    [prompt] = prompts(thinker)
    assert prompt.split("=")[0].removesuffix("<|assistant|>") == f"<s><|user|>hello{offered}"
    shaping = thinker.backend.request.shaping
    assert shaping.grammar_kind == grammar
    if isinstance(choice, dict) and choice["type"] == "function":
        assert "weather" not in shaping.grammar


def test_thoughts_that_lead_nowhere_and_calls_that_were_cut_off_are_not_kept(thinker: Server) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [part("reasoning_text", "hm")]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "x"}
    cut, said = call | {"status": "incomplete"}, {"role": "assistant", "content": "a"}
    given = [thought, call, thought, result, cut, thought, thought, said, user("b"), thought]
    first = post(thinker, input=given).json()["id"]
    kept: Any = parse(json.dumps({"input": given}).encode(), ResponseStore(), "").dialect
    assert " ".join(item["type"] for item in json.loads(kept.input)) == (
        "reasoning function_call function_call_output reasoning reasoning message message"
    )
    create(thinker, input="c", previous_response_id=first)
    before, after = prompts(thinker)
    assert after.startswith(before)


@pytest.mark.parametrize(
    ("format_", "kind"),
    [
        ({"type": "text"}, ""), ({"type": "json_object"}, "json_schema"), (None, ""),
        ({"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}, "json_schema"),
    ],
)  # fmt: skip
def test_formats_reach_the_backend(server: Server, format_: Any, kind: str) -> None:
    body = post(server, text={"format": format_, "verbosity": "medium"}).json()
    strict_response(body)
    assert server.backend.request.shaping.grammar_kind == kind
    assert body["text"] == {"format": format_ or {"type": "text"}, "verbosity": "medium"}


@pytest.mark.parametrize("stream", [False, True])
def test_three_turns_that_go_on_from_each_other(server: Server, stream: bool) -> None:
    server.backend.scripts = [says(server.ids(word)) for word in ("one", "two", "three")]
    last: dict[str, Any] = {"id": None}
    for i, word in enumerate(("a", "b", "c")):
        asked = {"input": word, "instructions": f"be {i}", "previous_response_id": last["id"]}
        last = body_of(post(server, stream=stream, **asked))
    assert prompts(server)[2] == (
        "<s><|system|>be 2<|user|>a<|assistant|>one<|user|>b<|assistant|>two<|user|>c<|assistant|>"
    )
    assert (last["output"][0]["content"][0]["text"], last["instructions"]) == ("three", "be 2")


def reference(item: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_that_names_earlier_items_by_their_ids(thinker: Server, stream: bool) -> None:
    """The AI SDK sends chats in this shape: thoughts and text of each earlier turn as references."""
    words = ("<think>hm</think>one", "<think>so</think>two", "three")
    thinker.backend.scripts = [says(thinker.ids(each)) for each in words * 2]
    chat: list[Any] = []
    for text in ("a", "b", "c"):
        chat.append(user(text))
        chat += map(reference, body_of(post(thinker, input=chat, stream=stream))["output"])
    named = "item_reference"
    assert [item.get("type") for item in chat] == [None, named, named, None, named, named, None, named]
    last = create(thinker, input=[user("a")])
    for text in ("b", "c"):
        last = create(thinker, input=[user(text)], previous_response_id=last.id)
    assert prompts(thinker)[:3] == prompts(thinker)[3:]


@pytest.mark.parametrize("named", [False, True])
def test_a_loop_of_tools_that_names_earlier_items_by_their_ids(thinker: Server, named: bool) -> None:
    """The AI SDK names thoughts by their ids. It repeats or names a call, by the kind of its tool."""
    thinker.backend.scripts = [says(thinker.ids(each)) for each in (f"<think>hm</think>{CALL}", "warm", "ok")]
    thought, call = post(thinker, tools=[WEATHER]).json()["output"]
    repeated = {key: call[key] for key in ("type", "call_id", "name", "arguments")}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
    steps = [user("hello"), reference(thought), reference(call) if named else repeated, result]
    [answer] = post(thinker, tools=[WEATHER], input=steps).json()["output"]
    post(thinker, tools=[WEATHER], input=[*steps, reference(answer), user("thanks")])
    post(thinker, tools=[WEATHER], input=[user("hello"), thought, call, result, answer, user("thanks")])
    *_, by_ids, whole = prompts(thinker)
    assert "hm" in whole
    assert by_ids == whole


@pytest.mark.parametrize(
    ("store", "times", "why"), [(False, 1, "is not known here"), (True, 2, "is named twice")]
)
def test_an_item_is_named_once_and_only_while_it_is_kept(
    server: Server, store: bool, times: int, why: str
) -> None:
    """A short body would otherwise name one long item many times."""
    [item] = post(server, store=store).json()["output"]
    refused = post(server, input=[user("hello"), *[reference(item)] * times])
    error = assert_error(refused, 400, "invalid_request")
    assert error["param"] == f"input[{times}].id"
    assert why in error["message"]
    assert "sends items with store false" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_must_not_be_kept_is_not(server: Server, stream: bool) -> None:
    id_ = body_of(post(server, store=False, stream=stream))["id"]
    with pytest.raises(openai.NotFoundError, match="6 hours, at most 1000 of them and 64 MiB, ") as caught:
        create(server, previous_response_id=id_)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "not_found")
    assert "store false" in caught.value.message


def test_an_abandoned_answer_is_not_kept(server: Server) -> None:
    server.backend.script = then(server.ids("ab"), forever)
    with create(server, stream=True) as stream:
        id_ = next(event.response.id for event in stream if event.type == "response.created")
    assert server.backend.all_closed()
    with pytest.raises(openai.NotFoundError):
        create(server, previous_response_id=id_)


def test_what_takes_long_is_not_done_where_others_tokens_are_sent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body is checked, and a conversation that was kept is read, in another thread than the server's."""
    threads: list[str] = []

    def noting(*given: Any) -> GenerationRequest:
        threads.append(threading.current_thread().name)
        return ask(*given)

    ask = responses_request._ask
    monkeypatch.setattr(responses_request, "_ask", noting)
    server.client.responses.input_tokens.count(model="tiny", input="hello")
    create(server)
    assert len(threads) == 2
    assert all(name.startswith("text_") for name in threads)


REGEX, TOOL = {"type": "regex", "pattern": "a"}, {"type": "function", "name": "weather"}


@pytest.mark.parametrize(
    ("field", "given", "shown"),
    [
        ("text", {"format": {"type": "text", "x": [1]}}, {"format": {"type": "text"}, "verbosity": "medium"}),
        ("text", {"format": REGEX | {"x": 1}}, {"format": REGEX, "verbosity": "medium"}),
        ("tool_choice", TOOL | {"x": [1]}, TOOL),
    ],
)
def test_unknown_keys_are_not_repeated(thinker: Server, field: str, given: Any, shown: Any) -> None:
    thinker.backend.script = says(thinker.ids(CALL.split("\n")[1]))
    body = post(thinker, tools=[WEATHER] if field == "tool_choice" else [], **{field: given}).json()
    assert body[field] == shown


def test_a_conversation_has_an_end() -> None:
    """Each of a few short requests would have all of it read again."""
    store = ResponseStore()

    def refused(**fields: Any) -> str:
        with pytest.raises(RequestError) as told:
            parse(json.dumps(fields).encode(), store, "")
        assert (told.value.param, told.value.status) == ("input", 400)
        return told.value.detail

    user = {"role": "user", "content": "a"}
    assert refused(input=[{"type": "reasoning"}] * 20_001) == (
        "input has 20001 items and parts of them, and at most 20000 are taken"
    )
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}] * 11_998}
    kept: Any = parse(json.dumps({"input": [parts, user]}).encode(), store, "").dialect
    store.put("", "resp_1", kept.input, {"status": "completed", "output": []})
    going_on: Any = {"previous_response_id": "resp_1"}
    parse(json.dumps(going_on | {"input": [user]}).encode(), store, "")
    assert refused(**going_on, input=[user, parts]) == (
        "input has 12001 items and parts of them, after 12001 of previous_response_id, "
        "and at most 20000 are taken"
    )


FUNCTION: dict[str, Any] = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"input": None}, "input", "missing"),
        ({"input": []}, "input", "empty"),
        ({"input": 3}, "input", "got 3"),
        ({"input": ["a"]}, "input[0]", 'got "a"'),
        ({"input": [{}]}, "input[0].type", "missing"),
        ({"input": [{"id": "msg_x"}]}, "input[0].id", 'the item "msg_x" is not known here'),
        ({"input": [{"type": "item_reference", "id": "msg_a_0"}]}, "input[0].id", "store false"),
        ({"input": [{"type": "item_reference", "id": 3}]}, "input[0].id", "got 3"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role", "missing"),
        ({"input": [{"role": "user"}]}, "input[0].content", "got null"),
        ({"input": [{"type": "mesage"}]}, "input", "empty"),
        ({"input": [{"type": 3}]}, "input[0].type", "got 3"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"tools": [{"name": "f"}]}, "tools[0].type", "missing"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name", '"f"'),
        ({"tools": [FUNCTION | {"parameters": ["array"]}]}, "tools[0].parameters", "array"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": FUNCTION}, "tool_choice.name", '"f"'),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "web_search_preview"),
        ({"tool_choice": "perhaps"}, "tool_choice", '"perhaps"'),
        ({"tools": [FUNCTION], "tool_choice": allowed("auto", "g")}, "tool_choice.tools[0].name", '"g"'),
        ({"tool_choice": allowed("auto", "g") | {"tools": [3]}}, "tool_choice.tools[0]", "got 3"),
        ({"background": True, "store": False}, "store", "store false"),
        ({"conversation": "conv_1"}, "conversation", "conv_1"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "pmpt_1"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "JSON schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "xml"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "huge"),
        ({"include": ["everything"]}, "include[0]", "everything"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"truncation": "some"}, "truncation", "some"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "513"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "17"),
        ({"max_output_tokens": 0}, "max_output_tokens", "from 1 to"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_a_400_that_names_it(
    server: Server, fields: dict[str, Any], param: str, named: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, stream=stream, extra_body=fields)
    assert caught.value.param == param
    assert named in caught.value.message
    assert server.backend.requests == []


def test_a_conversation_too_long_is_refused_in_the_words_of_this_endpoint(server: Server) -> None:
    for fields in (
        {"input": "q" * CONTEXT},
        {"input": "q" * 100_000},
        {"input": "a", "truncation": "auto", "instructions": "q" * 300},
    ):
        error = assert_error(post(server, **fields), 400, "context_length_exceeded")
        assert error["param"] == "input"
    assert str(CONTEXT) in error["message"]


@pytest.mark.parametrize("said", ["", "ab"])
def test_an_answer_that_breaks_off_has_failed(server: Server, said: str) -> None:
    server.backend.script = then(server.ids(said), fail_with(GroupError("rank 1 is gone")))
    last = events_of(post(server, stream=True))[-1]
    body, told = last["response"], {"message": "rank 1 is gone", "type": "rank_lost", "param": None}
    assert (last["type"], body["error"]) == ("response.failed", told | {"code": "server_error"})
    assert [item["status"] for item in body["output"]] == (["incomplete"] if said else [])
    with server.client.responses.stream(model="tiny", input="hello") as stream, pytest.raises(RuntimeError):
        stream.get_final_response()
    with pytest.raises(openai.NotFoundError):
        create(server, previous_response_id=body["id"])
    assert_error(post(server), 503, "rank_lost")

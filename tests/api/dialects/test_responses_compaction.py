"""Compaction at `/v1/responses`: the model writes a summary, and a client goes on with it."""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from mlxtp.api.dialects.responses_items import COMPACT, compaction_content, users_of
from mlxtp.text.tool_grammar import log_once

from ..conftest import Server, says
from ..test_app import assert_error
from .shapes import CompactedHistory, read
from .test_responses import body_of, create, events_of, http, kinds_of, post, prompts, user

CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "42"}
TALK: list[Any] = [user("what is it?"), CALL, RESULT, {"role": "assistant", "content": "it is 42"}]
TOLD = f"<|user|>what is it?<|assistant|>!f{{}}<|tool|>42<|assistant|>it is 42<|user|>{COMPACT}"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
TRIGGER = {"type": "compaction_trigger"}
SUMMARY = "It is 42, by f."
MARK = "[Summary of the conversation so far]\n"


@pytest.fixture
def server(thinker: Server) -> Server:
    """A server whose model thinks, has room for a conversation, and writes a summary."""
    thinker.backend.context = 2000
    thinker.backend.script = says(thinker.ids(SUMMARY))
    return thinker


def compacted(server: Server, input_: Any = TALK, **fields: Any) -> dict[str, Any]:
    response = http(server, {"model": "tiny", "input": input_} | fields, "/compact")
    assert response.status_code == 200, response.text
    read(CompactedHistory, response.content)
    body: dict[str, Any] = response.json()
    return body


def triggered(server: Server, stream: bool, input_: Sequence[Any] = TALK, **fields: Any) -> dict[str, Any]:
    """The response to a conversation with a trigger, and its only item, strictly parsed."""
    body = body_of(post(server, input=[*input_, TRIGGER], stream=stream, **fields))
    [item] = body["output"]
    assert item["type"] == "compaction"
    return body


def summary_of(body: dict[str, Any]) -> str:
    content = body["output"][-1]["encrypted_content"]
    assert content.startswith("mlxtp:")
    return b64decode(content.removeprefix("mlxtp:")).decode()


def test_a_new_history_has_the_users_words_and_a_summary(server: Server) -> None:
    body = compacted(server, [{"role": "developer", "content": "be"}, *TALK, user("and why?")], tools=[TOOL])
    first, second, _ = body["output"]
    assert [first["content"], second["content"]] == [
        [{"type": "input_text", "text": text}] for text in ("what is it?", "and why?")
    ]
    assert summary_of(body) == SUMMARY
    prompt = f"<s><|system|>be{TOLD.replace(COMPACT, '')}and why?<|user|>{COMPACT}"
    assert prompts(server)[0].startswith(prompt + "+f<|assistant|>")
    assert body["usage"]["input_tokens"] == len(server.backend.request.tokens)
    assert body["usage"]["output_tokens"] == len(server.ids(SUMMARY))
    create(server, input=[*body["output"], user("go on")])
    assert prompts(server)[1] == (
        f"<s><|user|>what is it?<|user|>and why?<|user|>{MARK}{SUMMARY}<|user|>go on<|assistant|>"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_trigger_makes_the_answer_a_summary(server: Server, stream: bool) -> None:
    body = triggered(server, stream, tools=[TOOL])
    assert summary_of(body) == SUMMARY
    assert prompts(server)[0].startswith(f"<s>{TOLD}+f<|assistant|>")
    assert body["usage"]["output_tokens"] == len(server.ids(SUMMARY))
    counted = http(server, {"input": [*TALK, TRIGGER], "tools": [TOOL]}, "/input_tokens").json()
    assert counted["input_tokens"] == body["usage"]["input_tokens"]
    create(server, input=[TALK[0], body["output"][0], user("go on")])
    go_on = f"<s><|user|>what is it?<|user|>{MARK}{SUMMARY}<|user|>go on<|assistant|>"
    assert prompts(server)[1] == go_on


def test_the_events_of_a_summary(server: Server) -> None:
    events = events_of(post(server, input=[*TALK, TRIGGER], stream=True))
    added, *compacting, done = kinds_of(events, 0)
    assert (added, done) == ("output_item.added", "output_item.done")
    assert set(compacting) == {"compaction.compacting"}
    assert len(compacting) > 5
    begun, whole = (next(each for each in events if each["type"].endswith(end)) for end in (added, done))
    assert begun["item"] == whole["item"] | {"encrypted_content": ""}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("words", "reason", "summary"),
    [
        ("<think>hm</think>\n\nall\n", "stop", "all"), ("<think>all", "stop", "all"),
        ("al", "length", "al\n[cut off here]"),
        ('all<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "stop", "all"),
    ],
)  # fmt: skip
def test_a_summary_is_the_text_alone_and_says_where_it_was_cut(
    server: Server, stream: bool, words: str, reason: str, summary: str
) -> None:
    server.backend.script = says(server.ids(words), reason)
    body = triggered(server, stream, tools=[TOOL])
    assert (body["status"], summary_of(body)) == ("completed", summary)
    assert summary_of(compacted(server, tools=[TOOL])) == summary


def test_without_a_summary_the_conversation_stays(server: Server) -> None:
    server.backend.script = says([1])
    assert_error(http(server, {"model": "tiny", "input": TALK}, "/compact"), 500, "internal")
    assert_error(post(server, input=[*TALK, TRIGGER]), 500, "internal")
    failed = events_of(post(server, input=[*TALK, TRIGGER], stream=True))[-1]
    assert failed["type"] == "response.failed"
    assert "wrote no summary" in failed["response"]["error"]["message"]
    long = http(server, {"model": "tiny", "input": "q" * 3000}, "/compact")
    assert assert_error(long, 400, "context_length_exceeded")["param"] == "input"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_from_a_summary(server: Server, stream: bool) -> None:
    first = triggered(server, stream)
    second = create(server, input="go on", previous_response_id=first["id"])
    again = compacted(server, None, previous_response_id=second.id)
    assert [item["type"] for item in again["output"]] == ["message", "message", "compaction"]
    assert prompts(server)[1] == f"<s><|user|>what is it?<|user|>{MARK}{SUMMARY}<|user|>go on<|assistant|>"
    assert prompts(server)[2].startswith(
        f"<s><|user|>what is it?<|user|>{MARK}{SUMMARY}<|user|>go on<|assistant|>{SUMMARY}<|user|>Write a"
    )


def test_a_summary_stands_for_what_the_assistant_did_before_it(server: Server) -> None:
    """A client may leave its whole history in front of it."""
    ours = {"type": "compaction", "encrypted_content": compaction_content("new")}
    older = ours | {"encrypted_content": compaction_content("old")}
    create(server, input=[{"role": "system", "content": "be"}, older, *TALK, ours, user("go on")])
    assert prompts(server) == [
        f"<s><|system|>be<|user|>what is it?<|user|>{MARK}new<|user|>go on<|assistant|>"
    ]


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary", "context_compaction"])
@pytest.mark.parametrize("content", ["gAAAAABpM0Yj", "mlxtp:?", "mlxtp:", None, 5])
def test_a_summary_that_another_server_wrote_is_left_out(server: Server, kind: str, content: Any) -> None:
    create(server, input=[*TALK[:1], {"type": kind, "encrypted_content": content}, user("go on")])
    note = (
        "<|assistant|>[summary of the conversation left out: only its maker can read it]" if content else ""
    )
    assert prompts(server) == [f"<s><|user|>what is it?{note}<|user|>go on<|assistant|>"]


def test_settings_of_answers_do_not_hold_for_summaries(server: Server) -> None:
    format_ = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    include = ["message.output_text.logprobs"]
    body = triggered(
        server, False, text={"format": format_}, stop=["42"], include=include, tools=[TOOL],
        tool_choice="required", temperature=0.5, reasoning={"effort": "low"},
    )  # fmt: skip
    assert summary_of(body) == SUMMARY
    request = server.backend.request
    assert (request.shaping.grammar_kind, request.logprobs, request.sampling.temperature) == ("", -1, 0.5)


def test_nothing_of_a_conversation_that_is_to_be_summarized_is_refused(server: Server) -> None:
    shown = {"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}
    for input_ in ([*TALK, shown], [shown]):
        note = "[image left out: this model reads no images]"
        assert compacted(server, input_)["output"][-2]["content"][0]["text"] == note
        triggered(server, False, input_)
    with pytest.raises(openai.BadRequestError, match="this model reads no images"):
        create(server, input=[*TALK, shown])
    with pytest.raises(openai.BadRequestError, match="input is missing"):
        create(server, input=None, extra_body={"input": None})
    assert_error(http(server, {"input": None}, "/compact"), 400, "invalid_request")
    create(server, input=[TRIGGER, *TALK])  # it stands behind what it compacts
    assert COMPACT not in prompts(server)[-1]


def test_the_users_older_words_give_way() -> None:
    def message(size: int) -> dict[str, Any]:
        return {"type": "message", "role": "user", "content": [{"text": "x" * size}]}

    def kept(*sizes: int, size: int) -> list[int]:
        return [len(item["content"][0]["text"]) for item in users_of([*map(message, sizes)], size)]

    assert kept(10, 20, 30, size=0) == [10, 20, 30]
    assert kept(1500, 900, 900, size=4000) == [900, 900]
    assert kept(1500, 900, 900, size=8000) == [1500, 900, 900]
    assert kept(10, 9000, size=4000) == [9000], "the newest stays"


def test_a_wish_for_compaction_by_itself_is_logged_and_changes_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    caplog.set_level(logging.INFO, "mlxtp")
    create(server, extra_body={"context_management": [{"type": "compaction", "compact_threshold": 1000}]})
    assert prompts(server) == ["<s><|user|>hello<|assistant|>"]
    assert [line for line in caplog.messages if "context_management" in line]


def test_the_prompt_of_a_summary_begins_with_the_answer_as_the_model_wrote_it(server: Server) -> None:
    """With its thoughts, which the client leaves out: so the prefix cache holds all but the request."""
    server.backend.scripts = [says(server.ids("<think>hm</think>it is 42"))]
    create(server, input=TALK[:1])
    triggered(server, False, [TALK[0], TALK[3]])
    first, second = (request.tokens for request in server.backend.requests)
    assert second[: len(first)] == first
    assert (
        prompts(server)[1].partition("<|assistant|>")[2].startswith("<think>hm</think>it is 42<|user|>Write")
    )

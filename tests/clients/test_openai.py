"""openai-python against two live ranks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest

from ..live_cluster import WAIT_S, Cluster, until
from ..reference import random_text

SECRET = "FALCON-MERCURY-7749"
ENDLESS = "Count from 1 to 60."
PROPERTIES = {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["n", "ok"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up", "parameters": SCHEMA}}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def reached(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


@pytest.fixture(scope="module")
def client(two_ranks: Cluster) -> Iterator[openai.OpenAI]:
    with reached(two_ranks) as found:
        yield found


def test_a_whole_answer_and_a_streamed_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": user(f"Repeat exactly: {SECRET}")}
    assert client.chat.completions.create(**asked).choices[0].message.content == SECRET
    with client.chat.completions.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content == SECRET
    assert len(pieces) > 5


FORCED = {"type": "function", "function": {"name": "look_up"}}


@pytest.mark.parametrize("choice", ["required", pytest.param(FORCED, marks=pytest.mark.chaos)])
def test_a_tool_that_must_be_called(client: openai.OpenAI, choice: Any) -> None:
    messages = user("Look up 5.")
    asked: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "messages": messages, "tool_choice": choice}
    answer: Any = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert (call.type, call.function.name) == ("function", "look_up")
    assert set(json.loads(call.function.arguments)) == {"n", "ok"}
    with client.chat.completions.stream(**asked) as stream:
        streamed: Any = stream.get_final_completion().choices[0].message
    assert streamed.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": SECRET}
    told = [*messages, answer.message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(**asked | {"messages": told, "tool_choice": "none"}).choices


def test_later_turns_compute_only_what_is_new(client: openai.OpenAI) -> None:
    told, known = list[Any](), 0
    for word in (SECRET, "OTHER-WORD-12", "THIRD-WORD-99"):
        told += user(f"Repeat exactly: {word}")
        answer: Any = client.chat.completions.create(model="tiny", messages=told)
        assert answer.usage.prompt_tokens_details.cached_tokens >= known
        known = answer.usage.total_tokens - 1  # the last token is not computed
        told.append(answer.choices[0].message.model_dump(exclude_none=True))


def test_a_beginning_and_what_follows_it_are_the_uninterrupted_answer(client: openai.OpenAI) -> None:
    asked = user(f"Repeat exactly: {SECRET}-{SECRET}")

    def rest(given: str) -> Any:
        messages = [*asked, {"role": "assistant", "content": given}]
        return client.chat.completions.create(model="tiny", messages=messages)

    whole = client.chat.completions.create(model="tiny", messages=asked, logprobs=True)
    text, tokens = whole.choices[0].message.content or "", (whole.choices[0].logprobs or fail()).content or []
    words = [each.token for each in tokens if each.bytes]
    assert "".join(words) == text == f"{SECRET}-{SECRET}"
    for count in range(1, len(words) + 1, 3):
        given = "".join(words[:count])
        answer = rest(given)
        assert given + answer.choices[0].message.content == text
        assert answer.usage.total_tokens == (whole.usage or fail()).total_tokens
        assert answer.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens - 1
    cut: Any = client.chat.completions.create(model="tiny", messages=asked, max_tokens=9)
    first = cut.choices[0].message.content
    assert first + rest(first).choices[0].message.content == text


def fail() -> Any:
    raise AssertionError("a field is missing")


def test_a_beginning_that_its_format_allows_is_continued_within_it(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

    def rest(given: str) -> Any:
        messages = [*user("Say something."), {"role": "assistant", "content": given}]
        asked: Any = {"model": "tiny", "messages": messages, "response_format": form, "max_tokens": 30}
        return client.chat.completions.create(**asked).choices[0]

    for given in ('{"', '{"n": ', '{"n": 7, "o', '{"n": 7, "ok": true}'):
        answer = rest(given)
        assert answer.finish_reason == "stop"
        assert set(json.loads(given + answer.message.content)) == {"n", "ok"}
    with pytest.raises(openai.BadRequestError, match="no beginning that the answer's format allows"):
        rest('{"m')


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_hides_no_cached_tokens(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": user(f"{ENDLESS} {stream}"), "stop": [" 4"]}
    client.chat.completions.create(**asked)
    if stream:
        chunks = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
        usage = [chunk.usage for chunk in chunks][-1]
    else:
        usage = client.chat.completions.create(**asked).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_several_answers_with_their_probabilities(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model="tiny", messages=user("Say anything."), n=3, temperature=1, seed=7, max_tokens=12,
        logprobs=True, top_logprobs=2,
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs.content
        assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in choice.logprobs.content)
    assert answer.usage.completion_tokens > 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_rank_0_refuses_is_the_clients_mistake(client: openai.OpenAI, stream: bool) -> None:
    format_: Any = {"type": "regex", "pattern": "("}
    asked: dict[str, Any] = {"model": "tiny", "messages": user("hello"), "response_format": format_}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(stream=stream, **asked)


def test_who_leaves_is_not_decoded_for(client: openai.OpenAI, two_ranks: Cluster) -> None:
    before = two_ranks.idle()
    stream = client.chat.completions.create(
        model="tiny", messages=user(ENDLESS), stream=True, max_tokens=3000, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    until(lambda: two_ranks.health()["open_requests"] == 0, "the abandoned request ends")
    assert 0 < (two_ranks.idle() - before).emitted[0] < 3000


def test_many_at_once_get_each_their_own(client: openai.OpenAI) -> None:
    secrets = [random_text(Random(number), 12) for number in range(32)]

    def ask(secret: str) -> str | None:
        answer = client.chat.completions.create(model="tiny", messages=user(f"Repeat exactly: {secret}"))
        return answer.choices[0].message.content

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, secrets)) == secrets


IN_BACKGROUND: dict[str, Any] = {"model": "tiny", "input": ENDLESS, "background": True}
LONG: dict[str, Any] = {"max_output_tokens": 3000, "extra_body": {"ignore_eos": True}}


@pytest.mark.group
def test_a_response_in_the_background_outlives_its_client_and_a_rank(tmp_path: Path) -> None:
    seen: list[Any] = []
    with Cluster(tmp_path) as cluster, reached(cluster) as client:
        with client.responses.create(**IN_BACKGROUND, **LONG, stream=True) as stream:
            for event in stream:
                seen.append(event)
                if event.type == "response.output_text.delta":
                    break  # and leave
        os.kill(cluster.pids()[1], signal.SIGKILL)
        id_ = seen[0].response.id
        seen += client.responses.retrieve(id_, stream=True, starting_after=seen[-1].sequence_number)
        found = client.responses.retrieve(id_)
        assert cluster.epoch > 1
        whole = client.responses.create(model="tiny", input=ENDLESS, **LONG)
    assert [each.sequence_number for each in seen] == list(range(len(seen)))
    assert (found.status, found.output_text) == (whole.status, whole.output_text)
    assert seen[-1].response == found


def test_a_response_in_the_background_is_freed_where_it_is_cancelled(
    client: openai.OpenAI, two_ranks: Cluster
) -> None:
    before = two_ranks.idle()
    id_ = client.responses.create(**IN_BACKGROUND, **LONG).id
    until(lambda: client.responses.retrieve(id_).status == "in_progress", "it begins")
    assert client.responses.cancel(id_).status == client.responses.retrieve(id_).status == "cancelled"
    until(lambda: two_ranks.health()["open_requests"] == 0, "it ends on the ranks")
    assert (two_ranks.idle() - before).emitted[0] < 3000


def test_turns_on_a_socket(client: openai.OpenAI) -> None:
    with client.responses.connect() as socket:
        last = None
        for word in (SECRET, "OTHER-WORD-12"):
            more: dict[str, Any] = {"previous_response_id": last, "store": False}
            socket.response.create(model="tiny", input=f"Repeat exactly: {word}", **more)
            done = next(event for event in socket if event.type == "response.completed")
            assert done.response.output_text == word
            last = done.response.id

"""Options of chat requests: the real client library, a real server; only the model is played."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError

from mlxtp.api.backend import Sampling, Shaping
from mlxtp.api.sampling import choice_seed
from mlxtp.errors import Code, GroupError, RequestError

from ..conftest import CONTEXT, WAIT_S, Server, forever, says, says_scored, score, then
from ..test_app import (
    HELLO,
    ask,
    assert_error,
    chunks_of,
    connect,
    data_of,
    fail_with,
    post,
    read_until,
    send,
)
from .conftest import impossible
from .shapes import read

EMOJI = "\U0001f9ff"


def create(server: Server, **fields: Any) -> Any:
    """The library's answer, or its chunks, each of which is read strictly."""
    answer: Any = server.client.chat.completions.create(**({"model": "tiny", "messages": HELLO} | fields))
    if fields.get("stream"):
        return (read(ChatCompletionChunk, chunk.to_json()) for chunk in answer)
    return read(ChatCompletion, answer.to_json())


def whole(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The choices of an answer that is not streamed."""
    choices: list[dict[str, Any]] = create(server, **fields).model_dump()["choices"]
    return choices


def streamed(server: Server, n: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """The choices put together from a stream, in the shape of `whole`."""
    choices: list[dict[str, Any]] = [
        {"content": "", "scores": [], "finish_reason": None, "role": None} for _ in range(n)
    ]
    if n > 1:
        fields["n"] = n
    for chunk in create(server, stream=True, **fields):
        for part in chunk.choices:
            choice = choices[part.index]
            assert choice["finish_reason"] is None
            assert part.delta.role == ("assistant" if choice["role"] is None else None)
            choice["role"] = "assistant"
            choice["content"] += part.delta.content or ""
            choice["finish_reason"] = part.finish_reason
            if part.logprobs is not None:
                choice["scores"] += part.logprobs.model_dump()["content"]
    return choices


def test_sampling_and_shaping_reach_the_backend(server: Server) -> None:
    create(
        server, temperature=0.5, top_p=0.9, seed=2**63 + 7, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={"7": -100, "8": 3}, max_tokens=20, logprobs=True, top_logprobs=4,
        extra_body={
            "top_k": 30, "min_p": 0.1, "xtc_probability": 0.2, "xtc_threshold": 0.3, "min_tokens": 2,
            "repetition_penalty": 1.5, "ignore_eos": True, "bad_words": ["hello"],
        },
    )  # fmt: skip
    request = server.backend.request
    assert request.sampling == Sampling(0.5, 0.9, 30, 0.1, 0.2, 0.3, 7)
    alone, behind = server.ids("hello"), server.ids(" hello")
    bad = {"bad_tokens": (*alone, *behind), "bad_lengths": (len(alone), len(behind))}
    assert request.shaping == Shaping(1.5, 0.5, -0.5, (7, 8), (-100.0, 3.0), 2, **bad)
    assert (request.max_tokens, request.logprobs, request.ignore_eos) == (20, 4, True)


def test_least_tokens_are_cut_to_what_fits_as_most_are(server: Server) -> None:
    server.backend.script = says([1])
    create(server, extra_body={"min_tokens": 10 * CONTEXT})
    request = server.backend.request
    assert request.shaping.min_tokens == request.max_tokens == CONTEXT - len(request.tokens)


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"temperature": 3}, "temperature", "from 0 to 2, got 3"),
        ({"logit_bias": {"340": 1}}, "logit_bias", "from 0 to 339"),
        ({"stop": ["x"] * 17}, "stop", "17 strings"),
        ({"bad_words": ["x", ""]}, "bad_words", "1 to 1000"),
        ({"min_tokens": 11, "max_tokens": 10}, "min_tokens", "from 0 to 10"),
        ({"stream_options": {}, "stream": False}, "stream_options", "needs stream true"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "JSON schema"),
        ({"tool_choice": "required"}, "tool_choice", "no tools to call"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_a_400_before_anything_is_asked(
    server: Server, fields: dict[str, Any], param: str, named: str, stream: bool
) -> None:
    """What the parser alone decides has its rows in `test_openai.py`."""
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, stream=stream, extra_body=fields)
    error = caught.value
    assert (error.code, error.param, error.type) == ("invalid_request", param, "invalid_request_error")
    assert named in error.message
    assert server.backend.requests == []


async def refuse() -> None:
    raise RequestError("the grammar has no end", Code.BAD_REQUEST)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_what_rank_0_refuses_is_a_real_400(server: Server, stream: bool, n: int) -> None:
    server.backend.judge = refuse
    error = assert_error(post(server, ask(stream=stream, n=n)), 400, "invalid_request")
    assert error["message"] == "the grammar has no end"
    assert len(server.backend.answers) == n
    assert server.backend.all_closed()


def test_a_client_that_leaves_before_acceptance_is_cancelled(server: Server) -> None:
    server.backend.judge = forever
    for stream in (False, True):
        with connect(server) as sock:
            send(sock, stream)
            assert server.backend.began.wait(WAIT_S)
            server.backend.began.clear()
        assert server.backend.all_closed()


def test_the_answers_that_were_begun_are_closed_when_one_more_is_too_many(server: Server) -> None:
    server.backend.most_open = 2
    assert_error(post(server, ask(n=3)), 429, "overloaded")
    assert len(server.backend.answers) == 2
    assert server.backend.all_closed()


@pytest.mark.parametrize("step", [1, 3, 100])
def test_an_answer_ends_before_the_stop_string(server: Server, step: int) -> None:
    tokens = server.ids("hello wide world, the end")
    used = next(i for i in range(99) if "world" in server.tokenizer.decode(tokens[:i]))
    server.backend.script = says(tokens, "length", step)
    answer = create(server, stop=["zzz", "world"])
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("hello wide ", "stop")
    assert answer.usage.completion_tokens == used
    assert server.backend.all_closed()
    [again] = streamed(server, stop="world")
    assert (again["content"], again["finish_reason"]) == ("hello wide ", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_at_once(server: Server, stream: bool) -> None:
    """The script waits for ever behind the stop string: only closing it lets the client have its answer."""
    server.backend.script = then(server.ids("hello wide world,"), forever)
    more = {"stream_options": {"include_usage": True}} if stream else {}
    response = post(server, ask(stop="wide", stream=stream, **more))
    if stream:
        *_, last, trailer = chunks_of(response)
        assert last["choices"][0]["finish_reason"] == "stop"
        assert trailer["usage"]["completion_tokens"] > 0
    else:
        assert response.json()["choices"][0]["message"]["content"] == "hello "
    assert server.backend.all_closed()
    assert not server.backend.finished


def expected_scores(server: Server, tokens: list[int], top: int) -> list[dict[str, Any]]:
    name = server.backend.loaded_text.name

    def entry(token: int, logprob: float) -> dict[str, Any]:
        shown, bytes_ = name(token)
        return {"token": shown, "logprob": logprob, "bytes": None if bytes_ is None else list(bytes_)}

    scores = [score(i, top) for i in range(len(tokens))]
    return [
        entry(token, one.logprob) | {"top_logprobs": [entry(*pair) for pair in one.top]}
        for token, one in zip(tokens, scores, strict=True)
    ]


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("top", [0, 2])
def test_scores_are_the_same_streamed_and_not(server: Server, step: int, top: int) -> None:
    text = f"hello {EMOJI} 日本語 wor"
    tokens = [*server.ids(text), 1]
    server.backend.script = says_scored(tokens, step, top)
    expected = expected_scores(server, tokens, top)
    wanted = {"logprobs": True, "top_logprobs": top, "stop": "world"}
    [choice] = whole(server, **wanted)
    assert choice["message"]["content"] == text
    assert choice["logprobs"]["content"] == expected
    assert b"".join(bytes(row["bytes"] or []) for row in expected).decode() == text
    [parts] = streamed(server, **wanted)
    assert (parts["content"], parts["scores"]) == (text, expected)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_named_or_counted_without_scores(server: Server, stream: bool) -> None:
    said = server.ids("hello world")
    server.backend.script = says(said, step=2, token=1, cached=1)
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if stream else {}
    answer = create(server, stream=stream, extra_body={"return_token_ids": True} | usage)
    parts = [part for part in (answer if stream else [answer]) if part.choices]
    assert [token for part in parts for token in part.choices[0].token_ids] == [*said, 1]
    assert parts[0].prompt_token_ids == list(server.backend.request.tokens)
    assert (parts[-1].choices[0].stop_reason, parts[-1].choices[0].matched_stop) == (None, 1)
    assert all(part.choices[0].logprobs is None for part in parts)
    counts = [part.usage.completion_tokens for part in parts]
    assert counts == sorted(counts)
    assert not stream or len(said) > counts[1] > 0
    assert (counts[0], counts[-1]) == (0 if stream else len(said), len(said))


def test_scores_name_tokens_by_their_ids_if_asked_for(server: Server) -> None:
    said = server.ids("wide")
    server.backend.script = says_scored(said, top=1)
    answer = create(server, logprobs=True, top_logprobs=1, extra_body={"return_tokens_as_token_ids": True})
    rows = answer.choices[0].logprobs.content
    assert [row.token for row in rows] == [f"token_id:{token}" for token in said]
    assert bytes(byte for row in rows for byte in row.bytes) == b"wide"
    assert rows[0].top_logprobs[0].token == "token_id:60"


def test_a_stop_string_is_named(server: Server) -> None:
    server.backend.script = says(server.ids("hello world"))
    for part in (create(server, stop=["wor"]), list(create(server, stop=["wor"], stream=True))[-1]):
        assert (part.choices[0].stop_reason, part.choices[0].matched_stop) == ("wor", "wor")


def test_an_impossible_token_still_makes_valid_json(server: Server) -> None:
    server.backend.script = impossible
    response = post(server, ask(logprobs=True, top_logprobs=2))
    assert "Infinity" not in response.text
    [row] = response.json()["choices"][0]["logprobs"]["content"]
    assert (row["logprob"], [other["logprob"] for other in row["top_logprobs"]]) == (-9999.0, [-9999.0, 0.0])


def test_what_is_missing_or_too_much_is_found(server: Server) -> None:
    server.backend.script = says(server.ids("hello"))
    answer = post(server, ask()).json()
    for field in ("id", "choices", "created", "model", "object", "usage"):
        with pytest.raises((ValidationError, AssertionError), match=field):
            read(ChatCompletion, json.dumps({name: answer[name] for name in answer if name != field}))
    answer["choices"][0]["message"]["odd"] = 1
    with pytest.raises(AssertionError, match="odd"):
        read(ChatCompletion, json.dumps(answer))


TEXTS, REASONS = ["hello", "wide 日本語 world", "x"], ["stop", "length", "stop"]


def three(server: Server) -> None:
    server.backend.scripts = [
        says(server.ids(text), reason, cached=40 - i, drafted=6, accepted=i)
        for i, (text, reason) in enumerate(zip(TEXTS, REASONS, strict=True))
    ]


def test_n_answers_to_one_prompt(server: Server) -> None:
    three(server)
    answer = create(server, n=3, seed=7, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == TEXTS
    assert [choice.finish_reason for choice in answer.choices] == REASONS
    requests = server.backend.requests
    assert len({request.tokens for request in requests}) == 1
    assert [request.sampling.seed for request in requests] == [choice_seed(7, i) for i in range(3)]
    usage = answer.usage.model_dump()
    assert usage["prompt_tokens"] == len(requests[0].tokens)
    assert usage["completion_tokens"] == sum(len(server.ids(text)) for text in TEXTS)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 38
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 3
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] == 15
    three(server)
    choices = streamed(server, n=3)
    assert [choice["content"] for choice in choices] == TEXTS
    assert [choice["finish_reason"] for choice in choices] == REASONS


def test_a_slow_answer_holds_up_no_other(server: Server) -> None:
    server.backend.scripts = [then([], forever), says(server.ids("ab"))]
    with connect(server) as sock:
        send(sock, stream=True, n=2)
        read = read_until(sock, b'"finish_reason":"stop"')
        assert b'"index":1' in read
        assert b'"index":0' not in read
        assert b"[DONE]" not in read
    assert server.backend.all_closed()


def test_n_answers_stop_each_for_itself(server: Server) -> None:
    stopped, whole = then(server.ids("hello wide world"), forever), says(server.ids("no stop here"), "length")
    server.backend.scripts = [stopped, whole]
    choices = streamed(server, n=2, stop="wide")
    told = [(choice["content"], choice["finish_reason"]) for choice in choices]
    assert told == [("hello ", "stop"), ("no stop here", "length")]


@pytest.mark.parametrize("stream", [False, True])
def test_one_failure_is_seen_and_ends_the_others(server: Server, stream: bool) -> None:
    server.backend.scripts = [
        then(server.ids("ab"), forever),
        then(server.ids("ab"), fail_with(GroupError("rank 1 is gone"))),
    ]
    response = post(server, ask(stream=stream, n=2))
    if stream:
        *_, error = data_of(response)
        assert json.loads(error)["error"]["code"] == "rank_lost"
    else:
        assert_error(response, 503, "rank_lost")
    assert server.backend.all_closed()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_every_answer(server: Server, stream: bool) -> None:
    server.backend.script = then(server.ids("ab"), forever)
    with connect(server) as sock:
        send(sock, stream, n=4)
        if stream:
            read_until(sock, b'"content":"ab"', times=4)
        assert server.backend.began.wait(WAIT_S)
    assert server.backend.all_closed()
    assert len(server.backend.answers) == 4

"""Options of chat requests: the real client library, a real server; only the model is played."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from mlxtp.api.backend import PLAIN, Sampling, Shaping, StreamEnd, TokenEvent, Tokens, TokenScore
from mlxtp.api.sampling import choice_seed
from mlxtp.errors import Code, GroupError, RequestError

from ..conftest import WAIT_S, Server, forever, says, says_scored, score, then
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

EMOJI = "\U0001f9ff"


def create(server: Server, **fields: Any) -> Any:
    return server.client.chat.completions.create(**({"model": "tiny", "messages": HELLO} | fields))


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


# --- what reaches the backend -----------------------------------------------------------------------------


def test_sampling_and_shaping_reach_the_backend(server: Server) -> None:
    create(
        server, temperature=0.5, top_p=0.9, seed=2**63 + 7, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={"7": -100, "8": 3}, max_tokens=20, logprobs=True, top_logprobs=4,
        extra_body={
            "top_k": 30, "min_p": 0.1, "xtc_probability": 0.2, "xtc_threshold": 0.3, "min_tokens": 2,
            "repetition_penalty": 1.5, "ignore_eos": True,
        },
    )  # fmt: skip
    request = server.backend.request
    assert request.sampling == Sampling(0.5, 0.9, 30, 0.1, 0.2, 0.3, 7)
    assert request.shaping == Shaping(1.5, 0.5, -0.5, (7, 8), (-100.0, 3.0), 2)
    assert (request.max_tokens, request.logprobs, request.ignore_eos) == (20, 4, True)


def test_a_bare_request_is_greedy_with_a_seed_of_its_own(server: Server) -> None:
    create(server)
    create(server)
    first, second = server.backend.requests
    assert first.sampling == Sampling(seed=first.sampling.seed)
    assert first.shaping == PLAIN
    assert (first.logprobs, first.ignore_eos) == (-1, False)
    assert first.sampling.seed != second.sampling.seed


def test_the_models_own_defaults_fill_what_is_left_out(server: Server) -> None:
    server.backend.defaults = Sampling(0.6, 0.95, 20)
    create(server, seed=1)
    create(server, seed=1, temperature=0)
    assert [request.sampling for request in server.backend.requests] == [
        Sampling(0.6, 0.95, 20, seed=1),
        Sampling(0.0, 0.95, 20, seed=1),
    ]


def test_a_json_schema_reaches_the_backend(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    create(server, response_format=format_)
    shaping = server.backend.request.shaping
    assert shaping.grammar_kind == "json_schema"
    held = json.loads(shaping.grammar)
    assert {key: held[key] for key in schema} == schema
    assert held["additionalProperties"] is False


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"temperature": 3}, "temperature", "from 0 to 2, got 3"),
        ({"logit_bias": {"340": 1}}, "logit_bias", "from 0 to 339"),
        ({"stop": ["x"] * 17}, "stop", "17 strings"),
        ({"min_tokens": 11, "max_tokens": 10}, "min_tokens", "from 0 to 10"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "JSON schema"),
        ({"tool_choice": "required"}, "tool_choice", "no tools to call"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_a_400_before_anything_is_asked(
    server: Server, fields: dict[str, Any], param: str, named: str, stream: bool
) -> None:
    """What the parser alone decides has its rows in `test_openai_request.py`."""
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, stream=stream, extra_body=fields)
    error = caught.value
    assert (error.code, error.param, error.type) == ("invalid_request", param, "invalid_request_error")
    assert named in error.message
    assert server.backend.requests == []


# --- being accepted ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_group_lost_before_acceptance_is_a_503(server: Server, stream: bool) -> None:
    async def lose() -> None:
        raise GroupError("rank 1 is gone")

    server.backend.judge = lose
    assert post(server, ask(stream=stream)).headers["retry-after"] == "7"
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


# --- stop strings -----------------------------------------------------------------------------------------


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
    for part in (1, 2, 100):
        server.backend.script = says(tokens, "length", part)
        [again] = streamed(server, stop="world")
        assert (again["content"], again["finish_reason"]) == ("hello wide ", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_at_once(server: Server, stream: bool) -> None:
    """The script waits for ever behind the stop string: only closing it lets the client have its answer."""
    server.backend.script = then(server.ids("hello wide world,"), forever)
    response = post(server, ask(stop="wide", stream=stream, stream_options={"include_usage": True}))
    if stream:
        *_, last, trailer = chunks_of(response)
        assert last["choices"][0]["finish_reason"] == "stop"
        assert trailer["usage"]["completion_tokens"] > 0
    else:
        assert response.json()["choices"][0]["message"]["content"] == "hello "
    assert server.backend.all_closed()
    assert not server.backend.finished


def test_what_looked_like_a_stop_string_is_sent_at_the_end(server: Server) -> None:
    server.backend.script = says(server.ids("hello wor"), "length")
    [choice] = streamed(server, stop="world")
    assert (choice["content"], choice["finish_reason"]) == ("hello wor", "length")
    assert whole(server, stop="world")[0]["message"]["content"] == "hello wor"


def test_no_chunk_has_a_part_of_a_stop_string(server: Server) -> None:
    server.backend.script = says(server.ids("hello wordy world x"))
    chunks = chunks_of(post(server, ask(stream=True, stop="world")))
    contents = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    sent = ""
    for content in contents:
        sent += content
        assert not any(sent.endswith("world"[:n]) for n in range(1, 5))
    assert sent == "hello wordy "


# --- log-probabilities ------------------------------------------------------------------------------------


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


def test_a_chunk_has_the_scores_of_its_own_text(server: Server) -> None:
    tokens = server.ids(f"a{EMOJI}b")
    server.backend.script = says_scored(tokens)
    chunks = chunks_of(post(server, ask(stream=True, logprobs=True)))
    seen = [
        (chunk["choices"][0]["delta"].get("content"), len(chunk["choices"][0]["logprobs"]["content"]))
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
    ]
    assert seen == [("a", 1), (EMOJI, len(tokens) - 2), ("b", 1)]
    for chunk in chunks:
        if scores := chunk["choices"][0]["logprobs"]:
            text = b"".join(bytes(row["bytes"]) for row in scores["content"]).decode()
            assert text == chunk["choices"][0]["delta"]["content"]


def test_scores_end_with_the_token_that_completed_the_stop_string(server: Server) -> None:
    tokens = server.ids("hello wide world, the end")
    server.backend.script = says_scored(tokens, 100)
    answer = create(server, logprobs=True, stop="wide")
    rows = answer.choices[0].logprobs.content
    assert len(rows) == answer.usage.completion_tokens < len(tokens)
    assert "wide" in "".join(row.token for row in rows)
    [parts] = streamed(server, logprobs=True, stop="wide")
    assert len(parts["scores"]) == len(rows)


def test_without_the_option_there_are_no_scores(server: Server) -> None:
    server.backend.script = says(server.ids("hello"))
    assert whole(server)[0]["logprobs"] is None
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks_of(post(server, ask(stream=True))))


def test_an_impossible_token_still_makes_valid_json(server: Server) -> None:
    async def script() -> AsyncIterator[TokenEvent]:
        yield Tokens((70,), (TokenScore(-math.inf, ((71, -math.inf),)),))
        yield StreamEnd("stop", 1)

    server.backend.script = script
    response = post(server, ask(logprobs=True, top_logprobs=1))
    assert "Infinity" not in response.text
    assert response.json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


# --- several answers --------------------------------------------------------------------------------------


def three(server: Server) -> None:
    texts = ["hello", "wide 日本語 world", "x"]
    server.backend.scripts = [
        says(server.ids(text), reason, cached=40 - i, drafted=6, accepted=i)
        for i, (text, reason) in enumerate(zip(texts, ["stop", "length", "stop"], strict=True))
    ]


def test_n_answers_to_one_prompt(server: Server) -> None:
    three(server)
    answer = create(server, n=3, seed=7, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["hello", "wide 日本語 world", "x"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length", "stop"]
    requests = server.backend.requests
    assert len({request.tokens for request in requests}) == 1
    assert [request.sampling.seed for request in requests] == [choice_seed(7, i) for i in range(3)]
    tokens = sum(len(server.ids(text)) for text in ("hello", "wide 日本語 world", "x"))
    usage = answer.usage.model_dump()
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(requests[0].tokens), tokens)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 38
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 3
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] == 15


def test_n_answers_stream_side_by_side(server: Server) -> None:
    three(server)
    choices = streamed(server, n=3)
    assert [choice["content"] for choice in choices] == ["hello", "wide 日本語 world", "x"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length", "stop"]


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
    server.backend.scripts = [
        then(server.ids("hello wide world"), forever),
        says(server.ids("no stop here"), "length"),
    ]
    choices = streamed(server, n=2, stop="wide")
    assert [(choice["content"], choice["finish_reason"]) for choice in choices] == [
        ("hello ", "stop"),
        ("no stop here", "length"),
    ]


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


def test_the_async_client_reads_several_streams_at_once(server: Server) -> None:
    server.backend.script = says(server.ids("hello wide world"))

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True, n=2)
        parts = ["", ""]
        async for chunk in stream:
            parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert parts[0] == parts[1]
        return parts[0]

    async def story() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=WAIT_S) as client:
            return await asyncio.gather(*(one(client) for _ in range(5)))

    assert asyncio.run(story()) == ["hello wide world"] * 5

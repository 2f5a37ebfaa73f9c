from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mlxtp.api.adapter import About, error_body_of, error_status
from mlxtp.api.backend import StreamEnd, TokenScore
from mlxtp.api.dialects import openai as answers
from mlxtp.api.dialects.openai import ChunkWriter
from mlxtp.errors import GroupError, LinkError, LocalProtocolError, ModelError, RequestError
from mlxtp.text.conversation import Call, Conversation, GenerationOptions, GenerationRequest
from mlxtp.text.tokenizer import Name
from mlxtp.text.transcript import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    ContentDelta,
    Finish,
    ReasoningDelta,
    Scored,
    WholeAnswer,
)

HEAD = {"id": 'chatcmpl-i"\\u0000', "created": 5, "model": '"m\0'}


def name(token: int) -> Name:
    return (f'"{token}', (token,)) if token < 10 else ("<end>", None)


def about(n: int = 1, logprobs: int = -1, prompts: tuple[int, ...] = (7,)) -> About:
    ask = GenerationRequest(None, Conversation(()), GenerationOptions(n=n, logprobs=logprobs))
    return About('i"\\u0000', 5.9, '"m\0', prompts, (), name, ask)


def chunks_of(written: bytes) -> list[Any]:
    assert written.isascii()
    events = written.split(b"\n\n")
    assert events.pop() == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    return [json.loads(event[6:]) for event in events]


def deltas(event: AnswerEvent) -> Any:
    """Return what a choice that has begun adds to its message."""
    writer = ChunkWriter(about(event.choice + 1), False)
    writer.write(ContentDelta(event.choice, ""))
    (chunk,) = chunks_of(writer.write(event))
    (choice,) = chunk["choices"]
    return choice


def test_chunks_are_ascii_and_decode_to_what_went_in() -> None:
    text = 'a"\n\u2028😀\\%b%d\0'
    for include_usage in (True, False):
        _, chunk = chunks_of(ChunkWriter(about(12), include_usage).write(ContentDelta(11, text)))
        choice = {"index": 11, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        usage = {"usage": None} if include_usage else {}
        assert chunk == HEAD | usage | {"object": "chat.completion.chunk", "choices": [choice]}


def test_the_first_chunk_of_each_choice_has_its_role() -> None:
    writer = ChunkWriter(about(2), False)
    written = [writer.write(ContentDelta(index, "x")) for index in (1, 1, 0)]
    rows = [[chunk["choices"][0] for chunk in chunks_of(each)] for each in written]
    role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert [row[0] == {"index": row[0]["index"]} | role for row in rows] == [True, False, True]
    assert [len(row) for row in rows] == [2, 1, 2]


def test_what_is_thought_and_what_is_called() -> None:
    assert deltas(ReasoningDelta(0, "hm"))["delta"] == {"reasoning_content": "hm"}
    call = {"index": 2, "id": "c", "type": "function", "function": {"name": "add", "arguments": ""}}
    assert deltas(CallBegan(0, 2, "c", "add"))["delta"] == {"tool_calls": [call]}
    more = {"index": 2, "function": {"arguments": '{"a'}}
    assert deltas(CallArguments(0, 2, '{"a'))["delta"] == {"tool_calls": [more]}


def test_the_last_chunk_of_a_choice() -> None:
    assert deltas(Finish(2, "length", StreamEnd("length", 3))) == {
        "index": 2, "delta": {}, "logprobs": None, "finish_reason": "length",
    }  # fmt: skip


def test_the_close_has_usage_only_when_it_was_asked_for() -> None:
    end = StreamEnd("stop", 3)
    plain, counted = ChunkWriter(about(), False), ChunkWriter(about(), True)
    for writer in (plain, counted):
        writer.write(Finish(0, "stop", end))
    assert plain.close() == b"data: [DONE]\n\n"
    trailer, done = counted.close().split(b"\n\n", 1)
    assert done == b"data: [DONE]\n\n"
    assert json.loads(trailer[6:])["usage"] == answers.usage(about(), [end])


def test_a_failure_is_no_end() -> None:
    written = ChunkWriter(about(), True).fail(GroupError("gone"))
    assert b"[DONE]" not in written
    assert chunks_of(written)[0]["error"]["message"] == "gone"


def whole(
    text: str = "", scores: Sequence[Scored] = (), reasoning: str = "", calls: Sequence[Call] = ()
) -> WholeAnswer:
    made = WholeAnswer()
    made.see(ReasoningDelta(0, reasoning))
    made.see(ContentDelta(0, text))
    for number, call in enumerate(calls):
        made.see(CallBegan(0, number, call.id, call.name))
        made.see(CallArguments(0, number, call.arguments))
    made.see(Finish(0, "stop", StreamEnd("stop", 1)))
    made.scores += scores
    return made


def test_scores_have_the_shape_of_openai() -> None:
    scores = [(5, TokenScore(-0.5, ((5, -0.5), (12, -1.5)))), (12, TokenScore(-1e9, ()))]
    expected = {
        "content": [
            {
                "token": '"5',
                "logprob": -0.5,
                "bytes": [5],
                "top_logprobs": [
                    {"token": '"5', "logprob": -0.5, "bytes": [5]},
                    {"token": "<end>", "logprob": -1.5, "bytes": None},
                ],
            },
            {"token": "<end>", "logprob": -9999.0, "bytes": None, "top_logprobs": []},
        ],
        "refusal": None,
    }
    assert deltas(ContentDelta(0, "x", scores))["logprobs"] == expected
    body = answers.completion_body(about(logprobs=2), [whole("x", scores=scores)])
    assert json.loads(json.dumps(body))["choices"][0]["logprobs"] == expected


def test_a_score_is_a_number_that_json_has() -> None:
    scores = [(1, TokenScore(float("-inf"), ())), (1, TokenScore(1e-6, ()))]
    assert [row["logprob"] for row in answers.logprobs(scores, name)["content"]] == [-9999.0, 0.0]


def test_no_scores_are_not_the_same_as_none_wanted() -> None:
    bodies = [answers.completion_body(about(2, logprobs), [whole(), whole()]) for logprobs in (0, -1)]
    for body, expected in zip(bodies, ({"content": [], "refusal": None}, None), strict=True):
        assert [choice["logprobs"] for choice in body["choices"]] == [expected] * 2
        assert [choice["index"] for choice in body["choices"]] == [0, 1]


def test_a_whole_message_has_what_it_thought_and_what_it_called() -> None:
    body = answers.completion_body(about(), [whole(reasoning="hm", calls=[Call("c", "add", '{"a": 1}')])])
    (choice,) = body["choices"]
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


def test_usage_adds_the_answers_and_counts_each_prompt_once() -> None:
    ends = [StreamEnd("stop", 5, 30, 8, 6), StreamEnd("length", 7, 39, 2, 0)]
    expected = {
        "prompt_tokens": 40,
        "completion_tokens": 12,
        "total_tokens": 52,
        "prompt_tokens_details": {"cached_tokens": 30},
        "completion_tokens_details": {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 4},
    }
    assert answers.usage(about(2, prompts=(40,)), ends) == expected
    of_two_prompts = expected | {"prompt_tokens_details": {"cached_tokens": 69}}
    assert answers.usage(about(1, prompts=(10, 30)), ends) == of_two_prompts


def test_a_lost_group_invites_to_come_back_a_bug_does_not() -> None:
    errors = [GroupError("x"), LinkError("x"), ModelError("x"), LocalProtocolError("x"), RequestError("x")]
    assert [error_status(error) for error in errors] == [503, 503, 500, 500, 400]
    body = error_body_of(RequestError("x", status=429, param="p"))
    assert body == {
        "error": {"message": "x", "type": "rate_limit_error", "param": "p", "code": "invalid_request"}
    }

from __future__ import annotations

import json
from typing import Any

from mlxtp.api import answers
from mlxtp.api.answers import Choice, ChunkWriter, Completion
from mlxtp.api.backend import End, Score
from mlxtp.api.text import Name
from mlxtp.errors import GroupError, LinkError, LocalProtocolError, ModelError, RequestError

COMPLETION = Completion('i"\\u0000', 5, '"m\0"')
HEAD = {"id": COMPLETION.id, "created": 5, "model": COMPLETION.model}


def name(token: int) -> Name:
    return (f'"{token}', (token,)) if token < 10 else ("<end>", None)


def chunk_of(event: bytes) -> Any:
    assert event.isascii()
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event[6:])


def test_chunks_are_ascii_and_decode_to_what_went_in() -> None:
    text = 'a"\n\u2028😀\\%b%d\0'
    for include_usage in (True, False):
        writer = ChunkWriter(COMPLETION, include_usage, name)
        choice = {"index": 11, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        usage = {"usage": None} if include_usage else {}
        assert chunk_of(writer.text(11, text, ())) == HEAD | usage | {
            "object": "chat.completion.chunk",
            "choices": [choice],
        }


def test_the_first_and_the_last_chunk_of_a_choice() -> None:
    writer = ChunkWriter(COMPLETION, False, name)
    first, last = chunk_of(writer.role(2)), chunk_of(writer.finish(2, "length"))
    assert first["choices"] == [
        {
            "index": 2,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert last["choices"] == [{"index": 2, "delta": {}, "logprobs": None, "finish_reason": "length"}]


def test_the_close_has_usage_only_when_it_was_asked_for() -> None:
    ends = [End("stop", 3)]
    assert ChunkWriter(COMPLETION, False, name).close(7, ends) == b"data: [DONE]\n\n"
    trailer, done = ChunkWriter(COMPLETION, True, name).close(7, ends).split(b"\n\n", 1)
    assert done == b"data: [DONE]\n\n"
    assert json.loads(trailer[6:])["usage"] == answers.usage(7, ends)


def test_scores_have_the_shape_of_openai() -> None:
    scores = [(5, Score(-0.5, ((5, -0.5), (12, -1.5)))), (12, Score(-1e9, ()))]
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
    chunk = chunk_of(ChunkWriter(COMPLETION, False, name).text(0, "x", scores))
    assert chunk["choices"][0]["logprobs"] == expected
    body = answers.completion_body(COMPLETION, 1, [Choice("x", scores, End("stop", 1))], name)
    assert json.loads(json.dumps(body))["choices"][0]["logprobs"] == expected


def test_a_score_is_a_number_that_json_has() -> None:
    scores = [(1, Score(float("-inf"), ())), (1, Score(1e-6, ()))]
    assert [row["logprob"] for row in answers.logprobs(scores, name)["content"]] == [-9999.0, 0.0]


def test_no_scores_are_not_the_same_as_none_wanted() -> None:
    end = End("stop", 0)
    body = answers.completion_body(COMPLETION, 1, [Choice("", [], end), Choice("", None, end)], name)
    assert [choice["logprobs"] for choice in body["choices"]] == [{"content": [], "refusal": None}, None]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]


def test_usage_adds_the_answers_and_counts_the_prompt_once() -> None:
    ends = [End("stop", 5, 30, 8, 6), End("length", 7, 39, 2, 0)]
    assert answers.usage(40, ends) == {
        "prompt_tokens": 40,
        "completion_tokens": 12,
        "total_tokens": 52,
        "prompt_tokens_details": {"cached_tokens": 30},
        "completion_tokens_details": {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 4},
    }


def test_a_lost_group_invites_to_come_back_a_bug_does_not() -> None:
    errors = [GroupError("x"), LinkError("x"), ModelError("x"), LocalProtocolError("x"), RequestError("x")]
    assert [answers.error_status(error) for error in errors] == [503, 503, 500, 500, 400]
    body = answers.error_body_of(RequestError("x", status=429, param="p"))
    assert body == {
        "error": {"message": "x", "type": "rate_limit_error", "param": "p", "code": "invalid_request"}
    }

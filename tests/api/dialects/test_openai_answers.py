from __future__ import annotations

import json
from typing import Any

from mlxtp.api.adapter import About, error_status
from mlxtp.api.backend import StreamEnd
from mlxtp.api.dialects import openai as answers
from mlxtp.api.dialects.openai import ChunkWriter
from mlxtp.errors import GroupError, LinkError, LocalProtocolError, ModelError, RequestError
from mlxtp.text.conversation import Conversation, GenerationOptions, GenerationRequest
from mlxtp.text.tokenizer import Name
from mlxtp.text.transcript import ContentDelta, Finish, WholeAnswer

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


def test_chunks_are_ascii_and_decode_to_what_went_in() -> None:
    text = 'a"\n\u2028😀\\%b%d\0'
    for include_usage in (True, False):
        _, chunk = chunks_of(ChunkWriter(about(12), include_usage).write(ContentDelta(11, text)))
        choice = {"index": 11, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        usage = {"usage": None} if include_usage else {}
        assert chunk == HEAD | usage | {"object": "chat.completion.chunk", "choices": [choice]}


def whole() -> WholeAnswer:
    made = WholeAnswer()
    made.see(Finish(0, "stop", StreamEnd("stop", 1)))
    return made


def test_no_scores_are_not_the_same_as_none_wanted() -> None:
    bodies = [answers.completion_body(about(2, logprobs), [whole(), whole()]) for logprobs in (0, -1)]
    for body, expected in zip(bodies, ({"content": [], "refusal": None}, None), strict=True):
        assert [choice["logprobs"] for choice in body["choices"]] == [expected] * 2
        assert [choice["index"] for choice in body["choices"]] == [0, 1]


def test_a_lost_group_invites_to_come_back_a_bug_does_not() -> None:
    errors = [GroupError("x"), LinkError("x"), ModelError("x"), LocalProtocolError("x"), RequestError("x")]
    assert [error_status(error) for error in errors] == [503, 503, 500, 500, 400]

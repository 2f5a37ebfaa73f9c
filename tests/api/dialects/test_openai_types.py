"""Answers in OpenAI's dialects, checked against the types of OpenAI's own library, strictly.

The library itself takes anything. Here every required field has to be there, every value has to have
its type, and fields that OpenAI does not have are those that mlxtp says it adds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, ValidationError

from ..conftest import WAIT_S, Server, says, says_scored
from ..test_app import ask, data_of, get, post
from . import openai_shapes as shapes
from .test_openai_tools import CALL, TOOLS, answers_with

ADDED = {
    "ChatCompletionMessage": {"reasoning_content"},
    "ChoiceDelta": {"reasoning_content"},
    "Model": {"context_length", "max_model_len", "supported_features"},
}
"""By the type that has them: what other servers add too, and clients look for."""
STORIES = ("text", "scores", "calls", "several", "stopped", "thoughts")


def parts(value: object) -> Iterator[BaseModel]:
    """An answer and everything in it."""
    if isinstance(value, BaseModel):
        yield value
        value = dict(value)
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(each)


def check(kind: type[BaseModel], data: str | bytes) -> None:
    """Raises ValidationError, or AssertionError for unknown fields."""
    for part in parts(kind.model_validate_json(data)):
        unknown = set(part.model_extra or {}) - ADDED.get(type(part).__name__.split(".")[-1], set())
        assert not unknown, (type(part), unknown)


def tell(server: Server, story: str) -> dict[str, Any]:
    """Has the model say something; what has to be asked for it."""
    server.backend.script = says(server.ids("hello wide world"))
    match story:
        case "scores":
            server.backend.script = says_scored(server.ids("hello"), top=2)
            return {"logprobs": True, "top_logprobs": 2}
        case "calls":
            answers_with(server, f"Sure. {CALL}")
            return {"tools": TOOLS}
        case "several":
            return {"n": 3}
        case "stopped":
            return {"stop": "wide"}
        case "thoughts":
            answers_with(server, "<think>hm</think>hello")
    return {}


def complete(server: Server, asked: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=WAIT_S, trust_env=False)


@pytest.mark.parametrize("story", STORIES)
def test_a_chat(server: Server, story: str) -> None:
    """Both in OpenAI's types and in the shape that `/openapi.json` describes."""
    fields = tell(server, story)
    whole = post(server, ask(**fields)).content
    check(ChatCompletion, whole)
    shapes.ChatCompletion.model_validate_json(whole)
    *chunks, done = data_of(post(server, ask(stream=True, stream_options={"include_usage": True}, **fields)))
    assert done == "[DONE]"
    assert len(chunks) > 2
    for chunk in chunks:
        check(ChatCompletionChunk, chunk)
        shapes.ChatCompletionChunk.model_validate_json(chunk)


@pytest.mark.parametrize("story", ["text", "scores", "several", "stopped"])
def test_a_completion(server: Server, story: str) -> None:
    fields = tell(server, story)
    if fields.pop("logprobs", None):
        fields = {"logprobs": fields.pop("top_logprobs")}
    asked = {"model": "tiny", "prompt": "hello", **fields}
    check(Completion, complete(server, asked).content)
    *chunks, done = data_of(complete(server, {**asked, "stream": True}))
    assert done == "[DONE]"
    for chunk in map(json.loads, chunks):
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # null, which the type has not
        check(Completion, json.dumps(chunk))


def test_models(server: Server) -> None:
    (listed,) = get(server, "/v1/models").json()["data"]
    check(Model, json.dumps(listed))
    check(Model, get(server, f"/v1/models/{listed['id']}").content)


def test_what_is_missing_or_too_much_is_found(server: Server) -> None:
    server.backend.script = says(server.ids("hello"))
    answer = post(server, ask()).json()
    for field in ("id", "choices", "created", "model", "object"):
        with pytest.raises(ValidationError, match=field):
            check(ChatCompletion, json.dumps({name: answer[name] for name in answer if name != field}))
    answer["choices"][0]["message"]["odd"] = 1
    with pytest.raises(AssertionError, match="odd"):
        check(ChatCompletion, json.dumps(answer))

"""Recorded requests, sent again and read by the official parsers. Each event has to match its type."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anthropic
import httpx
import ollama
import openai
import pydantic
import pytest

RECORDINGS = Path(__file__).with_name("recordings")
T = TypeVar("T", bound=pydantic.BaseModel)


@dataclass
class Said:
    """One answer as its parser read it. `calls` are names and arguments."""

    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


def recordings(group: str) -> list[Any]:
    """Parameters for tests, one for each file."""
    files = sorted((RECORDINGS / group).glob("*.json"))
    return [pytest.param(json.loads(file.read_text()), id=file.stem) for file in files]


def answered(url: str, recording: dict[str, Any]) -> dict[str, Any]:
    """Send a recorded request and return what came, in the terms of what is expected."""
    said = BY_PATH[recording["path"]](url, recording["body"])
    expected, found = recording["expected"], dict[str, Any]()
    if "text" in expected:
        assert expected["text"], "an empty text is in every answer"
        found["text"] = expected["text"] if expected["text"] in said.text else said.text
    if "json" in expected:
        found["json"] = said.calls[0][1] if said.calls else json.loads(said.text)
    if "call" in expected:
        found["call"] = ", ".join(name for name, _ in said.calls)
    return found


def checked(event: T) -> T:
    """An event that its own type takes: the libraries themselves let missing fields pass."""
    type(event).model_validate(event.model_dump(mode="json", by_alias=True))
    return event


def chat(url: str, body: Any) -> Said:
    create: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).chat.completions.create
    if not body.get("stream"):
        message = checked(create(model="", messages=[], extra_body=body)).choices[0].message
        calls = [
            (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []
        ]
        return Said(message.content or "", calls)
    text, heads, tails = "", dict[int, str](), dict[int, str]()
    for chunk in create(model="", messages=[], stream=True, extra_body=body):
        for choice in checked(chunk).choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                heads.setdefault(call.index, call.function.name)
                tails[call.index] = tails.get(call.index, "") + (call.function.arguments or "")
    return Said(text, [(name, json.loads(tails[index])) for index, name in heads.items()])


def responses(url: str, body: Any) -> Said:
    create: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).responses.create
    if body.get("stream"):
        events = [checked(event) for event in create(stream=True, extra_body=body)]
        assert events[-1].type == "response.completed", events[-1]
        response = events[-1].response
    else:
        response = checked(create(extra_body=body))
    calls = [item for item in response.output if item.type == "function_call"]
    return Said(response.output_text, [(call.name, json.loads(call.arguments)) for call in calls])


def messages(url: str, body: Any) -> Said:
    create: Any = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0).messages.create
    asked: dict[str, Any] = {"model": "", "messages": [], "max_tokens": 1, "extra_body": body}
    if not body.get("stream"):
        content: Iterable[Any] = checked(create(**asked)).content
        calls = [(block.name, block.input) for block in content if block.type == "tool_use"]
        return Said("".join(block.text for block in content if block.type == "text"), calls)
    text, names, arguments = "", dict[int, str](), dict[int, str]()
    for event in create(stream=True, **asked):
        checked(event)
        if event.type == "content_block_start" and event.content_block.type == "tool_use":
            names[event.index], arguments[event.index] = event.content_block.name, ""
        elif event.type == "content_block_delta":
            if event.delta.type == "text_delta":
                text += event.delta.text
            elif event.delta.type == "input_json_delta":
                arguments[event.index] += event.delta.partial_json
    return Said(text, [(name, json.loads(arguments[index])) for index, name in names.items()])


def ollama_chat(url: str, body: Any) -> Said:
    found: Any = ollama.Client(host=url).chat(**body)
    said = Said()
    for part in found if body.get("stream") else [found]:
        said.text += checked(part).message.content or ""
        calls = part.message.tool_calls or []
        said.calls += [(call.function.name, dict(call.function.arguments)) for call in calls]
    return said


def posted(path: str, url: str, body: Any) -> Said:
    """A reply as Open WebUI reads it, without a library."""
    told = httpx.post(url + path, json=body, timeout=60).raise_for_status().json()
    if path == "/v1/rerank":
        results = sorted(told["results"], key=lambda result: result["index"])
        return Said(f"{len({result['relevance_score'] for result in results})} scores")
    found = told["embeddings"] if "embeddings" in told else [each["embedding"] for each in told["data"]]
    return Said(f"{len(found)} vectors of {len(found[-1])}")


BY_PATH = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/api/chat": ollama_chat,
    **{path: partial(posted, path) for path in ("/v1/embeddings", "/api/embed", "/v1/rerank")},
}

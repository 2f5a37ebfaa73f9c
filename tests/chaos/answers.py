"""Requests of clients to an endpoint, and the answers they get."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..live_cluster import SLOWNESS

LONG = "Repeat exactly: " + "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" * 3
"""117 tokens, four chunks of prefill in a `FaultyCluster`; the answer is about as long."""
COUNT = "Count from 1 to 60."
"""The longest answer that the tiny model has learned: 171 tokens."""
SHORT = "Repeat exactly: FALCON-MERCURY-7749"


Fields = dict[str, Any]

NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 12}

CALL: Fields = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "add",
                "parameters": {"type": "object", "properties": {"all": NUMBERS}, "required": ["all"]},
            },
        }
    ],
    "tool_choice": "required",
}
"""A tool call that takes a while to write."""

UNSURE: Fields = {"prompt": "Tell me a story about the sea.", "temperature": 2.0, "ignore_eos": True}
"""The answer depends on the draw; with penalties on almost every one."""

KINDS: dict[str, Fields] = {
    "a stream": {},
    "in one piece": {"stream": False},
    "seeded": UNSURE | {"seed": 5},
    "penalties": UNSURE | {
        "seed": 6, "repetition_penalty": 1.1, "frequency_penalty": 1.0, "presence_penalty": 0.5
    },
    "biased": {"logit_bias": {"511": -1.0}},
    "two at once": UNSURE | {"n": 2, "seed": 7},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "guided": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": NUMBERS}}},
    "guided, in one piece": {"stream": False, "response_format": {"type": "regex", "pattern": "[A-Z]{80}"}},
    "a call": CALL,
    "a call, in one piece": CALL | {"stream": False},
}  # fmt: skip
"""Everything that a request may ask for and that must be the same in the next group."""


@dataclass
class Answer:
    """A client's answer, until its end. Times are time.time()."""

    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    status: int = 0
    retry_after: str | None = None
    ended_at: float = 0.0
    tokens: int = 0
    """Generated, as the server counts them; of an answer that breaks off, the events with text in them."""
    scores: list[tuple[str, float]] = field(default_factory=list)
    """Each token and its logprob, where they were asked for."""
    idle: list[float] = field(default_factory=list)
    """The times of empty chunks, in seconds since 1970."""

    @property
    def code(self) -> str | None:
        return self.error["code"] if self.error else None


def ask(url: str, prompt: str, *, n: int = 1, **fields: Any) -> list[Answer]:
    """One request, read to any end; its `n` answers. See `ask_into`."""
    answers = [Answer() for _ in range(n)]
    ask_into(answers, url, prompt, **fields)
    return answers


def ask_into(
    answers: list[Answer],
    url: str,
    prompt: str,
    *,
    stream: bool = True,
    silent_s: float = 120 * SLOWNESS,
    **fields: Any,
) -> None:
    """One request for as many answers; without `stream` they come in one piece.

    `silent_s` is the longest time without a byte. Raises httpx.TransportError when the connection is
    refused, or ends before the answer does.
    """
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 400, "temperature": 0}
    body |= fields | {"stream": stream, "n": len(answers)}
    if stream:
        body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=silent_s) as response:
        for answer in answers:
            answer.status = response.status_code
            answer.retry_after = response.headers.get("Retry-After")
        if response.status_code == 200 and stream:
            read_events(response.iter_lines(), *answers)
        else:
            response.read()
            read_whole(response.json(), answers)
    for answer in answers:
        answer.ended_at = time.time()


def read_events(lines: Iterator[str], *answers: Answer) -> None:
    """Server-sent events into `answers`. What comes after an error or the end is a failure."""
    for line in lines:
        if not line.startswith("data: "):
            continue
        assert not any(answer.done for answer in answers), f"after the end: {line}"
        assert not any(answer.error for answer in answers), f"after the error: {line}"
        data = line.removeprefix("data: ")
        event = {} if data == "[DONE]" else json.loads(data)
        for answer in answers:
            answer.done = not event
            answer.error = event.get("error")
        for choice in event.get("choices", ()):
            answer = answers[choice["index"]]
            assert answer.finish is None, f"after the finish reason: {line}"
            text = said(choice["delta"])
            if not choice["delta"] and not choice["finish_reason"]:
                answer.idle.append(time.time())
            answer.text += text
            answer.tokens += bool(text)
            answer.scores += scores_of(choice)
            answer.finish = choice["finish_reason"]
        if usage := event.get("usage"):
            for answer in answers:
                answer.tokens = usage["completion_tokens"] // len(answers)


def read_whole(body: dict[str, Any], answers: list[Answer]) -> None:
    """The body of an answer that came in one piece, or of an error."""
    for index, answer in enumerate(answers):
        answer.error = body.get("error")
        if answer.error is None:
            choice = body["choices"][index]
            answer.text, answer.finish = said(choice["message"]), choice["finish_reason"]
            answer.scores = scores_of(choice)
            answer.tokens = body["usage"]["completion_tokens"] // len(answers)
            answer.done = True


def said(message: dict[str, Any]) -> str:
    """Return the text and the calls of a message, or of a part of one."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    called = "".join((call.get("name") or "") + call["arguments"] for call in calls)
    return (message.get("content") or "") + called


def scores_of(choice: dict[str, Any]) -> list[tuple[str, float]]:
    """Tokens and their logprobs, where they were asked for."""
    return [(each["token"], each["logprob"]) for each in (choice.get("logprobs") or {}).get("content") or ()]

"""The OpenAI dialect: what an answer, an error, a model and the cluster's health look like. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Code, GroupError, LinkError, MlxtpError, RequestError
from .backend import End, Health, ModelInfo
from .stops import Scored
from .text import Name

Json = dict[str, Any]
Names = Callable[[int], Name]

LEAST_LOGPROB = -9999.0
"""What OpenAI says of tokens that are next to impossible; JSON has no minus infinity."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What all chunks of one answer have in common. `created` in seconds since 1970."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer of a request that does not stream. `scores` None: they were not asked for."""

    text: str
    scores: Sequence[Scored] | None
    end: End


def usage(prompt: int, ends: Sequence[End]) -> Json:
    """What all answers to one prompt took. Only what no answer had to compute counts as cached."""
    completion = sum(end.generated for end in ends)
    accepted = sum(end.accepted for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(end.cached for end in ends)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(end.drafted for end in ends) - accepted,
        },
    }


def completion_body(completion: Completion, prompt: int, choices: Sequence[Choice], names: Names) -> Json:
    """The whole answer to a request that does not stream. `prompt` in tokens."""
    rows = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if choice.scores is None else logprobs(choice.scores, names),
            "finish_reason": choice.end.reason,
        }
        for index, choice in enumerate(choices)
    ]
    counts = usage(prompt, [choice.end for choice in choices])
    return _head(completion, "chat.completion") | {"choices": rows, "usage": counts}


def logprobs(scores: Sequence[Scored], names: Names) -> Json:
    """OpenAI's shape. A token without bytes has no text in the answer."""
    content = [
        _logprob(token, score.logprob, names)
        | {"top_logprobs": [_logprob(other, logprob, names) for other, logprob in score.top]}
        for token, score in scores
    ]
    return {"content": content, "refusal": None}


def _logprob(token: int, logprob: float, names: Names) -> Json:
    name, bytes_ = names(token)
    return {"token": name, "logprob": min(max(logprob, LEAST_LOGPROB), 0.0), "bytes": bytes_}


class ChunkWriter:
    """The events of one stream, as bytes. What all chunks have in common is encoded once."""

    def __init__(self, completion: Completion, include_usage: bool, names: Names) -> None:
        self._head = _head(completion, "chat.completion.chunk")
        self._before = b"data: " + _encode(self._head)[:-1] + b',"choices":[{"index":'
        self._after = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._include_usage = include_usage
        self._names = names

    def role(self, index: int) -> bytes:
        """The first chunk of a choice."""
        return self._chunk(index, b'{"role":"assistant","content":""}')

    def text(self, index: int, text: str, scores: Sequence[Scored]) -> bytes:
        known = _encode(logprobs(scores, self._names)) if scores else b"null"
        return self._chunk(index, b'{"content":%b}' % json.dumps(text).encode(), known)

    def finish(self, index: int, reason: str) -> bytes:
        """The last chunk of a choice."""
        return self._chunk(index, b"{}", reason=json.dumps(reason).encode())

    def close(self, prompt: int, ends: Sequence[End]) -> bytes:
        """The usage if it was asked for, and `[DONE]`. `prompt` in tokens."""
        trailer = b""
        if self._include_usage:
            trailer = sse(self._head | {"choices": [], "usage": usage(prompt, ends)})
        return trailer + b"data: [DONE]\n\n"

    def _chunk(self, index: int, delta: bytes, scores: bytes = b"null", reason: bytes = b"null") -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._before, index, delta, scores, reason, self._after,
        )  # fmt: skip


def _encode(data: Json) -> bytes:
    """ASCII only, so that no client breaks lines at U+2028."""
    return json.dumps(data, separators=(",", ":")).encode()


def sse(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


def model_body(model: ModelInfo) -> Json:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "mlxtp",
        "context_length": model.context,
        "max_model_len": model.context,
    }


def models_body(models: Sequence[ModelInfo]) -> Json:
    return {"object": "list", "data": [model_body(model) for model in models]}


def health_body(health: Health) -> Json:
    return {
        "status": "ok" if health.ready else "unavailable",
        "state": health.state,
        "epoch": health.epoch,
        "world_size": health.world_size,
        "backend": health.backend,
        "model": health.model,
        "reason": health.reason,
        "ready": health.ready,
        "open_requests": health.open_requests,
        "ranks": [dict(rank) for rank in health.ranks],
    }


def error_status(error: MlxtpError) -> int:
    """The HTTP status: a lost group is being formed again, so the client may come back."""
    if isinstance(error, RequestError):
        return error.status
    if error.code is Code.DEADLINE:
        return 504
    come_back = isinstance(error, GroupError | LinkError) or error.code in (
        Code.NOT_READY,
        Code.SHUTTING_DOWN,
    )
    return 503 if come_back else 500


def error_body(message: str, code: str, status: int, param: str | None = None) -> Json:
    kind = (
        "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body_of(error: MlxtpError) -> Json:
    return error_body(error.detail, error.code.value, error_status(error), getattr(error, "param", None))


def _head(completion: Completion, object_: str) -> Json:
    return {
        "id": completion.id,
        "object": object_,
        "created": completion.created,
        "model": completion.model,
    }

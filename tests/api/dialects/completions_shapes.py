"""The shapes of answers of `/v1/completions`; see `openai_shapes.py`."""

from __future__ import annotations

from typing import Literal

from .openai_shapes import Shape, Usage


class CompletionLogprobs(Shape):
    """Scores with one entry for each token. `text_offset` in characters of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(Shape):
    """A chunk. `usage` is there on request: in the last chunk, which has no choices; None before."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None

"""Shapes of answers in Ollama's dialect, each field required unless the docstring says otherwise.

Its library has types, in which every field may be missing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

OllamaTime = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?Z$")]  # RFC 3339


class Shape(BaseModel):
    """A shape with exactly these fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class OllamaError(Shape):
    """A refusal, or the last line of a stream that failed."""

    error: str


class OllamaMadeFunction(Shape):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaMadeCall(Shape):
    id: str
    function: OllamaMadeFunction


class OllamaSaid(Shape):
    """A piece of an answer, or all of it. The last two fields are there only when not empty."""

    role: Literal["assistant"]
    content: str
    thinking: Annotated[str, Field(min_length=1)] | None = None
    tool_calls: Annotated[list[OllamaMadeCall], Field(min_length=1)] | None = None


class OllamaLogprob(Shape):
    """The score of a token. `bytes` is missing for a token that has none."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class OllamaTokenLogprob(OllamaLogprob):
    top_logprobs: list[OllamaLogprob]


class OllamaPart(Shape):
    """Fields of all lines. `logprobs` is there only when not empty."""

    model: str
    created_at: OllamaTime
    logprobs: Annotated[list[OllamaTokenLogprob], Field(min_length=1)] | None = None


class OllamaEnd(OllamaPart):
    """The last line of a stream, or an answer that is not streamed. Durations in ns.

    The counts are missing where nothing was generated: `load`, `unload`.
    """

    done: Literal[True]
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaChatLine(OllamaPart):
    done: Literal[False]
    message: OllamaSaid


class OllamaChatAnswer(OllamaEnd):
    message: OllamaSaid


class OllamaGenerateLine(OllamaPart):
    """A piece of a streamed answer. `thinking` is there only when not empty."""

    done: Literal[False]
    response: str
    thinking: Annotated[str, Field(min_length=1)] | None = None


class OllamaGenerateAnswer(OllamaEnd):
    """An answer to `/api/generate`. `thinking` is there only when not empty."""

    response: str
    thinking: Annotated[str, Field(min_length=1)] | None = None


class OllamaDetails(Shape):
    """Details of a model. An empty string is unknown."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListed(Shape):
    name: str
    model: str
    size: int
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    details: OllamaDetails


class OllamaModel(OllamaListed):
    modified_at: OllamaTime


class OllamaModels(Shape):
    models: list[OllamaModel]


class OllamaRunningModel(OllamaListed):
    expires_at: OllamaTime
    size_vram: int
    context_length: int


class OllamaRunningModels(Shape):
    models: list[OllamaRunningModel]


class OllamaShown(Shape):
    """Information about a model. `model_info` has `general.architecture` and `<architecture>.context_length`
    etc.
    """

    model_config = ConfigDict(protected_namespaces=())

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[Literal["completion", "tools", "thinking"]]
    modified_at: OllamaTime


class OllamaVersion(Shape):
    version: str

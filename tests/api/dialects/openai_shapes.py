"""The OpenAI dialect: the shapes of answers, each field required unless the docstring says otherwise.

They describe answers in `/openapi.json`, and tests check every answer against them. Answers are written
without them: a stream is written token by token.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    """A shape with exactly these fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class OpenAIErrorDetail(Shape):
    """Details of an error. `state`, such as "loading", is set while no model is ready."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str
    state: str = ""


class OpenAIError(Shape):
    error: OpenAIErrorDetail


class FunctionCall(Shape):
    name: str
    arguments: str


class MessageToolCall(Shape):
    id: str
    type: Literal["function"]
    function: FunctionCall


class CustomCall(Shape):
    name: str
    input: str


class CustomToolCall(Shape):
    id: str
    type: Literal["custom"]
    custom: CustomCall


class CandidateLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(CandidateLogprob):
    top_logprobs: list[CandidateLogprob]


class ChoiceLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(Shape):
    """The message of an answer. `content` is None beside calls. Empty last two fields are left out."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[MessageToolCall | CustomToolCall] = []


class AnswerChoice(Shape):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class PromptDetails(Shape):
    cached_tokens: int


class CompletionDetails(Shape):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: Usage


class DeltaFunction(Shape):
    """A piece of a function call. `name` is in the first piece only."""

    arguments: str
    name: str = ""


class DeltaToolCall(Shape):
    """A piece of a tool call. `id` and `type` are in the first piece only."""

    index: int
    function: DeltaFunction
    id: str = ""
    type: Literal["function"] = "function"


class DeltaCustom(Shape):
    """A piece of a custom call. `name` is in the first piece only."""

    input: str
    name: str = ""


class DeltaCustomCall(Shape):
    """A piece of a custom tool call. `id` and `type` are in the first piece only."""

    index: int
    custom: DeltaCustom
    id: str = ""
    type: Literal["custom"] = "custom"


class ChatDelta(Shape):
    """One of the fields; `role` with empty `content` in the first chunk of a choice, none in the last."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[DeltaToolCall | DeltaCustomCall] = []


class ChunkChoice(Shape):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(Shape):
    """A chunk. `usage` is there on request: in the last chunk, which has no choices; None before."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class ListedModel(Shape):
    """A model. `supported_features`, of "tools" and "reasoning", is set for the loaded model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["mlxtp"]
    context_length: int
    max_model_len: int
    supported_features: list[Literal["tools", "reasoning"]] = []


class ModelList(Shape):
    object: Literal["list"]
    data: list[ListedModel]


class DeploymentRow(Shape):
    """State of one deployment in `HealthBody`."""

    name: str
    model: str
    state: str
    pinned: bool
    ready: bool
    reason: str | None
    groups_ready: int
    groups_wanted: int
    expires_s: float | None


class HealthBody(Shape):
    """Snapshot of the cluster. `reason`: why it is not ready."""

    status: Literal["ok", "unavailable"]
    state: str
    epoch: int
    world_size: int
    backend: str
    model: str | None
    reason: str | None
    ready: bool
    open_requests: int
    ranks: list[dict[str, object]]
    deployments: list[DeploymentRow]

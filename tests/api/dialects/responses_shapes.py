"""The shapes of answers of `/v1/responses`; see `openai_shapes.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .openai_shapes import Shape

ResponseStatus = Literal["in_progress", "completed", "incomplete"]


class OutputCandidate(Shape):
    token: str
    logprob: float
    bytes: list[int]


class OutputLogprob(OutputCandidate):
    top_logprobs: list[OutputCandidate]


class OutputText(Shape):
    """A part of a message with the model's text. `annotations` is empty."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[OutputLogprob]


class OutputMessage(Shape):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: ResponseStatus
    content: list[OutputText]


class FunctionCallItem(Shape):
    """A call of a function. `arguments`: the JSON text of an object, unless the status is "incomplete".

    `namespace` is set for a function of a namespace.
    """

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: str = ""
    arguments: str
    status: ResponseStatus


class CustomCallItem(Shape):
    """A call of a custom tool. `namespace` is set for a tool of a namespace."""

    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    namespace: str = ""
    input: str
    status: ResponseStatus


class SearchCallItem(Shape):
    type: Literal["tool_search_call"]
    id: str
    call_id: str
    execution: Literal["client"]
    arguments: dict[str, Any]
    status: ResponseStatus


class ReasoningText(Shape):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Shape):
    """Thoughts. `summary` is empty."""

    type: Literal["reasoning"]
    id: str
    status: ResponseStatus
    summary: list[Any]
    content: list[ReasoningText]


class CompactionItem(Shape):
    """A summary. Its content is empty while it is written."""

    type: Literal["compaction"]
    id: str
    encrypted_content: str


CallItem = FunctionCallItem | CustomCallItem | SearchCallItem
OutputItem = Annotated[OutputMessage | CallItem | ReasoningItem | CompactionItem, Field(discriminator="type")]


class ReasoningSaid(Shape):
    effort: str | None
    summary: str | None


class TextSaid(Shape):
    format: dict[str, Any]
    verbosity: Literal["low", "medium", "high"]


class Incomplete(Shape):
    reason: Literal["max_output_tokens"]


class ResponseFailure(Shape):
    """An error. `type` is mlxtp's own code."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str
    type: str
    param: None


class InputDetails(Shape):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseBody(Shape):
    """A response. Most fields repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSaid
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: TextSaid
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class InputText(Shape):
    type: Literal["input_text"]
    text: str


class KeptMessage(Shape):
    """A message of the user in a new history."""

    type: Literal["message"]
    id: str
    role: Literal["user"]
    status: Literal["completed"]
    content: list[InputText]


class CompactedHistory(Shape):
    """A new history: messages of the user, and a summary at the end."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Annotated[KeptMessage | CompactionItem, Field(discriminator="type")]]
    usage: ResponseUsage


class InputTokens(Shape):
    object: Literal["response.input_tokens"]
    input_tokens: int

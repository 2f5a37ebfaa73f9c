"""The Anthropic dialect: the shapes of answers, each field required.

They describe answers in `/openapi.json`, and tests check every answer against them. Answers are written
without them: a stream is written token by token.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .openai_shapes import Shape

AnthropicStopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessageUsage(Shape):
    """Counts of tokens. The prompt's are the sum of all `input_tokens` fields."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(Shape):
    type: Literal["text"]
    text: str


class ThinkingBlock(Shape):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Shape):
    type: Literal["tool_use"]
    id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]+$")]
    name: str
    input: dict[str, Any]


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class AnthropicMessage(Shape):
    """An answer. `stop_reason` is None only at the start of a stream."""

    id: Annotated[str, Field(pattern=r"^msg_[0-9a-f]{32}$")]
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: AnthropicStopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Shape):
    input_tokens: int


class AnthropicErrorDetail(Shape):
    type: Literal[
        "invalid_request_error", "authentication_error", "permission_error", "not_found_error",
        "request_too_large", "rate_limit_error", "timeout_error", "overloaded_error", "api_error",
    ]  # fmt: skip
    message: str


class AnthropicError(Shape):
    """An error. `request_id` equals the header `request-id`, and `req_` plus `x-request-id`."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: Annotated[str, Field(pattern=r"^req_[!-~]{1,128}$")]


class AnthropicModel(Shape):
    """A model. `created_at` is in the format of RFC 3339."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class AnthropicModelPage(Shape):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


# --- the events of a stream -------------------------------------------------------------------------------


class MessageStart(Shape):
    type: Literal["message_start"]
    message: AnthropicMessage


class PingEvent(Shape):
    type: Literal["ping"]


class BlockStart(Shape):
    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(Shape):
    type: Literal["text_delta"]
    text: Annotated[str, Field(min_length=1)]


class ThinkingDelta(Shape):
    type: Literal["thinking_delta"]
    thinking: Annotated[str, Field(min_length=1)]


class SignatureDelta(Shape):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(Shape):
    type: Literal["input_json_delta"]
    partial_json: Annotated[str, Field(min_length=1)]


class BlockDelta(Shape):
    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | SignatureDelta | InputDelta, Field(discriminator="type")]


class BlockStop(Shape):
    type: Literal["content_block_stop"]
    index: int


class StopDelta(Shape):
    stop_reason: AnthropicStopReason
    stop_sequence: str | None


class MessageDelta(Shape):
    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage


class MessageStop(Shape):
    type: Literal["message_stop"]


StreamEvent = Annotated[
    MessageStart
    | PingEvent
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | AnthropicError,
    Field(discriminator="type"),
]

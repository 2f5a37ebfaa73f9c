"""Answers as the strictest client reads them: by the types of the publishers' own libraries.

The libraries themselves take anything. Here each value has the type of its field, no field is unknown but
those that mlxtp adds, and none is missing but those that it leaves out. What no library has a type for has
one here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import anthropic.types
import openai.types
from anthropic.pagination import SyncPage
from openai.types.chat import ChatCompletion
from openai.types.completion_choice import CompletionChoice
from openai.types.responses import Response, ResponseCompactionItem, ResponseUsage
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import BaseModel, Field, RootModel

from . import ollama_shapes
from .ollama_shapes import Shape

T = TypeVar("T", bound=BaseModel)


class OpenAIErrorDetail(Shape):
    """Details of an error. `state`, such as "loading", is set while no model is ready."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str
    state: str = ""


class OpenAIError(Shape):
    error: OpenAIErrorDetail


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


class Ping(Shape):
    type: Literal["ping"]


class MessageEvent(RootModel[anthropic.types.RawMessageStreamEvent | Ping | AnthropicError]):
    """An event of Anthropic's."""


class ListedModels(Shape):
    object: Literal["list"]
    data: list[openai.types.Model]


class CompletionPart(CompletionChoice):
    """A choice in a chunk. It has no reason until it ends."""

    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class CompletionChunk(openai.types.Completion):
    choices: list[CompletionPart]  # type: ignore[assignment]


class KeptMessage(Shape):
    type: Literal["message"]
    id: str
    role: Literal["user"]
    status: Literal["completed"]
    content: list[dict[Literal["type", "text"], str]]


class CompactedHistory(Shape):
    """Messages of the user, and a summary at the end."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[KeptMessage | ResponseCompactionItem]
    usage: ResponseUsage


ANTHROPIC_MODELS: Any = SyncPage[anthropic.types.ModelInfo]
ANSWERS: Mapping[str, type[BaseModel]] = {
    "GET /v1/models": ListedModels,
    "GET /v1/models/{id}": openai.types.Model,
    "POST /v1/chat/completions": ChatCompletion,
    "POST /v1/completions": openai.types.Completion,
    "POST /v1/responses": Response,
    "POST /v1/responses/compact": CompactedHistory,
    "POST /v1/responses/input_tokens": InputTokenCountResponse,
    "POST /v1/messages": anthropic.types.Message,
    "POST /v1/messages/count_tokens": anthropic.types.MessageTokensCount,
    "POST /api/chat": ollama_shapes.OllamaChatAnswer,
    "POST /api/generate": ollama_shapes.OllamaGenerateAnswer,
    "GET /api/tags": ollama_shapes.OllamaModels,
    "GET /api/ps": ollama_shapes.OllamaRunningModels,
    "POST /api/show": ollama_shapes.OllamaShown,
    "GET /api/version": ollama_shapes.OllamaVersion,
}
ERRORS: Mapping[str, type[BaseModel]] = {
    "/api/": ollama_shapes.OllamaError,
    "/v1/messages": AnthropicError,
    "": OpenAIError,
}
ADDED = {
    "ChatCompletion": "prompt_logprobs prompt_token_ids",
    "ChatCompletionChunk": "prompt_token_ids",
    "ChatCompletionMessage": "reasoning reasoning_content",
    "Choice": "matched_stop stop_reason token_ids",
    "ChoiceDelta": "reasoning reasoning_content",
    "CompletionChoice": "matched_stop prompt_logprobs prompt_token_ids stop_reason token_ids",
    "CompletionPart": "matched_stop prompt_token_ids stop_reason token_ids",
    "Model": "context_length max_model_len root supported_features",
    "Response": "frequency_penalty presence_penalty store",
    "ResponseCustomToolCall": "status",
    "ResponseFunctionCallArgumentsDoneEvent": "name",
    "Logprob": "bytes",
    "LogprobTopLogprob": "bytes",
}
"""Published by some and unknown to this version of a library, or what clients of other servers look for."""
LEFT_OUT = {
    "CompletionUsage": "completion_tokens_details prompt_tokens_details",
    "ChatCompletion": "metadata moderation service_tier system_fingerprint",
    "ChatCompletionChunk": "moderation obfuscation service_tier system_fingerprint usage",
    "ChatCompletionMessage": "annotations audio function_call tool_calls",
    "ChoiceDelta": "audio content function_call refusal role tool_calls",
    "ChoiceDeltaToolCall": "id type",
    "ChoiceDeltaToolCallFunction": "name",
    "Completion": "system_fingerprint",
    "CompletionChunk": "system_fingerprint usage",
    "CompletionTokensDetails": "audio_tokens text_tokens",
    "PromptTokensDetails": "audio_tokens cache_write_tokens image_tokens text_tokens",
    "Model": "shutdown_date",
    "Message": "container diagnostics stop_details",
    "Delta": "container stop_details",
    "Usage": "cache_creation inference_geo output_tokens_details server_tool_use service_tier",
    "MessageDeltaUsage": "output_tokens_details server_tool_use",
    "TextBlock": "citations",
    "ToolUseBlock": "caller toolset_name",
    "ModelInfo": "capabilities deprecated_at line retires_at",
    "Response": (
        "access_programs conversation image input_transformations moderation prompt prompt_cache_diagnostics "
        "prompt_cache_options prompt_cache_retention tool_usage"
    ),
    "Reasoning": "context generate_summary mode",
    "ResponseError": "misalignment",
    "ResponseOutputMessage": "phase",
    "ResponseReasoningItem": "encrypted_content",
    "ResponseCompactionItem": "created_by",
    "ResponseToolSearchCall": "created_by",
    "ResponseFunctionToolCall": "async_ caller namespace",
    "ResponseCustomToolCall": "async_ caller namespace",
    "InputTokensDetails": "cache_write_tokens_details",
}
"""By the type that has them. A request's own parts, which a response repeats, are as they were sent."""
REPEATED = ("Tool", "ToolFunction", "Format", "Grammar")


def parts(value: object) -> Iterator[BaseModel]:
    """Yield an answer and everything in it."""
    if isinstance(value, BaseModel):
        yield value
        value = value.__dict__
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(each)


def read(kind: type[T], data: str | bytes) -> T:
    """Return an answer. Raises ValidationError or AssertionError where the strictest client would."""
    answer = kind.model_validate_json(data, strict=True)
    for part in parts(answer):
        fields, name = type(part).model_fields, type(part).__name__.rpartition(".")[2]
        unknown = set(part.model_extra or ()) - set(ADDED.get(name, "").split())
        assert not unknown, (name, unknown)
        if not (isinstance(part, Shape) or name.endswith(REPEATED) or name.startswith("ResponseFormat")):
            missing = fields.keys() - part.model_fields_set - set(LEFT_OUT.get(name, "").split())
            assert not missing, (name, missing)
    return answer


def read_answer(label: str, status: int, data: bytes) -> None:
    """Read the answer of an operation, if it has a type here, or its refusal."""
    path = label.split(" ")[1]
    kind = ANSWERS.get(label)
    if status >= 400:
        kind = next(shape for prefix, shape in ERRORS.items() if path.startswith(prefix))
    if kind is not None:
        read(kind, data)

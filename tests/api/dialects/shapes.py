"""The shape of each operation's answers and refusals."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from . import anthropic_shapes, completions_shapes, ollama_shapes, openai_shapes, responses_shapes

ANSWERS: Mapping[str, type[BaseModel]] = {
    "GET /health": openai_shapes.HealthBody,
    "GET /v1/models": openai_shapes.ModelList,
    "GET /v1/models/{id}": openai_shapes.ListedModel,
    "POST /v1/chat/completions": openai_shapes.ChatCompletion,
    "POST /v1/completions": completions_shapes.Completion,
    "POST /v1/responses": responses_shapes.ResponseBody,
    "POST /v1/responses/compact": responses_shapes.CompactedHistory,
    "POST /v1/responses/input_tokens": responses_shapes.InputTokens,
    "POST /v1/messages": anthropic_shapes.AnthropicMessage,
    "POST /v1/messages/count_tokens": anthropic_shapes.TokenCount,
    "POST /api/chat": ollama_shapes.OllamaChatAnswer,
    "POST /api/generate": ollama_shapes.OllamaGenerateAnswer,
    "GET /api/tags": ollama_shapes.OllamaModels,
    "GET /api/ps": ollama_shapes.OllamaRunningModels,
    "POST /api/show": ollama_shapes.OllamaShown,
    "GET /api/version": ollama_shapes.OllamaVersion,
}
ERRORS: Mapping[str, type[BaseModel]] = {
    "/api/": ollama_shapes.OllamaError,
    "/v1/messages": anthropic_shapes.AnthropicError,
    "": openai_shapes.OpenAIError,
}


def shape_of(label: str, status: int) -> type[BaseModel] | None:
    """Return the shape of an answer or a refusal; None for an answer that has none."""
    path = label.split(" ")[1]
    if status < 400:
        return ANSWERS.get(label)
    return next(shape for prefix, shape in ERRORS.items() if path.startswith(prefix))

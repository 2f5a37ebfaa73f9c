"""Requests made from what OpenAI, Anthropic and Ollama publish of their APIs, as their libraries carry it.

The types of the first two libraries are generated from the publishers' own descriptions. Of each parameter
random values are asked, one parameter at a time beside a request that is right: it is answered, as the
description says, or refused in words; nothing fails. What a parameter does is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import httpx
import pytest
import schemathesis
from anthropic.types import Message
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming as MessageParams
from ollama import ChatResponse, GenerateResponse
from ollama._types import ChatRequest, GenerateRequest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as ResponseParams
from pydantic import BaseModel, TypeAdapter
from schemathesis import GenerationMode

from .conftest import Server
from .test_app_openapi_holds import ASKED, check, operations

pytestmark = pytest.mark.chaos

WORDS = {"type": "string", "minLength": 1}
PERHAPS = {"type": ["string", "null"]}


def exactly(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


OPENAI = exactly(error=exactly(message=WORDS, type=WORDS, param=PERHAPS, code=PERHAPS))
ANTHROPIC = exactly(type={"const": "error"}, error=exactly(type=WORDS, message=WORDS))
OLLAMA = exactly(error=WORDS)
PUBLISHED: Mapping[str, tuple[Any, type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatParams, ChatCompletion, OPENAI),
    "/v1/completions": (CompletionParams, Completion, OPENAI),
    "/v1/responses": (ResponseParams, Response, OPENAI),
    "/v1/messages": (MessageParams, Message, ANTHROPIC),
    "/api/chat": (ChatRequest, ChatResponse, OLLAMA),
    "/api/generate": (GenerateRequest, GenerateResponse, OLLAMA),
}
"""Requests, replies and refusals."""
STREAM: dict[str, Any] = {"application/x-ndjson": {}}
"""Ollama's, of which its types say nothing; OpenAI's and Anthropic's are other operations."""
REFERENCE = "#/components/schemas/{model}"


@cache
def schemas(path: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Of each parameter, of a whole answer, and of what these refer to."""
    params, answer, _ = PUBLISHED[path]
    body = TypeAdapter(params).json_schema(ref_template=REFERENCE)
    whole = answer.model_json_schema(mode="serialization", ref_template=REFERENCE)
    return body["properties"], whole, {**body.pop("$defs", {}), **whole.pop("$defs", {})}


def described(path: str, parameter: str) -> schemathesis.APIOperation:
    """The operation with this parameter alone in its body."""
    parameters, answer, definitions = schemas(path)
    body = exactly(**{parameter: parameters[parameter]}) | {"additionalProperties": False}
    refused = {"description": "", "content": {"application/json": {"schema": PUBLISHED[path][2]}}}
    answered = {"description": "", "content": {"application/json": {"schema": answer}, **STREAM}}
    post = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": answered, "400": refused, "404": refused},
    }
    description = {
        "openapi": "3.1.0",
        "info": {"title": path, "version": "1"},
        "paths": {path: {"post": post}},
        "components": {"schemas": definitions},
    }
    [operation] = operations(description)
    return operation


def beside(request: Mapping[str, Any], case: schemathesis.Case) -> None:
    assert isinstance(case.body, dict)
    case.body = {**request, **case.body}


@pytest.mark.parametrize(
    ("path", "parameter"), [(path, parameter) for path in PUBLISHED for parameter in schemas(path)[0]]
)
def test_a_published_parameter(roomy: Server, path: str, parameter: str) -> None:
    request = {"model": "default", "stream": False, **ASKED[path]}
    assert httpx.post(roomy.url + path, json=request, trust_env=False).status_code == 200
    assert check(roomy, described(path, parameter), GenerationMode.POSITIVE, partial(beside, request))

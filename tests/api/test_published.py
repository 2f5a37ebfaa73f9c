"""Requests made from what OpenAI publishes of its API, as its library carries it: all of it is understood.

The library's types are generated from OpenAI's own description. Of each parameter random values are asked,
one parameter at a time beside a request that is right: it is answered, as the description says, or
refused in words; nothing fails. Whether the answer has to do with the parameter others test.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import pytest
import schemathesis
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as ResponseParams
from pydantic import BaseModel, TypeAdapter
from schemathesis import GenerationMode

from .conftest import Server
from .test_openapi_holds import ASKED, check, operations

PUBLISHED: Mapping[str, tuple[Any, type[BaseModel]]] = {
    "/v1/chat/completions": (ChatParams, ChatCompletion),
    "/v1/completions": (CompletionParams, Completion),
    "/v1/responses": (ResponseParams, Response),
}
REFERENCE = "#/components/schemas/{model}"
REFUSAL = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def schemas(path: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Of each parameter, of a whole answer, and of what these refer to."""
    params, answer = PUBLISHED[path]
    body = TypeAdapter(params).json_schema(ref_template=REFERENCE)
    whole = answer.model_json_schema(mode="serialization", ref_template=REFERENCE)
    return body["properties"], whole, {**body.pop("$defs", {}), **whole.pop("$defs", {})}


def described(path: str, parameter: str) -> schemathesis.APIOperation:
    """The operation with this parameter alone in its body."""
    parameters, answer, definitions = schemas(path)
    body = {
        "type": "object",
        "properties": {parameter: parameters[parameter]},
        "required": [parameter],
        "additionalProperties": False,
    }
    refused = {"description": "", "content": {"application/json": {"schema": REFUSAL}}}
    post = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": "", "content": {"application/json": {"schema": answer}}},
            "400": refused,
            "404": refused,
        },
    }
    [operation] = operations(
        {
            "openapi": "3.1.0",
            "info": {"title": "OpenAI", "version": "1"},
            "paths": {path: {"post": post}},
            "components": {"schemas": definitions},
        }
    )
    return operation


def beside(request: Mapping[str, Any], case: schemathesis.Case) -> None:
    assert isinstance(case.body, dict)
    case.body = {**request, **case.body}


@pytest.mark.parametrize(
    ("path", "parameter"), [(path, parameter) for path in PUBLISHED for parameter in schemas(path)[0]]
)
def test_a_published_parameter(roomy: Server, path: str, parameter: str) -> None:
    request = {"model": "default", **ASKED[path]}
    statuses = check(roomy, described(path, parameter), GenerationMode.POSITIVE, partial(beside, request))
    assert 200 in statuses

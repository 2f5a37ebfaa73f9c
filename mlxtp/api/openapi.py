"""`GET /openapi.json`: bodies of this endpoint's requests, from the schemas that check them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

Json = dict[str, Any]
_JSON = "application/json"
_REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `body` None: it takes none.

    `stream` is the media type of an answer that may come in pieces, `media` that of any other. `always`: the
    status of an operation that refuses every request.
    """

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    stream: str = ""
    media: str = _JSON
    always: int = 0


def document(operations: Iterable[Operation], version: str) -> Json:
    """Return the OpenAPI document (3.1)."""
    operations = tuple(operations)
    bodies: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {
        (each.body, "validation"): None for each in operations if each.body is not None
    }
    references, definitions = models_json_schema(list(bodies), ref_template=_REFERENCE)
    paths: dict[str, Json] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxtp", "version": version},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(operation: Operation, references: Any) -> Json:
    described: Json = {"summary": operation.summary, "operationId": _id(operation)}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if operation.body is not None:
        schema = references[operation.body, "validation"]
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    refused: Json = {_JSON: {}}
    first = {"200": {"description": "the answer", "content": _content(operation)}}
    if operation.always:
        first = {str(operation.always): {"description": "refused, always", "content": refused}}
    described["responses"] = {
        **first,
        "4XX": {"description": "refused", "content": refused},
        "5XX": {"description": "not now (503), or a failure", "content": refused},
    }
    return described


def _content(operation: Operation) -> Json:
    """Return the content of an answer."""
    text: Json = {"schema": {"type": "string"}}
    content: Json = {operation.media: {} if operation.media == _JSON else text}
    if operation.stream:
        content[operation.stream] = text
    return content


def _id(operation: Operation) -> str:
    words = operation.path.replace("{", "").replace("}", "").strip("/").replace("/", "_").replace(".", "_")
    return f"{operation.method.lower()}_{words}"

"""Schemas for /openapi.json of what later checks refuse, such as rules between fields. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, WithJsonSchema

NULL: Mapping[str, Any] = {"type": "null"}
TRUE, NOT_TRUE = {"const": True}, {"enum": [None, False]}
NO_ITEMS: Mapping[str, Any] = {"enum": [None, []]}
NO_SCORES = {"enum": [None, 0]}
TEXT: Mapping[str, Any] = {"type": "string", "minLength": 1}
FilledText = Annotated[str, WithJsonSchema({**TEXT})]


def rules(*each: tuple[Mapping[str, Any], ...]) -> ConfigDict:
    """Return the configuration of a schema with rules: of each, the fields of one branch at least are so."""
    return ConfigDict(json_schema_extra={"allOf": [{"anyOf": [*map(fields, rule)]} for rule in each]})


def fields(schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with these fields. Those that may be null may be absent."""
    may = [name for name, of in schemas.items() if None in of.get("enum", ()) or "null" in of.get("type", "")]
    there = [name for name in schemas if name not in may]
    return {"type": "object", "properties": {**schemas}, "required": there}

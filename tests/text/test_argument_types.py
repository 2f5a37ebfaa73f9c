from __future__ import annotations

from typing import Any

import pytest

from mlxtp.text.argument_types import property_types, typed

DEFINITIONS = {
    "$defs": {"Limit": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}, "a/b": {"type": "boolean"}}
}
#: A schema, a text, and its value.
ROWS: list[tuple[Any, str, object]] = [
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
    ({"type": "string"}, "  indented\n", "  indented\n"),
    ({"type": "integer"}, " 5\n", 5),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "integer"}, "0123", "0123"),
    ({"type": "number"}, "5", 5),
    ({"type": "number"}, "0.5", 0.5),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "False", False),
    ({"type": "boolean"}, "yes", "yes"),
    ({"type": "array"}, "[1, 'a',]", [1, "a"]),
    ({"type": "array"}, "", []),
    ({"type": "object"}, '{"a": "x\ny"}', {"a": "x\ny"}),
    ({"type": "object"}, "", {}),
    ({"type": "object"}, "[1]", "[1]"),
    ({"type": "null"}, "None", None),
    ({"type": "STRING"}, "5", "5"),
    ({"type": "int"}, "5", 5),
    ({"type": "any"}, "5", "5"),
    ({"type": ["string", "null"]}, "5", "5"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "integer"]}, "5", 5),
    ({"type": ["string", "integer"]}, "x", "x"),
    ({"type": "integer", "nullable": True}, "null", None),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
    ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
    ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, "5", 5),
    ({"anyOf": [{"type": "integer"}, {}]}, "5", "5"),
    ({"$ref": "#/$defs/Limit"}, "5", 5),
    ({"$ref": "#/$defs/a~1b"}, "true", True),
    ({"$ref": "#/$defs/Loop"}, "5", "5"),
    ({"$ref": "#/$defs/none"}, "5", "5"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"const": 1}, "1", 1),
    ({"properties": {}}, '{"a": 1}', {"a": 1}),
    ({"items": {"type": "integer"}}, "[1]", [1]),
    ({}, "5", "5"),
    ({}, "[1]", [1]),
    ({}, "null", None),
]


@pytest.mark.parametrize(("schema", "text", "value"), ROWS)
def test_a_value_has_the_type_of_its_schema(schema: Any, text: str, value: object) -> None:
    types = property_types({"properties": {"a": schema}} | DEFINITIONS, "a")
    assert (found := typed(text, types)) == value
    assert type(found) is type(value)


def test_an_argument_that_is_not_described_is_text_unless_its_family_writes_json() -> None:
    for parameters in ({}, {"properties": None}, {"properties": {"b": {"type": "integer"}}}):
        assert property_types(parameters, "a") is None
    for text, value in (("5", 5), ("[1]", [1]), ("x", "x")):
        assert typed(text, None) == text
        assert typed(text, None, guess=True) == value
    assert typed("null", None) is None
    assert property_types({"additionalProperties": {"type": "integer"}}, "a") == {"integer"}

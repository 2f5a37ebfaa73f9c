"""Formats that answers are held to, and JSON schemas as they are enforced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, SecretStr

from mlxtp.api.sampling import Guidance, guidance
from mlxtp.engine.grammar import Grammars
from mlxtp.errors import Code, MlxtpError, RequestError
from mlxtp.text.call_style import Separators
from mlxtp.text.conversation import ChatMessage, Conversation, GenerationOptions, GenerationRequest
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text
from mlxtp.text.tool_grammar import guided_schema

from ..reference import TINY, model_of

EOS = tuple(sorted(model_of(TINY)[1]))
SCHEMA = {"type": "object", "properties": {"größe": {"type": "number"}}}


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(LocalRenderer.load(TINY))


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    held = Grammars(TINY, 512, frozenset(EOS))
    yield held
    held.close()


def held(text: Text, format_: Any) -> Guidance:
    prompt = Conversation((ChatMessage("user", "go"),))
    return guidance(GenerationRequest(None, prompt, GenerationOptions(format=format_)), text, EOS)


def closed(schema: dict[str, Any]) -> Any:
    found = json.loads(guided_schema(schema, Separators(), "response_format"))
    del found["x-guidance"]
    return found


@pytest.mark.parametrize(
    ("format_", "grammar"),
    [
        (None, ("", "")),
        ({"type": "text"}, ("", "")),
        ({"type": "regex", "pattern": "[ab]+"}, ("regex", "[ab]+")),
        ({"type": "grammar", "grammar": 'start: "a"'}, ("lark", 'start: "a"')),
        ({"type": "lark", "grammar": 'start: "a"'}, ("lark", 'start: "a"')),
    ],
)
def test_a_format_becomes_a_grammar(text: Text, format_: Any, grammar: tuple[str, str]) -> None:
    assert held(text, format_) == Guidance(grammar)


@pytest.mark.parametrize(
    ("format_", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_object", "schema": SCHEMA}, {**SCHEMA, "additionalProperties": False}),
        ({"type": "json_object", "value": SCHEMA}, {**SCHEMA, "additionalProperties": False}),
        ({"type": "json", "value": SCHEMA}, {**SCHEMA, "additionalProperties": False}),
        (
            {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}},
            {**SCHEMA, "additionalProperties": False},
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
            {**SCHEMA, "additionalProperties": False},
        ),
    ],
)
def test_a_format_of_json_becomes_a_schema(text: Text, format_: Any, schema: Any) -> None:
    kind, grammar = held(text, format_).grammar
    found = json.loads(grammar)
    assert found.pop("x-guidance")["item_separator"] == ", "
    assert (kind, found) == ("json_schema", schema)


@pytest.mark.parametrize(
    ("format_", "param"),
    [
        ({"type": "json_schema"}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"a": float("nan")}}}, "response_format"),
        ({"type": "regex"}, "response_format.pattern"),
        ({"type": "regex", "pattern": ""}, "response_format.pattern"),
        ({"type": "lark", "grammar": 5}, "response_format.grammar"),
        ({"type": "grammar"}, "response_format.grammar"),
    ],
)
def test_a_format_without_its_grammar_is_refused(text: Text, format_: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        held(text, format_)
    assert (caught.value.code, caught.value.param) == (Code.BAD_REQUEST, param)
    assert len(caught.value.detail) < 300


@pytest.mark.parametrize("format_", [{"type": "xml"}, {}, {"type": 5}])
def test_an_unknown_format_is_not_passed_over(text: Text, format_: Any) -> None:
    with pytest.raises(RequestError) as caught:
        held(text, format_)
    assert (caught.value.code, caught.value.param) == (Code.NOT_SUPPORTED, "response_format")
    assert json.dumps(format_) in caught.value.detail


A = {"type": "object", "properties": {"a": {"type": "string"}}}
B = {"type": "object", "properties": {"b": {"type": "string"}}}
CLOSED_A = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED_A),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "patternProperties": {"^x": {}}}, {**A, "patternProperties": {"^x": {}}}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"$defs": {"a": A}, "$ref": "#/$defs/a"}, {"$defs": {"a": CLOSED_A}, "$ref": "#/$defs/a"}),
        ({"allOf": [A]}, {"allOf": [CLOSED_A]}),
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        ({**A, "anyOf": [B, {}]}, {**A, "anyOf": [B, {}]}),
        (
            {"$defs": {"a": A}, "allOf": [{"$ref": "#/$defs/a"}, B]},
            {"$defs": {"a": A}, "allOf": [{"$ref": "#/$defs/a"}, B]},
        ),
        ({"properties": {"uniqueItems": {"uniqueItems": True}}},
         {"properties": {"uniqueItems": {}}, "additionalProperties": False}),
        ({"type": "string", "format": "password"}, {"type": "string"}),
        ({"type": "string", "format": "uri"}, {"type": "string", "format": "uri"}),
        (
            {"$defs": {"a/b": A}, "allOf": [{"$ref": "#/%24defs/a~1b"}, B]},
            {"$defs": {"a/b": A}, "allOf": [{"$ref": "#/%24defs/a~1b"}, B]},
        ),
        (
            {"$defs": {"a": A, "c": {"$ref": "#/$defs/a"}}, "allOf": [{"$ref": "#/$defs/c"}, B]},
            {"$defs": {"a": A, "c": {"$ref": "#/$defs/a"}}, "allOf": [{"$ref": "#/$defs/c"}, B]},
        ),
        ({"type": "integer"}, {"type": "integer", "minimum": 1024 - 2**63, "maximum": 2**63 - 1024}),
        ({"type": "integer", "minimum": 5}, {"type": "integer", "minimum": 5, "maximum": 2**63 - 1024}),
        ({"type": "object", "x-guidance": {"lenient": True}}, {"type": "object"}),
        ({**A, "required": ["b"]},
         {**CLOSED_A, "properties": {"a": {"type": "string"}, "b": True}, "required": ["b"]}),
        ({**A, "required": None, "anyOf": None, "additionalProperties": None, "enum": None}, CLOSED_A),
        ({"type": "array", "items": {"type": "integer", "maximum": None, "minimum": 1, "format": None}},
         {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 2**63 - 1024}}),
        ({"type": "array", "items": None, "prefixItems": None}, {"type": "array"}),
        ({"properties": {"null": A}, "$defs": None},
         {"properties": {"null": CLOSED_A}, "additionalProperties": False}),
        ({"const": None}, {"const": None}),
    ],
)  # fmt: skip
def test_objects_are_closed_unless_they_say_otherwise(schema: dict[str, Any], expected: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == before


def test_a_schema_that_is_nested_beyond_reason_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="not a JSON schema"):
        guided_schema(deep, Separators(), "response_format")


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)] = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: set[str]


class Home(BaseModel):
    """Most of what pydantic's schemas hold."""

    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]
    favorite: Cat | Dog | None = None
    by_room: dict[str, int]
    code: SecretStr
    path: Path
    share: Annotated[float, Field(gt=0, lt=1)]
    pair: tuple[int, str]


def test_pydantics_schemas_are_enforced(text: Text, grammars: Grammars) -> None:
    format_ = {"type": "json_schema", "json_schema": {"schema": Home.model_json_schema()}}
    matcher = grammars.compile(*held(text, format_).grammar).matcher()
    answer = (
        '{"pets": [{"kind": "dog", "tricks": ["sit"]}, {"kind": "cat"}], "favorite": null, '
        '"by_room": {"hall": 2}, "code": "x", "path": "/a", "share": 0.5, "pair": [1, "b"]}'
    )
    for token in text.encoded(answer, special=False):
        matcher.accept(token)
    assert matcher.finished
    assert Home.model_validate_json(answer).pets[0].kind == "dog"


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [("date", "2026-11-23", "0000-11-23"), ("date-time", "2026-11-23T09:30:00.5Z", "2026-11-23t09:30:00Z")],
)
def test_a_date_is_one_that_libraries_read(
    text: Text, grammars: Grammars, kind: str, right: str, wrong: str
) -> None:
    schema = guided_schema({"type": "string", "format": kind}, Separators(), "response_format")
    grammar = grammars.compile("json_schema", schema)

    def write(date: str) -> bool:
        matcher = grammar.matcher()
        for token in text.encoded(f'"{date}"', special=False):
            matcher.accept(token)
        return matcher.finished

    assert write(right)
    with pytest.raises(MlxtpError):
        write(wrong)

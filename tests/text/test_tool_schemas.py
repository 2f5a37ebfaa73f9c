"""Schemas of tools: what a grammar can enforce is enforced, the rest is left out and named.

`schema_kinds.jsonl` has schemas of a value, `schemas_of_tools.jsonl` those of whole arguments, as people and
generators write them: a name, the schema, values that a grammar must allow, and those that it must not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.engine import grammar
from mlxtp.engine.grammar import Grammars
from mlxtp.errors import MlxtpError
from mlxtp.text import renderer, tool_schemas
from mlxtp.text.call_style import CallStyle
from mlxtp.text.conversation import Tool as OfferedTool
from mlxtp.text.renderer import LocalRenderer, SandboxedRenderer
from mlxtp.text.tokenizer import Text
from mlxtp.text.tool_grammar import JSON_STYLE, call_grammar, checked_tools
from mlxtp.text.tool_schemas import relaxed

from ..reference import TINY, model_of

Case = tuple[str, Any, list[Any], list[Any]]


def read(name: str) -> list[Case]:
    return [json.loads(line) for line in (Path(__file__).parent / name).read_text().splitlines()]


def named(cases: list[Case]) -> dict[str, Any]:
    return {"argvalues": cases, "ids": [case[0] for case in cases]}


KINDS, WHOLE = read("schema_kinds.jsonl"), read("schemas_of_tools.jsonl")


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(LocalRenderer.load(TINY))


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    held = Grammars(TINY, 512, frozenset(model_of(TINY)[1]))
    yield held
    held.close()


class Tool:
    """A tool named x that must be called."""

    def __init__(
        self, grammars: Grammars, text: Text, parameters: Any, style: CallStyle = JSON_STYLE
    ) -> None:
        schemas = text.relaxed(checked_tools([OfferedTool("x", parameters=parameters)]), style.field is None)
        self._grammar = grammars.compile("lark", call_grammar(schemas, style))
        self._text = text

    def takes(self, arguments: Any) -> bool:
        return self.writes(f'{{"name": "x", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}')

    def writes(self, call: str) -> bool:
        matcher = self._grammar.matcher()
        try:
            for token in self._text.encoded(call, special=False):
                matcher.accept(token)
        except MlxtpError:
            return False
        return matcher.complete


def object_of(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": schema, "w": {"type": "integer"}}, "required": ["v"]}


#: Places of a schema, and how a value of it stands there.
PLACES = {
    "a property": (lambda schema: schema, lambda value: value),
    "a list": (lambda schema: {"type": "array", "items": schema}, lambda value: [value]),
    "a tuple": (
        lambda schema: {"type": "array", "prefixItems": [{"type": "integer"}, schema], "minItems": 2},
        lambda value: [1, value],
    ),
    "a map": (lambda schema: {"type": "object", "additionalProperties": schema}, lambda value: {"k": value}),
    "a choice": (
        lambda schema: {"anyOf": [object_of({"const": "other"}), object_of(schema)]},
        lambda value: {"v": value},
    ),
    "a combination": (lambda schema: {"allOf": [schema]}, lambda value: value),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schema", "valid", "invalid"), **named(KINDS))
def test_a_kind_of_schema_in_every_place(
    grammars: Grammars, text: Text, name: str, schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    definition = {"$defs": {"V": schema}, **object_of({"$ref": "#/$defs/V", "description": "a value"})}
    placed = [(object_of(make(schema)), wrap) for make, wrap in PLACES.values()]
    for parameters, wrap in [*placed, (definition, lambda value: value)]:
        before = json.dumps(parameters)
        tool = Tool(grammars, text, parameters)
        assert json.dumps(parameters) == before
        assert [value for value in valid if not tool.takes({"v": wrap(value)})] == []
        assert [value for value in invalid if tool.takes({"v": wrap(value)})] == []
        assert not tool.takes({})
        assert not valid or not tool.takes({"v": wrap(valid[0]), "w": "no integer"})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schema", "valid", "invalid"), **named(WHOLE))
def test_a_schema_of_arguments(
    grammars: Grammars, text: Text, name: str, schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    tool = Tool(grammars, text, schema)
    assert [value for value in valid if not tool.takes(value)] == []
    assert [value for value in invalid if tool.takes(value)] == []


@pytest.mark.slow
def test_schemas_that_are_large_or_deep(grammars: Grammars, text: Text) -> None:
    deep: Any = {"type": "integer"}
    for _ in range(90):
        deep = {"type": "object", "properties": {"k": deep}, "required": ["k"]}
    tool = Tool(grammars, text, object_of(deep))
    assert not tool.takes({"v": {}})
    value: Any = "anything"
    for _ in range(60):
        value = {"k": value}
    assert tool.takes({"v": value})
    chain = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2000)}
    assert Tool(grammars, text, object_of({"$ref": "#/$defs/d0"}) | {"$defs": chain}).takes({"v": []})
    words = {"enum": [f"word {i}" for i in range(3000)], "type": "string"}
    tool = Tool(grammars, text, object_of(words))
    assert tool.takes({"v": "word 2999"})
    assert not tool.takes({"v": "word 3000"})


@pytest.mark.slow
def test_many_kinds_at_once(grammars: Grammars, text: Text) -> None:
    tools = [OfferedTool(name, parameters=object_of(schema)) for name, schema, _, _ in KINDS[::2]]
    schemas = text.relaxed(checked_tools(tools), True)
    grammars.compile("lark", call_grammar(schemas, JSON_STYLE))


PIECES = st.sampled_from(
    ["a", "[a-z]", "[^/]", r"[\w.-]", r"[\w-.]", "[.*+?^${}()|]", "[a-]", "[z-a]", "[]", "[^]", "[[]", "(?<=",
     "[a&&b]", r"\d", r"\S", ".", "(", "(?:", "(?<n>", "(?P<n>", ")", "|", "*", "+", "?", "+?", "++", "?+",
     "{2}", "{1,3}", "{2,}", "{,3}", "{", "}", "]", "[", "^", "$", r"\.", r"\-", r"\/", r"\b", r"\1", "(?!",
     r"\k<n>", r"\p{L}", r"\pN", r"\p{Foo}", r"\u0041", r"\ud800", r"\x41", r"\t", r"\A", r"\Z", r"\<",
     r"\cA", r"\0", "(?=", "(?>", "(?i)", "(?i:", "(?m)", "(?P<stop>", "é", "-", "/", " ", '"', "\\"]
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=300)
@given(
    pieces=st.lists(PIECES, min_size=1, max_size=7),
    edges=st.sampled_from(["{}", "^{}", "{}$", "^{}$"]),
    least=st.sampled_from([None, 1, 5, 40]),
    most=st.sampled_from([None, 2, 30, 255]),
)
def test_any_pattern_is_enforced_or_left_out(
    grammars: Grammars, text: Text, pieces: list[str], edges: str, least: int | None, most: int | None
) -> None:
    pattern = edges.replace("{}", "".join(pieces))
    schema = {"type": "string", "pattern": pattern, "minLength": least, "maxLength": most}
    assert not Tool(grammars, text, object_of(schema)).takes({"v": 1})


KEYWORDS = st.sampled_from(
    ["type", "properties", "items", "prefixItems", "enum", "anyOf", "allOf", "oneOf", "not", "$ref", "const",
     "required", "minItems", "maxItems", "maxLength", "minLength", "pattern", "additionalProperties", "if",
     "exclusiveMaximum", "multipleOf", "format", "minProperties", "patternProperties", "nullable", "minimum"]
)  # fmt: skip
VALUES = st.sampled_from(
    ["string", "object", "array", "integer", "any", "#", "#/$defs/a", "a", "^a$", "(?=a)", "email", 0, 1, 3,
     -1, 0.5, True, False, None]
)  # fmt: skip
JSON = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.just("a"), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(schema=st.dictionaries(KEYWORDS, JSON, max_size=5))
def test_any_json_makes_a_tool(grammars: Grammars, text: Text, schema: dict[str, Any]) -> None:
    Tool(grammars, text, object_of(schema) | {"$defs": {"a": schema}})
    Tool(grammars, text, schema)


REFERENCES = st.sampled_from(["#/$defs/a", "#/$defs/b", "#/$defs/c", "#", "#/properties/a"])
NAMES = st.sampled_from(["a", "b", "c"])
LEAVES = st.sampled_from(
    [True, False, {}, {"type": "string"}, {"type": "integer", "minimum": 0}, {"enum": ["x", "y"]},
     {"const": 1}, {"type": ["string", "null"]}, {"type": "string", "minLength": 2}, {"pattern": "(?=a)"}]
)  # fmt: skip
COUNTS = st.integers(0, 3)


def node(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas that combine, repeat and contradict others."""
    several = st.lists(inner, min_size=1, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array"]),
            "$ref": REFERENCES,
            **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), several),
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "required": st.lists(NAMES | st.just("z"), max_size=3),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=2),
            **dict.fromkeys(("items", "additionalProperties"), inner),
            **dict.fromkeys(("minItems", "maxItems", "minProperties", "maxProperties"), COUNTS),
        },
    )


SCHEMAS = st.recursive(LEAVES | REFERENCES.map(lambda each: {"$ref": each}), node, max_leaves=6)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(schema=node(SCHEMAS), definitions=st.fixed_dictionaries(dict.fromkeys("abc", SCHEMAS)))
def test_any_schemas_that_refer_to_each_other_make_a_tool(
    grammars: Grammars, text: Text, schema: dict[str, Any], definitions: dict[str, Any]
) -> None:
    assert not Tool(grammars, text, schema | {"$defs": definitions}).takes(5)


LOOK = "look-around, including look-ahead and look-behind, is not supported"
COUNT = 'min/maxProperties only supported when all keys listed in "properties" are required'


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"type": "string", "maxLength": 5}, []),
        ({"type": "string", "pattern": None, "title": "t", "x-a": 1, "default": 5, "readOnly": True}, []),
        ({"type": "integer", "format": "int32"}, []),
        ({"type": "string", "pattern": "^(?!-)a"}, [f"v.pattern: {LOOK}"]),
        ({"type": "string", "pattern": "(?<=a)b"}, [f"v.pattern: {LOOK}"]),
        ({"type": "string", "pattern": r"(a)\1"}, ["v.pattern: backreferences are not supported"]),
        ({"type": "string", "pattern": r"\ba"},
         [r"v.pattern: lookarounds not supported yet; WordUnicode in regex /\ba/"]),
        ({"type": "string", "pattern": "(a"}, ["v.pattern: unclosed group"]),
        ({"type": "string", "pattern": "a" * 2001}, []),
        ({"type": "array", "items": {"pattern": "(?=a)"}}, [f"v.items.pattern: {LOOK}"]),
        (
            {"anyOf": [{"type": "null"}, {"properties": {"a": {"not": {"const": 1}}}}]},
            ['v.anyOf[1].properties.a.not: no grammar enforces {"const": 1}'],
        ),
        ({"type": "array", "uniqueItems": True}, ["v.uniqueItems: no grammar enforces true"]),
        ({"type": "array", "uniqueItems": False}, []),
        ({"type": "string", "format": "phone"}, ['v.format: no grammar enforces "phone"']),
        ({"type": "any"}, ['v.type: no grammar enforces "any"']),
        ({"type": "string", "minLength": "1"}, ['v.minLength: no grammar enforces "1"']),
        ({"$ref": "#/nowhere"}, ['v.$ref: no grammar enforces "#/nowhere"']),
        ({"type": "string", "enum": [1]}, ["v.enum: it contradicts the rest"]),
        ({"type": "string", "pattern": "a.{5,30}b", "maxLength": 64},
         ["v.maxLength: it stands beside a pattern"]),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, [f"v.minProperties: {COUNT}"]),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1, "maxProperties": 2},
         [f"v.maxProperties: {COUNT}"]),
    ],
)  # fmt: skip
def test_what_is_left_out_is_named(schema: Any, left_out: list[str]) -> None:
    _, found = relaxed({"x": object_of(schema)}, True)
    assert [each.removeprefix("tools.x.parameters.properties.") for each in found] == left_out


def test_a_definition_is_named_once_by_its_own_place() -> None:
    parameters = object_of({"$ref": "#/$defs/A"}) | {
        "$defs": {"A": {"pattern": "(?=a)"}, "B": {"not": {"a": 1}}}
    }
    parameters["properties"]["w"] = {"$ref": "#/$defs/A"}
    assert relaxed({"x": parameters}, True)[1] == [f"tools.x.parameters.$defs.A.pattern: {LOOK}"]


#: Definitions of two properties each, all required, so that a value has 2 ** 40 parts.
FORK = {
    "properties": {"v": {"$ref": "#/$defs/0"}},
    "$defs": {
        str(i): {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/{(i + 1) % 40}"} for name in ("a", "b")},
            "required": ["a", "b"],
        }
        for i in range(40)
    },
}


def test_a_part_may_take_no_more_than_a_whole_grammar() -> None:
    assert tool_schemas.FUEL <= grammar.FUEL
    assert tool_schemas.STATES <= grammar.STATES


def test_the_same_tools_are_compiled_and_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, replies = Text(SandboxedRenderer(TINY)), []
    read = renderer.read_reply
    monkeypatch.setattr(renderer, "read_reply", lambda *reply: replies.append(reply) or read(*reply))
    caplog.set_level(logging.INFO, "mlxtp")
    tools = {"odd": object_of({"type": "string", "pattern": "^(?=once)", "nullable": True})}
    found = [text.relaxed(json.loads(json.dumps(tools)), nullable) for nullable in (True, True, False, True)]
    assert found == [relaxed(tools, nullable)[0] for nullable in (True, True, False, True)]
    line = f"not enforced by a grammar: tools.odd.parameters.properties.v.pattern: {LOOK}"
    assert caplog.messages == [line, line]
    assert len(replies) == 2


def test_schemas_that_take_too_long_are_those_of_any_object(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text(SandboxedRenderer(TINY))
    caplog.set_level(logging.INFO, "mlxtp")
    assert text.relaxed({"x": FORK, "y": object_of(True)}, True) == {
        "x": {"type": "object"},
        "y": {"type": "object"},
    }
    assert caplog.messages == ["not enforced by a grammar: x, y: they take too much time or memory"]
    assert text.relaxed({"y": object_of(True)}, True) == relaxed({"y": object_of(True)}, True)[0]
    monkeypatch.setattr(renderer, "CPU_S", 0.0)
    assert text.relaxed({"x": FORK, "y": object_of(True)}, True)["x"] == {"type": "object"}


FIELDS = CallStyle("<call>", "\n", "</call>", field=("<p=", ">\n", "\n</p>\n"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameters", "valid", "invalid"),
    [
        (object_of({"type": "string", "pattern": "^(?!a)"}), ["<p=v>\na\n</p>\n"],
         ["", "<p=w>\n1\n</p>\n"]),
        (object_of({"type": "STRING"}), ["<p=v>\na b\n</p>\n<p=w>\n1\n</p>\n"],
         ["<p=v>\na\n</p>\n<p=w>\nb\n</p>\n"]),
        (object_of({"type": "integer", "enum": None}), ["<p=v>\n5\n</p>\n"], ["<p=v>\na\n</p>\n"]),
        ({"properties": {"w": {"type": "integer"}}, "required": ["w", "z"]},
         ["<p=w>\n1\n</p>\n<p=z>\nanything\n</p>\n"], ["<p=w>\n1\n</p>\n"]),
        ({"$ref": "#/$defs/A", "$defs": {"A": object_of({"$ref": "#/$defs/B"}), "B": {"type": "integer"}}},
         ["<p=v>\n5\n</p>\n"], ["<p=v>\na\n</p>\n", ""]),
        (object_of({"type": "array", "items": {"$ref": "#"}}),
         ['<p=v>\n[{"v": []}]\n</p>\n'], ['<p=v>\n[{"w": 1}]\n</p>\n', '<p=v>\n[1]\n</p>\n']),
        ({"type": "object"}, ["", "<p=a>\n1\n</p>\n<p=b>\nx\n</p>\n"], ["<q>\n"]),
        ({"type": "string"}, ["", "<p=a>\n1\n</p>\n"], ["<q>\n"]),
        ({"type": "object", "properties": {}}, [""], ["<p=a>\n1\n</p>\n"]),
        ({"type": "object", "additionalProperties": False}, [""], ["<p=a>\n1\n</p>\n"]),
        (object_of({"anyOf": [{"type": "string"}, {"type": "null"}]}), ["<p=v>\nHi\n</p>\n", "<p=v>\nnull\n</p>\n"], [""]),
        (object_of({"type": ["integer", "string"]}), ["<p=v>\na\n</p>\n", "<p=v>\n5\n</p>\n"], [""]),
        (object_of({"type": ["integer", "null"]}), ["<p=v>\nnull\n</p>\n", "<p=v>\n5\n</p>\n"], ["<p=v>\na\n</p>\n"]),
        ({"properties": {"v": {"$ref": "#/$defs/U"}}, "required": ["v"], "$defs": {"U": {"type": "string", "enum": ["a b", "c"]}}},
         ["<p=v>\na b\n</p>\n"], ['<p=v>\n"c"\n</p>\n', "<p=v>\nd\n</p>\n"]),
        (object_of({"anyOf": [{"const": "x"}, {"enum": [1, True]}, {"type": "null"}]}),
         [f"<p=v>\n{word}\n</p>\n" for word in ("x", "1", "true", "null")], ['<p=v>\n"x"\n</p>\n', "<p=v>\n2\n</p>\n"]),
        ({"properties": {"v": {"$ref": "#/$defs/n"}}, "required": ["v"],
          "$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}}}, ["<p=v>\nnull\n</p>\n"], [""]),
        (object_of({"description": "any"}), ["<p=v>\n[1] or\n\nmore\n</p>\n"], [""]),
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": True},
         ["<p=a>\n1\n</p>\n", "<p=a>\n1\n</p>\n<p=z>\nx\n</p>\n"], ["<p=z>\nx\n</p>\n"]),
        ({"type": "object", "properties": {"a": False, "b": True}},
         ["", "<p=b>\nx\n</p>\n"], ["<p=a>\n1\n</p>\n"]),
    ],
)  # fmt: skip
def test_arguments_that_stand_one_by_one(
    grammars: Grammars, text: Text, parameters: Any, valid: list[str], invalid: list[str]
) -> None:
    tool = Tool(grammars, text, parameters, FIELDS)
    assert [call for call in valid if not tool.writes(f"<call>x\n{call}</call>")] == []
    assert [call for call in invalid if tool.writes(f"<call>x\n{call}</call>")] == []

"""Constraints under every name become one format; what cannot be held is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxtp.api import sampling
from mlxtp.api.dialects import completions
from mlxtp.api.dialects.openai import parse_chat
from mlxtp.errors import RequestError
from mlxtp.text.conversation import GenerationRequest
from mlxtp.text.tool_grammar import MOST_GBNF

from .conftest import BYTE_LEVEL, Loaded

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
REGEX = {"type": "regex", "pattern": "a+"}
LARK = {"type": "lark", "grammar": 'start: "a"'}
GBNF = {"type": "gbnf", "grammar": 'root ::= "a" [0-9]'}
WORDS = {"type": "lark", "grammar": 'start: "a ::= b" | "c\\"日"'}
OBJECT = {"type": "json_object"}


def parse(**fields: Any) -> GenerationRequest:
    """The request, which is the same of both APIs."""
    chat = parse_chat(json.dumps({"messages": [{"role": "user", "content": "x"}]} | fields).encode())
    plain = completions.parse(json.dumps({"prompt": "x"} | fields).encode())
    assert chat.options.format == plain.options.format
    assert chat.options.format_field == plain.options.format_field
    return plain


def inside(name: str, value: Any) -> dict[str, Any]:
    return {"structured_outputs": {name: value, "disable_fallback": True, "whitespace_pattern": " "}}


@pytest.mark.parametrize(
    ("fields", "format_", "field"),
    [
        ({}, None, "response_format"),
        ({"response_format": {"type": "text"}, "regex": "a+"}, REGEX, "regex"),
        ({"structured_outputs": {}, "guided_json": SCHEMA}, JSON, "guided_json"),
        (inside("json", SCHEMA), JSON, "structured_outputs.json"),
        (inside("json", json.dumps(SCHEMA)), JSON, "structured_outputs.json"),
        (inside("regex", "a+"), REGEX, "structured_outputs.regex"),
        (inside("choice", ["a ::= b", 'c"日']), WORDS, "structured_outputs.choice"),
        (inside("grammar", LARK["grammar"]), LARK, "structured_outputs.grammar"),
        (inside("json_object", True), OBJECT, "structured_outputs.json_object"),
        (inside("json_object", False) | {"regex": "a+"}, REGEX, "regex"),
        ({"guided_json": json.dumps(SCHEMA)}, JSON, "guided_json"),
        ({"guided_regex": "a+"}, REGEX, "guided_regex"),
        ({"guided_choice": ["a ::= b", 'c"日']}, WORDS, "guided_choice"),
        ({"guided_grammar": GBNF["grammar"]}, GBNF, "guided_grammar"),
        ({"ebnf": GBNF["grammar"]}, GBNF, "ebnf"),
        ({"json_schema": SCHEMA}, JSON, "json_schema"),
        ({"json_schema": json.dumps(SCHEMA)}, JSON, "json_schema"),
        ({"grammar": GBNF["grammar"]}, GBNF, "grammar"),
        ({"grammar": {"type": "json", "value": SCHEMA}}, JSON, "grammar"),
        ({"grammar": {"type": "json_schema", "value": {"schema": SCHEMA}}}, JSON, "grammar"),
        ({"grammar": {"type": "regex", "value": "a+"}}, REGEX, "grammar"),
    ],
)
def test_a_constraint_under_every_name(fields: dict[str, Any], format_: Any, field: str) -> None:
    options = parse(**fields).options
    assert (options.format, options.format_field) == (format_, field)


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"regex": "a", "guided_json": SCHEMA}, "regex", "guided_json and regex both constrain"),
        ({"response_format": OBJECT, "ebnf": "x"}, "ebnf", "response_format and ebnf"),
        (inside("json", SCHEMA) | {"regex": "a"}, "structured_outputs.json", "regex and structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "both"),
        (inside("structural_tag", "{}"), "structured_outputs.structural_tag", "send json, regex, choice"),
        ({"guided_json": "no JSON"}, "guided_json", 'got "no JSON"'),
        (inside("json", [1]), "structured_outputs.json", "a JSON schema"),
        ({"regex": ""}, "regex", "a pattern"),
        (inside("choice", []), "structured_outputs.choice", "a list of texts"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "none of them empty"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", "string"),
        ({"grammar": {"type": "x"}}, "grammar", "a grammar (a string)"),
    ],
)
def test_what_is_no_constraint_is_refused_by_its_name(fields: dict[str, Any], param: str, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert named in caught.value.detail


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ("root ::= (", "this is no GBNF grammar: Expected ')'"),
        ('root ::= "\\', "this is no GBNF grammar"),
        ("root ::= other", "Rule 'other' not found"),
        ("root ::= " + "(" * 5000, "nested too deep"),
        ("root ::= " + '"a" ' * MOST_GBNF, f"at most {MOST_GBNF}"),
    ],
)
def test_a_wrong_gbnf_grammar_is_refused_by_its_name(
    loaded: dict[str, Loaded], grammar: str, named: str
) -> None:
    with pytest.raises(RequestError) as caught:
        sampling.guidance(parse(ebnf=grammar), loaded[BYTE_LEVEL].text, (1,))
    assert caught.value.param == "ebnf"
    assert named in caught.value.detail


def test_errors_have_the_client_s_name(loaded: dict[str, Loaded]) -> None:
    for field, long in (
        ("json_schema", {"type": "object", "x": "y" * 600_000}),
        ("guided_regex", "a" * 600_000),
    ):
        asked = parse(**{field: long})
        with pytest.raises(RequestError) as caught:  # noqa: PT012 - which of both refuses is not told
            grammar = sampling.guidance(asked, loaded[BYTE_LEVEL].text, (1,)).grammar
            sampling.shaping(asked.options, 340, grammar)
        assert caught.value.param == field


def test_a_grammar_of_empty_lines_takes_linear_work() -> None:
    """A search that begins anew at each line would take hours."""
    assert parse(grammar="\n" * 1_000_000).options.format == {"type": "lark", "grammar": "\n" * 1_000_000}

"""Constraints of an answer under every name that clients have for them, as one `response_format`. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from ..errors import RequestError
from ..text.json_limits import check_extent, parsed
from .answer_shapes import TEXT, FilledText, fields
from .request_body import BodySchema, not_supported, wrong

Format = Mapping[str, Any]

RESPONSE_FORMAT = "response_format"
_GBNF = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)  # linear in the text's length


_OF_TGI = {
    "anyOf": [
        fields({"type": {"const": kind}, "value": value})
        for kind, value in {
            "regex": TEXT, "json": {"type": "object"}, "json_schema": fields({"schema": {"type": "object"}}),
        }.items()
    ]
}  # fmt: skip


class ConstrainedBody(BodySchema):
    """Names of constraints: OpenAI's, vLLM's (`structured_outputs`, `guided_…`), SGLang's and llama.cpp's."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: FilledText | None = None
    guided_choice: Annotated[list[FilledText], Field(fail_fast=True)] | None = None
    guided_grammar: FilledText | None = None
    regex: FilledText | None = None
    ebnf: FilledText | None = None
    json_schema: str | dict[str, Any] | None = None
    grammar: FilledText | Annotated[dict[str, Any], WithJsonSchema(_OF_TGI)] | None = None

    def constraint(self) -> tuple[str, Format | None]:
        """Return the field with the constraint, and a `response_format` that means it; None for none.

        Raises RequestError for two constraints, and for what no grammar can enforce.
        """
        given = {name: getattr(self, name) for name in ConstrainedBody.model_fields}
        found = {name: value for name, value in given.items() if value not in (None, {"type": "text"})}
        inside = found.pop("structured_outputs", None) or {}
        found |= {
            f"structured_outputs.{key}": value for key, value in inside.items() if value not in (None, False)
        }
        found = {name: value for name, value in found.items() if _kind(name) not in _DETAILS}
        if len(found) > 1:
            names = " and ".join(list(found)[:2])
            raise RequestError(f"{names} both constrain the answer: send one of them", param=list(found)[1])
        for name, value in found.items():
            if name == RESPONSE_FORMAT:
                return name, value
            if (form := _FORMS.get(_kind(name))) is None:
                words = "is not supported: send json, regex, choice, grammar or json_object"
                raise not_supported(f"{name} {words}", name)
            return name, form(value, name)
        return RESPONSE_FORMAT, None


def _kind(name: str) -> str:
    return name.rpartition(".")[2].removeprefix("guided_")


def _schema(value: object, name: str) -> Format:
    if isinstance(value, str):
        check_extent(value, where=name, param=name)
    schema = parsed(value) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise wrong(name, "a JSON schema (an object, or its text)", value)
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _text(kind: str, key: str) -> Callable[[object, str], Format]:
    def form(value: object, name: str) -> Format:
        if not isinstance(value, str) or not value:
            raise wrong(name, f"a {key} (a string)", value)
        return {"type": kind, key: value}

    return form


def _grammar(value: object, name: str) -> Format:
    match value:
        case {"type": "json", "value": schema} | {"type": "json_schema", "value": {"schema": schema}}:
            return _schema(schema, name)
        case {"type": "regex", "value": pattern}:
            return _text("regex", "pattern")(pattern, name)
    kind = "gbnf" if isinstance(value, str) and _GBNF.search(value) else "lark"
    return _text(kind, "grammar")(value, name)


def _choice(value: object, name: str) -> Format:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise wrong(name, "a list of texts, none of them empty", value)
    words = [json.dumps(each, ensure_ascii=False) for each in value]
    return {"type": "lark", "grammar": f"start: {' | '.join(words)}"}


_FORMS: Mapping[str, Callable[[Any, str], Format]] = {
    "json": _schema,
    "json_schema": _schema,
    "json_object": lambda _value, _name: {"type": "json_object"},
    "regex": _text("regex", "pattern"),
    "choice": _choice,
    "grammar": _grammar,
    "ebnf": _grammar,
}
#: Parts of vLLM's `structured_outputs` that say how, not what: JSON here is on one line and closed anyway.
_DETAILS = (
    "disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern",
)  # fmt: skip

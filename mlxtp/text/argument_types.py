"""Arguments that a model wrote as plain text, converted to the types of the tool's schema. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from .json_limits import integral, parsed
from .json_mender import PYTHON_QUOTES, mended

_MOST_STEPS = 8  # nested references and combinations
_MOST_PLACES = 10_000  # subschemas searched for types
_INDEX = re.compile("0|[1-9][0-9]{0,8}")
_COMBINATIONS = ("anyOf", "oneOf", "allOf")
#: Names of JSON's types, and their common synonyms.
_TYPES = {kind: kind for kind in ("null", "boolean", "integer", "number", "string", "array", "object")} | {
    "str": "string", "text": "string", "varchar": "string", "char": "string",
    "int": "integer", "long": "integer", "float": "number", "double": "number", "bool": "boolean",
    "dict": "object", "map": "object", "list": "array", "tuple": "array", "arr": "array", "none": "null",
}  # fmt: skip
_TYPE_OF: Mapping[type, str] = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
    dict: "object",
}  # fmt: skip
Schema = Mapping[str, Any]
KnownTypes = dict[tuple[int, int], frozenset[str]]  #: Types by a schema's identity and the steps left.


def types_of(
    schema: object, root: Schema, known: KnownTypes | None = None, steps: int = _MOST_STEPS
) -> frozenset[str]:
    """Return the types that a schema within `root` allows; empty: any. `known` caches them for one root."""
    if not isinstance(schema, Mapping) or not steps:
        return frozenset()
    known, place = {} if known is None else known, (id(schema), steps)
    if place not in known:
        known[place] = frozenset()
        if len(known) <= _MOST_PLACES:
            known[place] = _types_in(schema, root, known, steps - 1)
    return known[place]


def _types_in(schema: Schema, root: Schema, known: KnownTypes, steps: int) -> frozenset[str]:
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(referred(reference, root), root, known, steps)
    found = frozenset(named_types(schema.get("type")))
    if not found and isinstance(values := schema.get("enum"), list) and values:
        found = frozenset([_TYPE_OF[type(value)] for value in values])
    if not found and "const" in schema:
        found = frozenset({_TYPE_OF[type(schema["const"])]})
    for key in _COMBINATIONS:
        if not found and isinstance(parts := schema.get(key), list) and parts:
            each = [types_of(part, root, known, steps) for part in parts]
            some = [types for types in each if types]
            if key == "allOf":
                found = frozenset.intersection(*some) if some else found
            elif len(some) == len(each):
                found = frozenset().union(*some)
    if not found and isinstance(schema.get("properties"), Mapping):
        found = frozenset({"object"})
    if not found and isinstance(schema.get("items"), Mapping):
        found = frozenset({"array"})
    return found | {"null"} if found and schema.get("nullable") is True else found


def property_types(parameters: Schema, name: str) -> frozenset[str] | None:
    """Return the types of a tool's argument; None if its schema does not describe it."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return types_of(properties[name], parameters)
    if isinstance(more := parameters.get("additionalProperties"), Mapping) and more:
        return types_of(more, parameters)
    return None


def typed(text: str, types: frozenset[str] | None, *, guess: bool = False) -> object:
    """Return the value that a model wrote without quotes, in the most specific type that fits.

    Text that fits no type stays text, so that the client sees the mistake. Without a type, `null` is read as
    JSON; so are objects and lists if the schema describes the argument, and with `guess` all literals.
    """
    bare = text.strip()
    if types == frozenset({"string"}):
        return text
    value = _literal(bare, mends=bool(types))
    if not bare and types and "string" not in types and (empty := types & {"object", "array"}):
        return {} if "object" in empty else []
    if not types:
        guessed = guess or value is None or (types is not None and isinstance(value, dict | list))
        return value if guessed and value is not _NO_LITERAL else text
    if value is _NO_LITERAL:
        return text
    value = value if "number" in types else integral(value)
    kind = _TYPE_OF[type(value)]
    return value if kind in types or (kind == "integer" and "number" in types) else text


_NO_LITERAL = object()  # for a text that is not a literal
_WORDS: Mapping[str, object] = {
    "true": True, "false": False, "True": True, "False": False, "null": None, "None": None,
}  # fmt: skip


def _literal(text: str, mends: bool) -> object:
    """Return the value of a JSON or Python literal, but no string. With `mends`, mend its containers."""
    if text in _WORDS:
        return _WORDS[text]
    value = parsed(mended(text, PYTHON_QUOTES) if mends and text[:1] in ("{", "[") else text, _NO_LITERAL)
    whole = isinstance(value, int | dict | list) or (isinstance(value, float) and math.isfinite(value))
    return value if whole else _NO_LITERAL


def referred(reference: str, root: object) -> Any:
    """Return the target of a JSON pointer, with or without "#"; None if there is none."""
    start, *parts = reference.split("/")
    found = root if start in ("", "#") else None
    for part in parts:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if _INDEX.fullmatch(key) and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found


def named_types(given: object) -> list[str]:
    """Return JSON's names of the types in a schema's `type`; [] if one is unknown."""
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    found = [*dict.fromkeys(_TYPES.get(str(name).strip().lower(), "") for name in names)]
    return [] if "" in found else found

"""JSON schemas that answers are held to. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from ..errors import RequestError
from .call_style import Separators

Json = dict[str, Any]

#: Keywords without meaning for a grammar, and those that it cannot enforce though the answer is still useful.
_LEFT_OUT = frozenset(
    {"uniqueItems", "propertyNames", "x-guidance", "title", "description", "default", "examples", "$comment"}
)
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)  # the grammar library knows no others
_DATE = "[1-9][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DATES = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}T{_TIME}$"}  # without year 0, which few libraries read
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")
_MOST_INTEGER = 2**63 - 1024  # limit of an integer without a bound: the largest float below 2**63
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_TABLES = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
_OPENING = (
    "allOf", "anyOf", "oneOf", "$ref", "additionalProperties", "patternProperties", "unevaluatedProperties"
)  # fmt: skip


def guided_schema(
    schema: Mapping[str, Any], separators: Separators, where: str, *, lenient: bool = False
) -> str:
    """Return `schema` as JSON text: its objects closed, its JSON to be written with `separators`.

    An object with `properties` is closed unless it declares that it may have others. An integer without a
    bound gets one. `lenient` leaves out keywords that the grammar cannot enforce; otherwise the compilation
    refuses them. `where` is the field to name in an error. Raises RequestError.
    """
    options: Json = {"whitespace_flexible": False}
    options |= {"item_separator": separators.item, "key_separator": separators.key}
    if lenient:
        options |= {"lenient": True, "coerce_one_of": True}
    try:
        closed = _closed(dict(schema), _shared(schema), "#")
        return json.dumps(closed | {"x-guidance": options}, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise RequestError(f"{where}: this is not a JSON schema", param=where) from None


def _closed(schema: Any, shared: frozenset[str], path: str, part: bool = False) -> Any:
    """Close the objects of a schema at `path`.

    A `part` of a combination stays open, and so does one that combinations refer to (`shared`): the
    combination's other parts add properties of their own.
    """
    if not isinstance(schema, dict):
        return schema
    made: Json = {}
    combines = _combines(schema)
    for key, value in schema.items():
        if key in _LEFT_OUT or (key == "format" and value not in _FORMATS):
            continue
        if key in _TABLES and isinstance(value, dict):
            made[key] = {
                name: _closed(each, shared, f"{path}/{key}/{_escaped(name)}") for name, each in value.items()
            }
        elif key in _LISTS and isinstance(value, list):
            open_ = key != "prefixItems" and (part or combines)
            made[key] = [_closed(each, shared, f"{path}/{key}/{i}", open_) for i, each in enumerate(value)]
        elif key in _SINGLE:
            made[key] = _closed(value, shared, f"{path}/{key}")
        else:
            made[key] = value
    if (pattern := _DATES.get(str(made.get("format")))) and "pattern" not in made:
        made["pattern"] = pattern
        del made["format"]
    if schema.get("type") == "integer" and not any(key in schema for key in _BOUNDS):
        made |= {"minimum": -_MOST_INTEGER, "maximum": _MOST_INTEGER}
    closes = isinstance(schema.get("properties"), dict) and not any(key in schema for key in _OPENING)
    if closes and not part and path not in shared:
        made["additionalProperties"] = False
    return made


def _shared(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the places that combinations refer to, also by way of other references."""
    shared: set[str] = set()
    found = set(_combined(schema))
    while found:
        shared |= found
        found = {each for place in found for each in _combined(_at(schema, place), True)} - shared
    return frozenset(shared)


def _at(schema: Any, place: str) -> Any:
    for part in place.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, dict) else None
    return schema


def _escaped(name: str) -> str:
    """Return a name in the form of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _combines(schema: Json) -> bool:
    """Return True if one object's properties come from several places of this schema."""
    kinds = sum(key in schema for key in ("properties", "allOf", "anyOf", "oneOf", "$ref"))
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return kinds > 1 or several


def _combined(schema: Any, part: bool = False) -> Iterator[str]:
    """Yield references to schemas that are parts of a combination."""
    if isinstance(schema, list):
        for each in schema:
            yield from _combined(each, part)
        return
    if not isinstance(schema, dict):
        return
    part = part or _combines(schema)
    if part and isinstance(reference := schema.get("$ref"), str):
        yield unquote(reference)
    for key, value in schema.items():
        if key in _TABLES and isinstance(value, dict):
            yield from _combined(list(value.values()))
        else:
            yield from _combined(value, part and key in _LISTS and key != "prefixItems")

"""Grammars of answers: JSON schemas, and tool calls with or without another answer. Pure but for a log."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from ..errors import RequestError
from .argument_types import KnownTypes, referred, types_of
from .call_style import CallStyle, Separators
from .calls import CallFormat
from .conversation import Tool

# --- JSON schemas -----------------------------------------------------------------------------------------

JsonSchema = dict[str, Any]
Json = Mapping[str, Any]

MOST_SCHEMA = 1 << 19  #: characters, the limit of a whole grammar
#: Formats of strings that grammars support.
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
#: Keywords that a grammar ignores: without meaning to it, or unenforceable though the answer stays useful.
_LEFT_OUT = frozenset(
    {"uniqueItems", "propertyNames", "x-guidance", "title", "description", "default", "examples", "$comment"}
)
_DATE = "[1-9][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DATES = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}T{_TIME}$"}  # without year 0, which few libraries read
_MOST_INTEGER = 2**63 - 1024  # default bound of integers: the largest float below 2**63
_BOUNDS = (("minimum", "exclusiveMinimum", -_MOST_INTEGER), ("maximum", "exclusiveMaximum", _MOST_INTEGER))
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_TABLES = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
_OPENING = (*IN_PLACE, "additionalProperties", "patternProperties", "unevaluatedProperties")
_LENIENT = {"lenient": True, "coerce_one_of": True}


def guided_schema(
    schema: Mapping[str, Any], separators: Separators, where: str, *, lenient: bool = False
) -> str:
    """Return `schema` as JSON text. It closes objects that declare no other properties, and bounds integers.

    `lenient` drops keywords that the grammar cannot enforce. Raises RequestError about the field `where`.
    """
    options: JsonSchema = {"item_separator": separators.item, "key_separator": separators.key}
    options |= {"whitespace_flexible": False, **(_LENIENT if lenient else {})}
    try:
        if (size := len(json.dumps(schema, allow_nan=False))) > MOST_SCHEMA:
            detail = f"{where}: this JSON schema has {size} characters; at most {MOST_SCHEMA}"
            raise RequestError(detail, param=where)
        closed = _closed(schema, _shared(schema))
        return json.dumps(closed | {"x-guidance": options}, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise RequestError(f"{where}: this is not a JSON schema", param=where) from None


def combines(schema: Mapping[str, Any]) -> bool:
    """Return True if several parts of this schema give properties to one object."""
    kinds = sum(schema.get(key) is not None for key in ("properties", *IN_PLACE))
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return kinds > 1 or several


def _closed(schema: Any, shared: Set[int], part: bool = False) -> Any:
    """Close objects, except a `part` of a combination or the `shared`: others add properties to them."""
    if not isinstance(schema, Mapping):
        return schema
    open_ = part or id(schema) in shared
    schema = {key: value for key, value in schema.items() if value is not None or key == "const"}
    made: JsonSchema = {}
    several = combines(schema)
    for key, value in schema.items():
        if key in _LEFT_OUT or (key == "format" and value not in FORMATS):
            continue
        if key in _TABLES and isinstance(value, dict):
            made[key] = {name: _closed(each, shared) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            parts = key != "prefixItems" and (part or several)
            made[key] = [_closed(each, shared, parts) for each in value]
        elif key in _SINGLE:
            made[key] = _closed(value, shared)
        else:
            made[key] = value
    if (pattern := _DATES.get(str(made.get("format")))) and "pattern" not in made:
        made["pattern"] = pattern
        del made["format"]
    if schema.get("type") == "integer" and schema.keys().isdisjoint(("multipleOf", "enum", "const")):
        for bound, exclusive, most in _BOUNDS:
            if exclusive not in schema:
                made.setdefault(bound, most)
    closes = isinstance(schema.get("properties"), dict) and not any(key in schema for key in _OPENING)
    if closes and not open_:
        made["additionalProperties"] = False
        undeclared = [name for name in schema.get("required", ()) if name not in made["properties"]]
        made["properties"] |= dict.fromkeys(undeclared, True)
    return made


def _shared(schema: Json) -> set[int]:
    """Return the identities of all schemas that combinations refer to, directly or indirectly."""
    shared, seen = set[int](), set[tuple[int, bool]]()
    todo: list[tuple[Any, bool]] = [(schema, False)]
    while todo:
        at, part = todo.pop()
        if (id(at), part) in seen:
            continue
        seen.add((id(at), part))
        if isinstance(at, list):
            todo += [(each, part) for each in at]
        if not isinstance(at, Mapping):
            continue
        part = part or combines(at)
        if part and isinstance(reference := at.get("$ref"), str):
            target = referred(unquote(reference), schema)
            shared.add(id(target))
            todo.append((target, True))
        for key, value in at.items():
            if key in _TABLES and isinstance(value, dict):
                todo += [(each, False) for each in value.values()]
            else:
                todo.append((value, part and key in _LISTS and key != "prefixItems"))
    return shared


# --- calls ------------------------------------------------------------------------------------------------

JSON_STYLE = CallStyle('{"name": "', '", "arguments": ', "}")  # for templates of unknown style
_written = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode  # takes half the time
_MOST_KEPT = 32_000  # characters of a schema whose rules are cached

log = logging.getLogger(__name__)


MOST_GBNF = 1 << 14  #: characters, whose translation takes up to 0.2 s


def lark(gbnf: str, where: str) -> str:
    """Return a grammar in llama.cpp's notation as Lark. Raises RequestError about the field `where`."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(gbnf) > MOST_GBNF:
        words = f"a GBNF grammar of {len(gbnf)} characters; at most {MOST_GBNF}"
        raise RequestError(f"{where}: {words}", param=where)
    try:
        return gbnf_to_lark(gbnf)
    except RecursionError:
        raise RequestError(f"{where}: this grammar is nested too deep", param=where) from None
    except Exception as error:  # noqa: BLE001 - the library raises plain ones for a wrong grammar
        words = f"this is no GBNF grammar: {error}"
        raise RequestError(f"{where}: {words}", param=where) from None


@lru_cache(maxsize=100)  # clients choose the lines; each is logged once
def log_once(line: str) -> None:
    log.info(line)


def checked_tools(tools: Sequence[Tool]) -> dict[str, Json]:
    schemas: dict[str, Json] = {}
    for index, tool in enumerate(tools):
        if tool.name in schemas:
            raise RequestError(f"tools: two tools have the same name, {tool.name!r}", param="tools")
        try:
            json.dumps(tool.schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            where = f"tools[{index}].function.parameters"
            raise RequestError(f"{where}: this is not a JSON schema", param=where) from None
        schemas[tool.name] = tool.schema
    return schemas


def call_grammar(
    schemas: Mapping[str, Json],
    style: CallStyle,
    tokens: Collection[tuple[str, int]] = (),
    *,
    required: str | None = None,
    otherwise: tuple[str, str] | None = None,
) -> str:
    """Return a Lark grammar for one call of any tool, or of the `required` one. Raises RequestError.

    `tokens` stand for themselves. `otherwise` allows another answer: its prefix and JSON schema.
    """
    if required is not None and required not in schemas:
        raise RequestError(f"tool_choice: there is no tool named {required!r}", param="tool_choice")
    allowed = [(name, schema) for name, schema in schemas.items() if required in (None, name)]
    if otherwise is not None and style.before.startswith("{"):
        return _json_either(schemas, style, otherwise[1])
    writes, tokens = _Literals(tokens), tuple(tokens)
    calls = " | ".join(f"call_{index}" for index in range(len(allowed)))
    lines = [f"call: {writes(style.before)} ({calls}) {writes(style.after)}"]
    rules: dict[str, str] = {}  # of arguments, by schema: tools may share one
    for index, (name, schema) in enumerate(allowed):
        written = json.dumps(name, ensure_ascii=False)[1:-1] if style.before.endswith('"') else name
        rule, text = f"arguments_{index}", _written(schema)
        enforce = _arguments if len(text) <= _MOST_KEPT else _arguments.__wrapped__
        made = enforce(rule, text, style, tokens)
        if style.field is None:
            rule = rules.setdefault(made[0], rule)
        else:
            lines += made
        lines.append(f"call_{index}: {writes(written + style.between)} {rule}")
    if style.field is not None and writes.behind_text(style.field[2]):
        lines.append(f"text: <[^{','.join(map(str, sorted(id_ for _, id_ in tokens)))}]>*")
    lines += [f"{rule}: %json {text}" for text, rule in rules.items()]
    return _either(lines, writes, otherwise)


def marked_call_grammar(
    format_: CallFormat, tokens: Collection[tuple[str, int]], otherwise: tuple[str, str]
) -> str:
    """Return a Lark grammar for any text between the markers of a call, or for `otherwise`."""
    writes, end = _Literals(tokens), dict(tokens).get(format_.end_mark)
    call = f"call: {writes(format_.start)} text"
    if end is not None:
        return _either([f"{call} <[{end}]>", f"text: <[^{end}]>*"], writes, otherwise)
    suffix = f"[suffix={json.dumps(format_.end_mark)}]" if format_.end_mark else ""
    return _either([call, f"text{suffix}: /(?s:.*)/"], writes, otherwise)


def answer_grammar(prefix: str, schema: str, tokens: Collection[tuple[str, int]]) -> str:
    return _either([], _Literals(tokens), (prefix, schema))


def _either(calls: list[str], writes: _Literals, otherwise: tuple[str, str] | None) -> str:
    starts, lines = ["call"] * bool(calls), calls
    if otherwise is not None:
        starts.append(f"{writes(otherwise[0])} answer")
        lines = [*calls, f"answer: %json {otherwise[1]}"]
    return "\n".join([f"start: {' | '.join(starts)}", *lines, ""])


def _json_either(names: Iterable[str], style: CallStyle, otherwise: str) -> str:
    """Return one schema for both answer and call, since a lexer cannot tell their beginnings apart."""
    answer = json.loads(otherwise)
    options = answer.pop("x-guidance") | _LENIENT
    call = json.loads(f"{style.before}NAME{style.between}null{style.after}")
    fields: dict[str, Json] = {key: {"const": value} for key, value in call.items()}
    fields |= {key: {"enum": list(names)} for key, value in call.items() if value == "NAME"}
    fields |= {key: {"type": "object"} for key, value in call.items() if value is None}
    closed = {"properties": fields, "required": list(fields), "additionalProperties": False}
    both = {
        "anyOf": [{"$ref": "#/$defs/answer"}, {"type": "object", **closed}],
        "$defs": {"answer": _moved(answer, "#/$defs/answer")},
        "x-guidance": options,
    }
    return f"start: %json {json.dumps(both)}\n"


def _moved(schema: Any, to: str) -> Any:
    """Return the schema with its internal references prefixed by `to`."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _moved(value, to) for key, value in schema.items()}
    if isinstance(reference := made.get("$ref"), str) and reference.startswith("#"):
        made["$ref"] = to + reference[1:]
    return made


@lru_cache(maxsize=500)  # schemas repeat at every turn
def _arguments(
    rule: str, text: str, style: CallStyle, tokens: tuple[tuple[str, int], ...]
) -> tuple[str, ...]:
    """Return the arguments' schema as `guided_schema` does, or with `style.field` the rules of each."""
    schema = json.loads(text)
    if style.field is None:
        return (guided_schema(schema, style.separators, "tools", lenient=True),)
    return tuple(_fields(rule, schema, style, _Literals(tokens)))


def _fields(rule: str, schema: Json, style: CallStyle, writes: _Literals) -> Iterator[str]:
    """Yield a rule for each argument in the schema's order, then one for undeclared arguments."""
    assert style.field is not None
    opening, inside, closing = style.field
    definitions = schema.get("$defs", {})
    while "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        schema = target | {key: value for key, value in schema.items() if key != "$ref"}
    properties, required = schema.get("properties", {}), dict.fromkeys(schema.get("required", ()))
    others = {name: True for name in required if name not in properties}
    names, root, known = list[str](), {"$defs": definitions}, KnownTypes()

    def text(rule: str, head: str) -> Iterator[str]:
        if end := writes.behind_text(closing):
            yield f"{rule}: {head} text {end}"
            return
        yield f"{rule}: {head} {rule}_text"
        yield f"{rule}_text[suffix={json.dumps(closing)}]: /(?s:.*)/"

    for number, (name, value) in enumerate({**properties, **others}.items()):
        if value is False:
            continue
        field = f"{rule}_{number}"
        names.append(field if name in required else f"{field}?")
        head = writes(opening + name + inside)
        types = types_of(value, root, known)
        if choices := _choices(value, root):
            yield f"{field}: {head} ({' | '.join(map(writes, choices))}) {writes(closing)}"
        elif not types or "string" in types:  # any text
            yield from text(field, head)
        else:
            whole = {**value, "$defs": definitions} if definitions else value
            yield f"{field}: {head} {field}_json {writes(closing)}"
            yield f"{field}_json: %json {guided_schema(whole, style.separators, 'tools', lenient=True)}"
    if schema.get("additionalProperties", "properties" not in schema and not names) is not False:
        names.append(f"{rule}_any*")
        yield from text(f"{rule}_any", f'{writes(opening)} /[^<>\\s"=]+/ {writes(inside)}')
    yield f"{rule}: {' '.join(names)}" if names else f'{rule}: ""'


def _choices(schema: Any, root: Json) -> list[str]:
    """Return the texts of all values of a schema; [] if it does not list them, or too many."""
    found, size = list[str](), 0
    for text in _values(schema, root, 2):
        found.append(text or "")
        size += len(found[-1]) + 1
        if text is None or size > MOST_SCHEMA:
            return []
    return found


def _values(schema: Any, root: Json, references: int) -> Iterator[str | None]:
    """Yield the texts of a schema's values; None if it does not list them within so many references."""
    match schema:
        case {"$ref": str(reference)} if references:
            yield from _values(referred(reference, root), root, references - 1)
        case {"enum": [_, *_] as values}:
            yield from [each if isinstance(each, str) else json.dumps(each) for each in values]
        case {"const": value}:
            yield value if isinstance(value, str) else json.dumps(value)
        case {"type": "null"}:
            yield "null"
        case {"anyOf": [_, *_] as parts} | {"oneOf": [_, *_] as parts} | {"allOf": [_] as parts}:
            for part in parts:
                yield from _values(part, root, references)
        case _:
            yield None


class _Literals:
    """Text as literals of a Lark grammar. Tokens that stand for themselves become `<[id]>`.

    `engine/grammar.py` reads from `text <[id]>` and from `[suffix="..."]` how a text ends.
    """

    def __init__(self, tokens: Collection[tuple[str, int]]) -> None:
        self._ids = dict(tokens)
        names = sorted(self._ids, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")" if names else r"(?!)")

    def __call__(self, text: str) -> str:
        return " ".join(
            f"<[{self._ids[piece]}]>" if piece in self._ids else json.dumps(piece, ensure_ascii=False)
            for piece in filter(None, self._split.split(text))
        )

    def behind_text(self, closing: str) -> str:
        """Return `closing` without leading white space if a token begins it, and so ends a text; else ""."""
        found = next(filter(None, self._split.split(closing.lstrip())), "")
        return self(closing.lstrip()) if found in self._ids else ""

"""JSON schemas of tools, reduced to what a grammar can enforce.

The grammar library judges each part, and each keyword of a part that it refuses. That may take any time and
memory, so agents leave it to the process of a `Renderer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Set
from functools import cache, partial
from typing import Any

from ..errors import RequestError
from .argument_types import named_types, referred
from .call_style import Separators
from .json_limits import integral
from .tool_grammar import FORMATS, IN_PLACE, JsonSchema, combines, guided_schema

#: Compiler limits for one part of a schema. A whole grammar has three times the fuel.
FUEL, STATES = 100_000, 50_000

_BEYOND = (
    "not", "if", "contains", "uniqueItems", "propertyNames", "dependencies", "dependentRequired",
    "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
#: Keywords, most important first.
_ORDER = (
    "type", *IN_PLACE, "const", "enum", "properties", "patternProperties", "additionalProperties",
    "required", "prefixItems", "items", "pattern", "format", "multipleOf", "minimum", "exclusiveMinimum",
    "maximum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties",
    "maxProperties",
)  # fmt: skip
_KEYWORDS = frozenset({*_ORDER, *_BEYOND, "additionalItems"})
_PLAIN = frozenset({"type", "properties", "required", "additionalProperties", "items", "format"})
_DEEPEST = 50  # levels; the compiler reads 126 levels of JSON
_MOST_EXACT = 2**53  # largest exact integer: the compiler computes with floats
_MOST_DIGITS = 4  # of `multipleOf`: its states grow with its value, and a million takes ten seconds
_NAME = re.compile(r'"\$ref": "#/\$defs/(d[0-9]+)"')
_REFERENCE = re.compile(rf"{{{_NAME.pattern}}}")
_MOST_WORDS = 200  # characters of the compiler's explanation


def relaxed(tools: Mapping[str, Any], nullable: bool) -> tuple[dict[str, JsonSchema], list[str]]:
    """Return the tools' schemas by name, reduced to what a grammar enforces; and what is dropped, and why.

    Each schema describes an object and has all referenced schemas in `$defs`. `nullable` honors OpenAPI's
    keyword.
    """
    made, left_out = dict[str, JsonSchema](), list[str]()
    for name, schema in tools.items():
        relaxer = _SchemaRelaxer(schema, f"tools.{name}.parameters", nullable)
        try:
            made[name] = relaxer.arguments()
        except (RecursionError, RequestError):
            made[name] = {"type": "object"}
            relaxer.left_out.append(f"tools.{name}.parameters: it is nested too deep")
        left_out += dict.fromkeys(relaxer.left_out)
    return made, left_out


class _SchemaRelaxer:
    """Relaxation of one schema. `_definitions`: its finished reference targets."""

    def __init__(self, root: Mapping[str, Any], where: str, nullable: bool) -> None:
        self._root = {**root, "type": "object", "nullable": False}
        self._where, self._nullable = where, nullable
        self.left_out: list[str] = []
        self._definitions: JsonSchema = {}
        self._names: dict[int, str] = {}  # of targets, by identity
        self._loops: set[str] = set()  # names of recursive targets

    def arguments(self) -> JsonSchema:
        whole: JsonSchema = {"$ref": self._reference("#")}
        if "d0" not in self._loops:
            whole = self._definitions.pop("d0") or {"type": "object"}
        return {**whole, "$defs": self._definitions} if self._definitions else whole

    def _relaxed(self, schema: Any, at: str, depth: int = 0) -> Any:
        if isinstance(schema, bool) or schema is None:
            return schema is not False
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            self.left_out.append(f"{at}: it is {'nested too deep' if depth > _DEEPEST else 'no schema'}")
            return True
        if schema.get("not") in ({}, True):
            return False
        made: JsonSchema = {}
        for name, value in schema.items():
            key = "additionalProperties" if name == "unevaluatedProperties" and not combines(schema) else name
            if key not in _KEYWORDS or (value is None and key != "const"):
                continue
            kept = self._kept(key, value, f"{at}.{key}", depth + 1)
            if kept is not ...:
                made.setdefault(key, kept)
            elif value is not False and (key != "format" or schema.get("type") not in ("integer", "number")):
                self.left_out.append(f"{at}.{key}: no grammar enforces {json.dumps(value)[:50]}")
        rest = made.pop("additionalItems", True)
        if isinstance(made.get("items"), list):  # a tuple in earlier drafts
            made |= {"prefixItems": made["items"], "items": rest}
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(made.get(exclusive), bool) and made.pop(exclusive) and bound in made:  # draft 4
                made[exclusive] = made.pop(bound)
        made = self._enforced(made, at, self._fault)
        nullable = self._nullable and schema.get("nullable") is True
        return {"anyOf": [made, {"type": "null"}]} if nullable else made

    def _kept(self, key: str, value: Any, at: str, depth: int) -> Any:
        """Return a keyword's value in the compiler's form; Ellipsis if it has none."""
        kept: Any = ...
        match key, value:
            case (("properties" | "patternProperties"), dict()):
                kept = {name: self._relaxed(each, f"{at}.{name}", depth) for name, each in value.items()}
            case (("items" | "prefixItems" | "allOf" | "anyOf" | "oneOf"), list()):
                parts = [(i, each) for i, each in enumerate(value) if each is not None]
                kept = [self._relaxed(each, f"{at}[{i}]", depth) for i, each in parts] or ...
            case (("items" | "additionalItems" | "additionalProperties"), dict() | bool()):
                kept = self._relaxed(value, at, depth)
            case "$ref", str():
                kept = self._reference(value) or ...
            case "type", _:
                types = named_types(value)
                kept = types if types[1:] else types[0] if types else ...
            case "required", list():
                kept = [*dict.fromkeys(name for name in value if isinstance(name, str))]
            case ("enum", [_, *_]) | ("const", _) if _is_exact(value):
                kept = value
            case (("pattern" | "format"), str()) if key == "pattern" or value in FORMATS:
                kept = value
            case _, int() | float() if key.startswith(("multiple", "min", "max", "exclusive")):
                kept = integral(value)
                if key == "multipleOf" and len(re.findall("[0-9]", str(kept).lstrip("0."))) > _MOST_DIGITS:
                    kept = ...
        return kept

    def _enforced(self, made: JsonSchema, at: str, fault: Callable[[JsonSchema], str]) -> JsonSchema:
        """Return a schema unchanged, or only keywords that together have no fault."""
        if not (why := fault(made)):
            return made
        kept: JsonSchema = {}
        circular = "circular" in why and at != self._where
        for key in dict.fromkeys((*IN_PLACE, *_ORDER) if circular else _ORDER):
            several = key in ("required", "allOf")
            for value in (made[key] if several else [made[key]]) if key in made else ():
                tried = {**kept, key: [*kept.get(key, ()), value] if several else value}
                why = fault(tried)
                if why and key == "required" and value not in (known := kept.get("properties", {})):
                    tried["properties"] = {**known, value: True}
                    why = fault(tried)
                if not why:
                    kept = tried
                    continue
                self.left_out.append(f"{at}.{key}: {why}")
                if key == "patternProperties":
                    rest = made.get("additionalProperties", True)
                    made["additionalProperties"] = rest is True or {"anyOf": [*value.values(), rest]}
        return kept

    def _fault(self, schema: JsonSchema) -> str:
        """Return why the compiler refuses a schema whose parts it accepts; "" if it accepts it."""
        if _is_plain(schema):
            return ""
        lengths = ("minLength", "maxLength") if "{" in schema.get("pattern", "") else ()
        if "pattern" in schema and not schema.keys().isdisjoint(("format", *lengths)):
            return "it stands beside a pattern"  # it would have many states, noticed only within an answer
        todo, definitions = [schema], dict[str, JsonSchema]()
        inside = {"properties": {"x": schema}, "items": schema}  # stands for an unfinished definition
        for each in todo:  # it grows
            for name in {*_NAME.findall(json.dumps(each))} - definitions.keys():
                todo.append(definitions.setdefault(name, self._definitions.get(name, inside)))
        if not schema.keys().isdisjoint(IN_PLACE):
            schema = {"minItems": 1, **schema}  # else an empty list would hide that no item is valid
        if "patternProperties" in schema:  # else optional properties would hide contradictions
            schema = {**schema, "required": [*schema.get("properties", ()), *schema.get("required", ())]}
        return _compiled(schema, definitions)

    def _reference(self, reference: str) -> str:
        """Return a reference to a definition, relaxing that first; "" if it leads nowhere."""
        base, _, fragment = reference.partition("#")
        anchor = "" if fragment.startswith("/") else fragment  # else a pointer
        part = _named(self._root, base or anchor)
        found = part if anchor else referred(fragment, part)
        if not isinstance(found, dict):
            return ""
        if (name := self._names.get(id(found))) is None:
            name = self._names[id(found)] = f"d{len(self._names)}"
            at = self._where + fragment.replace("/", ".")
            made = self._definitions[name] = self._relaxed(found, at)
            if name in self._loops:
                self._definitions[name] = self._enforced(made, at, partial(self._endless, name))
        if name not in self._definitions:
            self._loops.add(name)
        return f"#/$defs/{name}"

    def _endless(self, name: str, schema: JsonSchema) -> str:
        """Return why every value of a definition would contain another one, endlessly; "" if some do not."""
        return _compiled(json.loads(self._unfolded(json.dumps(schema), {name})), self._definitions)

    def _unfolded(self, text: str, busy: Set[str]) -> str:
        """Return a schema's JSON with definitions in place of references; a recursive one becomes false."""

        def target(found: re.Match[str]) -> str:
            there = json.dumps(self._definitions.get(found[1], True))
            return "false" if found[1] in busy else self._unfolded(there, busy | {found[1]})

        return _REFERENCE.sub(target, text)


def _named(schema: Any, name: str) -> Any:
    """Return the part of a schema with this `$id` or anchor (the whole for ""), or None."""
    todo = [schema]
    for part in todo:  # it grows
        if isinstance(part, dict):
            given = [str(part.get(key, "")) for key in ("$id", "id", "$anchor", "$dynamicAnchor")]
            if any(each in (name, f"#{name}") or each.endswith(f"/{name}") for each in given):
                return part
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return None


def _is_exact(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or abs(value) <= _MOST_EXACT


def _is_plain(schema: JsonSchema) -> bool:
    if not schema.keys().isdisjoint(IN_PLACE):
        (parts,) = schema.values() if len(schema) == 1 else ([],)
        return ("allOf" not in schema or len(parts) == 1) and any(each is not False for each in parts)
    if schema.keys() == {"type", "enum"}:
        return schema["type"] == "string" and all(isinstance(each, str) for each in schema["enum"])
    others = schema.get("additionalProperties", True)
    needed = [schema.get("properties", {}).get(name, others) for name in schema.get("required", ())]
    return schema.keys() <= _PLAIN and all(each is not False for each in needed)


def _compiled(schema: Any, definitions: JsonSchema) -> str:
    """Return why the compiler refuses all values of a schema; "" if it accepts and enforces it."""
    from llguidance import LLMatcher, LLParserLimits

    whole = {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": definitions}
    text = guided_schema(whole, Separators(), "", lenient=True)
    limits = LLParserLimits(initial_lexer_fuel=FUEL, max_lexer_states=STATES, verbose_errors=False)
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, None, {"lenient": False})
        matcher = LLMatcher(_tokens(), grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()
        why = matcher.get_error()
    except ValueError as error:  # half characters
        why = str(error)
    words = " ".join(why.rpartition("error: ")[2].split())
    return "it contradicts the rest" if words.endswith("is unsatisfiable") else words[:_MOST_WORDS]


@cache
def _tokens() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")

"""JSON schemas of tools, as far as a grammar can enforce them. Pure.

A tool can be called with any schema. What the grammar library cannot enforce of a schema is known here,
because agents do without that library; a test compares both. It is left out, keyword by keyword.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

JsonSchema = dict[str, Any]

#: Formats of strings that a grammar knows, and the least and the greatest length of such strings.
FORMATS: Mapping[str, tuple[float, float]] = {
    "date": (10, 10), "date-time": (20, 32), "duration": (3, math.inf), "email": (3, math.inf),
    "hostname": (1, math.inf), "ipv4": (7, 15), "ipv6": (2, 45), "time": (9, math.inf),
    "uri": (2, math.inf), "uuid": (36, 36),
}  # fmt: skip
_TYPES = {
    "int": "integer", "long": "integer", "float": "number", "double": "number", "str": "string",
    "bool": "boolean", "list": "array", "tuple": "array", "dict": "object", "map": "object",
}  # fmt: skip
_KIND_OF = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
    dict: "object",
}  # fmt: skip
_KINDS = frozenset(_KIND_OF.values())
_SIZES = {
    "integer": ("minimum", "maximum"), "number": ("minimum", "maximum"), "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"), "object": ("minProperties", "maxProperties"),
}  # fmt: skip
_COUNTS = frozenset(key for kind in ("string", "array", "object") for key in _SIZES[kind])
_NUMBERS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
_LISTS = ("allOf", "anyOf", "oneOf")
_IN_PLACE = ("$ref", *_LISTS)
_BEYOND = frozenset(
    {"not", "if", "contains", "uniqueItems", "propertyNames", "dependencies", "dependentRequired",
     "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}
)  # fmt: skip
_KEYWORDS = _BEYOND | _COUNTS | {
    *_NUMBERS, *_IN_PLACE, "type", "enum", "const", "properties", "patternProperties", "additionalProperties",
    "required", "items", "prefixItems", "additionalItems", "pattern", "format",
}  # fmt: skip
#: What no value of an enum is compared with.
_NOT_OF_VALUES = ("pattern", "format", "properties", "patternProperties", "additionalProperties", "required",
                  "items", "prefixItems")  # fmt: skip
_NUMBER_FORMATS = (("format", "integer"), ("format", "number"))  # such as int32, which say nothing more
_ORDER = ("type", *_IN_PLACE, "properties", "required", "additionalProperties", "items")
_DEEPEST = 50  # levels; the compiler reads JSON of 126
_MOST_COUNT = 2**31
_MOST_EXACT = 2**53  # greatest integer among values: the compiler computes with floats
_HUGE, _TINY = 9e17, 1e-50  # the compiler writes bounds digit by digit
_MOST_STEP = 10_000  # of `multipleOf`; it takes as many states
_MOST_CHECKS = 10_000  # in search of contradictions


def relaxed(
    schema: Mapping[str, Any], where: str, *, nullable: bool = True
) -> tuple[JsonSchema, tuple[str, ...]]:
    """Return a tool's schema as a grammar can enforce it, and what is left out.

    The result describes an object, and contradictions that are found are gone. Its references lead to its
    `$defs`. What is left out is named by place and reason: `where.properties.x.pattern: it looks ahead`.
    `nullable` honors OpenAPI's keyword of that name.
    """
    relaxer = _SchemaRelaxer(schema, where, nullable)
    try:
        made = relaxer.arguments()
    except RecursionError:
        made = {"type": "object"}
        relaxer.leave_out(where, "it is nested too deep")
    return made, tuple(dict.fromkeys(relaxer.left_out))


def combines(schema: Mapping[str, Any]) -> bool:
    """Return True if one object's properties come from several places of this schema."""
    kinds = sum(schema.get(key) is not None for key in ("properties", *_IN_PLACE))
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return kinds > 1 or several


class _SchemaRelaxer:
    """One schema while it is relaxed. `_definitions` are the finished targets of its references."""

    def __init__(self, root: Mapping[str, Any], where: str, nullable: bool) -> None:
        self._root, self._where, self._nullable = root, where, nullable
        self.left_out: list[str] = []
        self._definitions: JsonSchema = {}
        self._names: dict[int, str] = {}  # of targets, by identity
        self._checks = 0

    def leave_out(self, at: str, why: str) -> None:
        self.left_out.append(f"{at}: {why}")

    def arguments(self) -> JsonSchema:
        """Return the whole schema."""
        types = _types(self._root.get("type"))
        whole: Any = not types or "object" in types
        if whole:
            whole = self._relaxed({**self._root, "type": "object", "nullable": False}, self._where)
        if name := self._names.get(id(self._root)):
            whole = self._defined(name, whole, self._where)
        if not self._possible([whole, {"type": "object"}]):
            self.leave_out(self._where, "it describes no object")
            return {"type": "object"}
        return {**whole, "$defs": self._definitions} if self._definitions else whole

    # --- one schema of the tree ---

    def _relaxed(self, schema: Any, at: str, depth: int = 0, part: bool = False) -> Any:
        """Return a schema. Objects of a `part` of a combination have other properties, too."""
        if isinstance(schema, bool) or schema is None:
            return schema is not False
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            self.leave_out(at, "it is nested too deep" if depth > _DEEPEST else "it is no schema")
            return True
        if schema.get("not") in ({}, True):
            return False
        made: JsonSchema = {}
        part = part or combines(schema)
        for name, value in schema.items():
            key = "additionalProperties" if name == "unevaluatedProperties" and not part else name
            if key not in _KEYWORDS or (value is None and key != "const"):
                continue
            kept, why = self._kept(key, value, f"{at}.{key}", depth + 1, part)
            if kept is not ...:
                made.setdefault(key, kept)
            elif value is not False and (key, schema.get("type")) not in _NUMBER_FORMATS:
                self.leave_out(f"{at}.{key}", why)
        rest = made.pop("additionalItems", True)
        if isinstance(made.get("items"), list):  # a tuple of earlier drafts
            made |= {"prefixItems": made["items"], "items": rest}
        if made.keys() != {"type"}:  # as for most
            self._fit_numbers(made, at)
            self._fit_strings(made, at)
            self._fit_properties(made, at)
            self._fit_counts(made, at, part)
            self._fit_references(made, at)
            made = self._consistent(made, at)
        if self._nullable and schema.get("nullable") is True:
            return {"anyOf": [made, {"type": "null"}]}
        return made

    def _kept(self, key: str, value: Any, at: str, depth: int, part: bool) -> tuple[Any, str]:
        """Return a keyword's value as far as it can be enforced by itself; Ellipsis, and why: not at all."""
        match key, value:
            case (("properties" | "patternProperties"), dict()):
                return {name: self._relaxed(each, f"{at}.{name}", depth) for name, each in value.items()}, ""
            case (("items" | "prefixItems"), list()):
                return [self._relaxed(each, f"{at}[{i}]", depth) for i, each in enumerate(value)], ""
            case (("items" | "additionalItems" | "additionalProperties"), dict() | bool()):
                return self._relaxed(value, at, depth), ""
            case (("allOf" | "anyOf" | "oneOf"), list()):
                parts = [(i, each) for i, each in enumerate(value) if each is not None]
                return [
                    self._relaxed(each, f"{at}[{i}]", depth, part) for i, each in parts
                ] or ..., "it is empty"
            case "$ref", str():
                return self._reference(value) or ..., "it leads to no schema here"
        return _leaf(key, value)

    # --- keywords that depend on each other ---

    def _fit_numbers(self, made: JsonSchema, at: str) -> None:
        for bound, exclusive in (_NUMBERS[:2], _NUMBERS[2:4]):
            if isinstance(made.get(exclusive), bool) and made.pop(exclusive) and bound in made:  # of draft 4
                made[exclusive] = made.pop(bound)
        for key in [key for key in _NUMBERS if key in made]:
            value = made[key]
            small = _has_few_states(value) if key == "multipleOf" else not value or _TINY < abs(value) < _HUGE
            if isinstance(value, bool) or not small:
                del made[key]
                self.leave_out(f"{at}.{key}", "it cannot be computed")

    def _fit_strings(self, made: JsonSchema, at: str) -> None:
        stronger = next((key for key in ("const", "enum", "pattern") if key in made), "")
        weaker = {"": (), "pattern": ("format",)}.get(stronger, _NOT_OF_VALUES)
        for key in sorted(made.keys() & {*weaker}):
            del made[key]
            self.leave_out(f"{at}.{key}", f"it stands beside {stronger}")
        for key in _SIZES["string"]:
            least, fits = key == "minLength", True
            if key in made and "pattern" in made:
                fits = _counts_beside(made["pattern"], made[key], least)
            elif key in made and "format" in made:
                short, long = FORMATS[made["format"]]
                fits = made[key] <= min(long, short + _FEW) if least else made[key] >= short
            if not fits:
                del made[key]
                self.leave_out(f"{at}.{key}", "it stands beside a pattern or format")

    def _fit_properties(self, made: JsonSchema, at: str) -> None:
        """Describe properties that are only required; take patterns of names away that cannot be enforced."""
        properties, patterns = made.get("properties", {}), made.get("patternProperties", {})
        why = next(filter(None, map(_fault, patterns)), "they may overlap" if len(patterns) > 1 else "")
        pairs = ([one, other] for one in patterns.values() for other in properties.values())
        if why or not all(map(self._possible, pairs)):
            del made["patternProperties"]
            self.leave_out(f"{at}.patternProperties", why or "they may contradict the properties")
            rest = made.get("additionalProperties", True)
            made["additionalProperties"] = rest is True or {"anyOf": [*patterns.values(), rest]}
        known = {*properties}
        if made.get("additionalProperties") is not False:
            if made.keys().isdisjoint(_IN_PLACE):
                return
            known = {
                name for each in self._in_place(made, set()) if each for name in each.get("properties", ())
            }
        if undeclared := [name for name in made.get("required", ()) if name not in known]:
            made["properties"] = {**properties, **dict.fromkeys(undeclared, True)}

    def _fit_counts(self, made: JsonSchema, at: str, part: bool) -> None:
        """Leave out counts of properties but where all are required, and but for the first optional one."""
        properties, names = made.get("properties", {}), made.get("required", [])
        part = part or not made.keys().isdisjoint(_IN_PLACE)
        closed = made.get("additionalProperties", part or "properties" not in made) is False
        most = len({*properties, *names}) if closed and "patternProperties" not in made else math.inf
        optional = any(value is not False and name not in names for name, value in properties.items())
        for key in [key for key in _SIZES["object"] if key in made]:
            count = made[key]
            implied = count <= len(names) if key == "minProperties" else count >= most
            first = count == len(names) + 1 and most < math.inf
            if implied or part or not (first if optional else len(names) <= count <= most):
                del made[key]
                if not implied:
                    self.leave_out(f"{at}.{key}", "it is not counted beside optional properties")

    def _fit_references(self, made: JsonSchema, at: str) -> None:
        """Leave alone what refers to an unfinished definition: the compiler combines it with nothing."""
        for key in _IN_PLACE:
            parts = made.get(key, []) if key != "$ref" else [{key: made.get(key, "")}]
            loops = [each for each in parts if None in self._in_place(each, set())]
            if loops and (len(made) > 1 or key == "allOf"):
                for other in sorted(made.keys() - {key}) + [key] * (key == "allOf" and len(parts) > 1):
                    self.leave_out(f"{at}.{other}", "it stands beside a schema that contains this one")
                alone = loops[0] if key in ("$ref", "allOf") else {key: made[key]}
                made.clear()
                made.update(alone)
                return

    def _in_place(self, schema: Any, seen: set[str]) -> Iterator[JsonSchema | None]:
        """Yield a schema and those that it combines in place; None for an unfinished definition."""
        if isinstance(schema, dict):
            yield schema
            if (name := _name(schema)) and name not in seen:
                seen.add(name)
                yield from self._in_place(self._definitions.get(name, True), seen)
                yield from () if name in self._definitions else (None,)
            for key in _LISTS:
                for each in schema.get(key, ()):
                    yield from self._in_place(each, seen)

    def _consistent(self, made: Any, at: str, busy: frozenset[str] = frozenset()) -> Any:
        """Return a schema without what contradicts the rest of it."""
        if self._possible([made], busy):
            return made
        kept: JsonSchema = {}
        for key in sorted(made, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER)):
            single = key not in ("required", "allOf")
            for value in [made[key]] if single else made[key]:
                tried = {**kept, key: value if single else [*kept.get(key, ()), value]}
                kept = tried if self._possible([tried], busy) else kept
            if kept.get(key, ... if single else []) != made[key]:
                self.leave_out(f"{at}.{key}", "it contradicts the rest")
        return kept

    # --- references ---

    def _reference(self, reference: str) -> str:
        """Return the reference to a definition, which is relaxed first; empty if it leads nowhere."""
        found = self._found(reference)
        if not isinstance(found, dict):
            return ""
        name = self._names.get(id(found))
        if name is None:
            name = self._names[id(found)] = f"d{len(self._names)}"
            if found is not self._root:
                at = self._where + reference.partition("#")[2].replace("/", ".")
                self._defined(name, self._relaxed(found, at), at)
        return f"#/$defs/{name}"

    def _defined(self, name: str, made: Any, at: str) -> JsonSchema:
        """Finish a definition: leave out what must contain itself without end. Return a reference to it."""
        self._definitions[name] = made
        self._definitions[name] = made is not False and self._consistent(made, at, frozenset({name}))
        return {"$ref": f"#/$defs/{name}"}

    def _found(self, reference: str) -> Any:
        """Return what a reference leads to, by pointer, `$id` or anchor; None: nothing."""
        base, _, fragment = reference.partition("#")
        anchor = "" if fragment.startswith("/") else fragment
        found: Any = self._root
        if name := base or anchor:
            found = _named(found, name)
        for step in fragment.split("/")[1:] if fragment.strip("/") and not anchor else ():
            if isinstance(found, list):
                found = {str(i): each for i, each in enumerate(found)}
            keys = [each.replace("~1", "/").replace("~0", "~") for each in (unquote(step), step)]
            found = next((found[key] for key in keys if isinstance(found, dict) and key in found), None)
        return found

    # --- what is valid ---

    def _possible(self, schemas: Sequence[Any], busy: frozenset[str] = frozenset()) -> bool:
        """Return False if no value is valid for all these schemas, patterns apart.

        A value of a `busy` definition is not searched for: it would contain another one, and so on.
        """
        self._checks += 1
        if self._checks > _MOST_CHECKS:
            return True
        if len(schemas) == 1 and isinstance(schemas[0], dict) and [*schemas[0]] == ["$ref"]:
            name = _name(schemas[0])
            return name not in busy and self._possible([self._definitions.get(name, True)], busy | {name})
        flat: list[JsonSchema] = []
        choices: list[list[Any]] = []
        seen, todo = {""}, [*schemas]
        while todo:
            schema = todo.pop()
            if schema is False:
                return False
            if schema is True:
                continue
            if (name := _name(schema)) not in seen:
                seen.add(name)
                todo.append(self._definitions.get(name, True))
            todo += schema.get("allOf", ())
            choices += [schema[key] for key in ("anyOf", "oneOf") if key in schema]
            if rest := {key: value for key, value in schema.items() if key not in _IN_PLACE}:
                flat.append(rest)
        if choices:
            others = [{"anyOf": choice} for choice in choices[1:]]
            return any(self._possible([*flat, *others, each], busy) for each in choices[0])
        values = [each["enum"] for each in flat if "enum" in each]
        values += [[each["const"]] for each in flat if "const" in each]
        if values:
            common = [value for value in values[0] if all(value in each for each in values)]
            return any(all(_fits(value, each) for each in flat) for value in common)
        return any(self._has_values(kind, flat, busy) for kind in _KINDS.intersection(*map(_kinds, flat)))

    def _has_values(self, kind: str, schemas: Sequence[JsonSchema], busy: frozenset[str]) -> bool:
        """Return False if no value of a type is valid for all these schemas, which combine no others."""
        if kind in _SIZES and not _has_size(kind, schemas):
            return False
        if kind == "array":
            least = max((each.get("minItems", 0) for each in schemas), default=0)
            first = max((len(each.get("prefixItems", ())) for each in schemas), default=0)
            items = [each["items"] for each in schemas if each.get("items", True) is not True]
            if least <= first and (len(items) < 2 or False in items):
                return True  # else it would be a list that can only be empty
            return self._possible(items, busy)
        if kind == "object":
            for name in {name for each in schemas for name in each.get("required", ())}:
                found = []
                for each in schemas:
                    others = True if "patternProperties" in each else each.get("additionalProperties", True)
                    found.append(each.get("properties", {}).get(name, others))
                if not self._possible(found, busy):
                    return False
        return True


def _leaf(key: str, value: Any) -> tuple[Any, str]:
    """Return a keyword without schemas as far as it can be enforced; Ellipsis, and why: not at all."""
    kept: Any = ...
    why = "no grammar enforces it" if key in _BEYOND else "it cannot be understood"
    match key, value:
        case "type", _:
            types = _types(value)
            kept, why = types[0] if len(types) == 1 else types or ..., "this type is unknown"
        case "required", list():
            kept = list(dict.fromkeys(name for name in value if isinstance(name, str)))
        case ("enum", [_, *_]) | ("const", _):
            kept, why = value if _is_exact(value) else ..., "it has integers of more than 53 bits"
        case "pattern", str():
            why = _fault(value)
            kept = ... if why else value
        case "format", str():
            kept, why = value if value in FORMATS else ..., "this format is unknown"
        case _, int() | float() if key in _NUMBERS:
            kept = value
        case _, int() | float() if key in _COUNTS and value == int(value) and 0 <= value < _MOST_COUNT:
            kept = int(value)
    return kept, why


def _types(value: Any) -> list[str]:
    """Return the types that a schema names; none if one of them is unknown."""
    names = [str(each).lower() for each in (value if isinstance(value, list) else [value])]
    types = dict.fromkeys(_TYPES.get(name, name) for name in names)
    return [*types] if types.keys() <= _KINDS else []


def _name(schema: JsonSchema) -> str:
    """Return the name of the definition that a schema refers to; empty: of none."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _named(schema: Any, name: str) -> Any:
    """Return the part of a schema with an `$id` or anchor; None: there is none."""
    todo = [schema]
    for part in todo:  # it grows
        if isinstance(part, dict):
            given = [str(part.get(key, "")) for key in ("$id", "id", "$anchor", "$dynamicAnchor")]
            if any(each in (name, f"#{name}") or each.endswith(f"/{name}") for each in given):
                return part
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return None


def _kinds(schema: JsonSchema) -> frozenset[str]:
    types = schema.get("type", _KINDS)
    kinds = frozenset([types] if isinstance(types, str) else types)
    return kinds | {"integer"} if "number" in kinds else kinds


def _fits(value: Any, schema: JsonSchema) -> bool:
    """Return True if a schema allows the type and the size of a value."""
    kind = _KIND_OF[type(value)]
    size = len(value) if isinstance(value, str | list | dict) else value
    sized = [schema, dict.fromkeys(_SIZES.get(kind, ()), size)]
    return kind in _kinds(schema) and (kind not in _SIZES or _has_size(kind, sized))


def _has_size(kind: str, schemas: Sequence[JsonSchema]) -> bool:
    """Return False if no number lies within all bounds, or no length or count does."""
    low = max((each[key] for each in schemas for key in _SIZES[kind][:1] if key in each), default=-math.inf)
    high = min((each[key] for each in schemas for key in _SIZES[kind][1:] if key in each), default=math.inf)
    step = 1.0 if kind == "integer" else 0
    for each in schemas if kind in ("integer", "number") else ():
        low = max(low, math.nextafter(each.get("exclusiveMinimum", -math.inf), math.inf))
        high = min(high, math.nextafter(each.get("exclusiveMaximum", math.inf), -math.inf))
        step = max(step, abs(each.get("multipleOf", 0)))
    if not step or max(abs(low), abs(high)) > _HUGE:
        return low <= high
    return math.ceil(low / step) <= math.floor(high / step)


def _has_few_states(step: float) -> bool:
    """Return True if the compiler can count in steps of this size."""
    step = abs(step)
    while step % 1 and step < _MOST_STEP:
        step *= 10  # as the compiler does, with its errors of rounding
    return 0 < step <= _MOST_STEP


def _is_exact(value: Any) -> bool:
    """Return True if the compiler reads a value as it is."""
    if isinstance(value, list | dict):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or abs(value) <= _MOST_EXACT


# --- regular expressions ----------------------------------------------------------------------------------


_MOST_PATTERN = 2000  # characters
_FEW = 16  # characters more than a pattern needs, which can be counted beside it
_ESCAPE = (
    r"\\(?:[dDwWsStnrfva!-/:;=?@\[-`{-~ ]|x[0-9A-Fa-f]{2}|u(?![dD][89A-Fa-f])[0-9A-Fa-f]{4}"
    r"|[pP](?:[LMNPSZ]|\{(?:[LMNPSZ]|L[ultmo]|N[dlo]|(?:(?:Script|sc)=)?(?:Latin|Greek|Cyrillic|Han|Hiragana"
    r"|Katakana|Hangul|Arabic|Hebrew|Thai|Devanagari))\}))"
)
_SET = rf"\[(?!\^\])\^?(?:(?!--|&&|~~|\|\|)(?:[^\\\[\]]|{_ESCAPE}))+\]"
_OPENING = r"\((?:\?(?:P?<(?!stop>)[A-Za-z_]\w*>|[isu]*:)|(?!\?))"
_TIMES = r"[*+][?+]?|(?:\?|\{\d{1,6}(?:,\d{0,6})?\})\??"
_PATTERN = re.compile(rf"(?:\(\?[isu]+\))?(?:{_OPENING}|{_ESCAPE}|{_SET}|{_TIMES}|[^\\\[({{*+?])*+", re.ASCII)
_PIECES = re.compile(rf"({_ESCAPE}|{_SET})|({_OPENING})|\(\?[isu]+\)", re.ASCII)
_ANCHORED = re.compile(r"\^?(?![*+?{])[^$^]*\$?")
_REASONS = {
    r"\(\?[=!]": "it looks ahead",
    r"\(\?<[=!]": "it looks behind",
    r"\\[1-9]|\\k|\(\?P=": "it refers back to a group",
    r"\\[bB]": "it looks for the border of a word",
}


@lru_cache(maxsize=256)
def _skeleton(pattern: str) -> str | None:
    """Return a pattern with x for its escapes and sets; None if the grammar library cannot take it."""
    if len(pattern) > _MOST_PATTERN or not _PATTERN.fullmatch(pattern):
        return None
    plain = re.sub(r"(\\[dDwWsS])-", r"\1\\-", re.sub(r"\\[pP](\{[^}]*\}|.)", r"\\d", pattern))
    try:
        re.compile(re.sub(r"\(\?<", "(?P<", plain))  # for what needs more than an expression to check
    except (re.error, RecursionError, OverflowError):
        return None
    skeleton = _PIECES.sub(lambda piece: "x" if piece[1] else "(" if piece[2] else "", pattern)
    shorter, flat = skeleton, ""
    while shorter != flat:
        shorter, flat = re.sub(r"\([^()^$]*\)", "x", shorter), shorter
    outside = "(" not in flat and all(map(_ANCHORED.fullmatch, flat.split("|")))
    return skeleton if outside else None


def _fault(pattern: str) -> str:
    """Return why a grammar cannot enforce a pattern; empty: it can."""
    if _skeleton(pattern) is not None:
        return ""
    return next((why for sign, why in _REASONS.items() if re.search(sign, pattern)), "its syntax is unknown")


def _counts_beside(pattern: str, length: int, least: bool) -> bool:
    """Return True if the compiler can count to a least or a greatest length beside a pattern."""
    skeleton = _skeleton(pattern) or ""
    inner = skeleton.strip("^$")
    bounded = skeleton.endswith("$") and not {*inner} & {"*", "+"}
    if bounded or "{" in inner or r"\p" in pattern.lower() or not skeleton.startswith("^"):
        return False
    return length <= _FEW or skeleton in ("^x+$", "^x*$") if least else length >= len(inner)

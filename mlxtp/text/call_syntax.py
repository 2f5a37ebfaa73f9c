"""Syntaxes of calls, and readers of their bodies. Pure.

Only its syntax ends a call, because the content of a file may hold any markup. Readers return valid JSON.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .argument_types import property_types, typed
from .json_limits import parsed
from .json_mender import JSON_QUOTES, JsonMender, mended, skip_blanks


class CallBody(ABC):
    done = False  #: The call is over.
    doubtful = False  #: It may be over. `push` decides by the text that follows.
    end_is_own = False  #: It is doubtful, and only later text could show that it goes on.
    rest = ""  #: text after the end
    name: str | None = None  #: the tool's name as written; None until known
    id = ""
    has_arguments = True  #: The model wrote arguments, perhaps empty ones.
    streams = False  #: The reader has passed on arguments that `push` returned.
    is_call = True  #: False while it may still be text of the answer.

    @property
    def complete(self) -> bool:
        return self.done or self.doubtful

    @abstractmethod
    def push(self, text: str, end: bool = False) -> str:
        """Return arguments that are certain. `end`: the text is a special token that only ends calls."""

    @abstractmethod
    def close(self) -> str:
        """End the call here, and return its remaining arguments."""

    @abstractmethod
    def arguments(self) -> tuple[str, str]:
        """Return all arguments as a JSON object, and text that does not fit into one."""


@dataclass(frozen=True)
class JsonSyntax:
    """A JSON object with the tool's name among its fields. `keyed`: the name is its only key."""

    keyed: bool = False

    def heads(self, name: str) -> Iterator[tuple[str, int]]:
        quoted = compact(json.dumps(name, ensure_ascii=False))
        if self.keyed:
            yield f"{{{quoted}:", 0
            return
        for key in _NAMES:
            yield f'{{"{key}":{quoted}', 0
        yield f'{{"function":{{"name":{quoted}', 0
        yield from ((f'{{"{key}":{{', 0) for key in (*_ARGUMENTS, *_MISNAMED))
        yield from ((f'{{"{key}":', 0) for key in _BESIDE)

    def body(self, name: str, schema: Mapping[str, Any], ends: Sequence[str]) -> CallBody:
        return JsonCall(self.keyed, ends)


@dataclass(frozen=True)
class NamedSyntax:
    """A name within one of `before` (as `{}`), perhaps `lead`, then an object opened by `opening`."""

    before: tuple[str, ...]
    lead: re.Pattern[str] = re.compile(r"\s*")  #: A group `number` makes an id, as in `functions.NAME:0`.
    opening: str = "{"
    quotes: tuple[str, ...] = JSON_QUOTES
    wrapper: str = ""  #: field of the object that holds the arguments
    plain: bool = False  #: Text of an answer may look the same.

    def heads(self, name: str) -> Iterator[tuple[str, int]]:
        for before in self.before:
            text = compact(before.replace("{}", name))
            yield text, len(text) - text.endswith(tuple(self.opening))

    def body(self, name: str, schema: Mapping[str, Any], ends: Sequence[str]) -> CallBody:
        return _NamedCall(self, name, ends)


@dataclass(frozen=True)
class TaggedSyntax:
    """A name within one of `before` (as `{}`), one of `behind`, tagged values, and `end`."""

    before: tuple[str, ...]
    behind: tuple[str, ...]
    end: str
    opening: re.Pattern[str]  #: with a group `key` and perhaps `type`
    closing: str  #: with `{}` for the key
    gap: str | None = "\n"  #: text after each value; None: any white space
    before_values: re.Pattern[str] = re.compile(r"(?!)")  #: optional text before the first value
    framed: bool = False  #: One newline on each side of a value belongs to the tags.
    nested: bool = False  #: Objects and lists are written as tags too.
    guess: bool = False  #: as in `typed`

    def heads(self, name: str) -> Iterator[tuple[str, int]]:
        for before in self.before:
            text = compact(before.replace("{}", name))
            for behind in (*self.behind, self.end, "{"):
                yield text + compact(behind), len(text)

    def body(self, name: str, schema: Mapping[str, Any], ends: Sequence[str]) -> CallBody:
        return _TaggedCall(self, name, schema, ends)

    @cached_property
    def closings(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.closing).replace(r"\{\}", "[^<>]+"))

    @cached_property
    def tags(self) -> re.Pattern[str]:
        """Pattern of an opening or a closing. Only an opening has a `key`."""
        return re.compile(f"{self.opening.pattern}|{self.closings.pattern}", self.opening.flags)

    def closes(self, text: str) -> bool:
        """Return True if text ends with a closing as templates write it, or after a one-line value."""
        text = text.rstrip()
        inside = text.removesuffix(self.closing.rpartition("{}")[2])
        if inside == text or not self.framed or inside.endswith("\n"):
            return inside != text
        lines = inside[inside.rfind("\n", 0, max(0, inside.rfind("\n"))) + 1 :]
        *_, opening = (None, *self.opening.finditer(lines))
        return opening is not None and "\n" not in lines[opening.end() :].removeprefix("\n")


#: `heads` yields how a call may begin, without white space, and the length that its body skips. `body`
#: returns the reader of the rest. It stops at each of `ends`, except in a string.
CallSyntax = JsonSyntax | NamedSyntax | TaggedSyntax

_NAMES = ("name", "tool_name", "function", "tool")  # a JSON call's fields for the name
_ARGUMENTS = ("arguments", "parameters")
_MISNAMED = ("args", "input")  # some models' fields for the arguments
_BESIDE = ("type", "id", "tool_call_id", "index", "thought")


def compact(text: str) -> str:
    return "".join(text.split())


class JsonCall(CallBody):
    is_call = False

    def __init__(self, keyed: bool, ends: Sequence[str]) -> None:
        self._keyed = keyed
        self._fields = JsonMender(stops=ends, apart=() if keyed else _ARGUMENTS)
        self._written: list[str] = []  # JSON of its fields, without the arguments
        self._passed = 0  # pieces of the arguments that were returned
        self._value: object = None

    @property
    def complete(self) -> bool:
        return self.done or self._fields.inner_done

    def push(self, text: str, end: bool = False) -> str:
        if end:
            return self.close()
        before = len(self._fields.inner)
        self._written.append(self._fields.push(text))
        if self._fields.inner and not before:
            self._read_fields("".join(self._written) + "}")
        return self._new()

    def close(self) -> str:
        if not self.done:
            self._written.append(self._fields.close())
        return self._new()

    def _new(self) -> str:
        if self._fields.done and not self.done:
            self.done, self.rest = True, self._fields.rest
            self._read_fields("".join(self._written))
        new = self._fields.inner[self._passed :] if self.name is not None else []
        self._passed += len(new)
        return "".join(new)

    def arguments(self) -> tuple[str, str]:
        if self._fields.inner:
            return "".join(self._fields.inner), ""
        if self._value in (None, "", []):
            return "{}", ""
        if isinstance(self._value, str) and (found := mended(self._value.strip())).startswith("{"):
            return found, ""
        if isinstance(self._value, dict):
            return json.dumps(self._value, ensure_ascii=False), ""
        return "{}", json.dumps(self._value, ensure_ascii=False)

    def _read_fields(self, written: str) -> None:
        if (fields := parsed(written)) is None:
            return
        if self._keyed:
            self.name, self._value = next(iter(fields.items()), (None, None))
            return
        function = fields.get("function", fields.get("tool"))
        inner = function if isinstance(function, dict) else fields
        name = next((inner[key] for key in ("name", "tool_name") if key in inner), function)
        self.name = name if isinstance(name, str) else None
        given = [inner[key] for key in _ARGUMENTS if key in inner]
        others = {key: value for key, value in inner.items() if key not in (*_NAMES, *_BESIDE)}
        if not given and len(others) == 1:  # among other fields it is an argument of that name
            given = [each for key in _MISNAMED if _is_object(each := others.get(key))]
        self._value, self.has_arguments = (given or [others])[0], bool(given)
        id_ = fields.get("id", fields.get("tool_call_id"))
        self.id = id_ if isinstance(id_, str) else ""


def _is_object(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, str) and value.lstrip().startswith("{"))


class _NamedCall(CallBody):
    def __init__(self, syntax: NamedSyntax, name: str, ends: Sequence[str]) -> None:
        self.name = name
        self.is_call = not syntax.plain
        self._syntax = syntax
        self._ends = ends
        self._lead = ""
        self._mender: JsonMender | None = None
        self._made: list[str] = []

    def push(self, text: str, end: bool = False) -> str:
        if end:
            return self.close()
        if self._mender is None:
            self._lead += text
            signs = (*self._syntax.opening, *self._ends)
            if (at := min([at for sign in signs if (at := self._lead.find(sign)) >= 0], default=-1)) < 0:
                return ""
            self._lead, text = self._lead[:at], self._lead[at:]
            if text.startswith("{") and self._lead.rstrip().endswith('"'):  # an object in a string
                self._lead, text = self._lead.rstrip()[:-1], f'["{text}'
            elif not text.startswith(tuple(self._syntax.opening)):
                self.rest = text
                return self.close()
            self._mender = JsonMender(self._syntax.quotes, self._ends)
        self._made.append(self._mender.push(text))
        if self._mender.done:
            self.rest = self._mender.rest
            self.close()
        return ""

    def close(self) -> str:
        self.done = True
        if self._mender is not None and not self._mender.done:
            self._made.append(self._mender.close())
        self.has_arguments = self.is_call or self._mender is None or not self._mender.broken
        lead = self._syntax.lead.match(self._lead)
        if lead is not None:
            self._lead = self._lead[lead.end() :]
            if number := lead.groupdict().get("number"):
                self.id = f"functions.{self.name}:{number}"
        return ""

    def arguments(self) -> tuple[str, str]:
        if self._mender is None:
            return "{}", self._lead.strip()
        made = "".join(self._made)
        if made.startswith("["):
            inside = str(json.loads(made)[0])
            made = mended(inside.strip())
            return (made, "") if made.startswith("{") else ("{}", inside)
        if not self._syntax.wrapper:
            return made, ""
        if (whole := parsed(made)) is None:
            return "{}", made
        return json.dumps(whole.get(self._syntax.wrapper, {}), ensure_ascii=False), ""


class _TagBalance:
    def __init__(self, tags: re.Pattern[str]) -> None:
        self._tags = tags
        self._seen = 0  # characters
        self.open = 0  # open values

    def lowest(self, text: str) -> int | None:
        """Count the tags in new text. Return the lowest count of open values, None without tags."""
        lowest = None
        for tag in self._tags.finditer(text, self._seen):
            count = self.open + (1 if tag["key"] else -1)
            lowest = count if lowest is None else min(lowest, count)
            self.open = max(0, count)
        self._seen = len(text)
        return lowest


class _TaggedCall(CallBody):
    """Call whose values may contain calls, so that only later text shows which end is its own.

    A likely end follows a closing, unless more closings than openings follow. It is final once all values are
    closed and another call, or text with values, follows; or at the answer's end.
    """

    def __init__(
        self, syntax: TaggedSyntax, name: str, schema: Mapping[str, Any], ends: Sequence[str]
    ) -> None:
        self.name = name
        self._syntax = syntax
        self._schema = schema
        self._ends = [syntax.end, *(end for end in ends if end != syntax.end)]
        self._text: list[str] = []
        self._length = 0
        self._tail = ""  # may contain the beginning of an end
        self._balance = _TagBalance(syntax.tags)
        self._end = self._own_end = -1  # lengths of the text at the latest end and at the likely one
        self._own_open = 0  # open values at the likely end

    def push(self, text: str, end: bool = False) -> str:
        self.doubtful = self.end_is_own = False
        while not self.doubtful and not self.done:
            seen, known = self._tail + text, len(self._tail)
            found = min([(at, each) for each in self._ends if (at := seen.find(each)) >= 0], default=None)
            if found is None:
                self._add(text)
                self._tail = seen[max(0, len(seen) - max(map(len, self._ends)) + 1) :]
                break
            at, mark = found
            self._add(seen[known : at + len(mark)])
            text, self._tail, self._end = seen[at + len(mark) :], "", self._length
            self._judge(mark, text)
        return ""

    def _add(self, text: str) -> None:
        self._text.append(text)
        self._length += len(text)

    def _written(self) -> str:
        self._text = ["".join(self._text)]
        return self._text[0]

    def _judge(self, mark: str, rest: str) -> None:
        written = self._written()
        lowest, open_ = self._balance.lowest(written), self._balance.open
        if self._own_end >= 0 and (lowest is None or lowest >= self._own_open):
            if lowest is not None and open_ == self._own_open == 0:
                self._end_at(self._own_end, rest)
            return
        inside = written.removesuffix(mark)
        closes = self._syntax.closes(inside) or not self._syntax.opening.search(inside)
        closes = closes and not self._in_string(inside)
        self.doubtful, self.rest = closes, rest
        self.end_is_own = closes and open_ == 0 and mark == self._syntax.end
        self._own_end, self._own_open = (self._end, open_) if closes else (-1, 0)

    def _in_string(self, written: str) -> bool:
        """Return True if text ends within a string of a value that the schema wants as JSON."""
        for opening in reversed(list(self._syntax.opening.finditer(written))):
            if _is_json(self._schema, _key(opening)):
                value = written[opening.end() :].lstrip()
                mender = JsonMender()
                mender.push(value if value.startswith(("{", "[")) else "{}")
                return mender.in_string
        return False

    def _end_at(self, end: int, rest: str = "") -> None:
        written = self._written()
        self._text, self.rest, self.done = [written[:end]], written[end:] + rest, True

    def close(self) -> str:
        if self.done:
            return ""
        lowest = self._balance.lowest(self._written())
        if self.doubtful:
            self._end_at(self._end, self.rest)
        elif self._own_end >= 0 and (lowest is None or lowest >= self._own_open):
            self._end_at(self._own_end)
        else:
            self._end_at(self._end if self._end >= 0 else self._length)
        return ""

    def arguments(self) -> tuple[str, str]:
        text = self._written().rstrip()
        for end in reversed(self._ends):
            text = text.removesuffix(end).rstrip()
        try:
            if found := _TaggedValues(self._syntax, self._schema).read(text):
                return json.dumps(found, ensure_ascii=False), ""
        except RecursionError:
            return "{}", text
        if (at := text.find("{")) >= 0 and (whole := mended(text[at : text.rfind("}") + 1])):
            return whole, ""
        return "{}", self._syntax.before_values.sub("", text).strip()


class _TaggedValues:
    def __init__(self, syntax: TaggedSyntax, schema: Mapping[str, Any]) -> None:
        self._syntax = syntax
        self._schema = schema
        properties = schema.get("properties")
        self._declared = frozenset(properties) if isinstance(properties, Mapping) else frozenset()

    def read(self, text: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        at = 0
        while (opening := self._syntax.opening.search(text, at)) is not None:
            key = _key(opening)
            end, at = self._end_of(text, opening, self._declared - found.keys() - {key})
            value = self._value(key, text[opening.end() : end], opening.groupdict().get("type"))
            if key not in found:
                found[key] = value
            elif self._syntax.nested:  # a repeated element is a list
                found[key] = [*found[key], value] if isinstance(found[key], list) else [found[key], value]
        return found

    def _end_of(self, text: str, opening: re.Match[str], missing: frozenset[str]) -> tuple[int, int]:
        """Return the end of a value, and the start of the text after its closing.

        A closing belongs to the innermost opening before it. It counts if another value or nothing follows.
        An opening of one of the schema's `missing` arguments ends a value even without a closing.
        """
        start, depth, last = opening.end(), 0, -1
        nested = self._syntax.nested
        closing = self._syntax.closing.replace("{}", _key(opening))
        if _is_json(self._schema, _key(opening)) and (end := _end_of_json(text, start)) >= 0:
            end = skip_blanks(text, end)
            if text.startswith(closing, end):
                return end, end + len(closing)
        while True:
            inner, closed = self._syntax.opening.search(text, start), text.find(closing, start)
            if inner is not None and (closed < 0 or inner.start() < closed):
                if not nested and _key(inner) in missing and not self._left_to_close(text[inner.start() :]):
                    return inner.start(), inner.start()
                depth += not nested or _key(inner) == _key(opening)
                start = inner.end()
            elif closed < 0:
                return (last, last + len(closing)) if last >= 0 else (len(text), len(text))
            else:
                start = closed + len(closing)
                behind = skip_blanks(text, start)
                following = self._syntax.opening.match(text, behind)
                if following is not None and not nested and _key(following) in missing:
                    return closed, start
                if following is not None and self._syntax.gap not in (None, text[start:behind]):
                    following = None  # no template writes this
                if nested or behind == len(text) or following is not None:
                    if not depth:
                        return closed, start
                    last = closed
                depth = max(0, depth - 1)

    def _left_to_close(self, text: str) -> bool:
        syntax = self._syntax
        return len(syntax.closings.findall(text)) > len(syntax.opening.findall(text))

    def _value(self, key: str, text: str, type_: str | None) -> object:
        if self._syntax.nested and self._syntax.opening.search(text):
            return self._elements(key, text)
        if self._syntax.framed:
            text = text.removeprefix("\n").removesuffix("\n")
        if (data := _CDATA.fullmatch(text)) is not None:
            text = data[1]
        if type_ in ("true", "string"):
            return text
        guess = self._syntax.guess or self._syntax.nested or type_ is not None
        return typed(text, property_types(self._schema, key), guess=guess)

    def _elements(self, key: str, text: str) -> object:
        """Return an object or list that is written as tags; in a list each tag is `item`."""
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        inner = schema if isinstance(schema, Mapping) else {}
        items = inner.get("items")
        if isinstance(items, Mapping):
            inner = {"additionalProperties": items}
        found = _TaggedValues(self._syntax, inner).read(text)
        if found.keys() == {"item"}:
            return found["item"] if isinstance(found["item"], list) else [found["item"]]
        return found


def _is_json(schema: Mapping[str, Any], key: str) -> bool:
    """Return True if an argument can be an object or a list, but not text."""
    types = property_types(schema, key) or frozenset()
    return "string" not in types and bool(types & {"object", "array"})


def _end_of_json(text: str, at: int) -> int:
    at = skip_blanks(text, at)
    if text[at : at + 1] not in ("{", "["):
        return -1
    try:
        return json.JSONDecoder().raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return -1


_CDATA = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>\s*", re.DOTALL)


def _key(opening: re.Match[str]) -> str:
    return opening["key"].strip().strip("\"'")

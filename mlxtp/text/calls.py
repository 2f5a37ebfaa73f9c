"""Reader of tool calls in a model's text. Pure.

Each family writes calls in a syntax of its own. A call begins where a tool that was offered is called in that
syntax; everything else is text. It ends where its syntax says, not at the first text that looks like an end: a
file's content may hold any markup. Its arguments leave as valid JSON.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any

from .argument_types import property_types, typed
from .conversation import Tool
from .json_mender import JSON_QUOTES, JsonMender, mended

_LONGEST_HEAD = 1000  # characters up to the name of a call's tool
_BETWEEN = ";,[]}"  # signs that may stand between two calls, beside white space
_FENCES = ("```json", "```python", "```")  # of Markdown, around calls

TextPiece = tuple[str, bool]  #: text, and True if it is one special token


def new_id() -> str:
    """Return a new id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class CallText:
    """A piece of call number `index`. The first of each has its `id` and `name` and no text."""

    index: int
    text: str = ""
    id: str = ""
    name: str = ""


# --- syntaxes ---------------------------------------------------------------------------------------------


class CallSyntax(ABC):
    """One way to write a call."""

    @abstractmethod
    def heads(self, name: str) -> Iterator[tuple[str, int]]:
        """Yield texts that begin a call of the tool `name`, without white space.

        With each, the number of its characters that its body does not read again.
        """

    @abstractmethod
    def body(self, name: str, schema: Mapping[str, Any], ends: Sequence[str]) -> CallBody:
        """Return the reader of the rest of a call. It stops at each of `ends`, unless a string is open."""


class CallBody(ABC):
    """Reader of one call from its head on."""

    done = False  #: The call is over.
    doubtful = False  #: It may be over; if other text follows, its `push` takes that.
    sure = False  #: It is doubtful, and nothing but what follows could show that it is not over.
    rest = ""  #: text after the end
    name: str | None = None  #: the tool's name as written; None while it is unknown
    id = ""

    @abstractmethod
    def push(self, text: str, end: bool = False) -> str:
        """Return arguments that can be passed on before the call is over. `end`: this token can only end it."""

    @abstractmethod
    def close(self) -> str:
        """End the call where it is, and return further arguments to pass on."""

    has_arguments = True  #: The model wrote some, even if they are empty.

    @property
    @abstractmethod
    def complete(self) -> bool:
        """True if nothing of the arguments is missing."""

    @abstractmethod
    def arguments(self) -> tuple[str, str]:
        """Return all arguments as JSON of an object, and the text that no such object can hold."""


@dataclass(frozen=True)
class JsonSyntax(CallSyntax):
    """An object in JSON with the tool's name among its fields. `keyed`: its only key is the name."""

    keyed: bool = False

    def heads(self, name: str) -> Iterator[tuple[str, int]]:
        quoted = _compact(json.dumps(name, ensure_ascii=False))
        if self.keyed:
            yield f"{{{quoted}:", 0
            return
        for key in ("name", "tool_name", "function", "tool"):
            yield f'{{"{key}":{quoted}', 0
        yield f'{{"function":{{"name":{quoted}', 0
        yield from ((f'{{"{key}":{{', 0) for key in ("arguments", "parameters"))
        yield from ((f'{{"{key}":"', 0) for key in ("type", "id", "tool_call_id"))

    def body(self, name: str, schema: Mapping[str, Any], ends: Sequence[str]) -> CallBody:
        return _JsonCall(self.keyed, ends)


@dataclass(frozen=True)
class NamedSyntax(CallSyntax):
    """The tool's name, then an object.

    A call begins with one of `before`, with `{}` for the name. Then `lead` may stand before the object, whose
    bracket is one of `opening`. `quotes` are those of its strings. A group `number` in `lead` makes the
    call's id, as in Kimi's `functions.NAME:0`. `wrapper` is the field of the object that holds the arguments.
    """

    before: tuple[str, ...]
    lead: re.Pattern[str] = re.compile(r"\s*")
    opening: str = "{"
    quotes: tuple[str, ...] = JSON_QUOTES
    wrapper: str = ""

    def heads(self, name: str) -> Iterator[tuple[str, int]]:
        for before in self.before:
            text = _compact(before.replace("{}", name))
            yield text, len(text) - text.endswith(tuple(self.opening))

    def body(self, name: str, schema: Mapping[str, Any], ends: Sequence[str]) -> CallBody:
        return _NamedCall(self, name, ends)


@dataclass(frozen=True)
class TaggedSyntax(CallSyntax):
    """Arguments one by one between tags, as plain text.

    A call begins with `before`, with `{}` for the tool's name, and one of `behind`; it ends with `end`.
    `opening` (with a group `key`, and perhaps `type`) and `closing` enclose a value; a `{}` in `closing` is
    the key. `before_values` may stand before the first of them, and `gap`, or any white space, stands behind
    each. `framed`: one newline on each side of a value belongs to the tags.
    `nested`: objects and lists are written in tags, too. `guess` as in `typed`.
    """

    before: tuple[str, ...]
    behind: tuple[str, ...]
    end: str
    opening: re.Pattern[str]
    closing: str
    gap: str | None = "\n"
    before_values: re.Pattern[str] = re.compile(r"(?!)")
    framed: bool = False
    nested: bool = False
    guess: bool = False

    def heads(self, name: str) -> Iterator[tuple[str, int]]:
        for before in self.before:
            text = _compact(before.replace("{}", name))
            for behind in (*self.behind, self.end, "{"):
                yield text + _compact(behind), len(text)

    def body(self, name: str, schema: Mapping[str, Any], ends: Sequence[str]) -> CallBody:
        return _TaggedCall(self, name, schema, ends)

    @cached_property
    def closings(self) -> re.Pattern[str]:
        """The closing of any key."""
        return re.compile(re.escape(self.closing).replace(r"\{\}", "[^<>]+"))

    @cached_property
    def tags(self) -> re.Pattern[str]:
        """An opening or a closing. Only an opening has a `key`."""
        return re.compile(f"{self.opening.pattern}|{self.closings.pattern}", self.opening.flags)

    def closes(self, text: str) -> bool:
        """Return True if this text ends with a closing as templates write it."""
        closing = self.closing.rpartition("{}")[2]
        inside = text.rstrip().removesuffix(closing)
        return inside != text.rstrip() and (not self.framed or inside.endswith("\n"))


def _compact(text: str) -> str:
    return "".join(text.split())


# --- their bodies -----------------------------------------------------------------------------------------


class _JsonCall(CallBody):
    def __init__(self, keyed: bool, ends: Sequence[str]) -> None:
        self._keyed = keyed
        self._ends = ends
        pause = () if keyed else ("arguments", "parameters")
        self._fields = JsonMender(stops=ends, pause=pause)  # of the call, without its arguments
        self._inner: JsonMender | None = None  # its arguments
        self._written: list[str] = []  # its fields in JSON
        self._passed: list[str] = []  # its arguments in JSON
        self._value: object = None
        self._name_first = False

    @property
    def complete(self) -> bool:
        return self.done or (self._inner is not None and self._inner.done)

    def push(self, text: str, end: bool = False) -> str:
        if end:
            return self.close()
        new: list[str] = []
        while text and not self.done:
            if self._inner is not None and not self._inner.done:
                new.append(self._inner.push(text))
                text = self._inner.rest
                if not self._inner.done:
                    break
                self._written.append(self._fields.resume())
            self._written.append(self._fields.push(text))
            text = ""
            if self._fields.paused:
                text, self._inner = self._fields.rest, JsonMender()
                self._read("".join(self._written) + "null}")
                self._name_first = self.name is not None
            elif self._fields.done:
                self._over()
        self._passed += new
        return "".join(new) if self._name_first else ""

    def close(self) -> str:
        new = ""
        if self._inner is not None and not self._inner.done:
            new = self._inner.close()
            self._passed.append(new)
            self._written.append(self._fields.resume())
        if not self.done:
            self._written.append(self._fields.close())
            self._over()
        return new

    def arguments(self) -> tuple[str, str]:
        if self._inner is not None:
            return "".join(self._passed), ""
        if self._value is None or self._value == "":
            return "{}", ""
        if isinstance(self._value, str) and (found := mended(self._value.strip())).startswith("{"):
            return found, ""
        if isinstance(self._value, dict):
            return json.dumps(self._value, ensure_ascii=False), ""
        return "{}", json.dumps(self._value, ensure_ascii=False)

    def _over(self) -> None:
        self.done, self.rest = True, self._fields.rest
        self._read("".join(self._written))

    def _read(self, written: str) -> None:
        """Read name, id and arguments off the call's fields."""
        try:
            fields = json.loads(written)
        except (ValueError, RecursionError):
            return
        if self._keyed:
            self.name, self._value = next(iter(fields.items()), (None, None))
            return
        function = fields.get("function", fields.get("tool"))
        inner = function if isinstance(function, dict) else fields
        name = next((inner[key] for key in ("name", "tool_name") if key in inner), function)
        self.name = name if isinstance(name, str) else None
        self._value = inner.get("arguments", inner.get("parameters"))
        self.has_arguments = "arguments" in inner or "parameters" in inner
        id_ = fields.get("id", fields.get("tool_call_id"))
        self.id = id_ if isinstance(id_, str) else ""


class _NamedCall(CallBody):
    def __init__(self, syntax: NamedSyntax, name: str, ends: Sequence[str]) -> None:
        self.name = name
        self._syntax = syntax
        self._ends = ends
        self._lead = ""
        self._mender: JsonMender | None = None
        self._made: list[str] = []

    @property
    def complete(self) -> bool:
        return self.done

    def push(self, text: str, end: bool = False) -> str:
        if end:
            return self.close()
        if self._mender is None:
            self._lead += text
            at = _first(self._lead, (*self._syntax.opening, *self._ends))
            if at < 0:
                return ""
            self._lead, text = self._lead[:at], self._lead[at:]
            if not text.startswith(tuple(self._syntax.opening)):
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
        if self._syntax.wrapper:
            made = json.dumps(json.loads(made).get(self._syntax.wrapper, {}), ensure_ascii=False)
        return made, ""


class _TaggedCall(CallBody):
    """Call whose values may hold calls themselves, so that only what follows shows which end is its own.

    An end behind a closing is its own unless a closing too many follows. It is taken where as many values were
    closed as opened and another call follows, or text with values of its own; otherwise where the answer ends.
    """

    def __init__(
        self, syntax: TaggedSyntax, name: str, schema: Mapping[str, Any], ends: Sequence[str]
    ) -> None:
        self.name = name
        self._syntax = syntax
        self._schema = schema
        self._ends = [syntax.end, *(end for end in ends if end != syntax.end)]
        self._longest = max(map(len, self._ends))
        self._text: list[str] = []
        self._length = 0
        self._tail = ""  # in which an end may begin
        self._seen = 0  # characters in which openings and closings are counted
        self._open = 0  # openings without a closing in them
        self._end = self._own_end = -1  # of the text, at the latest end and at the likely one
        self._own_open = 0  # `_open` there

    @property
    def complete(self) -> bool:
        return self.done or self.doubtful

    def push(self, text: str, end: bool = False) -> str:
        self.doubtful = self.sure = False
        while not self.doubtful and not self.done:
            seen, known = self._tail + text, len(self._tail)
            found = min([(at, each) for each in self._ends if (at := seen.find(each)) >= 0], default=None)
            if found is None:
                self._add(text)
                self._tail = seen[max(0, len(seen) - self._longest + 1) :]
                break
            at, mark = found
            self._add(seen[known : at + len(mark)])
            text, self._tail, self._end = seen[at + len(mark) :], "", self._length
            self._judge(mark, text)
        return ""

    def _judge(self, mark: str, rest: str) -> None:
        """Decide about the end that was just read, with `rest` behind it."""
        written = "".join(self._text)
        self._text = [written]
        tagged, lowest = self._count(written)
        if self._own_end >= 0 and lowest >= self._own_open:
            if tagged and self._open == self._own_open == 0:
                self._end_at(self._own_end, rest)
            return
        inside = written.removesuffix(mark)
        closes = self._syntax.closes(inside) or not self._syntax.opening.search(inside)
        closes = closes and not self._in_string(inside)
        self.doubtful, self.rest = closes, rest
        self.sure = closes and self._open == 0 and mark == self._syntax.end
        self._own_end, self._own_open = (self._end, self._open) if closes else (-1, 0)

    def _count(self, written: str) -> tuple[bool, int]:
        """Count openings without a closing. Return whether new text has tags, and the lowest count in it."""
        new = list(self._syntax.tags.finditer(written, self._seen))
        self._seen, lowest = len(written), self._open
        for tag in new:
            lowest = min(lowest, self._open + (1 if tag["key"] else -1))
            self._open = max(0, self._open + (1 if tag["key"] else -1))
        return bool(new), lowest

    def _in_string(self, written: str) -> bool:
        """Return True if this ends in a string of a value that the schema wants in JSON."""
        for opening in reversed(list(self._syntax.opening.finditer(written))):
            if _is_json(self._schema, _key(opening)):
                value = written[opening.end() :].lstrip()
                mender = JsonMender()
                mender.push(value if value.startswith(("{", "[")) else "{}")
                return mender.in_string
        return False

    def _end_at(self, end: int, rest: str = "") -> None:
        written = "".join(self._text)
        self._text, self.rest, self.done = [written[:end]], written[end:] + rest, True

    def close(self) -> str:
        if self.done:
            return ""
        _, lowest = self._count("".join(self._text))
        if self.doubtful:
            self._end_at(self._end, self.rest)
        elif self._own_end >= 0 and lowest >= self._own_open:
            self._end_at(self._own_end)
        else:
            self._end_at(self._end if self._end >= 0 else self._length)
        return ""

    def arguments(self) -> tuple[str, str]:
        text = "".join(self._text).rstrip()
        for end in reversed(self._ends):
            text = text.removesuffix(end).rstrip()
        found = _TaggedValues(self._syntax, self._schema).read(text)
        if not found and (at := text.find("{")) >= 0 and (whole := mended(text[at : text.rfind("}") + 1])):
            return whole, ""
        return json.dumps(found, ensure_ascii=False), "" if found else self._syntax.before_values.sub(
            "", text
        ).strip()

    def _add(self, text: str) -> None:
        self._text.append(text)
        self._length += len(text)


class _TaggedValues:
    """Reader of the tagged arguments in a complete text."""

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
            end, at = self._end(text, opening, self._declared - found.keys() - {key})
            value = self._value(key, text[opening.end() : end], opening.groupdict().get("type"))
            if key not in found:
                found[key] = value
            elif self._syntax.nested:  # an element that stands several times is a list
                found[key] = [*found[key], value] if isinstance(found[key], list) else [found[key], value]
        return found

    def _end(self, text: str, opening: re.Match[str], missing: frozenset[str]) -> tuple[int, int]:
        """Return where a value ends, and where the text after its closing begins.

        A closing counts if another value or nothing follows it. As a value may hold whole calls, closings
        belong to the innermost opening before them. Where one of the `missing` arguments that the schema
        describes follows a closing, the value ends in any case, and so does one that was not closed.
        """
        start, depth, last = opening.end(), 0, -1
        nested = self._syntax.nested
        closing = self._syntax.closing.replace("{}", _key(opening))
        if _is_json(self._schema, _key(opening)) and (end := _end_of_json(text, start)) >= 0:
            end = _skip_blanks(text, end)
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
                behind = _skip_blanks(text, start)
                following = self._syntax.opening.match(text, behind)
                if following is not None and not nested and _key(following) in missing:
                    return closed, start
                if following is not None and self._syntax.gap not in (None, text[start:behind]):
                    following = None  # no template writes it so
                if nested or behind == len(text) or following is not None:
                    if not depth:
                        return closed, start
                    last = closed
                depth = max(0, depth - 1)

    def _left_to_close(self, text: str) -> bool:
        """Return True if this text closes more values than it opens."""
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
        types = property_types(self._schema, key)
        guess = self._syntax.guess or self._syntax.nested or type_ is not None
        return typed(text, types, guess=guess)

    def _elements(self, key: str, text: str) -> object:
        """Return the object or list that is written in tags of its own; a list has `item` in each."""
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
    """Return True if an argument can be an object or a list, and no text."""
    types = property_types(schema, key) or frozenset()
    return "string" not in types and bool(types & {"object", "array"})


def _end_of_json(text: str, at: int) -> int:
    """Return where the object or list at this place ends; -1 if there is none."""
    at = _skip_blanks(text, at)
    if text[at : at + 1] not in ("{", "["):
        return -1
    try:
        return json.JSONDecoder().raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return -1


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


_CDATA = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>\s*", re.DOTALL)


def _key(opening: re.Match[str]) -> str:
    return opening["key"].strip().strip("\"'")


def _first(text: str, signs: Sequence[str]) -> int:
    return min([at for sign in signs if (at := text.find(sign)) >= 0], default=-1)


# --- the reader -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of a model family's calls: any number between one of `starts` and one of `ends`.

    The first of each is what the template writes. Without `ends`, the end is that of the answer. `direct`:
    texts that begin a call without `starts`, with `{}` for a tool's name. A call of `JsonSyntax` then needs
    one of `ends` behind it. `bare`: an answer that begins with one of these signs may be a call, too.
    `streams`: arguments in JSON are passed on while they come. `past`: a call between `starts` and `ends`.
    `id_mark` stands before an id that the model makes up. `addressed`: a call is a message to a tool.
    """

    name: str
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    syntaxes: tuple[CallSyntax, ...]
    direct: tuple[str, ...] = ()
    bare: str = ""
    streams: bool = False
    past: str = '{"name": "NAME", "arguments": ARGUMENTS}'
    id_mark: str = ""
    addressed: bool = False

    @property
    def start(self) -> str:
        return self.starts[0] if self.starts else ""

    @property
    def end(self) -> str:
        return self.ends[0] if self.ends else ""

    def beside(self, other: CallFormat) -> CallFormat:
        """Return the format of calls in either way."""
        return replace(
            self,
            starts=tuple(dict.fromkeys((*self.starts, *other.starts))),
            ends=tuple(dict.fromkeys((*self.ends, *other.ends))),
            syntaxes=tuple(dict.fromkeys((*self.syntaxes, *other.syntaxes))),
            streams=other.streams,
        )

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a call, for templates that do not write calls themselves."""
        syntax = self.syntaxes[0]
        if isinstance(syntax, NamedSyntax) and syntax.opening == "(":
            call = f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
        else:
            object_ = json.dumps(arguments, ensure_ascii=False)
            call = self.past.replace("NAME", name).replace("ARGUMENTS", object_)
        return f"{self.start}{call}{self.ends[-1] if self.ends else ''}"


class ReaderState(Enum):
    """State of a reader: it reads calls, or has ended behind one, or found none.

    In the last two states the text that it did not use is in its `rest`.
    """

    OPEN = auto()
    CLOSED = auto()
    REFUSED = auto()


class _Next(Enum):
    """What follows between two calls: nothing clear yet, the head of a call, or other text."""

    UNCLEAR = auto()
    HEAD = auto()
    TEXT = auto()


class CallReader:
    """Reader of the calls of one answer, in runs: from one of `markers` on up to other text.

    `forced`: a grammar guarantees a call in JSON and nothing else. `most`: so many calls are read; 0 for all.
    What its methods yield as `str` is text of the answer.
    """

    def __init__(
        self, format_: CallFormat, tools: Sequence[Tool], forced: bool = False, most: int = 0
    ) -> None:
        self.format = format_
        self.forced = forced
        self.complete = 0  #: calls that were read to their end
        self.state = ReaderState.CLOSED
        self.rest: list[TextPiece] = []
        self._most = most
        self._tools = tools
        self._count = 0
        self._ids: set[str] = set()
        self.marker = ""  #: with which the run began
        self._first = True  # no call of the run is certain
        self._ended = False  # one of the format's ends stands behind the last call
        self._raw: list[TextPiece] = []  # all of the run behind its last certain call
        self._pending: list[TextPiece] = []  # the part of it whose meaning is not clear
        self._specials: list[TextPiece] = []  # the last tokens, which may end the answer instead of a string
        self._body: CallBody | None = None
        self._streams = False  # arguments of `_body` are passed on

    @cached_property
    def _offered(self) -> dict[str, Tool]:
        return {name: tool for tool in self._tools for name in (*tool.aliases, tool.name)}

    @cached_property
    def _heads(self) -> dict[str, tuple[int, CallSyntax, str]]:
        return {
            text: (length, syntax, name)
            for syntax in reversed(self.format.syntaxes)
            for name in self._offered
            for text, length in syntax.heads(name)
        }

    @cached_property
    def _first_signs(self) -> set[str]:
        return {sign for head in self._heads for sign in (head[0], head[0].replace('"', "'"))}

    @cached_property
    def markers(self) -> list[str]:
        """Texts with which a run may begin."""
        if self.forced:
            return []
        direct = [text.replace("{}", name) for text in self.format.direct for name in self._offered]
        return [*self.format.starts, *dict.fromkeys(direct)]

    def another(self) -> CallReader:
        """Return a new reader of the same calls."""
        return CallReader(self.format, self._tools, self.forced, self._most)

    def offers(self, name: str) -> bool:
        """Return True if the model may call this tool."""
        return name in self._offered

    @property
    def reads(self) -> bool:
        """True if a call has begun and is not over."""
        return self._body is not None and not self._in_doubt

    @property
    def held(self) -> int:
        """Number of characters that may turn out to be text of the answer."""
        return sum(len(text) for text, _ in (*self._raw, *self._specials)) if self._first else 0

    @property
    def _direct(self) -> bool:
        return bool(self.marker) and self.marker not in self.format.starts

    @property
    def _enough(self) -> bool:
        return 0 < self._most <= self.complete

    @property
    def _in_doubt(self) -> bool:
        """True if what follows decides whether the call is over, or whether it is one."""
        return self._body is not None and (self._body.done or self._body.doubtful)

    @property
    def _certain(self) -> bool:
        """True if the text that is read now is a call in any case."""
        return self._body is not None and (self._streams or not isinstance(self._body, _JsonCall))

    def begin(self, marker: str = "", special: bool = False) -> Iterator[CallText | str]:
        """Begin a run with one of `markers`, or at the beginning of an answer."""
        self.state, self.rest = ReaderState.OPEN, []
        self.marker, self._first, self._ended = marker, True, False
        self._raw = [(marker, special)] if marker else []
        self._pending = [(marker, special)] if self._direct else []
        self._specials, self._body = [], None
        yield from self._look()

    def push(self, text: str, special: bool = False) -> Iterator[CallText | str]:
        """Read more of a run. `special`: this is one special token."""
        self._specials.append((text, special))
        if special and not any(text in mark for mark in (*self.format.ends, *self.format.starts)):
            return
        pieces, self._specials = self._specials, []
        for piece in pieces:
            if self._enough:
                return
            if self.state is not ReaderState.OPEN:
                self.rest.append(piece)
            elif self._body is not None and not self._in_doubt:
                if not self._certain:
                    self._raw.append(piece)
                yield from self._feed(*piece)
                yield from self._look()
            else:
                self._raw.append(piece)
                if self._pending or not piece[0].isspace():
                    self._pending.append(piece)
                    yield from self._look()

    def finish(self, cut: bool) -> Iterator[CallText | str]:
        """End the run with the answer. `cut`: the budget ended it, not the model."""
        words = not self.marker or self._direct
        while self.state is ReaderState.OPEN and (body := self._body) is not None:
            incomplete = self._needs_end and not self._ended
            if incomplete or (cut and not body.complete and not self._streams):
                self._refuse() if words or incomplete else self._close([])
                return
            behind = list(self._raw) if body.doubtful else []
            yield from self._end_call(body, cut)
            if self.state is ReaderState.OPEN:
                self._raw = behind or ([(body.rest, False)] if body.rest else [])
                self._pending = list(self._raw)
                yield from self._look()
        if self.state is not ReaderState.OPEN:
            return
        if self._first and (words or not cut):
            self._refuse()
        else:
            fence = "".join([text for text, _ in self._pending]).strip() in _FENCES
            self._close([] if self._first or cut or self._enough or fence else self._pending)

    @property
    def _needs_end(self) -> bool:
        return self._direct and isinstance(self._body, _JsonCall)

    def _close(self, rest: Sequence[TextPiece]) -> None:
        self.state, self.rest, self._raw, self._body = ReaderState.CLOSED, list(rest), [], None

    def _refuse(self) -> None:
        self.state, self.rest, self._raw, self._body = ReaderState.REFUSED, self._raw, [], None

    def _feed(self, text: str, special: bool) -> Iterator[CallText | str]:
        """Give text to the body. If it is over, or may be, the text behind it is pending."""
        body = self._body
        assert body is not None
        new = body.push(text, special and text in self.format.ends)
        tool = self._offered.get(body.name or "")
        if new and tool is not None and self.format.streams and not self._needs_end:
            if not self._streams:
                self._streams, self._first, self._raw = True, False, []
                yield CallText(self._count, "", self._new_id(body), tool.name)
            yield CallText(self._count, new)
        if body.sure and self._most and self.complete + 1 >= self._most:
            body.close()
        if self._in_doubt:
            behind = [(body.rest, False)] if body.rest else []
            if body.done and not self._needs_end:
                yield from self._end_call(body, cut=False)
            if self._body is None or self._certain:
                self._raw = list(behind)
            self._pending = [] if _blank(behind) else behind

    def _end_call(self, body: CallBody, cut: bool) -> Iterator[CallText | str]:
        """Yield a call that is over, or its last arguments. Refuse it if it calls no offered tool."""
        if self._streams:
            self.complete += not cut or body.complete
            if not cut and (more := body.close()):
                yield CallText(self._count, more)
        else:
            body.close()
            tool = self._offered.get(body.name or "")
            if tool is None or (not self.marker and not self.forced and not body.has_arguments):
                self._refuse()
                return
            arguments, left = body.arguments()
            yield CallText(self._count, "", self._new_id(body), tool.name)
            yield CallText(self._count, arguments)
            self.complete += 1
            if left:
                yield left
        self._count += 1
        self._body, self._streams, self._first, self._ended = None, False, False, False

    def _new_id(self, body: CallBody) -> str:
        id_ = new_id() if not body.id or body.id in self._ids else body.id  # some models number calls anew
        self._ids.add(id_)
        return id_

    def _look(self) -> Iterator[CallText | str]:
        """Read what is pending: what stands before a call, between two, or behind a doubtful end."""
        while self.state is ReaderState.OPEN and self._pending and (self._body is None or self._in_doubt):
            if self._enough:
                return
            text = "".join([piece for piece, _ in self._pending])
            found, at, head = self._next(text)
            self._pending = _behind(self._pending, at)
            body = self._body
            if body is not None and self._needs_end and self._ended:
                yield from self._end_call(body, cut=False)
                self._raw = list(self._pending)
            elif found is _Next.UNCLEAR:
                return
            elif self._needs_end:
                self._refuse()
            elif body is not None and not body.done and not (body.sure and self._ends_before(found)):
                goes_on, self._raw, self._pending = self._raw, [], []
                yield from self._feed("".join([piece for piece, _ in goes_on]), False)
            elif body is not None:
                yield from self._end_call(body, cut=False)
                self._raw = list(self._pending)
            elif head is None:
                self._refuse() if self._first else self._close(self._pending)
            else:
                length, syntax, name = head
                schema = self._offered[name].parameters or {}
                self._body, self._pending = syntax.body(name, schema, self.format.ends), []
                if self._certain:
                    self._raw = []
                yield from self._feed(text[_place(text, at, length) :], False)

    def _ends_before(self, found: _Next) -> bool:
        """Return True if this cannot stand in a value: another call, or a special token of the model's own."""
        return found is _Next.HEAD or self._pending[0][1]

    def _next(self, text: str) -> tuple[_Next, int, tuple[int, CallSyntax, str] | None]:
        """Return what follows, and where it begins: behind blanks, and behind the format's own markers."""
        between = "" if self._in_doubt else "[" if self._first else _BETWEEN
        marks = (*self.format.starts, *filter(None, [self.format.id_mark]))
        if not self._in_doubt:
            marks = (*marks, *_FENCES)
        if not self._first or self._in_doubt:
            marks = (*self.format.ends, *marks)
        if self._first and not self.marker and not self.forced:
            begins = next(text.lstrip()[0] for text, _ in self._raw if not text.isspace())
            if begins not in self.format.bare:
                return _Next.TEXT, 0, None
        at = 0
        while at < len(text):
            if text[at].isspace():
                at += 1
                continue
            if any(len(mark) > len(text) - at and mark.startswith(text[at:]) for mark in marks):
                return _Next.UNCLEAR, at, None
            if mark := next((mark for mark in marks if text.startswith(mark, at)), None):
                self._ended = self._ended or mark in self.format.ends
                behind = at + len(mark)
                if mark == self.format.id_mark and (behind := text.find("<", behind)) < 0:
                    return _Next.UNCLEAR, at, None
                at = behind
                continue
            if text[at] in self._first_signs:
                written = _compact(text[at : at + _LONGEST_HEAD + 1]).replace("'", '"')
                if heads := [head for head in self._heads if written.startswith(head)]:
                    return _Next.HEAD, at, self._heads[max(heads, key=len)]
                if len(text) - at <= _LONGEST_HEAD and any(head.startswith(written) for head in self._heads):
                    return _Next.UNCLEAR, at, None
            if text[at] not in between:
                return _Next.TEXT, at, None
            at += 1
        return _Next.UNCLEAR, at, None


def _blank(pieces: Sequence[TextPiece]) -> bool:
    return all(text.isspace() for text, _ in pieces)


def _behind(pieces: Sequence[TextPiece], at: int) -> list[TextPiece]:
    """Return pieces without their first `at` characters."""
    kept = []
    for text, special in pieces:
        if at < len(text):
            kept.append((text[at:], special))
        at = max(0, at - len(text))
    return kept


def _place(text: str, at: int, length: int) -> int:
    """Return the place behind `length` signs from `at` on, blanks not counted."""
    while length:
        length -= not text[at].isspace()
        at += 1
    return at

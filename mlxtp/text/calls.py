"""Reader of tool calls in a model's text. Pure, except for random ids.

A call begins with an offered tool's name in the family's syntax. Everything else is text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property, lru_cache
from typing import Any

from .call_syntax import CallBody, CallSyntax, NamedSyntax, compact
from .conversation import Tool

_LONGEST_HEAD = 1000  # characters of a call up to its tool's name
_BETWEEN = ";,[]}"  # signs that, besides white space, may separate two calls
_FENCES = ("```json", "```python", "```")  # of Markdown, around calls

TextPiece = tuple[str, bool]  #: text; True if it is one special token


@dataclass(frozen=True, slots=True)
class CallText:
    """A piece of call number `index`. Its first piece has `id` and `name`, but no text."""

    index: int
    text: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A family's format: calls between one of `starts` and one of `ends`, or the answer's end."""

    name: str
    starts: tuple[str, ...]  #: Templates write the first.
    ends: tuple[str, ...]  #: Grammars write the first, templates the last.
    syntaxes: tuple[CallSyntax, ...]
    #: Beginnings of a call without `starts`, with `{}` for the tool's name. `JsonSyntax` then needs an end.
    direct: tuple[str, ...] = ()
    bare: str = ""  #: An answer that begins with one of these signs may also be a call.
    streams: bool = False  #: JSON arguments are passed on as they arrive.
    past: str = '{"name": "NAME", "arguments": ARGUMENTS}'  #: a call without markers
    id_mark: str = ""  #: precedes an id that the model wrote
    addressed: bool = False  #: A call is a message to a tool.

    @property
    def start(self) -> str:
        return self.starts[0] if self.starts else ""

    @property
    def end_mark(self) -> str:
        return self.ends[0] if self.ends else ""

    def beside(self, other: CallFormat) -> CallFormat:
        pairs = {name: getattr(self, name) + getattr(other, name) for name in ("starts", "ends", "syntaxes")}
        both: dict[str, Any] = {name: tuple(dict.fromkeys(values)) for name, values in pairs.items()}
        return replace(self, **both, streams=other.streams)

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        syntax = self.syntaxes[0]
        if isinstance(syntax, NamedSyntax) and syntax.opening == "(":
            call = f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
        else:
            object_ = json.dumps(arguments, ensure_ascii=False)
            call = self.past.replace("NAME", name).replace("ARGUMENTS", object_)
        return f"{self.start}{call}{self.ends[-1] if self.ends else ''}"


_CallHead = tuple[int, CallSyntax, str]  # length that the body skips, syntax, the tool's name


class _OfferedCalls:
    """Beginnings of calls of tools with these names, in a model's format. `markers`: their first texts."""

    def __init__(self, format_: CallFormat, names: Sequence[str]) -> None:
        self._heads: dict[str, _CallHead] = {
            text: (length, syntax, name)
            for syntax in reversed(format_.syntaxes)
            for name in names
            for text, length in syntax.heads(name)
        }
        self._first_signs = {sign for head in self._heads for sign in (head[0], head[0].replace('"', "'"))}
        direct = [text.replace("{}", name) for text in format_.direct for name in names]
        self.markers = [*format_.starts, *dict.fromkeys(direct)]

    def holds(self, token: str) -> bool:
        return any(token in head for head in self._heads)

    def head(self, text: str, at: int) -> tuple[bool, _CallHead | None]:
        """Return whether it is clear if a call begins at this place, and the call's head if one does."""
        if text[at] in self._first_signs:
            written = compact(text[at : at + _LONGEST_HEAD + 1]).replace("'", '"')
            if heads := [head for head in self._heads if written.startswith(head)]:
                return True, self._heads[max(heads, key=len)]
            if len(text) - at <= _LONGEST_HEAD and any(head.startswith(written) for head in self._heads):
                return False, None
        return True, None


_offered = lru_cache(maxsize=16)(_OfferedCalls)  # clients offer the same tools at every turn


class _Pieces(list[TextPiece]):
    """Pieces that are only appended, so that each length is counted once."""

    _counted = _chars = 0

    @property
    def chars(self) -> int:
        self._chars += sum(len(text) for text, _ in self[self._counted :])
        self._counted = len(self)
        return self._chars


class ReaderState(Enum):
    OPEN = auto()
    CLOSED = auto()  #: after a call. `rest` has the unused text.
    REFUSED = auto()  #: It was no call. `rest` has all text.


class CallReader:
    """Reader of one answer's calls, in runs: each from one of `markers` up to other text.

    `forced`: a grammar guarantees a JSON call. `most`: calls to read; 0 for all. A `str` that it yields is
    text of the answer.
    """

    def __init__(
        self, format_: CallFormat, tools: Sequence[Tool], forced: bool = False, most: int = 0
    ) -> None:
        self._tools = {name: tool for tool in tools for name in (*tool.aliases, tool.name)}
        self.format = format_
        self.forced = forced
        self.most = most
        self.complete = 0  #: calls read to their end
        self._ids: list[str] = []  # of all calls
        self.state = ReaderState.CLOSED
        self.rest: list[TextPiece] = []
        self.marker = ""  #: began the run
        self._first = True  # the run has no certain call yet
        self._ended = False  # one of the format's ends follows the last call
        self._raw = _Pieces()  # the run after its last certain call
        self._pending: list[TextPiece] = []  # the part of `_raw` whose meaning is not clear
        self._specials = _Pieces()  # last tokens: they may end the answer, even inside a string
        self._body: CallBody | None = None

    def another(self) -> CallReader:
        return CallReader(self.format, list(self._tools.values()))

    @cached_property
    def _offered(self) -> _OfferedCalls:
        return _offered(self.format, tuple(self._tools))

    @property
    def markers(self) -> list[str]:
        return [] if self.forced else self._offered.markers

    def offers(self, name: str) -> bool:
        return name in self._tools

    @property
    def held(self) -> int:
        return self._raw.chars + self._specials.chars if self._first else 0

    @property
    def _direct(self) -> bool:
        return bool(self.marker) and self.marker not in self.format.starts

    @property
    def _needs_end(self) -> bool:
        return self._direct and self._body is not None and not self._body.is_call

    @property
    def enough(self) -> bool:
        return 0 < self.most <= self.complete

    @property
    def _in_doubt(self) -> bool:
        """True if later text decides whether this is a call, or is over."""
        return self._body is not None and (self._body.done or self._body.doubtful)

    def start(self, marker: str = "", special: bool = False) -> Iterator[CallText | str]:
        self.state, self.rest = ReaderState.OPEN, []
        self.marker, self._first, self._ended = marker, True, False
        self._raw = _Pieces([(marker, special)] if marker else ())
        self._pending = [(marker, special)] if self._direct else []
        self._specials, self._body = _Pieces(), None
        return self._look()

    def push(self, text: str, special: bool = False) -> Iterator[CallText | str]:
        """Read more of a run. `special`: the text is one special token."""
        self._specials.append((text, special))
        marks = (*self.format.ends, *self.format.starts)
        if special and not any(text in mark for mark in marks) and not self._offered.holds(text):
            return
        pieces, self._specials = self._specials, _Pieces()
        for piece in pieces:
            if self.enough:
                return
            if self.state is not ReaderState.OPEN:
                self.rest.append(piece)
            elif self._body is not None and not self._in_doubt:
                self._raw += [] if self._body.is_call else [piece]
                yield from self._feed(*piece)
                yield from self._look()
            else:
                self._raw.append(piece)
                if self._pending or not piece[0].isspace():
                    self._pending.append(piece)
                    yield from self._look()

    def finish(self, cut: bool) -> Iterator[CallText | str]:
        """End the run with the answer. `cut`: the budget ended the answer, not the model."""
        words = not self.marker or self._direct
        while self.state is ReaderState.OPEN and (body := self._body) is not None:
            incomplete = self._needs_end and not self._ended
            if incomplete or (cut and not body.complete and not body.streams):
                self._leave(words or incomplete)
                return
            behind = list(self._raw) if body.doubtful else []
            yield from self._end_call(body, cut)
            if self.state is ReaderState.OPEN:
                self._raw = _Pieces(behind or ([(body.rest, False)] if body.rest else ()))
                self._pending = list(self._raw)
                yield from self._look()
        if self.state is not ReaderState.OPEN:
            return
        fence = "".join([text for text, _ in self._pending]).strip() in _FENCES
        nothing = self._first or cut or self.enough or fence
        self._leave(self._first and (words or not cut), [] if nothing else self._pending)

    def _leave(self, refused: bool, rest: Sequence[TextPiece] = ()) -> None:
        """End the run. `refused`: the text after its last certain call is no call."""
        self.state = ReaderState.REFUSED if refused else ReaderState.CLOSED
        self.rest = self._raw if refused else list(rest)
        self._raw, self._body = _Pieces(), None

    def _feed(self, text: str, special: bool) -> Iterator[CallText | str]:
        """Give text to the body. If it is or may be over, the remaining text is pending."""
        body = self._body
        assert body is not None
        new = body.push(text, special and text in self.format.ends)
        tool = self._tools.get(body.name or "")
        if new and tool is not None and self.format.streams and not self._needs_end:
            if not body.streams:
                body.streams = body.is_call = True
                self._first, self._raw = False, _Pieces()
                yield self._begun(body, tool)
            yield CallText(len(self._ids) - 1, new)
        if body.end_is_own and self.most and self.complete + 1 >= self.most:
            body.close()
        if self._in_doubt:
            behind = [(body.rest, False)] if body.rest else []
            if body.done and not self._needs_end:
                yield from self._end_call(body, cut=False)
            if self._body is None or self._body.is_call:
                self._raw = _Pieces(behind)
            self._pending = [] if body.rest.isspace() else behind

    def _begun(self, body: CallBody, tool: Tool) -> CallText:
        """Return a call's first piece. A repeated id is replaced: some models count from 0 in each answer."""
        own = bool(body.id) and body.id not in self._ids
        self._ids.append(body.id if own else f"call_{secrets.token_hex(12)}")
        return CallText(len(self._ids) - 1, "", self._ids[-1], tool.name)

    def _end_call(self, body: CallBody, cut: bool) -> Iterator[CallText | str]:
        """Yield a complete call, or its last arguments. Refuse it if its tool is not offered."""
        if body.streams:
            self.complete += not cut or body.complete
            if not cut and (more := body.close()):
                yield CallText(len(self._ids) - 1, more)
        else:
            body.close()
            tool = self._tools.get(body.name or "")
            if tool is None or (not self.marker and not self.forced and not body.has_arguments):
                self._leave(refused=True)
                return
            arguments, left = body.arguments()
            yield self._begun(body, tool)
            yield CallText(len(self._ids) - 1, arguments)
            self.complete += 1
            if left:
                yield left
        self._body, self._first, self._ended = None, False, False

    def _look(self) -> Iterator[CallText | str]:
        """Interpret pending text: before a call, between two, or after a doubtful end."""
        while self.state is ReaderState.OPEN and self._pending and not self.enough:
            if self._body is not None and not self._in_doubt:
                return
            text = "".join([piece for piece, _ in self._pending])
            clear, at, head = self._next(text)
            self._pending = _behind(self._pending, at)
            body = self._body
            if body is not None and self._needs_end and self._ended:
                yield from self._end_call(body, cut=False)
                self._raw = _Pieces(self._pending)
            elif not clear:
                return
            elif self._needs_end:
                self._leave(refused=True)
            elif body is not None and (body.done or (body.end_is_own and (head or self._pending[0][1]))):
                # A value contains neither another call nor one of the model's special tokens.
                yield from self._end_call(body, cut=False)
                self._raw = _Pieces(self._pending)
            elif body is not None:
                goes_on, self._raw, self._pending = self._raw, _Pieces(), []
                yield from self._feed("".join([piece for piece, _ in goes_on]), False)
            elif head is None:
                self._leave(self._first, self._pending)
            else:
                length, syntax, name = head
                schema = self._tools[name].parameters or {}
                self._body, self._pending = syntax.body(name, schema, self.format.ends), []
                self._raw = _Pieces() if self._body.is_call else self._raw
                while length:
                    length -= not text[at].isspace()
                    at += 1
                yield from self._feed(text[at:], False)

    def _next(self, text: str) -> tuple[bool, int, _CallHead | None]:
        """Return whether the next text is clear, its place after blanks and markers, and its call if any."""
        if self._first and not self.marker and not self.forced:
            begins = next(text.lstrip()[0] for text, _ in self._raw if not text.isspace())
            if begins not in self.format.bare:
                return True, 0, None
        between = "" if self._in_doubt else "[" if self._first else _BETWEEN
        marks = [*filter(None, [self.format.id_mark])]
        marks += () if self.format.addressed else self.format.starts
        marks += () if self._in_doubt else _FENCES
        marks += () if self._first and not self._in_doubt else self.format.ends
        at = 0
        while at < len(text):
            if any(len(mark) > len(text) - at and mark.startswith(text[at:]) for mark in marks):
                return False, at, None
            if mark := max([mark for mark in marks if text.startswith(mark, at)], key=len, default=""):
                self._ended = self._ended or mark in self.format.ends
                behind = at + len(mark)
                if mark == self.format.id_mark and (behind := text.find("<", behind)) < 0:
                    return False, at, None
                at = behind
            elif text[at].isspace():
                at += 1
            else:
                clear, head = self._offered.head(text, at)
                if head or not clear or text[at] not in between:
                    return clear, at, head
                at += 1
        return False, at, None


def _behind(pieces: Sequence[TextPiece], at: int) -> list[TextPiece]:
    kept = []
    for text, special in pieces:
        if at < len(text):
            kept.append((text[at:], special))
        at = max(0, at - len(text))
    return kept

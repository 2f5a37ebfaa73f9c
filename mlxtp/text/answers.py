"""Streaming parser that separates a model's thoughts, text and calls. Pure.

Markers may come in any pieces; text that could be the beginning of one waits. Special tokens are not shown,
but count where a marker or a call is written with them. Stop strings count in the shown text of the answer.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from .calls import CallReader, CallText, ReaderState, TextPiece
from .markups import Markup

# --- stop strings -----------------------------------------------------------------------------------------


class StopFinder:
    """Finder of the stop string that is complete first.

    Of several that end at the same character, it finds the longest. Text that may be the beginning of a stop
    string is held back. The time is linear in the text, for any pieces and any number of stop strings: an
    automaton over all of them (Aho and Corasick, 1975) reads each character once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        #: Characters that lead to a state: so many at the text's end may belong to a stop string.
        self._depth = [0]
        self._match = [0]  #: length of the longest stop string that ends in a state; 0 for none
        self._fallback = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0
        self._held = ""
        self.found = False
        self.match = ""  #: the stop string that was found
        self.rest = ""  #: text after it in the same piece

    @property
    def held(self) -> int:
        """Number of characters that are held back."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Return the text that is certain now: up to the stop string once it is found, then nothing."""
        if self.found:
            return ""
        text, start = self._held + text, len(self._held)
        state, depth, match = self._state, self._depth, self._match
        for at in range(start, len(text)):
            state = self._step(state, text[at])
            if match[state]:
                begin = at + 1 - match[state]
                self.found, self._held = True, ""
                self.match, self.rest = text[begin : at + 1], text[at + 1 :]
                return text[:begin]
        self._state = state
        certain = len(text) - depth[state]
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return the text that was held back, as it is no stop string after all."""
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _step(self, state: int, character: str) -> int:
        while character not in self._next[state] and state:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
                self._fallback.append(0)
            state = self._next[state][character]
        self._match[state] = self._depth[state]

    def _link(self) -> None:
        """Set the fallback of each state, the longest other one that it ends with, short states first."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self._step(self._fallback[state], character)
                states.append(child)
            self._match[state] = self._match[state] or self._match[self._fallback[state]]


# --- headers of gpt-oss -----------------------------------------------------------------------------------

_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")


class Address(NamedTuple):
    """Address of a gpt-oss message: the tool that it is for, or empty, and whether it is a thought."""

    recipient: str
    thought: bool


def address_of(header: str) -> Address:
    """Return the address in a header, whose special tokens are left out.

    The recipient stands in the role (`assistant to=functions.f commentary json`) or in the channel
    (`assistant commentary to=functions.f json`), which may be `analysis` as well.
    """
    found = _RECIPIENT.search(header)
    recipient = found[1] if found else ""
    return Address(recipient, recipient == "self" or "analysis" in header.split())


def opens_header(text: str) -> bool | None:
    """Return True if the first words continue the header that the prompt began; None if not clear yet."""
    return None if len(text) < len("to=") and "to=".startswith(text) else text.startswith("to=")


# --- the parser -------------------------------------------------------------------------------------------


class PartKind(Enum):
    """Kind of a piece of an answer.

    Headers are no parts: they only announce the kind of the text after them.
    """

    SAID = auto()
    THOUGHT = auto()
    CALL = auto()
    HEADER = auto()


class AnswerPart(NamedTuple):
    """Piece of an answer; a piece of a call in `call`, everything else in `text`."""

    kind: PartKind
    text: str = ""
    call: CallText | None = None


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """Reading plan of one answer.

    `forced`: nothing but a call may come. `calls` None: no calls are looked for. `dropped`: calls are left
    out.
    """

    markup: Markup
    thinking: bool = False
    calls: CallReader | None = None
    forced: bool = False
    dropped: bool = False


LONG_TEXT = 4000  #: characters
MOST_LONG_TEXTS = 8  #: so many long texts that only began like calls; then no more are looked for


class AnswerParser:
    """Parser of one answer, up to the first of the stop strings that `stops` finds in its text.

    White space around markers belongs to none of the channels.
    """

    def __init__(self, plan: ReadingPlan, stops: StopFinder | None = None) -> None:
        self._markup = plan.markup
        self._reader = plan.calls
        self._dropped = plan.dropped
        self._shown = _ShownParts(stops, plan.dropped)
        self._finders: dict[PartKind, StopFinder] = {}
        #: Length of the pieces that the finder holds, and whether they are special tokens.
        self._pieces: deque[tuple[int, bool]] = deque()
        self._unread: deque[TextPiece] = deque()
        self._beginning = _Held()  #: first words of gpt-oss, which may continue the header of its prompt
        self._first_words = ""  #: the same without the white space before them
        self._opens_header = bool(plan.markup.headers) and not plan.thinking and not plan.forced
        self._leading = _Held()  #: white space at the beginning, shown if text comes after it
        self._bare = False  #: The next text is shown without the white space before it.
        self._spoken = False  #: Text came since the beginning, the last call or the last header.
        self._answered = False  #: There is text of the answer, or a call.
        self._header = _Held()
        self._opened = ""  #: white space before the calls that are read
        self._doubted: _DoubtedCalls | None = None
        self._last_resort: list[CallText] = []  #: calls in a thought that ended with them
        self._long_texts = 0  #: long texts that began like calls and were none
        self._enter(PartKind.THOUGHT if plan.thinking else PartKind.SAID, after_marker=plan.thinking)
        if not plan.thinking:
            self._begin_bare()

    @property
    def held(self) -> int:
        """Number of characters that wait for further text."""
        held = self._finder.held + len(self._beginning) + len(self._leading) + self._shown.held
        if self._doubted is not None:
            return held + len(self._doubted.text)
        return held + (self._reader.held if self._reader is not None and self._kind is PartKind.CALL else 0)

    @property
    def thinking(self) -> bool:
        """True if the next text is a thought."""
        return self._kind is PartKind.THOUGHT

    @property
    def calls(self) -> int:
        """Number of complete calls."""
        return 0 if self._reader is None else self._reader.complete

    def push(self, text: str, special: bool = False) -> Iterator[AnswerPart]:
        """Yield the parts that are certain now. `special`: this is one special token."""
        if not text:
            return
        yield from self._shown.pass_on(self._begin(text, special))

    def finish(self, cut: bool) -> Iterator[AnswerPart]:
        """Yield the rest, up to a stop string. `cut`: the budget was used up, not the answer complete."""
        yield from self._shown.pass_on(self._rest(cut))
        yield from self._shown.finish()

    def _begin(self, text: str, special: bool) -> Iterator[AnswerPart]:
        """Hold the first words of gpt-oss until their kind is clear, because they may continue a header."""
        if not self._opens_header or (special and not len(self._beginning)):
            self._opens_header = False
            yield from self._read((text, special))
            return
        if special:
            yield from self._decide(False)
            yield from self._read((text, special))
            return
        self._beginning.add(text)
        self._first_words = (self._first_words + text).lstrip()
        opens = opens_header(self._first_words) if self._first_words else None
        if opens is not None:
            yield from self._decide(opens)

    def _decide(self, opens: bool) -> Iterator[AnswerPart]:
        self._opens_header = False
        if opens:
            self._enter(PartKind.HEADER)
        yield from self._read((self._beginning.take(), False))

    def _read(self, *pieces: TextPiece) -> Iterator[AnswerPart]:
        self._unread.extend(pieces)
        while self._unread:
            text, special = self._unread.popleft()
            if self._kind is PartKind.CALL:
                assert self._reader is not None
                yield from self._called(self._reader.push(text, special))
            elif self._doubted is not None:
                yield from self._doubt(self._doubted, text, special)
            else:
                yield from self._find(text, special)

    def _find(self, text: str, special: bool) -> Iterator[AnswerPart]:
        """Read text up to the next marker."""
        self._pieces.append((len(text), special))
        certain = self._finder.push(text)
        yield from self._show(self._take(len(certain)), certain)
        if self._finder.found:
            rest, marker = self._finder.rest, self._finder.match
            pieces = self._take(len(marker))
            self._return(_cut(self._take(len(rest)), rest))
            yield from self._pass(pieces, marker)

    def _return(self, pieces: Sequence[TextPiece]) -> None:
        """Put pieces back, to be read next."""
        self._unread.extendleft(reversed(pieces))

    def _rest(self, cut: bool) -> Iterator[AnswerPart]:
        if len(self._beginning):
            yield from self._decide(False)
        while self._kind is PartKind.CALL or self._doubted is not None:
            if self._doubted is not None:
                yield from self._end_doubt(self._doubted, cut)
            else:
                assert self._reader is not None
                yield from self._called(self._reader.finish(cut))
            yield from self._read()
        rest = self._finder.finish()
        pieces = self._take(len(rest))
        if not (cut and len(rest) > 1):  # the budget cut a marker, not words; "<" alone may be words
            yield from self._show(pieces, rest)
        if self._kind is PartKind.SAID and (space := self._leading.take()):
            yield AnswerPart(PartKind.SAID, space)
        elif self._kind is PartKind.HEADER and not cut and (words := self._header.take().strip()):
            yield AnswerPart(PartKind.SAID, words)
        if not cut and not self._answered:  # the client has nothing else to go on
            yield from (AnswerPart(PartKind.CALL, call=call) for call in self._last_resort)

    def _enter(self, kind: PartKind, after_marker: bool = True) -> None:
        self._kind = kind
        self._leading.take()
        self._bare = after_marker
        if kind not in self._finders:
            self._finders[kind] = StopFinder(self._markers(kind))
        self._finder = copy(self._finders[kind])

    def _markers(self, kind: PartKind) -> list[str]:
        think = self._markup.think
        if kind is PartKind.HEADER:
            return [self._markup.header_end]
        found = [*(think or ()), *(self._markup.wrappers if kind is PartKind.SAID else ())]
        if self._markup.headers:
            found = [*self._markup.headers] if kind is PartKind.SAID else found[1:]
        addressed = self._reader is None or self._reader.format.addressed
        reads = not addressed and self._long_texts < MOST_LONG_TEXTS
        return [*found, *self._reader.markers] if self._reader is not None and reads else found

    def _pass(self, pieces: list[tuple[int, bool]], marker: str) -> Iterator[AnswerPart]:
        """Go on behind a marker."""
        special = all(special for _, special in pieces)
        opens, closes = self._markup.think or ("", "")
        if self._kind is PartKind.THOUGHT and marker == closes:
            self._end_thought()
        elif self._kind is PartKind.THOUGHT and marker == opens:
            if self._bare:  # at its beginning it is that of the prompt again
                self._enter(PartKind.THOUGHT)
            else:
                yield from self._word(marker)
        elif self._kind is PartKind.THOUGHT and self._reader is not None:
            self._doubted = _DoubtedCalls(self._reader.another(), closes, "" if special else marker)
            yield from self._doubt_more(self._doubted, self._doubted.reader.start(marker, special))
        elif self._markup.headers and marker in (*self._markup.headers, self._markup.header_end):
            if not special:  # written in letters
                yield from self._word(marker)
            elif self._kind is PartKind.HEADER:
                yield from self._address()
            else:
                self._spoken = False
                self._enter(PartKind.HEADER)
        elif marker == opens and not self._spoken:  # a model thinks before it speaks
            self._enter(PartKind.THOUGHT)
        elif marker in (opens, closes) and self._answered:
            yield from self._word(marker)
        elif marker == closes:  # of a thought that was left out
            self._enter(PartKind.SAID)
        elif marker in self._markup.wrappers:
            self._enter(PartKind.SAID, after_marker=not self._spoken)
            yield AnswerPart(PartKind.HEADER)
        else:
            yield from self._begin_calls(marker, special)

    def _end_thought(self) -> None:
        self._enter(PartKind.SAID)
        self._begin_bare()

    def _word(self, marker: str, special: bool = False) -> Iterator[AnswerPart]:
        """Yield a marker that is none, but text like any other."""
        self._finder = copy(self._finders[self._kind])
        yield from self._show([(len(marker), special)], marker)

    def _address(self) -> Iterator[AnswerPart]:
        """Enter the kind that a complete header announces: a call, a thought, or text."""
        address = address_of(self._header.take())
        self._enter(PartKind.THOUGHT if address.thought else PartKind.SAID)
        name = address.recipient.removeprefix("functions.")
        reader = self._reader
        if reader is not None and reader.format.addressed and reader.offers(name):
            yield from self._begin_calls(reader.format.start, True)
            yield from self._read((f"{name}{self._markup.header_end}", False))

    # --- calls

    def _begin_bare(self) -> None:
        """Read calls at the beginning of an answer, where they may stand without a marker."""
        if self._reader is not None and (self._reader.forced or self._reader.format.bare):
            for _ in self._begin_calls("", False):
                raise AssertionError("nothing was read yet")

    def _begin_calls(self, marker: str, special: bool) -> Iterator[AnswerPart]:
        assert self._reader is not None
        self._opened = self._leading.take()
        self._kind = PartKind.CALL
        yield from self._called(self._reader.start(marker, special))

    def _called(self, pieces: Iterable[CallText | str]) -> Iterator[AnswerPart]:
        """Yield what the reader of calls found. Text that is no call after all becomes text of the answer."""
        reader = self._reader
        assert reader is not None
        for piece in pieces:
            self._answered = True
            if isinstance(piece, CallText):
                yield AnswerPart(PartKind.CALL, call=piece)
            elif not self._dropped:
                yield AnswerPart(PartKind.SAID, piece)
        if reader.state is ReaderState.CLOSED:
            self._spoken = False
            self._enter(PartKind.SAID)
            self._return(reader.rest)
        elif reader.state is ReaderState.REFUSED:
            rest = self._counted(reader.rest)
            self._enter(PartKind.SAID, self._bare)
            self._leading.add(self._opened)
            if reader.marker and rest:
                yield from self._word(*rest.pop(0))
            self._return(rest)

    def _counted(self, refused: Sequence[TextPiece]) -> list[TextPiece]:
        """Count a long text that began like a call, so that reading such texts again stays linear."""
        if sum(len(text) for text, _ in refused) > LONG_TEXT:
            self._long_texts += 1
            if self._long_texts == MOST_LONG_TEXTS:
                self._finders.clear()
        return list(refused)

    def _doubt(self, doubted: _DoubtedCalls, text: str, special: bool) -> Iterator[AnswerPart]:
        """Read calls within a thought, which counts as a thought if it goes on behind them."""
        ends, certain = special and text == doubted.closes, "" if special else doubted.finder.push(text)
        if ends or doubted.finder.found:
            ends = True
            self._return(
                [(doubted.closes, special), *([(doubted.finder.rest, False)] if not special else [])]
            )
        doubted.text += certain
        if special and not ends:
            certain = text
        if certain:
            yield from self._doubt_more(doubted, doubted.reader.push(certain, special))
        if ends and self._doubted is doubted:
            if not doubted.reader.reads:
                doubted.take(doubted.reader.finish(cut=False))
                self._last_resort = doubted.calls
            yield from self._no_doubt(doubted.text)

    def _doubt_more(self, doubted: _DoubtedCalls, pieces: Iterable[CallText | str]) -> Iterator[AnswerPart]:
        doubted.take(pieces)
        reader = doubted.reader
        if reader.state is ReaderState.CLOSED:
            yield from self._no_doubt(doubted.text + doubted.finder.finish())
        elif reader.state is ReaderState.REFUSED:
            (marker, special), *rest = self._counted(reader.rest)
            yield from self._no_doubt("" if special else marker)
            self._return(rest)

    def _no_doubt(self, text: str) -> Iterator[AnswerPart]:
        """Go on in the thought behind this text of it."""
        self._doubted = None
        self._enter(PartKind.THOUGHT, self._bare)
        yield from self._show([(len(text), False)], text)

    def _end_doubt(self, doubted: _DoubtedCalls, cut: bool) -> Iterator[AnswerPart]:
        """Yield the calls with which a thought, and the answer, ended."""
        assert self._reader is not None
        doubted.take(doubted.reader.finish(cut))
        if doubted.reader.complete and not self._answered:
            self._answered, self._doubted = True, None
            self._reader.complete += doubted.reader.complete
            yield from (AnswerPart(PartKind.CALL, call=call) for call in doubted.calls)
        else:
            yield from self._no_doubt(doubted.text + doubted.finder.finish())

    # --- what is shown

    def _show(self, pieces: list[tuple[int, bool]], text: str) -> Iterator[AnswerPart]:
        if any(special for _, special in pieces):
            text = _without_special(pieces, text, " " if self._kind is PartKind.HEADER else "")
        if self._kind is PartKind.HEADER:
            self._header.add(text)
            return
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        elif self._kind is PartKind.SAID and not self._spoken:
            self._leading.add(text)
            text = self._leading.take() if text.strip() else ""
        if text:
            said = self._kind is PartKind.SAID
            self._spoken, self._answered = self._spoken or said, self._answered or said
            yield AnswerPart(self._kind, text)

    def _take(self, count: int) -> list[tuple[int, bool]]:
        """Return the next `count` characters of the pushed text, as pieces."""
        taken = []
        while count:
            length, special = self._pieces.popleft()
            if length > count:
                self._pieces.appendleft((length - count, special))
                length = count
            taken.append((length, special))
            count -= length
        return taken


@dataclass(slots=True)
class _DoubtedCalls:
    """Calls in a thought, and their text. `closes` ends the thought."""

    reader: CallReader
    closes: str
    text: str
    finder: StopFinder = field(init=False)
    calls: list[CallText] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.finder = StopFinder((self.closes,))

    def take(self, pieces: Iterable[CallText | str]) -> None:
        self.calls += [piece for piece in pieces if isinstance(piece, CallText)]


class _ShownParts:
    """Filter of parts: up to the first stop string, without white space around markers."""

    def __init__(self, stops: StopFinder | None, dropped: bool) -> None:
        self._stops = stops
        self._dropped = dropped
        self._trailing = _Held()  #: White space that is shown if more of the kind of the last part comes.
        self._last = PartKind.SAID

    @property
    def held(self) -> int:
        return len(self._trailing)

    def pass_on(self, parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
        yield from self._trimmed(self._stopping(parts))
        if self._stops is not None and self._stops.found:
            yield from self.finish()

    def finish(self) -> Iterator[AnswerPart]:
        """Yield the text that was held back and may be shown, at the end of the answer."""
        yield from self._trimmed(self._released())
        space = self._trailing.take()
        if space and self._last is PartKind.SAID:
            yield AnswerPart(PartKind.SAID, space)

    def _stopping(self, parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
        """Yield the parts up to a stop string in the text of the answer."""
        for part in parts:
            if self._stops is None:
                yield part
            elif self._stops.found:
                return
            elif part.kind is not PartKind.SAID:
                yield from self._released()
                yield part
            elif text := self._stops.push(part.text):
                yield AnswerPart(PartKind.SAID, text)

    def _released(self) -> Iterator[AnswerPart]:
        """Yield text that could have become a stop string. None reaches across a thought or a call."""
        held = "" if self._stops is None or self._stops.found else self._stops.finish()
        if held:
            yield AnswerPart(PartKind.SAID, held)

    def _trimmed(self, parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
        for part in parts:
            if part.kind is not self._last:
                self._trailing.take()
                self._last = part.kind
            shown = part.text.rstrip()
            if shown:
                yield AnswerPart(part.kind, self._trailing.take() + shown)
            elif part.call is not None and not self._dropped:
                yield part
            self._trailing.add(part.text[len(shown) :])


class _Held:
    """Text in pieces, because joining them at each new one would take quadratic time."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._length += len(text)

    def take(self) -> str:
        """Return all of it and empty it."""
        text = "".join(self._pieces)
        self._pieces, self._length = [], 0
        return text


def _without_special(pieces: list[tuple[int, bool]], text: str, instead: str) -> str:
    return "".join([instead if special else piece for piece, special in _cut(pieces, text)])


def _cut(pieces: Sequence[tuple[int, bool]], text: str) -> list[TextPiece]:
    """Return the text in pieces of these lengths."""
    cut, at = [], 0
    for length, special in pieces:
        cut.append((text[at : at + length], special))
        at += length
    return cut

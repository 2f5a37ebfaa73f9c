"""Streaming parser that separates a model's thoughts, text and calls. Pure.

Text that may begin a marker is held back. Special tokens are not shown, but the markers and calls that they
spell count. A stop string counts only in the shown text of the answer.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import chain
from typing import NamedTuple

from ..errors import RequestError
from .calls import CallReader, CallText, ReaderState, TextPiece
from .markups import Markup

# --- stop strings -----------------------------------------------------------------------------------------


class StopFinder:
    """Search for the first complete stop string, the longest at its end. Linear (Aho, Corasick, 1975)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        #: Length of a state's prefix: that many last characters may belong to a stop string.
        self._depth = [0]
        self._match = [0]  #: length of the longest stop string that ends in a state; 0 for none
        self._fallback = [0]  #: state of the longest proper suffix
        for stop in stops:
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
        states = deque(self._next[0].values())
        while states:  # breadth first, as fallbacks are shorter
            state = states.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self._step(self._fallback[state], character)
                states.append(child)
            self._match[state] = self._match[state] or self._match[self._fallback[state]]
        self._state = 0
        self._held = ""
        self.found = False
        self.match = ""  #: the stop string that was found
        self.rest = ""  #: text after it in the same piece

    @property
    def held(self) -> int:
        return len(self._held)

    def push(self, text: str) -> str:
        """Return the text that is certain by now. After the stop string there is none."""
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
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, state: int, character: str) -> int:
        while character not in self._next[state] and state:
            state = self._fallback[state]
        return self._next[state].get(character, 0)


# --- the parser -------------------------------------------------------------------------------------------

_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")


class PartKind(Enum):
    """Kind of a piece of an answer. A header has no text and only separates its neighbors."""

    SAID = auto()
    THOUGHT = auto()
    CALL = auto()
    HEADER = auto()


class AnswerPart(NamedTuple):
    kind: PartKind
    text: str = ""
    call: CallText | None = None  #: a piece of a call; everything else is in `text`


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    markup: Markup
    thinking: bool = False
    calls: CallReader | None = None  #: None: calls are not searched for.
    dropped: bool = False  #: Calls are omitted.


LONG_TEXT = 4000  #: characters
#: After so many long texts that only began like calls, the rest is not searched: this keeps the time linear.
MOST_LONG_TEXTS = 8


class AnswerParser:
    """Parser of one answer, up to a stop string in its text. It drops white space around markers."""

    def __init__(self, plan: ReadingPlan, stops: StopFinder | None = None) -> None:
        self._markup = plan.markup
        self._reader = plan.calls
        self._shown = _ShownParts(stops, plan.dropped)
        self._finders: dict[tuple[PartKind, bool], StopFinder] = {}
        self._unread: deque[TextPiece] = deque()
        self._waiting = _HeldText()  #: white space to show if text follows, or the words of a header
        self._bare = False  #: The next text is shown without white space before it.
        self._spoken = False  #: There was text since the beginning, the last call or the last header.
        self._answered = False  #: There was text of the answer, or a call.
        self._thought: list[TextPiece] = []
        self._long_texts = 0  #: long texts that began like calls but were not
        self._enter(PartKind.THOUGHT if plan.thinking else PartKind.SAID, after_marker=plan.thinking)
        forced = plan.calls is not None and plan.calls.forced
        free = bool(plan.markup.headers) and not plan.thinking and not forced
        self._opening: list[TextPiece] | None = [] if free else None  #: held until its meaning is clear
        self._first_words = ""  #: gpt-oss may continue the header that the prompt began
        if not plan.thinking:
            self._begin_bare()

    def begin_with(self, pieces: Sequence[TextPiece]) -> None:
        """Read the beginning of an answer, which the client gave. Of that only an open call is shown.

        Raises RequestError if it has a whole call.
        """
        self._opening = None
        read = chain.from_iterable(map(self._read, pieces))
        self._shown.begun = [part for part in read if part.call is not None]
        if self._reader is not None and self._reader.complete:
            why = "the last message, the assistant's, has a whole call in its text, which needs a result"
            raise RequestError(f"{why}; send it in tool_calls, with its result", param="messages")
        text = "".join([text for text, _ in pieces])
        self._shown.known = text[len(text) - self.held :]

    @property
    def held(self) -> int:
        waiting = [self._finder.held, len(self._waiting), self._shown.held, len(self._first_words)]
        if self._kind is PartKind.CALL and self._reader is not None:
            waiting.append(self._reader.held)
        return sum(waiting)

    @property
    def thinking(self) -> bool:
        return self._kind is PartKind.THOUGHT

    def push(self, text: str, special: bool = False) -> Iterator[AnswerPart]:
        """Yield the parts that are certain by now. `special`: the text is one special token."""
        if not text:
            return
        if self._opening is None:
            yield from self._shown.pass_on(self._read((text, special)))
            return
        self._opening.append((text, special))
        self._first_words = words = (self._first_words + text * (not special)).lstrip()
        if special or words.startswith("to=") or not "to=".startswith(words):
            yield from self._shown.pass_on(self._begin(words.startswith("to=")))

    def finish(self, cut: bool) -> Iterator[AnswerPart]:
        """Yield the rest, up to a stop string. `cut`: the budget ended the answer, not the model."""
        yield from self._shown.pass_on(self._rest(cut))
        yield from self._shown.finish()

    def _begin(self, opens: bool) -> Iterator[AnswerPart]:
        pieces, self._opening, self._first_words = self._opening or [], None, ""
        if opens:
            self._enter(PartKind.HEADER)
        return self._read(*pieces)

    def _read(self, *pieces: TextPiece) -> Iterator[AnswerPart]:
        self._unread.extend(pieces)
        while self._unread:
            text, special = self._unread.popleft()
            if self._kind is PartKind.CALL:
                assert self._reader is not None
                yield from self._called(self._reader.push(text, special))
            else:
                finder = self._finder
                yield from self._show(finder.push(text, special))
                if finder.marker:
                    self._unread.extendleft(reversed(finder.rest))
                    special = all(special for _, special in finder.marker)
                    yield from self._pass("".join([piece for piece, _ in finder.marker]), special)

    def _rest(self, cut: bool) -> Iterator[AnswerPart]:
        if self._opening is not None:
            yield from self._begin(False)
        while (reader := self._reader) is not None and self._kind is PartKind.CALL:
            yield from self._called(reader.finish(cut))
            yield from self._read()
        rest = self._finder.finish()
        if not (cut and sum(len(text) for text, _ in rest) > 1):  # a cut marker; "<" alone may be text
            yield from self._show(rest)
        waiting = self._waiting.take()
        if self._kind is PartKind.HEADER:
            waiting = "" if cut else waiting.strip()
        if waiting:
            yield AnswerPart(PartKind.SAID, waiting)
        if not self._answered and (self._kind is PartKind.THOUGHT or not cut):
            yield from self._calls_in_thought(cut)

    # --- markers

    def _enter(self, kind: PartKind, after_marker: bool = True) -> None:
        self._kind = kind
        self._waiting.take()
        self._bare = after_marker
        self._find()

    def _find(self) -> None:
        key = self._kind, self._long_texts < MOST_LONG_TEXTS
        if key not in self._finders:
            self._finders[key] = StopFinder(_markers(self._markup, self._reader if key[1] else None, key[0]))
        self._finder = _MarkerFinder(self._finders[key])

    def _pass(self, marker: str, special: bool) -> Iterator[AnswerPart]:
        headers = (*self._markup.headers, self._markup.header_end) if self._markup.headers else ()
        opens, closes = self._markup.think or ("", "")
        if self._kind is PartKind.THOUGHT:
            yield from self._pass_in_thought(marker, special)
        elif marker in headers and special and self._kind is PartKind.HEADER:
            yield from self._address()
        elif marker in headers and special:
            self._spoken = False
            self._enter(PartKind.HEADER)
        elif marker == opens and not self._spoken:  # a model thinks before it speaks
            self._enter(PartKind.THOUGHT)
        elif marker in headers or (marker in (opens, closes) and self._answered):  # spelled as text
            yield from self._word(marker)
        elif marker == closes:  # the thought before it was omitted
            self._enter(PartKind.SAID)
        elif marker in self._markup.wrappers:
            self._enter(PartKind.SAID, after_marker=not self._spoken)
            yield AnswerPart(PartKind.HEADER)
        else:
            yield from self._begin_calls(marker, special)

    def _pass_in_thought(self, marker: str, special: bool) -> Iterator[AnswerPart]:
        opens, closes = self._markup.think or ("", "")
        if marker == closes:
            self._enter(PartKind.SAID)
            self._begin_bare()
        elif marker == opens and self._bare:  # it repeats the marker that ends the prompt
            self._enter(PartKind.THOUGHT)
        elif marker in self._markup.headers and special:  # the model did not close its thought
            self._enter(PartKind.HEADER)
        else:
            yield from self._word(marker)

    def _word(self, marker: str, special: bool = False) -> Iterator[AnswerPart]:
        self._find()
        return self._show([(marker, special)])

    def _address(self) -> Iterator[AnswerPart]:
        """Enter the kind that a complete header announces: a call, a thought, or text.

        The recipient follows the role (`assistant to=functions.f commentary json`) or the channel
        (`assistant commentary to=functions.f json`). The channel may also be `analysis`.
        """
        header = self._waiting.take()
        recipient = found[1] if (found := _RECIPIENT.search(header)) else ""
        thought = recipient == "self" or "analysis" in header.split()
        self._enter(PartKind.THOUGHT if thought else PartKind.SAID)
        name, reader = recipient.removeprefix("functions."), self._reader
        if reader is not None and reader.format.addressed and reader.offers(name):
            yield from self._begin_calls(reader.format.start, True)
            yield from self._read((f"{name}{self._markup.header_end}", False))

    # --- calls

    def _begin_bare(self) -> None:
        """Read calls at the beginning of an answer, if they need no marker there."""
        if self._reader is not None and (self._reader.forced or self._reader.format.bare):
            for _ in self._begin_calls("", False):
                raise AssertionError("nothing was read yet")

    def _begin_calls(self, marker: str, special: bool) -> Iterator[AnswerPart]:
        assert self._reader is not None
        self._kind = PartKind.CALL
        return self._called(self._reader.start(marker, special))

    def _called(self, pieces: Iterable[CallText | str]) -> Iterator[AnswerPart]:
        """Yield the reader's calls. Text that proves to be no call becomes text of the answer."""
        reader = self._reader
        assert reader is not None
        for piece in pieces:
            self._answered = True
            if isinstance(piece, CallText):
                yield AnswerPart(PartKind.CALL, call=piece)
            elif not self._shown.dropped:
                yield AnswerPart(PartKind.SAID, piece)
        if reader.state is ReaderState.CLOSED:
            self._spoken = False
            self._enter(PartKind.SAID)
            self._unread.extendleft(reversed(reader.rest))
        elif reader.state is ReaderState.REFUSED:
            self._long_texts += sum(len(text) for text, _ in reader.rest) > LONG_TEXT
            space = self._waiting.take()
            self._enter(PartKind.SAID, self._bare)
            self._waiting.add(space)
            word = reader.rest.pop(0) if reader.marker and reader.rest else None
            self._unread.extendleft(reversed(reader.rest))
            if word is not None:
                yield from self._word(*word)

    def _calls_in_thought(self, cut: bool) -> Iterator[AnswerPart]:
        """Yield the calls that end a thought, if the answer has neither text nor calls."""
        reader = self._reader
        if reader is None or reader.format.addressed or not self._thought:
            return
        again = reader.another()
        inner = AnswerParser(ReadingPlan(Markup(), calls=again))
        calls: list[CallText] = []
        for part in chain(*[inner.push(*piece) for piece in self._thought], inner.finish(cut)):
            calls = [] if part.call is None else [*calls, part.call]
        for call in calls if again.complete else ():
            index = call.index - calls[0].index
            if index < reader.most or not reader.most:
                yield AnswerPart(PartKind.CALL, call=replace(call, index=index))

    # --- what is shown

    def _show(self, pieces: Sequence[TextPiece]) -> Iterator[AnswerPart]:
        header, said = self._kind is PartKind.HEADER, self._kind is PartKind.SAID
        self._thought += pieces if self._kind is PartKind.THOUGHT else ()
        text = "".join([piece if not special else " " * header for piece, special in pieces])
        if header:
            self._waiting.add(text)
            return
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        elif said and not self._spoken:
            self._waiting.add(text)
            text = self._waiting.take() if text.strip() else ""
        if text:
            self._spoken, self._answered = self._spoken or said, self._answered or said
            yield AnswerPart(self._kind, text)


def _markers(markup: Markup, reader: CallReader | None, kind: PartKind) -> list[str]:
    if kind is PartKind.HEADER:
        return [markup.header_end]
    found = [*(markup.think or ()), *(markup.wrappers if kind is PartKind.SAID else ())]
    if markup.headers:
        found = [*markup.headers, *(() if kind is PartKind.SAID else found[1:])]
    calls = reader is not None and kind is PartKind.SAID and not reader.format.addressed
    return [*found, *reader.markers] if reader is not None and calls else found


class _MarkerFinder:
    def __init__(self, finder: StopFinder) -> None:
        self._finder = copy(finder)
        self._pieces: deque[tuple[int, bool]] = deque()  # lengths of held pieces; True for special tokens
        self.marker: list[TextPiece] = []
        self.rest: list[TextPiece] = []  #: after the marker

    @property
    def held(self) -> int:
        return self._finder.held

    def push(self, text: str, special: bool) -> list[TextPiece]:
        self._pieces.append((len(text), special))
        certain = self._taken(self._finder.push(text))
        if self._finder.found:
            self.marker, self.rest = self._taken(self._finder.match), self._taken(self._finder.rest)
        return certain

    def finish(self) -> list[TextPiece]:
        return self._taken(self._finder.finish())

    def _taken(self, text: str) -> list[TextPiece]:
        taken, at = [], 0
        while at < len(text):
            length, special = self._pieces.popleft()
            if at + length > len(text):
                self._pieces.appendleft((at + length - len(text), special))
                length = len(text) - at
            taken.append((text[at : at + length], special))
            at += length
        return taken


class _ShownParts:
    """Filter that drops parts after the first stop string, and white space around markers."""

    def __init__(self, stops: StopFinder | None, dropped: bool) -> None:
        self._stops = stops
        self.dropped = dropped
        self._trailing = _HeldText()  #: white space to show if another part of the last kind follows
        self._last = PartKind.SAID
        self.begun: list[AnswerPart] = []  #: an open call that the client began
        self.known = ""  #: text that the client gave, which is still to arrive

    @property
    def held(self) -> int:
        return len(self._trailing)

    def pass_on(self, parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
        yield from self._trimmed(self._stopping(self._new(parts)))
        if self._stops is not None and self._stops.found:
            yield from self.finish()

    def finish(self) -> Iterator[AnswerPart]:
        yield from self._trimmed(self._released())
        space = self._trailing.take()
        if space and self._last is PartKind.SAID:
            yield AnswerPart(PartKind.SAID, space)

    def _new(self, parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
        """Yield the parts without text that the client gave."""
        begun, self.begun = self.begun, []
        yield from begun
        for part in parts:
            known, self.known = self.known, ""
            if not known:
                yield part
            elif part.text and known.startswith(part.text):
                self.known = known[len(part.text) :]
            else:
                yield part._replace(text=part.text.removeprefix(known))

    def _stopping(self, parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
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
        """Yield text held back for a stop string, which cannot reach across a thought or a call."""
        held = "" if self._stops is None or self._stops.found else self._stops.finish()
        if held:
            yield AnswerPart(PartKind.SAID, held)

    def _trimmed(self, parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
        for part in parts:
            if part.kind is not self._last:
                self._trailing.take()
                self._last = part.kind
            if shown := part.text.rstrip():
                yield AnswerPart(part.kind, self._trailing.take() + shown)
            elif part.call is not None and not self.dropped:
                yield part
            self._trailing.add(part.text[len(shown) :])


class _HeldText:
    """Text in pieces: joining at each new piece would take quadratic time."""

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
        text = "".join(self._pieces)
        self._pieces, self._length = [], 0
        return text

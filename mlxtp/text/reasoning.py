"""Streaming parser that separates a model's reasoning, text and calls. Pure.

A model marks its thoughts and its tool calls with markers of its own, which are read off its chat template
and vocabulary. The families' markers are those of mlx-lm's `tokenizer_utils` (0.32.2); Llama and gpt-oss are
added. Markers may come in any pieces; text that could be the beginning of one waits. Special tokens are not
shown, but count where a marker or a call is written with them. Stop strings count in the shown text of the
answer.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

from .tool_calls import CallReader, CallText, ToolFormat

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


# --- markers ----------------------------------------------------------------------------------------------


_THINK = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
)
_XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")

#: Formats in the order of the search; one needs all of the texts of any of its groups.
_CALLS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("minimax_m2", (("<minimax:tool_call>",),)),
    ("gemma4", (("<|tool_call>", "<tool_call|>"),)),
    ("function_gemma", (("<start_function_call>",),)),
    ("longcat", (("<longcat_tool_call>",),)),
    ("glm47", (("<arg_key>",),)),
    ("pythonic", (("<|tool_list_start|>",), ("<|tool_call_start|>",))),
    ("qwen3_coder", (("<tool_call>\\n<function=",), ("<tool_call>\n<function=",))),
    ("kimi_k2", (("<|tool_calls_section_begin|>",),)),
    ("minicpm5", (('<function name="', '<param name="'),)),
    ("mistral", (("[TOOL_CALLS]",),)),
    ("muse_spark", (("<atem:function_calls>",),)),
    ("json_tools", (("<tool_call>",),)),
    ("llama", (('"parameters": dictionary of argument name',), ("<|python_tag|>",))),
)


@dataclass(frozen=True, slots=True)
class Markup:
    """Markers of a model. `think`: those before and after a thought. `call`: the same of a call, or empty.

    `headers`: special tokens that begin the header of a message. `header_end` ends it. Clients never see
    headers.
    """

    think: tuple[str, str] | None = None
    call: tuple[str, str] = ("", "")
    bare_calls: bool = False
    headers: tuple[str, ...] = ()
    header_end: str = ""

    def with_calls(self, format_: ToolFormat) -> Markup:
        """Return the same for an answer in which calls are looked for."""
        return replace(self, call=(format_.start, format_.end), bare_calls=format_.bare)


def thinking_markup(vocabulary: Container[str]) -> Markup:
    """Return the markers of thoughts; none for a model that does not think aloud."""
    for start, end in _THINK:
        if start in vocabulary and end in vocabulary:
            return Markup((start, end))
    if "<|channel>" in vocabulary and "<channel|>" in vocabulary:
        return Markup(("<|channel>thought", "<channel|>"))
    if all(token in vocabulary for token in _XTML):
        return Markup(("<|open|>think<|sep|>", "<|close|>think<|sep|>"))
    if all(token in vocabulary for token in _HARMONY):
        think = ("<|channel|>analysis<|message|>", "<|end|>")
        return Markup(think, headers=("<|start|>", "<|channel|>"), header_end="<|message|>")
    return Markup()


class Address(NamedTuple):
    """Address of a gpt-oss message: the tool that it is for, or empty, and whether it is a thought."""

    recipient: str
    thought: bool


def address_of(header: str) -> Address:
    """Return the address in a header, whose special tokens are left out.

    The recipient stands in the role (`assistant to=functions.f commentary json`) or in the channel
    (`assistant commentary to=functions.f json`), which may be `analysis` as well.
    """
    recipient = _RECIPIENT.search(header)
    return Address(recipient[1] if recipient else "", "analysis" in header.split())


def opens_header(text: str) -> bool | None:
    """Return True if the first words continue the header that the prompt began; None if not clear yet."""
    return None if len(text) < len("to=") and "to=".startswith(text) else text.startswith("to=")


def call_format(template: str, vocabulary: Container[str]) -> str | None:
    """Return the name of the model's call format, or None if neither template nor vocabulary shows one."""
    for name, groups in _CALLS:
        if any(all(text in template for text in group) for group in groups):
            return name
    if all(token in vocabulary for token in _XTML):
        return "kimi_k3"
    if all(token in vocabulary for token in _HARMONY):
        return "harmony"
    if "<|tool_call_start|>" in vocabulary and "<|tool_call_end|>" in vocabulary:
        return "pythonic"
    return None


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


class ReasoningParser:
    """Parser of one answer, up to the first of the stop strings that `stops` finds in its text.

    White space around markers belongs to none of the channels.
    """

    def __init__(self, plan: ReadingPlan, stops: StopFinder | None = None) -> None:
        self._markup = plan.markup
        self._reader = plan.calls
        self._dropped = plan.dropped
        self._shown = _ShownParts(stops, plan.dropped)
        #: Length of the pieces that the finder holds, and whether they are special tokens.
        self._pieces: deque[tuple[int, bool]] = deque()
        self._finder = StopFinder(())
        #: Decides whether the first words open a header or a call; None once that is decided.
        self._opens = self._opening() if not plan.thinking and not plan.forced else None
        self._beginning = _Held()  #: first words, held until `_opens` decides
        self._first_words = ""  #: the same without the white space before them
        self._leading = _Held()  #: white space at the beginning, shown if text comes after it
        self._bare = False  #: The next text is shown without the white space before it.
        self._spoken = False  #: Text came since the beginning, the last call or the last header.
        self._header = _Held()
        self._opened = ""  #: Text before the call that is read: white space and its marker.
        kind = PartKind.CALL if plan.forced else PartKind.THOUGHT if plan.thinking else PartKind.SAID
        self._enter(kind, after_marker=kind is PartKind.THOUGHT)

    @property
    def held(self) -> int:
        """Number of characters that wait for further text."""
        return self._finder.held + len(self._beginning) + len(self._leading) + self._shown.held

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
        yield from self._shown.pass_on(self._begin(text, special))

    def finish(self, cut: bool) -> Iterator[AnswerPart]:
        """Yield the rest, up to a stop string. `cut`: the budget was used up, not the answer complete."""
        yield from self._shown.pass_on(self._rest(cut))
        yield from self._shown.finish()

    def _opening(self) -> Callable[[str], bool | None] | None:
        if self._markup.headers:
            return opens_header
        return self._reader.opens if self._reader is not None and self._markup.bare_calls else None

    def _begin(self, text: str, special: bool) -> Iterator[AnswerPart]:
        """Hold the first words until their kind is clear, because they may show it without a marker."""
        if self._opens is None or (special and not len(self._beginning)):
            yield from self._read(text, special)
            return
        if special:
            yield from self._decide(False)
            yield from self._read(text, special)
            return
        self._beginning.add(text)
        self._first_words = (self._first_words + text).lstrip()
        opens = self._opens(self._first_words) if self._first_words else None
        if opens is not None:
            yield from self._decide(opens)

    def _decide(self, opens: bool) -> Iterator[AnswerPart]:
        self._opens = None
        if opens:
            self._enter(PartKind.HEADER if self._markup.headers else PartKind.CALL)
        yield from self._read(self._beginning.take(), False)

    def _read(self, text: str, special: bool) -> Iterator[AnswerPart]:
        self._pieces.append((len(text), special))
        while True:
            certain = self._finder.push(text)
            yield from self._show(self._take(len(certain)), certain)
            if not self._finder.found:
                return
            text, marker = self._finder.rest, self._finder.match
            yield from self._pass(self._take(len(marker)), marker)

    def _rest(self, cut: bool) -> Iterator[AnswerPart]:
        if len(self._beginning):
            yield from self._decide(False)
        rest = self._finder.finish()
        pieces = self._take(len(rest))
        if not (cut and len(rest) > 1):  # the budget cut a marker, not words; "<" alone may be words
            yield from self._show(pieces, rest)
        if self._kind is PartKind.CALL:
            yield from self._close_call(cut)
        elif self._kind is PartKind.SAID and (space := self._leading.take()):
            yield AnswerPart(PartKind.SAID, space)
        elif self._kind is PartKind.HEADER and not cut and (words := self._header.take().strip()):
            yield AnswerPart(PartKind.SAID, words)

    def _enter(self, kind: PartKind, after_marker: bool = True) -> None:
        self._kind = kind
        self._leading.take()
        self._bare = after_marker
        self._finder = StopFinder(self._markers(kind))

    def _markers(self, kind: PartKind) -> list[str]:
        think, call = self._markup.think, self._markup.call
        if kind is PartKind.CALL:
            return [call[1]] if call[1] and self._reader is not None and not self._reader.forced else []
        if kind is PartKind.THOUGHT:
            return [think[1]] if think is not None else []
        if kind is PartKind.HEADER:
            return [self._markup.header_end]
        if self._markup.headers:
            return [*self._markup.headers]
        markers = [think[0]] if think is not None else []
        return [*markers, call[0]] if self._reader is not None and call[0] else markers

    def _pass(self, pieces: list[tuple[int, bool]], marker: str) -> Iterator[AnswerPart]:
        self._opens = None
        if self._kind is PartKind.CALL and self._reader is not None and self._reader.quoted:
            yield from self._word(marker)  # it stands in an argument
        elif self._kind is PartKind.CALL:
            rest = list(self._close_call(cut=False))
            self._spoken = False
            yield from rest
            self._enter(PartKind.SAID, after_marker=all(part.call is not None for part in rest))
        elif self._kind is PartKind.THOUGHT:
            self._enter(PartKind.SAID)
        elif self._markup.headers:
            if not all(special for _, special in pieces):  # written in letters
                yield from self._word(marker)
            elif self._kind is PartKind.HEADER:
                yield from self._address()
            else:
                self._spoken = False
                self._enter(PartKind.HEADER)
        elif self._markup.think is not None and marker == self._markup.think[0]:
            if self._spoken:  # a model thinks before it speaks
                yield from self._word(marker)
            else:
                self._enter(PartKind.THOUGHT)
        else:
            self._opened = self._leading.take() + marker
            self._enter(PartKind.CALL)

    def _word(self, marker: str) -> Iterator[AnswerPart]:
        """Yield a marker that is none, but text like any other."""
        self._finder = StopFinder(self._markers(self._kind))
        yield from self._show([(len(marker), False)], marker)

    def _address(self) -> Iterator[AnswerPart]:
        """Enter the kind that a complete header announces: a call, a thought, or text."""
        address = address_of(self._header.take())
        if address.recipient and self._reader is not None:
            self._opened = self._markup.call[0]
            self._enter(PartKind.CALL)
            name = f"{address.recipient}{self._markup.header_end}"
            yield from self._show([(len(name), False)], name)
        else:
            self._enter(PartKind.THOUGHT if address.thought else PartKind.SAID)

    def _show(self, pieces: list[tuple[int, bool]], text: str) -> Iterator[AnswerPart]:
        if self._kind is PartKind.CALL:
            assert self._reader is not None
            for call in self._reader.push(text):
                yield AnswerPart(PartKind.CALL, call=call)
            return
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
            self._spoken = self._spoken or self._kind is PartKind.SAID
            yield AnswerPart(self._kind, text)

    def _close_call(self, cut: bool) -> Iterator[AnswerPart]:
        """Close a call.

        Text that is no call after all becomes text of the answer, so that nothing is lost.
        """
        assert self._reader is not None
        calls, raw = self._reader.close(cut)
        for call in calls:
            yield AnswerPart(PartKind.CALL, call=call)
        if raw and not (cut and self._dropped):
            end = "" if cut or not self._opened else self._markup.call[1]
            yield AnswerPart(PartKind.SAID, raw if self._reader.began else f"{self._opened}{raw}{end}")
        self._opened, self._reader.began = "", False

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
    kept, at = [], 0
    for length, special in pieces:
        kept.append(instead if special else text[at : at + length])
        at += length
    return "".join(kept)

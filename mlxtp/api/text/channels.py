"""What a model thinks, says and calls, told apart while it comes. Pure.

A model marks what it thinks, and its tool calls, with words of its own (`markup.py`). They may come in any
pieces; what could be the beginning of one waits. Special tokens are shown to nobody, but count where a
marker or a call is written with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from .calls import CallReader, CallText
from .markup import Markup
from .stops import StopFinder


class Kind(Enum):
    """What a piece of an answer is."""

    SAID = auto()
    THOUGHT = auto()
    CALL = auto()


class Part(NamedTuple):
    """A piece of an answer; a piece of a call in `call`, everything else in `text`."""

    kind: Kind
    text: str = ""
    call: CallText | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How one answer is read. `forced`: nothing but a call may come. `calls` None: none are looked for."""

    markup: Markup
    thinking: bool = False
    calls: CallReader | None = None
    forced: bool = False


class Channels:
    """Reads one answer. White space around markers belongs to none of the channels."""

    def __init__(self, plan: Plan) -> None:
        self._markup = plan.markup
        self._reader = plan.calls
        self._pieces: deque[tuple[int, bool]] = deque()
        """Length of the pieces that the finder holds, and whether they are special tokens."""
        self._finder = StopFinder(())
        self._space = ""
        """White space that is shown if something is said after it."""
        self._bare = False
        """What comes next is shown without the white space before it."""
        self._begun = False
        self._spoken = False
        """Something was said since the beginning, the last call or the last silent marker."""
        self._opened = ""
        """What stood before the call that is read: white space and its marker."""
        kind = Kind.CALL if plan.forced else Kind.THOUGHT if plan.thinking else Kind.SAID
        self._enter(kind, after_marker=kind is Kind.THOUGHT)

    @property
    def held(self) -> int:
        """Characters that wait for what comes next."""
        return self._finder.held + len(self._space)

    @property
    def thinking(self) -> bool:
        """Whether what comes next is a thought."""
        return self._kind is Kind.THOUGHT

    @property
    def calls(self) -> int:
        """How many calls are complete."""
        return 0 if self._reader is None else self._reader.complete

    def push(self, text: str, special: bool = False) -> Iterator[Part]:
        """The parts that are certain now. `special`: this is one special token."""
        if not self._begun and not special and text.strip():
            self._begin(text)
        self._pieces.append((len(text), special))
        while True:
            certain = self._finder.push(text)
            yield from self._show(self._take(len(certain)), certain)
            if not self._finder.found:
                return
            text, marker = self._finder.rest, self._finder.match
            self._take(len(marker))
            yield from self._pass(marker)

    def finish(self, cut: bool) -> Iterator[Part]:
        """The rest. `cut`: the budget was used up, not the answer complete."""
        rest = self._finder.finish()
        yield from self._show(self._take(len(rest)), rest)
        if self._kind is Kind.CALL:
            yield from self._close_call(cut)
        elif self._kind is Kind.SAID and self._space:
            yield Part(Kind.SAID, self._space)
        self._space = ""

    def _begin(self, text: str) -> None:
        """An answer that begins with a brace is a call in the dialects that have no other sign."""
        self._begun = True
        if self._reader is None or self._kind is not Kind.SAID or not self._markup.bare_calls:
            return
        if text.lstrip().startswith(("{", "[")):
            self._enter(Kind.CALL)

    def _enter(self, kind: Kind, after_marker: bool = True) -> None:
        self._kind = kind
        self._space, self._bare = "", after_marker
        self._finder = StopFinder(self._markers(kind))

    def _markers(self, kind: Kind) -> list[str]:
        think, call = self._markup.think, self._markup.call
        if kind is Kind.CALL:
            return [call[1]] if call[1] and self._reader is not None and not self._reader.forced else []
        if kind is Kind.THOUGHT:
            return [think[1]] if think is not None else []
        markers = [*self._markup.silent, *([think[0]] if think is not None else [])]
        return [*markers, call[0]] if self._reader is not None and call[0] else markers

    def _pass(self, marker: str) -> Iterator[Part]:
        self._begun = True
        if self._kind is Kind.CALL and self._reader is not None and self._reader.quoted:
            self._finder = StopFinder(self._markers(Kind.CALL))  # it stands in an argument
            yield from self._show([(len(marker), False)], marker)
        elif self._kind is Kind.CALL:
            rest = list(self._close_call(cut=False))
            self._spoken = False
            yield from rest
            self._enter(Kind.SAID, after_marker=all(part.call is not None for part in rest))
        elif self._kind is Kind.THOUGHT:
            self._enter(Kind.SAID)
        elif self._markup.think is not None and marker == self._markup.think[0]:
            if self._spoken:  # a model thinks before it speaks: this is a word like others
                self._finder = StopFinder(self._markers(Kind.SAID))
                yield from self._show([(len(marker), False)], marker)
            else:
                self._enter(Kind.THOUGHT)
        elif marker in self._markup.silent:
            self._spoken = False
            self._enter(Kind.SAID)
        else:
            self._opened = self._space + marker
            self._enter(Kind.CALL)

    def _show(self, pieces: list[tuple[int, bool]], text: str) -> Iterator[Part]:
        if self._kind is Kind.CALL:
            assert self._reader is not None
            for call in self._reader.push(text):
                yield Part(Kind.CALL, call=call)
            return
        if any(special for _, special in pieces):
            text = _without_special(pieces, text)
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._spoken = self._spoken or self._kind is Kind.SAID
            yield Part(self._kind, shown)

    def _close_call(self, cut: bool) -> Iterator[Part]:
        """What is no call after all was said: nothing is lost."""
        assert self._reader is not None
        calls, raw = self._reader.close(cut)
        for call in calls:
            yield Part(Kind.CALL, call=call)
        if raw:
            end = "" if cut or not self._opened else self._markup.call[1]
            yield Part(Kind.SAID, raw if self._reader.began else f"{self._opened}{raw}{end}")
        self._opened, self._reader.began = "", False

    def _take(self, count: int) -> list[tuple[int, bool]]:
        """The next `count` characters of what was pushed, as pieces."""
        taken = []
        while count:
            length, special = self._pieces.popleft()
            if length > count:
                self._pieces.appendleft((length - count, special))
                length = count
            taken.append((length, special))
            count -= length
        return taken


def _without_special(pieces: list[tuple[int, bool]], text: str) -> str:
    kept, at = [], 0
    for length, special in pieces:
        if not special:
            kept.append(text[at : at + length])
        at += length
    return "".join(kept)

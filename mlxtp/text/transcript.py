"""Transcript of an answer: tokens in, events out, without half characters or stop strings. Pure."""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Literal

from .answers import AnswerParser, AnswerPart, PartKind, ReadingPlan, StopFinder
from .calls import CallText
from .conversation import Call, ChatMessage, StreamEnd, TokenScore
from .json_limits import parsed
from .token_bytes import Detokenizer

Scored = tuple[int, TokenScore]
SCORES_AT_ONCE = 500  # of a prompt in one event
UNSCORED = TokenScore(0.0, ())  #: of a token that is only named
ChoiceFinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    choice: int
    text: str  #: may be empty with scores
    scores: Sequence[Scored] = ()  #: of all tokens since the last event
    prompt: bool = False  #: the scores are of the prompt's tokens, but for its first


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    choice: int
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments. Pieces of different calls never interleave."""

    choice: int
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    choice: int
    reason: ChoiceFinishReason
    end: StreamEnd
    stopped_by: str | None = None  #: the stop string that ended it
    thought: int = 0  #: number of tokens that are thoughts or end them
    began_ns: int = field(default=0, compare=False)  #: `time.perf_counter_ns` of its first token, or 0

    @property
    def matched(self) -> int | str | None:
        """The stop string that ended it, or the end or stop token."""
        return self.stopped_by or (self.end.token if self.end.token >= 0 else None)


AnswerEvent = ContentDelta | ReasoningDelta | CallBegan | CallArguments | Finish


class WholeAnswer:
    """Events of one answer, put together. A call that the budget cut off has incomplete JSON."""

    def __init__(self) -> None:
        self._kinds: list[tuple[type[AnswerEvent], list[str]]] = []  #: consecutive deltas of one kind
        self._calls: list[tuple[CallBegan, list[str]]] = []
        self.scores: list[Scored] = []  #: kept by its reader, if at all
        self.prompt: list[Scored] = []  #: scores of the prompt's tokens, but for its first
        self.finish: Finish  #: the last event, once it has arrived

    def see(self, event: AnswerEvent) -> None:
        match event:
            case ContentDelta(text=text) | ReasoningDelta(text=text) if text:
                if not self._kinds or self._kinds[-1][0] is not type(event):
                    self._kinds.append((type(event), []))
                self._kinds[-1][1].append(text)
            case CallBegan():
                self._kinds.append((CallBegan, []))
                self._calls.append((event, []))
            case CallArguments(index=index, text=text):
                self._calls[index][1].append(text)
            case Finish():
                self.finish = event

    @property
    def texts(self) -> list[str]:
        """Pieces of text, separated by thoughts and calls."""
        return ["".join(parts) for kind, parts in self._kinds if kind is ContentDelta]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ends_in_text(self) -> bool:
        return bool(self._kinds) and self._kinds[-1][0] is ContentDelta

    @property
    def reasoning(self) -> str:
        return "".join([part for kind, parts in self._kinds if kind is ReasoningDelta for part in parts])

    @property
    def calls(self) -> list[Call]:
        return [Call(began.id, began.name, "".join(parts)) for began, parts in self._calls]

    @property
    def complete_calls(self) -> list[Call]:
        """Calls, except a last one cut off by the budget: a client could take its arguments for complete."""
        calls = self.calls
        cut = calls and self.finish.reason == "length" and parsed(calls[-1].arguments) is None
        return calls[:-1] if cut else calls


class Transcript:
    """Events of one choice, made from its tokens: output up to a stop string, and scores.

    A score comes with the text that its token completes. Tokens after a stop string are neither shown nor
    counted; if `silent`, none are. `named`: tokens are told even without scores. `plan` separates thoughts
    and calls from text; stop strings count only in text. `specials` has the text of special tokens, since
    models mark calls with them.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        finder: StopFinder | None = None,
        scored: bool = False,
        *,
        named: bool = False,
        silent: bool = False,
        choice: int = 0,
        plan: ReadingPlan | None = None,
        specials: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._detokenizer = detokenizer
        self._finder = finder
        self._channels = None if plan is None else AnswerParser(plan, finder)
        self._calls = None if plan is None else plan.calls
        self._scored = "scored" if scored else "named" if named else ""
        self.silent = silent
        self._choice = choice
        self._prompt: list[Scored] = []  #: scores of the prompt that are not told yet
        self._specials = specials
        self._incomplete: list[Scored] = []  #: scores of tokens whose text is incomplete
        #: Other scores to show, each with the answer's length at its token's end.
        self._waiting: deque[tuple[int, Scored]] = deque()
        self._made = 0
        self.tokens = array("i")  #: up to the end, including the token that completed a stop string
        self.thought = 0  #: tokens that are thoughts or end them
        self.called = False  #: A tool call began.

    def begin_with(self, given: ChatMessage) -> None:
        """Read the beginning of the answer, which is not shown again. Raises RequestError."""
        if self._channels is None:
            return
        text = given.text or given.reasoning
        marks = [mark for mark in self._specials.values() if mark in text]
        pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        self._channels.begin_with([(piece, piece in marks) for piece in pieces if piece])
        self._made = self._channels.held

    @property
    def used(self) -> int:
        return len(self.tokens)

    @property
    def stopped(self) -> bool:
        """True if the answer is over: at a stop string, or at the most calls."""
        return self.stopped_by is not None or (self._calls is not None and self._calls.enough)

    @property
    def stopped_by(self) -> str | None:
        return self._finder.match if self._finder is not None and self._finder.found else None

    def push(self, tokens: Sequence[int], scores: Sequence[TokenScore] = ()) -> list[AnswerEvent]:
        if self.silent:
            return []
        if self._finder is None and not self._scored and self._channels is None:
            self.tokens.extend(tokens)
            text = self._detokenizer.push(tokens)
            return [ContentDelta(self._choice, text)] if text else []
        if self._scored == "named":
            scores = [UNSCORED] * len(tokens)
        if self._scored and len(scores) != len(tokens):
            raise ValueError(f"{len(scores)} scores for {len(tokens)} tokens")
        parts: list[AnswerPart] = []
        for i, token in enumerate(tokens):
            if self.stopped:
                break
            self.tokens.append(token)
            self.thought += self._channels is not None and self._channels.thinking
            if self._scored:
                self._incomplete.append((token, scores[i]))
            special = self._specials.get(token) if self._channels is not None else None
            text = self._detokenizer.push((token,)) if special is None else special
            parts += self._read(text, special is not None)
        return self._events(parts, self._rest_of_scores() if self.stopped else self._due())

    def push_prompt(self, tokens: Sequence[int], scores: Sequence[TokenScore]) -> None:
        """Take the next tokens of the prompt."""
        self._prompt.extend(zip(tokens, scores, strict=True))

    def prompt_scores(self) -> list[AnswerEvent]:
        """Return the events before the answer's first token, once."""
        scores, self._prompt = self._prompt, []
        parts = [scores[at : at + SCORES_AT_ONCE] for at in range(0, len(scores), SCORES_AT_ONCE)]
        return [ContentDelta(self._choice, "", part, prompt=True) for part in parts]

    def finish(self, cut: bool = False) -> list[AnswerEvent]:
        parts: list[AnswerPart] = []
        if not self.stopped:
            if self._channels is not None:
                parts += self._channels.finish(cut)
            elif self._finder is not None:
                parts.append(AnswerPart(PartKind.SAID, self._finder.finish()))
        return self._events(parts, self._rest_of_scores())

    def _rest_of_scores(self) -> list[Scored]:
        rest = [scored for _, scored in self._waiting] + self._incomplete
        self._waiting.clear()
        self._incomplete.clear()
        return rest

    def _read(self, text: str, special: bool) -> list[AnswerPart]:
        if not text:
            return []
        self._made += len(text)
        if self._incomplete:
            self._waiting.extend([(self._made, scored) for scored in self._incomplete])
            self._incomplete.clear()
        if self._channels is not None:
            return list(self._channels.push(text, special))
        return [AnswerPart(PartKind.SAID, text if self._finder is None else self._finder.push(text))]

    def _events(self, parts: Sequence[AnswerPart], scores: Sequence[Scored]) -> list[AnswerEvent]:
        """Return one event for consecutive parts of a kind. Scores go with the last event."""
        events: list[AnswerEvent] = []
        for kind, group in groupby(parts, key=attrgetter("kind")):
            if kind is PartKind.CALL:
                events += [self._call(part.call) for part in group if part.call is not None]
            elif text := "".join([part.text for part in group]):
                delta = ContentDelta if kind is PartKind.SAID else ReasoningDelta
                events.append(delta(self._choice, text))
        if scores:
            if events and isinstance(last := events[-1], ContentDelta):
                events[-1] = replace(last, scores=scores)
            else:
                events.append(ContentDelta(self._choice, "", scores))
        return events

    def _call(self, call: CallText) -> AnswerEvent:
        if call.name:
            self.called = True
            return CallBegan(self._choice, call.index, call.id, call.name)
        return CallArguments(self._choice, call.index, call.text)

    def _due(self) -> list[Scored]:
        if not self._waiting:
            return []
        shown = self._made - sum(each.held for each in (self._finder, self._channels) if each is not None)
        due = []
        while self._waiting and self._waiting[0][0] <= shown:
            due.append(self._waiting.popleft()[1])
        return due

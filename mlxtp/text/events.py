"""One stream of events for all dialects: a model's output, separated by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..api.backend import StreamEnd, TokenScore
from .conversation import Call

Scored = tuple[int, TokenScore]  #: a token and its score
ChoiceFinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text of the answer. `scores` of all tokens since the last event; the text may be empty then."""

    choice: int
    text: str
    scores: Sequence[Scored] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the model's thoughts before it answers."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """Start of tool call number `index` of this choice, from 0 on."""

    choice: int
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments. The pieces of calls are never interleaved."""

    choice: int
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Last event of a choice. `stopped_by`: the stop string that ended it, or None.

    `thought`: number of its tokens that are thoughts or end them. `began_ns`: time of its first token, of
    `time.perf_counter_ns`; 0 when there was none.
    """

    choice: int
    reason: ChoiceFinishReason
    end: StreamEnd
    stopped_by: str | None = None
    thought: int = 0
    began_ns: int = field(default=0, compare=False)


AnswerEvent = ContentDelta | ReasoningDelta | CallBegan | CallArguments | Finish


@dataclass(slots=True)
class WholeAnswer:
    """Complete output of one choice. Of a call that the budget cut off, the arguments are incomplete JSON."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    finish: Finish | None = None

"""One or more answers to the same request, as events in the order of their arrival."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence

from ..errors import Code, GroupError
from ..text.conversation import Call
from ..text.transcript import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    ChoiceFinishReason,
    ContentDelta,
    Finish,
    ReasoningDelta,
    Transcript,
    WholeAnswer,
)
from .backend import Progress, StreamEnd, TokenStream
from .streaming import interleaved


class Choices:
    """The answers of one request, closed together."""

    def __init__(self) -> None:
        self._answers: list[TokenStream] = []

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: TokenStream) -> None:
        self._answers.append(answer)

    async def accepted(self) -> None:
        """Wait until every answer is accepted. Raises the first refusal."""
        for answer in self._answers:
            await answer.accepted()

    def progress(self) -> Progress:
        """Return the progress of the first answer."""
        return self._answers[0].progress() if self._answers else Progress()

    def events(self, transcripts: Sequence[Transcript]) -> AsyncGenerator[AnswerEvent]:
        """Return the events of all answers, one transcript for each; the last event of each is its `Finish`.

        Raises an answer's error: then none is complete.
        """
        parts = [
            _events(index, answer, transcript)
            for index, (answer, transcript) in enumerate(zip(self._answers, transcripts, strict=True))
        ]
        return parts[0] if len(parts) == 1 else interleaved(parts)

    async def aclose(self) -> None:
        """Cancel unfinished answers, on every rank."""
        for answer in self._answers:
            await answer.aclose()


async def collect(events: AsyncGenerator[AnswerEvent], count: int) -> list[WholeAnswer]:
    """Return `count` whole answers."""
    collected = [_Collected() for _ in range(count)]
    async for event in events:
        collected[event.choice].add(event)
    return [each.whole() for each in collected]


class _Collected:
    """One choice. Pieces are joined at the end, as an answer may have very many."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._thought: list[str] = []
        self._calls: list[tuple[CallBegan, list[str]]] = []
        self._rest = WholeAnswer()

    def add(self, event: AnswerEvent) -> None:
        match event:
            case ContentDelta():
                self._said.append(event.text)
                self._rest.scores.extend(event.scores)
            case ReasoningDelta():
                self._thought.append(event.text)
            case CallBegan():
                self._calls.append((event, []))
            case CallArguments():
                self._calls[event.index][1].append(event.text)
            case Finish():
                self._rest.finish = event

    def whole(self) -> WholeAnswer:
        whole = self._rest
        whole.text, whole.reasoning = "".join(self._said), "".join(self._thought)
        whole.calls = [Call(began.id, began.name, "".join(parts)) for began, parts in self._calls]
        return whole


async def _events(index: int, answer: TokenStream, transcript: Transcript) -> AsyncGenerator[AnswerEvent]:
    """Yield the events of one answer. A stop string ends it on every rank; then only used tokens count."""
    began_ns = 0
    async for event in answer:
        if isinstance(event, StreamEnd):
            if event.reason == "cancel":
                raise GroupError("the request was cancelled on the server", Code.SHUTTING_DOWN)
            for said in transcript.finish(cut=event.reason == "length"):
                yield said
            end = _stopped(transcript, event) if transcript.stopped else event
            yield _finish(index, transcript, end, began_ns)
            return
        began_ns = began_ns or time.perf_counter_ns()
        for said in transcript.push(event.tokens, event.scores):
            yield said
        if transcript.stopped:
            await answer.aclose()
            for said in transcript.finish():
                yield said
            yield _finish(index, transcript, StreamEnd("stop", transcript.used), began_ns)
            return
    raise GroupError("the answer broke off", Code.INTERNAL)


def _stopped(transcript: Transcript, end: StreamEnd) -> StreamEnd:
    return StreamEnd("stop", transcript.used, end.cached, end.drafted, end.accepted)


def _finish(index: int, transcript: Transcript, end: StreamEnd, began_ns: int) -> Finish:
    """Return the last event. "length" takes precedence over a call that the budget cut off."""
    why: ChoiceFinishReason = (
        "length" if end.reason == "length" else "tool_calls" if transcript.called else "stop"
    )
    return Finish(index, why, end, transcript.stopped_by, transcript.thought, began_ns)

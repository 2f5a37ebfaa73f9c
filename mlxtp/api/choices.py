"""One answer or several to the same prompt, as pieces of text in the order in which they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from ..errors import Code, GroupError
from .answers import Choice
from .backend import Answer, End
from .stops import Scored, TextStream
from .streaming import interleaved


class Piece(NamedTuple):
    """What choice number `choice` has to say now; with `end`, for the last time."""

    choice: int
    text: str
    scores: Sequence[Scored]
    end: End | None = None


class Answers:
    """The answers of one request, to be closed together."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: Answer) -> None:
        self._answers.append(answer)

    async def accepted(self) -> None:
        """Wait until every answer is accepted. Raises what the first refusal says."""
        for answer in self._answers:
            await answer.accepted()

    def pieces(self, streams: Sequence[TextStream]) -> AsyncGenerator[Piece]:
        """The pieces of all answers, one stream for each; the last piece of each has its end.

        Raises what an answer raises: then none is complete.
        """
        parts = [
            _pieces(index, answer, stream)
            for index, (answer, stream) in enumerate(zip(self._answers, streams, strict=True))
        ]
        return parts[0] if len(parts) == 1 else interleaved(parts)

    async def aclose(self) -> None:
        """Cancel what has not ended, on every rank."""
        for answer in self._answers:
            await answer.aclose()


async def collect(pieces: AsyncGenerator[Piece], count: int, scored: bool) -> list[Choice]:
    """`count` whole answers."""
    texts: list[list[str]] = [[] for _ in range(count)]
    scores: list[list[Scored]] = [[] for _ in range(count)]
    ends: dict[int, End] = {}
    async for piece in pieces:
        texts[piece.choice].append(piece.text)
        scores[piece.choice].extend(piece.scores)
        if piece.end is not None:
            ends[piece.choice] = piece.end
    return [
        Choice("".join(texts[index]), scores[index] if scored else None, ends[index])
        for index in range(count)
    ]


async def _pieces(index: int, answer: Answer, stream: TextStream) -> AsyncGenerator[Piece]:
    """A stop string ends the answer on every rank at once. Its end then counts the tokens that were used."""
    async for event in answer:
        if isinstance(event, End):
            if event.reason == "cancel":
                raise GroupError("the request was cancelled on the server", Code.SHUTTING_DOWN)
            text, scores = stream.finish()
            yield Piece(index, text, scores, _stopped(stream, event) if stream.stopped else event)
            return
        text, scores = stream.push(event.tokens, event.scores)
        if stream.stopped:
            await answer.aclose()
            yield Piece(index, text, scores, End("stop", stream.used))
            return
        if text or scores:
            yield Piece(index, text, scores)
    raise GroupError("the answer broke off", Code.INTERNAL)


def _stopped(stream: TextStream, end: End) -> End:
    return End("stop", stream.used, end.cached, end.drafted, end.accepted)

"""A request of another agent's gateway: what rank 0 said about it, said again under the uid it has there."""

from __future__ import annotations

from collections.abc import Callable

from ..api.backend import End, Event, Score, Tokens
from ..errors import MlxtpError
from ..wire.base import Message
from ..wire.messages import Accepted, Delta, Error, Finished, ScoredDelta

Item = Event | MlxtpError


class Relayed:
    """A request of another agent: its events go back there as messages, numbered by the uid it has there."""

    def __init__(self, uid: int, tell: Callable[[Message], None]) -> None:
        self._uid = uid
        self._tell = tell
        self._index = 0

    def cancelled(self) -> None:
        """Its own gateway gave it up; this is the last word about it."""
        self._tell(Finished(self._uid, "cancel", self._index, 0))

    def accept(self) -> None:
        self._tell(Accepted(self._uid))

    def put(self, item: Item) -> None:
        match item:
            case Tokens(tokens, ()):
                count = len(tokens)
                indices = tuple(range(self._index, self._index + count))
                self._tell(Delta((self._uid,) * count, indices, tokens))
                self._index += count
            case Tokens(tokens, scores):
                self._tell(_scored(self._uid, self._index, tokens, scores))
                self._index += len(tokens)
            case End():
                self._tell(
                    Finished(
                        self._uid, item.reason, item.generated, 0, item.cached, item.drafted, item.accepted
                    )
                )
            case _:
                self._tell(Error(item.code, item.detail, self._uid))


def _scored(uid: int, index: int, tokens: tuple[int, ...], scores: tuple[Score, ...]) -> ScoredDelta:
    """The way back of `_scores`."""
    pairs = [pair for score in scores for pair in score.top]
    return ScoredDelta(
        uid,
        index,
        tokens,
        tuple(score.logprob for score in scores),
        len(scores[0].top),
        tuple(token for token, _ in pairs),
        tuple(logprob for _, logprob in pairs),
    )

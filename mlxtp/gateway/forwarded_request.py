"""A request of another agent's gateway. The events of rank 0 go back under the uid it has there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ..api.backend import StreamEnd, TokenEvent, Tokens, TokenScore
from ..api.request_metrics import UNWATCHED
from ..errors import Code, MlxtpError
from ..wire.codecs import Message
from ..wire.messages import Accepted, Delta, Error, Finished, Generate, Prefilled, ScoredDelta
from .retry_policy import RequestRecord

ForwardedItem = TokenEvent | MlxtpError


class RequestBackend(Protocol):
    """The destination of requests: rank 0, or the agent that has it."""

    def send(self, message: Message) -> None:
        """Send Generate or Cancel. Raises MlxtpError if the backend is gone."""


class ForwardedRequest:
    """A request of another agent. Its events go back there as messages, under the uid it has there."""

    watch = UNWATCHED  #: Not metered: each agent counts its own clients' requests.

    def __init__(self, generate: Generate, tell: Callable[[Message], None]) -> None:
        self.generate = generate
        self.uid = 0  #: Its uid at rank 0; 0 while rank 0 does not have it.
        self.backend: RequestBackend | None = None
        self.elsewhere = False
        self.strikes = generate.strikes
        self._notify = tell
        self._index = generate.answered

    def again(self, uid: int) -> Generate:
        """Return the message for rank 0, with the uid it will have there."""
        return replace(self.generate, uid=uid)

    @property
    def record(self) -> RequestRecord:
        """State of the request, should the group fail now."""
        progress = self._index - self.generate.answered
        return RequestRecord(self.strikes, progress, self.length, running=self.uid != 0)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.generate.tokens) + self._index - self.generate.answered

    def cancelled(self) -> None:
        """Send the last event, because its own gateway has given it up."""
        self._notify(Finished(self.generate.uid, "cancel", self._index, 0))

    def advance(self, event: Accepted | Prefilled) -> None:
        self._notify(replace(event, uid=self.generate.uid))

    def give_back(self, error: MlxtpError, *, struck: bool) -> None:
        """Return it to its own gateway, to be sent again. `struck`: it may have caused the failure."""
        self._notify(Error(Code.RANK_LOST if struck else Code.REPLANNED, error.detail, self.generate.uid))

    def put(self, item: ForwardedItem) -> None:
        uid = self.generate.uid
        match item:
            case Tokens(tokens, ()):
                count = len(tokens)
                indices = tuple(range(self._index, self._index + count))
                self._notify(Delta((uid,) * count, indices, tokens))
                self._index += count
            case Tokens(tokens, scores):
                self._notify(_scored(uid, self._index, tokens, scores))
                self._index += len(tokens)
            case StreamEnd():
                self._notify(
                    Finished(uid, item.reason, item.generated, 0, item.cached, item.drafted, item.accepted)
                )
            case _:
                self._notify(Error(item.code, item.detail, uid))


def _scored(uid: int, index: int, tokens: tuple[int, ...], scores: tuple[TokenScore, ...]) -> ScoredDelta:
    """Inverse of `gateway._scores`."""
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

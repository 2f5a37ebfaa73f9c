"""What leaves the group: tokens, scores, ends and errors, from rank 0 to its agent."""

from __future__ import annotations

from itertools import groupby

from ..errors import Code
from ..wire.link import Link
from ..wire.messages import Accepted, Delta, Error, Finished, ScoredDelta
from .moves import End, Failed, Outcome, Token
from .status import Status

LEAST_LOGPROB = -1e9
"""What stands for the logarithm of nothing: frames carry no infinities."""


class Emitter:
    """The only voice of the group: tokens and ends, to the agent. Other ranks have no such object."""

    def __init__(self, pipe: Link, status: Status) -> None:
        self._pipe = pipe
        self._status = status
        self._open: set[int] = set()

    def begin(self, uid: int) -> None:
        self._open.add(uid)

    def emit(self, outcomes: tuple[Outcome, ...]) -> None:
        """Send a step's tokens in one frame, then the ends. What belongs to ended requests is dropped."""
        tokens = [o for o in outcomes if isinstance(o, Token) and o.uid in self._open]
        self._status.emitted += len(tokens)
        if scored := [token for token in tokens if token.score is not None]:
            self._emit_scored(scored)
            tokens = [token for token in tokens if token.score is None]
        if tokens:
            self._pipe.send(
                Delta(
                    tuple(t.uid for t in tokens),
                    tuple(t.index for t in tokens),
                    tuple(t.token for t in tokens),
                )
            )
        for outcome in outcomes:
            if isinstance(outcome, End) and outcome.uid in self._open:
                self._open.remove(outcome.uid)
                self._pipe.send(
                    Finished(
                        outcome.uid,
                        outcome.reason,
                        outcome.generated,
                        outcome.forwards,
                        outcome.cached,
                        outcome.drafted,
                        outcome.accepted,
                    )
                )
            elif isinstance(outcome, Failed) and outcome.uid in self._open:
                self.fail(outcome.uid, outcome.code, outcome.detail)

    def _emit_scored(self, tokens: list[Token]) -> None:
        for uid, group in groupby(tokens, key=lambda token: token.uid):
            run = list(group)
            scores = [token.score for token in run if token.score is not None]
            self._pipe.send(
                ScoredDelta(
                    uid,
                    run[0].index,
                    tuple(token.token for token in run),
                    tuple(_finite(logprob) for logprob, _ in scores),
                    len(scores[0][1]),
                    tuple(token for _, top in scores for token, _ in top),
                    tuple(_finite(logprob) for _, top in scores for _, logprob in top),
                )
            )

    def accept(self, uid: int) -> None:
        """The request passed every check."""
        self._pipe.send(Accepted(uid))

    def fail(self, uid: int, code: Code, detail: str) -> None:
        self._open.discard(uid)
        self._pipe.send(Error(code, detail, uid))

    def fail_all(self, code: Code, detail: str) -> None:
        for uid in sorted(self._open):
            self.fail(uid, code, detail)


def _finite(logprob: float) -> float:
    """NaN counts as the logarithm of nothing, as it does for a greedy choice."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB

"""Output of the group: tokens, scores, ends and errors, from rank 0 to its agent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import groupby

from ..errors import Code
from ..wire.blocking import BlockingLink
from ..wire.messages import Accepted, Delta, Error, Finished, Prefilled, ScoredDelta
from .steps import SampledToken, SequenceEnd, SequenceFailed, StepResult
from .telemetry import RankTelemetry

LEAST_LOGPROB = -1e9  # stands for the logarithm of zero, because frames carry no infinities
PROGRESS_S = 0.3  # least time between two Prefilled of one request


class Emitter:
    """The group's only sender of tokens and ends to the agent. Other ranks have none."""

    def __init__(
        self, pipe: BlockingLink, status: RankTelemetry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pipe = pipe
        self._status = status
        self._clock = clock
        self._open: dict[int, float] = {}  # by uid: when the next Prefilled may go out

    def admit(self, uid: int) -> None:
        self._open[uid] = 0.0

    def emit(self, outcomes: tuple[StepResult, ...]) -> None:
        """Send a step's tokens in one frame, then the ends. Drops results of requests that have ended."""
        tokens = [o for o in outcomes if isinstance(o, SampledToken) and o.uid in self._open]
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
            if isinstance(outcome, SequenceEnd) and outcome.uid in self._open:
                del self._open[outcome.uid]
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
            elif isinstance(outcome, SequenceFailed) and outcome.uid in self._open:
                self.send_error(outcome.uid, outcome.code, outcome.detail)

    def _emit_scored(self, tokens: list[SampledToken]) -> None:
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
        """Report that the request passed every check."""
        self._pipe.send(Accepted(uid))

    def prefilled(self, uid: int, computed: int, cached: int) -> None:
        """Report the progress of a prefill, unless the request has ended or the last report is recent."""
        now = self._clock()
        if self._open.get(uid, math.inf) <= now:
            self._open[uid] = now + PROGRESS_S
            self._pipe.send(Prefilled(uid, computed, cached))

    def send_error(self, uid: int, code: Code, detail: str) -> None:
        self._open.pop(uid, None)
        self._pipe.send(Error(code, detail, uid))

    def fail_all(self, code: Code, detail: str) -> None:
        for uid in sorted(self._open):
            self.send_error(uid, code, detail)


def _finite(logprob: float) -> float:
    """Return a finite logarithm. NaN counts as that of zero, as it does for a greedy choice."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB

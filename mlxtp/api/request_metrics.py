"""Counters of requests. Pure, but for an injected clock.

The gateway has a `RequestMeter` and reports every request of its own clients to it. All of it runs on the
agent's event loop, reading included, so there are no locks. A token costs a few additions, and a step of all
requests together one call of the clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import MlxtpError
from .backend import StreamEnd
from .request_context import RequestContext, current

#: Seconds, from a cached prompt on a small model to 100,000 tokens, for which a Mac needs minutes.
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
#: Seconds, finest from 5 to 200 tokens per second. Above a second, something else came between, such as a
#: recovery.
INTER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05,
    0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip
#: Seconds, up to the longest allowed time of a request.
LATENCY_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
ACCEPT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
#: Models with counters of their own; later ones share one. An agent hardly serves so many in its life.
MAX_MODELS = 32
OTHER = "other"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class Histogram:
    """Counts of values up to each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # sum of all values

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[float, int]]:
        """Return (bound, count of values up to it) pairs; the last bound is infinite."""
        found, count = [], 0
        for bound, more in zip((*self._bounds, float("inf")), self._counts, strict=True):
            count += more
            found.append((bound, count))
        return found


class SequenceMeter(Protocol):
    """Meter of one sequence of one request, from its arrival at the gateway. Only its first end counts."""

    def accepted(self) -> None:
        """Note that rank 0 has checked it and will run it."""

    def tokens(self, count: int, now: float) -> None:
        """Add tokens; those of one step have the same time."""

    def end(self, end: StreamEnd) -> None:
        """Note the last event of the sequence."""

    def fail(self, error: MlxtpError) -> None:
        """Note the error that ended it."""

    def leave(self) -> None:
        """Note that its client needs no further tokens: it went away, or a stop string came."""


class RequestMeter(Protocol):
    """Meter of the gateway's own requests. `clock` is in seconds, from any start."""

    @property
    def clock(self) -> Callable[[], float]: ...

    def begin(self, model: str, prompt: Sequence[int]) -> SequenceMeter: ...


class NoSequenceMeter:
    """Meter that ignores its sequence."""

    def accepted(self) -> None: ...

    def tokens(self, count: int, now: float) -> None: ...

    def end(self, end: StreamEnd) -> None: ...

    def fail(self, error: MlxtpError) -> None: ...

    def leave(self) -> None: ...


UNWATCHED = NoSequenceMeter()


class NoRequestMeter:
    """Meter that counts nothing."""

    def clock(self) -> float:
        return 0.0

    def begin(self, model: str, prompt: Sequence[int]) -> SequenceMeter:
        return UNWATCHED


class ModelMetrics:
    """Counters of one model."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.inter_token_s = Histogram(INTER_TOKEN_S)
        self.latency_s = Histogram(LATENCY_S)
        self.accept_s = Histogram(ACCEPT_S)
        self.prompt = Histogram(TOKENS)
        self.generation = Histogram(TOKENS)
        self.prompt_tokens = 0  # of prompts that had a first token
        self.generation_tokens = 0
        self.queried_tokens = 0  # of prompts whose cached tokens rank 0 reported
        self.cached_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))


class RequestMetrics:
    """Counters of all requests of one agent. Implements `RequestMeter`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.models: dict[str, ModelMetrics] = {}
        self.answered: Counter[tuple[str, str, int]] = Counter()  # HTTP requests by method, path and status
        #: Requests answered with an error, by path and code
        self.refused: Counter[tuple[str, str]] = Counter()
        #: Streams that ended with an error, by path and code
        self.failed: Counter[tuple[str, str]] = Counter()

    def model(self, name: str) -> ModelMetrics:
        if name not in self.models and len(self.models) >= MAX_MODELS:
            name = OTHER
        return self.models.setdefault(name, ModelMetrics())

    def begin(self, model: str, prompt: Sequence[int]) -> SequenceMeter:
        now, account = self.clock(), current()
        watch = CountedSequence(
            self.model(model), prompt, now if account is None else account.arrived, self.clock
        )
        watch.begun, watch.account = now, account
        if account is not None:
            account.answers.append(watch)
        return watch

    def over(self, method: str, path: str, status: int, code: str) -> None:
        """Count one answered HTTP request. `path` is a route's, of which there are few."""
        self.answered[method if method in _METHODS else OTHER, path, status] += 1
        if code:
            (self.refused if status >= 400 else self.failed)[path, code] += 1


class CountedSequence:
    """One counted sequence. `arrived` is its request's time of arrival; times are the clock's."""

    __slots__ = (
        "_clock", "_ended_at", "_last_at", "_totals",
        "account", "arrived", "begun", "cached", "first_s", "generated", "prompt", "reason",
    )  # fmt: skip

    def __init__(
        self, totals: ModelMetrics, prompt: Sequence[int], arrived: float, clock: Callable[[], float]
    ) -> None:
        self._totals = totals
        self._clock = clock
        self._last_at = 0.0
        self._ended_at = 0.0
        self.account: RequestContext | None = None
        self.arrived = self.begun = arrived
        self.prompt = prompt
        self.cached: int | None = None
        self.generated = 0
        self.first_s: float | None = None
        self.reason = ""

    def accepted(self) -> None:
        self._totals.accept_s.observe(self._clock() - self.begun)

    def tokens(self, count: int, now: float) -> None:
        totals = self._totals
        self.generated += count
        totals.generation_tokens += count
        if self.first_s is None:
            self.first_s = now - self.arrived
            totals.first_token_s.observe(self.first_s)
            totals.prompt_tokens += len(self.prompt)
        elif now != self._last_at:
            totals.inter_token_s.observe(now - self._last_at)
        self._last_at = now

    def end(self, end: StreamEnd) -> None:
        if self.reason or self._ended_at:
            return
        totals = self._totals
        self.cached = min(end.cached, len(self.prompt))
        totals.queried_tokens += len(self.prompt)
        totals.cached_tokens += self.cached
        totals.drafted_tokens += end.drafted
        totals.accepted_tokens += end.accepted
        self._over("abort" if end.reason == "cancel" else end.reason)

    def fail(self, error: MlxtpError) -> None:
        if not self.reason and not self._ended_at:
            self._over("error")
            if self.account is not None:
                self.account.code = error.code

    def leave(self) -> None:
        if self.reason or self._ended_at:
            return
        self._ended_at = self._clock()
        if self.account is None:
            self._over("abort")

    def settle(self, *, delivered: bool) -> None:
        """Note the end of the HTTP request.

        A sequence without an end of its own ended by a stop string if the client received the whole answer.
        """
        self.leave()
        if not self.reason:
            self._over("stop" if delivered else "abort")

    def _over(self, reason: str) -> None:
        if self.reason:
            return
        self.reason = reason
        totals = self._totals
        totals.finished[reason] += 1
        if reason in ("stop", "length"):
            totals.latency_s.observe((self._ended_at or self._clock()) - self.arrived)
            totals.prompt.observe(len(self.prompt))
            totals.generation.observe(self.generated)

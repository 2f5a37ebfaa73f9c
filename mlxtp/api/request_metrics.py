"""What is counted while requests are answered. Pure, but for a clock that is handed in.

The gateway has a `RequestMeter` and tells it of every request of its own clients. All of it runs on the
agent's event loop, the reading too, so nothing is locked: a token costs a few additions, and a step of all
requests together one look at the clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import MlxtpError
from .backend import StreamEnd
from .request_context import RequestContext, current

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
"""From a cached prompt on a small model to 100,000 tokens that a Mac needs minutes for."""
INTER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05,
    0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip
"""Finest from 5 to 200 tokens per second; beyond a second something else came between, a recovery perhaps."""
LATENCY_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
"""Up to the longest time that a request may take."""
ACCEPT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
MAX_MODELS = 32
"""With a name of their own; those after them count as one. An agent hardly serves so many in its life."""
OTHER = "other"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class Histogram:
    """How many values were at most as large as each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Of all values."""

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[float, int]]:
        """(bound, how many up to it) pairs; the last bound is infinite."""
        found, count = [], 0
        for bound, more in zip((*self._bounds, float("inf")), self._counts, strict=True):
            count += more
            found.append((bound, count))
        return found


class SequenceMeter(Protocol):
    """One sequence of one request, from the moment the gateway took it. The first of its ends counts."""

    def accepted(self) -> None:
        """Rank 0 has checked it and will run it."""

    def tokens(self, count: int, now: float) -> None:
        """So many more; those that come with one step come with one time."""

    def end(self, end: StreamEnd) -> None:
        """The last word about it."""

    def fail(self, error: MlxtpError) -> None:
        """It ended with an error."""

    def leave(self) -> None:
        """Nobody wants more of it: its client went away, or a stop string came."""


class RequestMeter(Protocol):
    """What the gateway tells of the requests of its own clients. `clock` is in seconds, from anywhere on."""

    @property
    def clock(self) -> Callable[[], float]: ...

    def begin(self, model: str, prompt: Sequence[int]) -> SequenceMeter: ...


class NoSequenceMeter:
    """Of a sequence of which nobody wants to know."""

    def accepted(self) -> None: ...

    def tokens(self, count: int, now: float) -> None: ...

    def end(self, end: StreamEnd) -> None: ...

    def fail(self, error: MlxtpError) -> None: ...

    def leave(self) -> None: ...


UNWATCHED = NoSequenceMeter()


class NoRequestMeter:
    """Counts nothing."""

    def clock(self) -> float:
        return 0.0

    def begin(self, model: str, prompt: Sequence[int]) -> SequenceMeter:
        return UNWATCHED


class ModelMetrics:
    """What was counted for one model."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.inter_token_s = Histogram(INTER_TOKEN_S)
        self.latency_s = Histogram(LATENCY_S)
        self.accept_s = Histogram(ACCEPT_S)
        self.prompt = Histogram(TOKENS)
        self.generation = Histogram(TOKENS)
        self.prompt_tokens = 0
        """Of prompts that had a first token."""
        self.generation_tokens = 0
        self.queried_tokens = 0
        """Of prompts of which rank 0 said how much was cached."""
        self.cached_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))


class RequestMetrics:
    """Everything that is counted of one agent's requests. Implements `RequestMeter`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.models: dict[str, ModelMetrics] = {}
        self.answered: Counter[tuple[str, str, int]] = Counter()
        """HTTP requests by method, path and status."""
        self.refused: Counter[tuple[str, str]] = Counter()
        """Those that were answered with an error, by path and code."""
        self.failed: Counter[tuple[str, str]] = Counter()
        """Streams that broke off with an error, by path and code."""

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
        """One HTTP request was answered. `path` is a route's, of which there are few."""
        self.answered[method if method in _METHODS else OTHER, path, status] += 1
        if code:
            (self.refused if status >= 400 else self.failed)[path, code] += 1


class CountedSequence:
    """One sequence that is counted. `arrived` is when its request was here; times are the clock's."""

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
        """The HTTP request is over. An answer of which the client had all it should ended by a stop string,
        even though nobody waited for its end."""
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

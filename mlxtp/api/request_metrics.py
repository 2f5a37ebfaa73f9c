"""Metrics of requests. The gateway reports to a `RequestMeter`. Pure, but for an injected clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from ..errors import MlxtpError
from .backend import StreamEnd
from .request_context import RequestContext, current

#: Seconds: from a cached prompt on a small model to 100,000 tokens, which take a Mac minutes.
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
#: Seconds, finest from 5 to 200 tokens per second. Gaps above a second have another cause, such as recovery.
INTER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05,
    0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip
#: Seconds, up to the longest time that a request may take.
LATENCY_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
ACCEPT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
#: Models with counters of their own; later ones share one. An agent rarely serves so many.
MAX_MODELS = 32
#: Groups of all these models with counters of their own; later ones share one for each model.
MAX_GROUPS = 128
OTHER = "other"
_REASONS = ("stop", "length", "abort", "error")
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class SequenceMeter:
    """Meter of one sequence of a request. Only its first end counts. This base class counts nothing."""

    __slots__ = ()

    def moved(self, group: str) -> None:
        """Note the id of the group that serves the sequence from now on."""

    def accepted(self) -> None:
        """Note that rank 0 has checked it and will run it."""

    def tokens(self, count: int, now: float) -> None:
        """Add tokens; all tokens of one step have the same time."""

    def end(self, end: StreamEnd) -> None: ...
    def fail(self, error: MlxtpError) -> None: ...
    def leave(self) -> None:
        """Note that no further tokens are needed: the client left, or the answer hit a stop string."""


UNWATCHED = SequenceMeter()


class RequestMeter:
    """Meter of the gateway's own requests. This base class counts nothing."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.clock = clock  # in seconds, from any start

    def begin(self, model: str, group: str, prompt: Sequence[int]) -> SequenceMeter:
        """Return the meter of a sequence that arrives now in `group`; empty if no group has it yet."""
        return UNWATCHED


class GroupMetrics(NamedTuple):
    """Metrics of one group, labelled by model and group; in the order of `_HISTOGRAMS` and `_COUNTERS`."""

    first_token_s: Histogram
    inter_token_s: Histogram
    latency_s: Histogram
    accept_s: Histogram
    prompt: Histogram
    generation: Histogram
    prompt_tokens: Counter
    generation_tokens: Counter
    queried_tokens: Counter
    cached_tokens: Counter
    drafted_tokens: Counter
    accepted_tokens: Counter
    finished: Mapping[str, Counter]  #: by reason


class RequestMetrics(RequestMeter):
    """Metrics of all requests of one agent.

    Names with `vllm:` follow vLLM, so existing dashboards work. `registry` has no metrics of other agents in
    the same process.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # half of all samples, and of no use
        super().__init__(clock)
        self.registry = CollectorRegistry(auto_describe=False)
        self._groups: dict[tuple[str, str], GroupMetrics] = {}
        self._histograms = [
            Histogram(name, says, _LABELS, registry=self.registry, buckets=bounds)
            for name, says, bounds in _HISTOGRAMS
        ]
        self._counters = [Counter(name, says, _LABELS, registry=self.registry) for name, says in _COUNTERS]
        self._finished = Counter(
            "vllm:request_success",
            "Answers that ended: stop and length are whole; abort: the client gave up; error: the server "
            "did.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._answered = Counter(
            "mlxtp_http_requests",
            "HTTP requests by method, path of the route and status; 499: the client left before an answer.",
            ("method", "path", "status"),
            registry=self.registry,
        )
        self._refused = Counter(
            "mlxtp_requests_refused",
            "HTTP requests that were answered with an error, by path of the route and code.",
            ("path", "code"),
            registry=self.registry,
        )
        self._failed = Counter(
            "mlxtp_requests_failed",
            "HTTP requests whose answer broke off with an error after it had begun, by path and code.",
            ("path", "code"),
            registry=self.registry,
        )

    def group(self, model: str, group: str) -> GroupMetrics:
        """Return the metrics of a model's group. From then on they have samples."""
        labels = model, group
        if labels in self._groups:
            return self._groups[labels]
        models = {each for each, _ in self._groups if each != OTHER}
        if model not in models and len(models) >= MAX_MODELS:
            labels = OTHER, OTHER
        elif sum(each != OTHER for _, each in self._groups) >= MAX_GROUPS:
            labels = model, OTHER
        if labels not in self._groups:
            metrics = [each.labels(*labels) for each in (*self._histograms, *self._counters)]
            finished = {why: self._finished.labels(*labels, why) for why in _REASONS}
            self._groups[labels] = GroupMetrics._make([*metrics, finished])
        return self._groups[labels]

    def begin(self, model: str, group: str, prompt: Sequence[int]) -> SequenceMeter:
        now, account = self.clock(), current()
        arrived = now if account is None else account.arrived
        watch = CountedSequence(partial(self.group, model), prompt, arrived, self.clock)
        watch.moved(group)
        watch.begun, watch.account = now, account
        if account is not None:
            account.answers.append(watch)
        return watch

    def over(self, method: str, path: str, status: int, code: str) -> None:
        """Count one answered HTTP request. `path` is a route's, so there are few labels."""
        self._answered.labels(method if method in _METHODS else OTHER, path, status).inc()
        if code:
            (self._refused if status >= 400 else self._failed).labels(path, code).inc()


_LABELS = ("model_name", "group")
#: Name, help and buckets.
_HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    (
        "vllm:time_to_first_token_seconds",
        "Seconds from the arrival of a whole request to its first token.",
        FIRST_TOKEN_S,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Seconds between the steps with tokens of one answer. Tokens of one step count once.",
        INTER_TOKEN_S,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "Seconds from the arrival of a whole request to the end of a whole answer.",
        LATENCY_S,
    ),
    (
        "mlxtp_request_accept_seconds",
        "Seconds from the gateway until rank 0 accepts the request: checks, and compiling a grammar.",
        ACCEPT_S,
    ),
    ("vllm:request_prompt_tokens", "Prompt tokens of whole answers.", TOKENS),
    ("vllm:request_generation_tokens", "Generated tokens of whole answers.", TOKENS),
)
#: Name and help.
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens of answers that have begun."),
    ("vllm:generation_tokens", "Generated tokens."),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens of answers that were generated to their end: rank 0 reports cached tokens only "
        "for those.",
    ),
    ("vllm:prefix_cache_hits", "Queried tokens that were not computed again."),
    ("vllm:spec_decode_num_draft_tokens", "Drafted tokens of answers that were generated to their end."),
    ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were right."),
)


class CountedSequence(SequenceMeter):
    """One counted sequence. `of` returns the metrics of the group with the given id.

    `moved` has to be called before anything is counted. `arrived`: when its request arrived, by the clock.
    """

    __slots__ = (
        "_clock", "_ended_at", "_last_at", "_of", "_totals",
        "account", "arrived", "begun", "cached", "first_s", "generated", "prompt", "reason",
    )  # fmt: skip

    def __init__(
        self,
        of: Callable[[str], GroupMetrics],
        prompt: Sequence[int],
        arrived: float,
        clock: Callable[[], float],
    ) -> None:
        self._of = of
        self._totals: GroupMetrics
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

    def moved(self, group: str) -> None:
        self._totals = self._of(group)

    def accepted(self) -> None:
        self._totals.accept_s.observe(self._clock() - self.begun)

    def tokens(self, count: int, now: float) -> None:
        totals = self._totals
        self.generated += count
        totals.generation_tokens.inc(count)
        if self.first_s is None:
            self.first_s = now - self.arrived
            totals.first_token_s.observe(self.first_s)
            totals.prompt_tokens.inc(len(self.prompt))
        elif now != self._last_at:
            totals.inter_token_s.observe(now - self._last_at)
        self._last_at = now

    def end(self, end: StreamEnd) -> None:
        if self.reason or self._ended_at:
            return
        totals = self._totals
        self.cached = min(end.cached, len(self.prompt))
        totals.queried_tokens.inc(len(self.prompt))
        totals.cached_tokens.inc(self.cached)
        totals.drafted_tokens.inc(end.drafted)
        totals.accepted_tokens.inc(end.accepted)
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
        """Note the end of the HTTP request. A whole answer without an end hit a stop string."""
        self.leave()
        self._over("stop" if delivered else "abort")

    def _over(self, reason: str) -> None:
        if self.reason:
            return
        self.reason = reason
        totals = self._totals
        totals.finished[reason].inc()
        if reason in ("stop", "length"):
            totals.latency_s.observe((self._ended_at or self._clock()) - self.arrived)
            totals.prompt.observe(len(self.prompt))
            totals.generation.observe(self.generated)

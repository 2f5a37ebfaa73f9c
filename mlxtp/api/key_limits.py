"""Scopes, limits and counts of API keys, and the decision about a request. Pure.

Token buckets use seconds of any one clock (`clock`). All other times are seconds since 1970 (`now`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, time, timedelta
from typing import Any

from ..errors import Code
from .request_context import RequestContext

CHAT, ON_REQUEST, LOAD, METRICS = "chat", "on-request", "load", "metrics"
#: Scopes of keys, and the permission that each grants.
SCOPES: Mapping[str, str] = {
    CHAT: "answers",
    ON_REQUEST: "requests that load the model that they name, where the agent does so",
    LOAD: "loading and unloading on the page",
    METRICS: "/metrics and the use of keys",
}
PRIORITIES = INTERACTIVE, BATCH = "interactive", "batch"  #: Classes of requests.
DEFAULT_SCOPES = (CHAT, ON_REQUEST, METRICS)
MAX_COUNT = 1_000_000_000_000
MAX_PER_MINUTE = 1_000_000
MAX_MODELS = 64
MAX_MODEL_CHARS = 500
PATIENCE_S = 120  #: Longest `Retry-After` for clients. Beyond it, the answer tells them not to retry.
CHALLENGE = 'Bearer realm="mlxtp"'
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TIME = "%Y-%m-%d %H:%M %Z"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Stored record of a key. `expires` 0 is never.

    Its limits: requests a minute, tokens a minute and a day, concurrent requests; 0 is no limit. `models` are
    the names it may use; empty for all.
    """

    name: str
    digest: bytes = field(repr=False)
    created: int
    per_minute: int = 0
    expires: int = 0
    tokens_per_minute: int = 0
    tokens_per_day: int = 0
    concurrent: int = 0
    models: tuple[str, ...] = ()
    scopes: tuple[str, ...] = DEFAULT_SCOPES
    priority: str = INTERACTIVE

    @property
    def problem(self) -> str:
        """Description of an invalid field, which begins with the option; empty for a good key."""
        if not _NAME.fullmatch(self.name):
            return (
                f"{self.name!r:.80} cannot be the name of a key; take up to 64 letters, digits, dots, dashes "
                "or underscores, such as laptop"
            )
        for name, most, what in COUNTS:
            if not 0 <= (count := getattr(self, name)) <= most:
                return f"--{name.replace('_', '-')} {count}: a key has from 1 to {most} {what}"
        scopes = ", ".join(SCOPES)
        wrong = [f"--scope {each:.80}: the scopes are {scopes}" for each in self.scopes if each not in SCOPES]
        if self.priority not in PRIORITIES:
            wrong.append(f"--priority {self.priority:.80}: the classes are {', '.join(PRIORITIES)}")
        if wrong:
            return wrong[0]
        if not self.scopes or len(set(self.scopes)) != len(self.scopes):
            return "--scope: name each scope once"
        if wrong := [name for name in self.models if not 0 < len(name) <= MAX_MODEL_CHARS]:
            return f"--model {wrong[0]!r:.80}: a model has a name of 1 to {MAX_MODEL_CHARS} characters"
        return f"--model: a key has at most {MAX_MODELS} models" if len(self.models) > MAX_MODELS else ""

    def may(self, scope: str) -> bool:
        """Return True for a permitted scope; "" is permitted to all keys."""
        return not scope or scope in self.scopes or (scope == ON_REQUEST and LOAD in self.scopes)


REQUESTS, A_MINUTE, A_DAY, AT_ONCE = (
    "requests a minute", "tokens a minute", "tokens a day", "requests at one time"
)  # fmt: skip
#: The counted limits: field, greatest value, and its unit in words.
COUNTS = (
    ("per_minute", MAX_PER_MINUTE, REQUESTS),
    ("tokens_per_minute", MAX_COUNT, A_MINUTE),
    ("tokens_per_day", MAX_COUNT, A_DAY),
    ("concurrent", MAX_PER_MINUTE, AT_ONCE),
)


def counted(count: int, what: str) -> str:
    """Return a limit in words, such as "1 request a minute"."""
    return f"{count:,} {what if count != 1 else what.replace('s ', ' ', 1)}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal, sent instead of the route's answer. `headers` go on top of the usual ones."""

    status: int
    code: Code
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)


# --- the use of a key -------------------------------------------------------------------------------------

_ROUNDING = 1e-6  # tokens; tolerance for sums of floats


class TokenBucket:
    """Limiter to `per_minute` events a minute on average, and as many at once after an idle minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._most = self._level = float(per_minute)
        self._at = now

    def take(self, now: float) -> float:
        """Take one and return 0; without one, return the seconds until there is one."""
        if not (wait_s := self.wait_s(now)):
            self._level -= 1
        return wait_s

    def wait_s(self, now: float, pending: int = 0) -> float:
        """Return the seconds until the bucket has `pending` tokens and one more; 0 if it has them now."""
        rate = self._most / 60
        self._level = min(self._most, self._level + max(now - self._at, 0.0) * rate)
        self._at = max(now, self._at)
        short = 1 + pending - self._level
        return short / rate if short > _ROUNDING else 0.0

    def spend(self, count: int) -> None:
        """Take any number, even more than the bucket has."""
        self._level -= count


@dataclass(slots=True)
class KeyCounts:
    """Counts of a key since its creation. `day_tokens` count the local day with the ordinal `day`."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    last_used: int = 0
    day: int = 0
    day_tokens: int = 0

    def tokens_of(self, day: int) -> int:
        """Return the tokens of that day. A clock that goes back by a day begins no new day."""
        return self.day_tokens if self._goes_on(day) else 0

    def count(self, tokens: int, day: int) -> None:
        self.day_tokens = self.tokens_of(day) + tokens
        self.day = max(day, self.day) if self._goes_on(day) else day

    def _goes_on(self, day: int) -> bool:
        """Return True if `day` is the counted day, or the day before it (a clock that went back)."""
        return 0 <= self.day - day <= 1


class KeyUse:
    """Use of one key: its counts, and its open requests, whose tokens count as they are generated."""

    def __init__(self, key: ApiKey, counts: KeyCounts, clock: float) -> None:
        self.key = key
        self.counts = counts
        self.open: dict[RequestContext, None] = {}
        self._requests = TokenBucket(key.per_minute, clock) if key.per_minute else None
        self._tokens = TokenBucket(key.tokens_per_minute, clock) if key.tokens_per_minute else None

    def refusal(self, scope: str, clock: float, now: float) -> Refusal | None:
        """Return the refusal of a request that needs `scope`; None to admit it, which counts it."""
        self.counts.last_used = int(now)
        refused = outlived(self.key, now) or misplaced(self.key, scope)
        refused = refused or (self._too_much(clock, now) if scope == CHAT else None)
        if refused is None and self._requests is not None and (wait_s := self._requests.take(clock)):
            refused = _too_fast(self.key, counted(self.key.per_minute, REQUESTS), wait_s)
        self.counts.requests += refused is None
        self.counts.refused += refused is not None
        return refused

    def end(self, request: RequestContext, now: float) -> None:
        self.open.pop(request, None)
        counts, used = self.counts, _tokens(request)
        counts.prompt_tokens += request.prompt_tokens
        counts.generated_tokens += request.generated_tokens
        counts.count(used, _day(now))
        if self._tokens is not None:
            self._tokens.spend(used + request.counted_tokens)

    def summary(self, now: float) -> dict[str, Any]:
        """Return limits and counts, including open requests, to show to users. None is no limit."""
        names = ("expires", *(name for name, *_ in COUNTS))
        limits = {name: getattr(self.key, name) or None for name in names}
        found = asdict(self.counts) | limits
        del found["day"], found["day_tokens"]
        found["prompt_tokens"] += sum(each.prompt_tokens for each in self.open)
        found["generated_tokens"] += sum(each.generated_tokens for each in self.open)
        return {"name": self.key.name, **found, "tokens_today": self._today(now), "open": len(self.open)}

    def _today(self, now: float) -> int:
        return self.counts.tokens_of(_day(now)) + self._pending()

    def _pending(self) -> int:
        return sum(map(_tokens, self.open))

    def _too_much(self, clock: float, now: float) -> Refusal | None:
        key = self.key
        if key.concurrent and len(self.open) >= key.concurrent:
            allowed = f"the key {key.name} allows {counted(key.concurrent, AT_ONCE)}"
            words = f"{allowed}, and as many are open; retry when one has ended"
            return Refusal(429, Code.RATE_LIMITED, words, {"retry-after": "1"})
        if key.tokens_per_day and (used := self._today(now)) >= key.tokens_per_day:
            tomorrow = datetime.fromtimestamp(now).date() + timedelta(days=1)
            until = datetime.combine(tomorrow, time()).astimezone()
            allowed = f"{counted(key.tokens_per_day, A_DAY)} and has used {used} today"
            begins = f"; the next day begins at {until.strftime(_TIME)}"
            return _too_fast(key, allowed, until.timestamp() - now, begins, Code.QUOTA)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(clock, self._pending())):
            return _too_fast(key, f"{counted(key.tokens_per_minute, A_MINUTE)}, which are used up", wait_s)
        return None


def outlived(key: ApiKey, now: float) -> Refusal | None:
    if not key.expires or now < key.expires:
        return None
    at, name = datetime.fromtimestamp(key.expires).astimezone().strftime(_TIME), key.name
    words = f"the key {name} expired at {at}; `mlxtp key revoke {name}` and `mlxtp key create` replace it"
    return Refusal(401, Code.KEY_INVALID, words, {"www-authenticate": f'{CHALLENGE}, error="invalid_token"'})


def misplaced(key: ApiKey, scope: str) -> Refusal | None:
    if key.may(scope):
        return None
    words = f"the key {key.name} does not permit {SCOPES[scope]}: that is scope {scope}, and it has "
    return Refusal(403, Code.NOT_PERMITTED, words + ", ".join(key.scopes))


def _too_fast(
    key: ApiKey, allowed: str, wait_s: float, until: str = "", code: Code = Code.RATE_LIMITED
) -> Refusal:
    seconds = max(math.ceil(wait_s), 1)
    headers = {"retry-after": str(seconds)}
    if seconds > PATIENCE_S:
        headers["x-should-retry"] = "false"
    words = f"the key {key.name} allows {allowed}{until}; retry in {_duration(seconds)}"
    return Refusal(429, code, words, headers)


def _duration(seconds: int) -> str:
    if seconds < PATIENCE_S:
        return f"{seconds} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _tokens(request: RequestContext) -> int:
    return request.prompt_tokens + request.generated_tokens


def _day(now: float) -> int:
    return datetime.fromtimestamp(now).date().toordinal()

"""The API keys of a running agent: reloaded when the file changes, with use counts and rate limits."""

from __future__ import annotations

import hmac
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from ..errors import Code, ConfigError
from .api_keys import PREFIX, ApiKey, KeyFile, digest_of
from .guard import Refusal
from .request_context import note_key

_ROUNDING = 1e-6  # tokens by which a sum of floats may be short


class TokenBucket:
    """Limiter to `per_minute` requests a minute on average, and as many at once after an idle minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        """Start full at `now`, in seconds of the clock that later calls use."""
        self._most = float(per_minute)
        self._level = self._most
        self._at = now

    def take(self, now: float) -> float:
        """Take a token and return 0; without one, return the seconds until there is one."""
        rate = self._most / 60
        self._level = min(self._most, self._level + max(now - self._at, 0.0) * rate)
        self._at = max(now, self._at)
        if self._level >= 1 - _ROUNDING:
            self._level -= 1
            return 0.0
        return (1 - self._level) / rate


log = logging.getLogger(__name__)

LOOK_S = 1.0  # Greatest age, in seconds, of the last check of the file when a request arrives.
_CHALLENGE = 'Bearer realm="mlxtp"'
_HOW = "on the Mac that answers here, `mlxtp key create NAME` makes one"


def keys_needed(rule: str, *, beyond: bool, exist: bool) -> bool:
    """Return True where requests have to show a key.

    `rule` is the setting `api_keys`. `beyond`: other machines reach the endpoint. `exist`: there are keys.
    """
    return rule == "always" or (rule == "auto" and (beyond or exist))


class KeyRing:
    """Access decisions by the keys of one home, which may have none yet.

    `own_key` is that of this Mac's own commands and opens everything. `clock` and `now` (since 1970) are in
    seconds.
    """

    def __init__(
        self,
        file: KeyFile,
        rule: str,
        *,
        beyond: bool,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Load the keys. Raises ConfigError when they cannot be read."""
        self.own_key = ""
        self._file = file
        self._rule = rule
        self._beyond = beyond
        self._clock = clock
        self._now = now
        self._stamp = file.stamp()
        self._keys = file.load()
        self._problem = ""
        self._looked_at = clock()
        self._buckets: dict[ApiKey, TokenBucket] = {}
        self._used: dict[str, int] = {}

    @property
    def needed(self) -> bool:
        """True while requests have to show a key."""
        exist = bool(self._keys or self._problem)
        return keys_needed(self._rule, beyond=self._beyond, exist=exist)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all valid keys."""
        return tuple(each.name for each in self._keys)

    @property
    def used(self) -> Mapping[str, int]:
        """Time of the last use of each key since this agent started, in seconds since 1970."""
        return self._used

    def refusal(self, given: Sequence[str]) -> Refusal | None:
        """Return the refusal of a request that shows the keys `given`; None to admit it."""
        now = self._clock()
        self._reload(now)
        if not self.needed or self._is_own(given):
            return None
        if self._problem:
            return Refusal(
                503,
                Code.CONFIG,
                "this server cannot read its API keys, so it accepts none; see its log for the cause",
            )
        found = self._find(given)
        return self._unknown(given) if found is None else self._use(found, now)

    def admits(self, given: Sequence[str]) -> bool:
        """Return True where one of `given` is valid or none is needed. Does not count as a use."""
        self._reload(self._clock())
        return not self.needed or self._is_own(given) or self._find(given) is not None

    def _is_own(self, given: Sequence[str]) -> bool:
        return bool(self.own_key) and _among(digest_of(self.own_key), [digest_of(key) for key in given])

    def _find(self, given: Sequence[str]) -> ApiKey | None:
        digests = [digest_of(key) for key in given]
        found = None
        for key in self._keys:  # always all of them, so that the time reveals nothing
            if _among(key.digest, digests):
                found = key
        return found

    def _use(self, key: ApiKey, now: float) -> Refusal | None:
        self._used[key.name] = int(self._now())
        note_key(key.name)
        if not key.per_minute:
            return None
        bucket = self._buckets.setdefault(key, TokenBucket(key.per_minute, now))
        if not (wait_s := bucket.take(now)):
            return None
        seconds = math.ceil(wait_s)
        return Refusal(
            429,
            Code.RATE_LIMITED,
            f"the key {key.name} allows {key.per_minute} requests a minute; retry in {seconds} s",
            {"retry-after": str(seconds)},
        )

    def _unknown(self, given: Sequence[str]) -> Refusal:
        challenge = _CHALLENGE
        if not self._keys:
            why = f"this server requires an API key, and there is none yet: {_HOW}"
        elif not given:
            why = (
                "this server requires an API key, as `Authorization: Bearer KEY` or `x-api-key: KEY`; its "
                f"keys begin with {PREFIX}, and {_HOW}"
            )
        else:
            why = f"this API key is not known here, or was revoked; {_HOW}"
            challenge += ', error="invalid_token"'
        return Refusal(401, Code.KEY_INVALID, why, {"www-authenticate": challenge})

    def _reload(self, now: float) -> None:
        """Reload the file if it has changed. If it cannot be read, no key is valid."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        try:
            stamp = self._file.stamp()
            if stamp == self._stamp and not self._problem:
                return
            if stamp is None:
                raise ConfigError(
                    f"{self._file.path} is gone, so no API key is valid; restore it, or restart the agent "
                    f"to go on without keys"
                )
            self._keys, self._problem = self._file.load(), ""
            self._stamp = stamp
        except ConfigError as error:
            if error.detail != self._problem:
                log.error("%s", error.detail)
            self._keys, self._problem = (), error.detail
            return
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key in self._keys}
        self._used = {name: at for name, at in self._used.items() if name in self.names}
        log.info("API keys that count now: %s", ", ".join(self.names) or "none")


def _among(digest: bytes, digests: Sequence[bytes]) -> bool:
    """Constant-time membership test."""
    return sum(hmac.compare_digest(digest, each) for each in digests) > 0

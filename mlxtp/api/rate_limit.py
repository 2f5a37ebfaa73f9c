"""Rate limit by a token bucket. Pure; the caller passes the time."""

from __future__ import annotations

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

"""How often something may happen: a token bucket. Pure; whoever asks says what time it is."""

from __future__ import annotations

_ROUNDING = 1e-6
"""Tokens by which a sum of floats may be short."""


class TokenBucket:
    """Lets `per_minute` requests a minute through on average, and as many at once after a minute of rest."""

    def __init__(self, per_minute: int, now: float) -> None:
        """Full at `now`, in seconds of whatever clock is used later on."""
        self._most = float(per_minute)
        self._level = self._most
        self._at = now

    def take(self, now: float) -> float:
        """0 for a request that may go on; else nothing is taken, and one may in so many seconds."""
        rate = self._most / 60
        self._level = min(self._most, self._level + max(now - self._at, 0.0) * rate)
        self._at = max(now, self._at)
        if self._level >= 1 - _ROUNDING:
            self._level -= 1
            return 0.0
        return (1 - self._level) / rate

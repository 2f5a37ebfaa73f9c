"""Counts of epochs' ends by code, and of the time until a model was served again. Pure."""

from __future__ import annotations

from collections import Counter

from ..api.request_metrics import Histogram
from ..errors import Code

#: Buckets in seconds: a recovery takes about 2.5 with warm processes, about 7 without, plus the model's load.
RECOVERY_S = (0.5, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 300)


class Recoveries:
    """Recoveries of epochs whose rank 0 is on this machine. `now` is in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self.ended: Counter[Code] = Counter()
        #: Seconds from the failure of an epoch that served to the next one that serves.
        self.seconds = Histogram(RECOVERY_S)
        self._serving = False
        self._broken_at: float | None = None

    def serving(self, now: float) -> None:
        """Note that a model is served."""
        self._serving = True
        if self._broken_at is not None:
            self.seconds.observe(now - self._broken_at)
            self._broken_at = None

    def over(self, code: Code, now: float) -> None:
        """Note that an epoch has ended. One that makes room for another was no failure."""
        self.ended[code] += 1
        if self._serving and code is not Code.REPLANNED:
            self._broken_at = now
        self._serving = False

    def rested(self) -> None:
        """Note that no model is desired: the next epoch is no recovery."""
        self._serving = False
        self._broken_at = None

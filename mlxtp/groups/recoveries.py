"""How often epochs ended, why, and how long it took until a model was served again. Pure."""

from __future__ import annotations

from collections import Counter

from ..api.request_metrics import Histogram
from ..errors import Code

RECOVERY_S = (0.5, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 300)
"""With spares about 2.5 s, without about 7 s, and as long as the model takes to load."""


class Recoveries:
    """Of the epochs whose rank 0 is on this machine. `now` is in seconds, from anywhere on."""

    def __init__(self) -> None:
        self.ended: Counter[Code] = Counter()
        self.seconds = Histogram(RECOVERY_S)
        """From the failure of an epoch that served to the next one that serves."""
        self._serving = False
        self._broken_at: float | None = None

    def serving(self, now: float) -> None:
        """A model answers."""
        self._serving = True
        if self._broken_at is not None:
            self.seconds.observe(now - self._broken_at)
            self._broken_at = None

    def over(self, code: Code, now: float) -> None:
        """An epoch has ended. One that makes room for another was no failure."""
        self.ended[code] += 1
        if self._serving and code is not Code.REPLANNED:
            self._broken_at = now
        self._serving = False

    def rested(self) -> None:
        """Nothing shall be served: what comes next is no recovery."""
        self._serving = False
        self._broken_at = None

"""Counts of epochs' ends by code, and of the time until a model was served again. Pure."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from ..errors import Code

#: Buckets in seconds: a recovery takes about 2.5 with warm processes, about 7 without, plus the model's load.
RECOVERY_S = (0.5, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 300)


class Recoveries:
    """Recoveries of epochs whose rank 0 is on this machine. `now` is in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self.ended = Counter(
            "mlxtp_epochs_ended",
            "Epochs with rank 0 on this Mac that ended, by the code of the reason.",
            ("code",),
            registry=None,
        )
        self.seconds = Histogram(
            "mlxtp_recovery_seconds",
            "Seconds from a group's failure until a model is served again (on the Mac of rank 0).",
            registry=None,
            buckets=RECOVERY_S,
        )
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
        self.ended.labels(code).inc()
        if self._serving and code is not Code.REPLANNED:
            self._broken_at = now
        self._serving = False

    def rested(self) -> None:
        """Note that no model is desired: the next epoch is no recovery."""
        self._serving = False
        self._broken_at = None

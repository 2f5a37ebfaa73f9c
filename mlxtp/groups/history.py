"""Past epochs of this agent: their stages and ends, and the time from a failure to the next that serves.

This agent records each step of its own epochs, and only reports of epochs on other Macs. Arguments `clock`
are seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from prometheus_client import Counter, Histogram

from ..errors import Code

MOST = 20  #: Epochs to keep.


@dataclass(slots=True)
class EpochStory:
    """One epoch: `began` in seconds since 1970, `ready_s`, `lasted_s` and the times of reached `stages` in
    seconds since then. `here`: this agent formed it. None: not happened yet, or not reported.
    """

    epoch: int
    began: float
    here: bool
    world_size: int
    backend: str
    kind: str
    model: str | None
    stages: list[tuple[str, float]] = field(default_factory=list)
    ready_s: float | None = None
    lasted_s: float | None = None
    code: str | None = None
    reason: str | None = None


class History:
    """The last `MOST` epochs. A new epoch ends a running one, without a reason."""

    def __init__(self) -> None:
        self._stories: deque[EpochStory] = deque(maxlen=MOST)
        self._since = 0.0  #: Start of the newest.

    def began(self, story: EpochStory, clock: float) -> None:
        self.ended(clock)
        self._stories.append(story)
        self._since = clock

    def reached(self, stage: str, seconds: float) -> None:
        if (story := self._running) is not None:
            story.stages.append((stage, round(seconds, 3)))

    def ready(self, clock: float) -> None:
        """Note that the epoch serves; only the first time counts."""
        if (story := self._running) is not None and story.ready_s is None:
            story.ready_s = round(clock - self._since, 3)

    def ended(self, clock: float, code: str | None = None, reason: str | None = None) -> None:
        """Note that the epoch is over; the first reason holds."""
        if (story := self._running) is not None:
            story.lasted_s = round(clock - self._since, 3)
            story.code, story.reason = code, reason

    def remote_epoch(self, story: EpochStory, clock: float, *, state: str, reason: str) -> None:
        """Take in another Mac's repeated reports of its group. Epoch 0 is none. Its reason for not being
        ready is the best known reason for the end of the epoch before.
        """
        running, over = self._running, story.epoch == 0 or state in _OVER
        if running is not None and (over or story.epoch != running.epoch):
            self.ended(clock, None, reason if reason and (over or state in _BEFORE) else None)
        if over:
            return
        newest = self._stories[-1] if self._stories else None
        if newest is None or story.epoch > newest.epoch:
            self.began(story, clock)
        elif story.epoch == newest.epoch and not newest.here:  # only the link to its Mac was gone
            newest.lasted_s = newest.code = newest.reason = None
        if state == "ready" and self._stories[-1].epoch == story.epoch:
            self.ready(clock)

    def served_s(self, clock: float) -> float:
        """Return the seconds that the running epoch has served; 0 before it does."""
        ready_s = self._running.ready_s if self._running is not None else None
        return max(clock - self._since - ready_s, 0.0) if ready_s is not None else 0.0

    @property
    def stories(self) -> tuple[EpochStory, ...]:
        return tuple(reversed(self._stories))

    @property
    def _running(self) -> EpochStory | None:
        newest = self._stories[-1] if self._stories else None
        return newest if newest is not None and newest.lasted_s is None else None


_OVER = ("restarting", "failed", "idle", "stopped")  #: Another Mac has no group.
_BEFORE = ("starting", "forming")  #: Another Mac's reason is why it has no group yet.


class RateMeter:
    """Tokens per second over the last seconds, from a count that grows or restarts."""

    def __init__(self, window_s: float = 4.0, least_s: float = 0.4) -> None:
        self._window_s = window_s
        self._least_s = least_s
        self._seen: deque[tuple[float, int]] = deque()

    def rate(self, count: int, clock: float) -> float | None:
        """Return the present rate; None without an earlier call within the last seconds."""
        while self._seen and clock - self._seen[0][0] > self._window_s:
            self._seen.popleft()
        if self._seen and count < self._seen[-1][1]:
            self._seen.clear()
        if not self._seen or clock - self._seen[-1][0] >= self._least_s / 2:
            self._seen.append((clock, count))
        then, before = self._seen[0]
        return round((count - before) / (clock - then), 1) if clock - then >= self._least_s else None

    def reset(self) -> None:
        self._seen.clear()


# --- recoveries ------------------------------------------------------------------------------------------

#: Buckets in seconds: a recovery takes about 2.5 with warm processes, about 7 without, plus the model's load.
RECOVERY_S = (0.5, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 300)


class RecoveryMetrics:
    """Counts of ended epochs with rank 0 on this machine, and of recoveries from them."""

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


class Recoveries:
    def __init__(self, metrics: RecoveryMetrics | None = None) -> None:
        self.metrics = metrics or RecoveryMetrics()
        self._serving = False
        self._broken_at: float | None = None

    def serving(self, clock: float) -> None:
        self._serving = True
        if self._broken_at is not None:
            self.metrics.seconds.observe(clock - self._broken_at)
            self._broken_at = None

    def over(self, code: Code, clock: float) -> None:
        """Note that an epoch ended; a replanned epoch did not fail."""
        self.metrics.ended.labels(code).inc()
        if self._serving and code is not Code.REPLANNED:
            self._broken_at = clock
        self._serving = False

    def rested(self) -> None:
        """Note that no model is desired, so that the next epoch is no recovery."""
        self._serving, self._broken_at = False, None

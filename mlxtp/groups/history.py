"""What became of the last epochs, for people: when each began, how far it got, why it ended. Pure.

Epochs that this agent forms are told step by step; of those on other Macs it knows what it is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MOST = 20
"""How many epochs are kept."""


@dataclass(frozen=True, slots=True)
class Instant:
    """One moment: the time of day in seconds since 1970, and a clock that nobody sets."""

    at: float
    clock: float


@dataclass(slots=True)
class EpochStory:
    """One epoch. `began` in seconds since 1970, `ready_s` and `lasted_s` in seconds since then.

    `stages` are those that were reached, with the seconds until then. `here`: this agent formed it. What is
    None has not happened, or nobody has told it: `lasted_s` is None while the epoch runs.
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
    """The last `MOST` epochs. An epoch that begins ends the one before, should nobody have said why."""

    def __init__(self) -> None:
        self._stories: deque[EpochStory] = deque(maxlen=MOST)
        self._since = 0.0
        """When the newest began, by the clock that nobody sets."""

    def began(
        self,
        epoch: int,
        now: Instant,
        *,
        world_size: int,
        backend: str,
        kind: str = "",
        model: str | None = None,
        here: bool = True,
    ) -> None:
        """An epoch begins."""
        self.ended(now, None, None)
        self._stories.append(EpochStory(epoch, now.at, here, world_size, backend, kind, model))
        self._since = now.clock

    def reached(self, stage: str, seconds: float) -> None:
        """The epoch that runs got so far, `seconds` after it began."""
        if (story := self._running) is not None:
            story.stages.append((stage, round(seconds, 3)))

    def ready(self, now: Instant) -> None:
        """It answers. Only the first time counts."""
        if (story := self._running) is not None and story.ready_s is None:
            story.ready_s = round(now.clock - self._since, 3)

    def ended(self, now: Instant, code: str | None, reason: str | None) -> None:
        """It is over. What was said first holds."""
        if (story := self._running) is not None:
            story.lasted_s = round(now.clock - self._since, 3)
            story.code, story.reason = code, reason

    def remote_epoch(
        self, epoch: int, now: Instant, *, state: str, reason: str, world_size: int, backend: str, kind: str
    ) -> None:
        """What another Mac says of its group, again and again. Epoch 0 is none.

        Its reason for not being ready is the best that is known of why the epoch before has ended.
        """
        running, over = self._running, epoch == 0 or state in _OVER
        if running is not None and (over or epoch != running.epoch):
            self.ended(now, None, reason if reason and (over or state in _BEFORE) else None)
        if over:
            return
        newest = self._stories[-1] if self._stories else None
        if newest is None or epoch > newest.epoch:
            self.began(epoch, now, world_size=world_size, backend=backend, kind=kind, here=False)
        elif epoch == newest.epoch and not newest.here:  # only the way to it had gone
            newest.lasted_s = newest.code = newest.reason = None
        if state == "ready" and self._stories[-1].epoch == epoch:
            self.ready(now)

    @property
    def stories(self) -> tuple[EpochStory, ...]:
        """The newest first."""
        return tuple(reversed(self._stories))

    @property
    def _running(self) -> EpochStory | None:
        newest = self._stories[-1] if self._stories else None
        return newest if newest is not None and newest.lasted_s is None else None


_OVER = ("restarting", "failed", "idle", "stopped")
"""States in which a group on another Mac is none."""
_BEFORE = ("starting", "forming")
"""Those in which it says why there is no group yet; later, its reasons are about other things."""


def to_json(stories: Iterable[EpochStory]) -> list[Mapping[str, Any]]:
    """As JSON has it."""
    return [asdict(story) for story in stories]


class RateMeter:
    """Tokens per second over the last seconds, from a count that only grows."""

    def __init__(self, window_s: float = 4.0, least_s: float = 0.4) -> None:
        self._window_s = window_s
        self._least_s = least_s
        self._seen: deque[tuple[float, int]] = deque()

    def rate(self, count: int, clock: float) -> float | None:
        """The rate until now; None when nobody has looked within the last seconds: it is not known."""
        while self._seen and clock - self._seen[0][0] > self._window_s:
            self._seen.popleft()
        if not self._seen or clock - self._seen[-1][0] >= self._least_s / 2:
            self._seen.append((clock, count))
        then, before = self._seen[0]
        return round((count - before) / (clock - then), 1) if clock - then >= self._least_s else None

    def reset(self) -> None:
        """What was counted until now was for nobody."""
        self._seen.clear()

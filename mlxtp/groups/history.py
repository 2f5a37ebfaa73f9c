"""Record of the last epochs, for users: when each began, how far it got, why it ended. Pure.

This agent notes each step of the epochs that it forms. Of those on other Macs it has only their reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MOST = 20  #: Epochs that are kept.


@dataclass(frozen=True, slots=True)
class Instant:
    """One instant: the time of day in seconds since 1970, and seconds of a clock that never jumps."""

    at: float
    clock: float


@dataclass(slots=True)
class EpochStory:
    """One epoch. `began` in seconds since 1970, `ready_s` and `lasted_s` in seconds since then.

    `stages` are those that were reached, with the seconds until then. `here`: this agent formed it. A value
    of None has not happened, or was not reported: `lasted_s` is None while the epoch runs.
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
    """The last `MOST` epochs. An epoch that begins ends one that still runs, without a reason."""

    def __init__(self) -> None:
        self._stories: deque[EpochStory] = deque(maxlen=MOST)
        self._since = 0.0  #: Start of the newest, in seconds of the clock that never jumps.

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
        """Note that an epoch begins."""
        self.ended(now, None, None)
        self._stories.append(EpochStory(epoch, now.at, here, world_size, backend, kind, model))
        self._since = now.clock

    def reached(self, stage: str, seconds: float) -> None:
        """Note that the running epoch reached a stage, `seconds` after it began."""
        if (story := self._running) is not None:
            story.stages.append((stage, round(seconds, 3)))

    def ready(self, now: Instant) -> None:
        """Note that the epoch serves. Only the first time counts."""
        if (story := self._running) is not None and story.ready_s is None:
            story.ready_s = round(now.clock - self._since, 3)

    def ended(self, now: Instant, code: str | None, reason: str | None) -> None:
        """Note that the epoch is over. The first reason holds."""
        if (story := self._running) is not None:
            story.lasted_s = round(now.clock - self._since, 3)
            story.code, story.reason = code, reason

    def remote_epoch(
        self, epoch: int, now: Instant, *, state: str, reason: str, world_size: int, backend: str, kind: str
    ) -> None:
        """Take in another Mac's repeated reports of its group. Epoch 0 is none.

        Its reason for not being ready is the best known reason for the end of the epoch before.
        """
        running, over = self._running, epoch == 0 or state in _OVER
        if running is not None and (over or epoch != running.epoch):
            self.ended(now, None, reason if reason and (over or state in _BEFORE) else None)
        if over:
            return
        newest = self._stories[-1] if self._stories else None
        if newest is None or epoch > newest.epoch:
            self.began(epoch, now, world_size=world_size, backend=backend, kind=kind, here=False)
        elif epoch == newest.epoch and not newest.here:  # only the link to its Mac was gone
            newest.lasted_s = newest.code = newest.reason = None
        if state == "ready" and self._stories[-1].epoch == epoch:
            self.ready(now)

    @property
    def stories(self) -> tuple[EpochStory, ...]:
        """Return the epochs, the newest first."""
        return tuple(reversed(self._stories))

    @property
    def _running(self) -> EpochStory | None:
        newest = self._stories[-1] if self._stories else None
        return newest if newest is not None and newest.lasted_s is None else None


_OVER = ("restarting", "failed", "idle", "stopped")  #: States in which another Mac has no group.
#: States in which it reports why there is no group yet; later, its reasons are about other things.
_BEFORE = ("starting", "forming")


def to_json(stories: Iterable[EpochStory]) -> list[Mapping[str, Any]]:
    """Return the epochs for JSON."""
    return [asdict(story) for story in stories]


class RateMeter:
    """Tokens per second over the last seconds, from a count that only grows."""

    def __init__(self, window_s: float = 4.0, least_s: float = 0.4) -> None:
        self._window_s = window_s
        self._least_s = least_s
        self._seen: deque[tuple[float, int]] = deque()

    def rate(self, count: int, clock: float) -> float | None:
        """Return the present rate; None (unknown) without an earlier call within the last seconds."""
        while self._seen and clock - self._seen[0][0] > self._window_s:
            self._seen.popleft()
        if not self._seen or clock - self._seen[-1][0] >= self._least_s / 2:
            self._seen.append((clock, count))
        then, before = self._seen[0]
        return round((count - before) / (clock - then), 1) if clock - then >= self._least_s else None

    def reset(self) -> None:
        """Forget the counts so far."""
        self._seen.clear()

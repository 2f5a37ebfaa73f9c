"""The loop of an agent: what it does at intervals, and again after each change."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

LEAST_S = 0.02  #: Seconds between two rounds that only the time causes.
AGAIN_S = 0.5  #: Seconds until the round after one whose own steps changed something.


@dataclass(slots=True)
class _Interval:
    seconds: float
    act: Callable[[float], object]
    at: float
    needed: Callable[[], object]


class Rounds:
    """Runs steps in the order in which they were added. `clock` is a monotonic time in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._intervals: list[_Interval] = []
        self._steps: list[Callable[[float], float | None]] = []
        self._wake = asyncio.Event()

    def every(
        self,
        seconds: float,
        act: Callable[[float], object],
        *,
        first_s: float = 0.0,
        needed: Callable[[], object] = lambda: True,
    ) -> None:
        """Have `act` called with the time every so many seconds, the first time in `first_s`.

        It is not called, and begins no round, while `needed` returns something false.
        """
        self._intervals.append(_Interval(seconds, act, self._clock() + first_s, needed))

    def add(self, step: Callable[[float], float | None]) -> None:
        """Have `step` called with the time in each round. It may return a time of the next round."""
        self._steps.append(step)

    def wake(self) -> None:
        """Begin a round soon: something is different."""
        self._wake.set()

    def step(self, now: float) -> float:
        """Run all steps once. Return the latest time of the next round."""
        found = [step(now) for step in self._steps]
        return min((each for each in found if each is not None), default=math.inf)

    def due(self, now: float) -> float:
        """Run the intervals that are due, then all steps. Return the latest time of the next round."""
        self._wake.clear()
        for each in self._intervals:
            if now >= each.at and each.needed():
                following = each.at + each.seconds
                each.at = following if following > now else now + each.seconds
                each.act(now)
        until = max(self.step(now), now + LEAST_S)
        if self._wake.is_set():
            until = min(until, now + AGAIN_S)
            self._wake.clear()
        return min([until, *(each.at for each in self._intervals if each.needed())])

    async def run(self, after: Callable[[], Awaitable[None]]) -> None:
        """Run until cancelled. `after` ends each round; a change during it begins another one."""
        while True:
            until = self.due(self._clock())
            await after()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(until - self._clock(), 0.0)):
                    await self._wake.wait()
            await asyncio.sleep(0)

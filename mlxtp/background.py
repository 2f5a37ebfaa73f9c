"""Work beside its owner: tasks that are kept until they end, and pauses between tries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Called with a task that ended in an error, and the error.
Failed = Callable[[asyncio.Task[Any], BaseException], None]


def log_failure(task: asyncio.Task[Any], error: BaseException) -> None:
    """Log the error of a task under the task's name."""
    log.error("%s failed", task.get_name(), exc_info=error)


class Background:
    """Tasks of one owner. `failed` gets the error of each task at once, so that no error is lost."""

    def __init__(self, failed: Failed = log_failure) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def tasks(self) -> frozenset[asyncio.Task[Any]]:
        """Tasks that have not ended."""
        return frozenset(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` in a task. `name` begins the line of the log about its failure."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(task, error)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double with each failure, from `first_s` to `most_s`. Pure."""

    first_s: float
    most_s: float

    def after(self, failures: int) -> float:
        """Return the seconds to wait after so many failures before the last one."""
        return min(self.first_s * 2.0 ** min(failures, 64), self.most_s)

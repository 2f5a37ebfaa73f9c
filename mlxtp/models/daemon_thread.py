"""Daemon threads for work that waits for a network: no pool fills up, and the program can end at any time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a thread now. It cannot be cancelled, only abandoned."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: the waiting caller raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="apart", daemon=True).start()
    return future


async def apart(work: Callable[[], T]) -> T:
    """Run `work` in a thread and wait for it. Cancellation ends only the wait."""
    return await asyncio.wrap_future(begin(work))

"""Work that waits for a network, in threads of its own: it fills no pool, and no end of the program waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(work: Callable[[], T]) -> Future[T]:
    """Start it now. It cannot be cancelled, only left."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: whoever waits raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="apart", daemon=True).start()
    return future


async def apart(work: Callable[[], T]) -> T:
    """The same, and wait for it; whoever is cancelled waits no more."""
    return await asyncio.wrap_future(begin(work))

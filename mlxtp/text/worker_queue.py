"""Queue of work on texts, with a bound on the wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from ..errors import Code, RequestError

T = TypeVar("T")

MOST_WAIT_S = 30.0  # seconds before a request is refused


class WorkerQueue:
    """One thread that runs one piece of work after the other. Work that waits too long is refused."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "text")
        self._thread = self._pool.submit(threading.get_ident).result()

    @property
    def here(self) -> bool:
        """True in the thread of this queue."""
        return threading.get_ident() == self._thread

    def run_blocking(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, at once in the queue's own thread. Raises as `work` does."""
        return work() if self.here else self._pool.submit(work).result()

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raises as `work` does, and RequestError 503."""
        working = self._pool.submit(copy_context().run, work)
        waiting = asyncio.wrap_future(working)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=MOST_WAIT_S)
            if not done and working.cancel():  # it has not begun
                detail = f"other prompts kept the tokenizer busy for {MOST_WAIT_S:g} s"
                raise RequestError(detail, Code.OVERLOADED, status=503)
            return await waiting
        finally:
            working.cancel()

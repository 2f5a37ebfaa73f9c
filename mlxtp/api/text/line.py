"""Waiting lines for a model's text: short ones and long ones apart, each one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from ...errors import Code, RequestError

T = TypeVar("T")

MOST_WAIT_S = 30.0  # before a request is refused


class Line:
    """A thread for work that waits for a model's text process. What waits too long is refused."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. Raises as it does, and RequestError 503."""
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


SHORT_LINE = Line("short-text")
LONG_LINE = Line("long-text")

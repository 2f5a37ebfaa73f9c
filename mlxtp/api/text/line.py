"""Where requests wait for a model's text: short ones and long ones apart, each one after the other."""

from __future__ import annotations

import asyncio
import time
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
        since = time.monotonic()

        def in_turn() -> T:
            waited_s = time.monotonic() - since
            if waited_s > MOST_WAIT_S:
                detail = f"other prompts kept the tokenizer busy for {waited_s:.0f} s"
                raise RequestError(detail, Code.OVERLOADED, status=503)
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, in_turn)


SHORT_LINE = Line("short-text")
LONG_LINE = Line("long-text")

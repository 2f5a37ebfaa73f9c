"""Helpers of several stories of this folder."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ..live_cluster import WAIT_S


async def sees(condition: Callable[[], object], what: str = "") -> None:
    """Wait for what is not announced. Fails when it never comes."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {WAIT_S:g} s: {what or condition}") from None


async def within(story: Awaitable[None]) -> None:
    """A story that hangs fails."""
    async with asyncio.timeout(WAIT_S):
        await story


def run(story: Coroutine[Any, Any, None]) -> None:
    """Run it in an event loop of its own. Fails when a task ended by an error that was not looked at."""
    silent: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: silent.append(context))
        await story

    gc.freeze()  # what is here already need not be looked through
    try:
        asyncio.run(watched())
        gc.collect()
    finally:
        gc.unfreeze()
    assert silent == []

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.api.streaming import interleaved

from .conftest import WAIT_S, forever

quick = settings(max_examples=50, deadline=None, derandomize=True, database=None)


class Sources:
    """Sources of (source, item) pairs, and which of them were closed."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.closed: set[int] = set()

    async def source(
        self, index: int, items: int, error: Exception | None = None, wait: bool = False
    ) -> AsyncGenerator[tuple[int, int]]:
        try:
            for item in range(items):
                self.made.append((index, item))
                yield index, item
            if wait:
                await forever()
            if error is not None:
                raise error
        finally:
            self.closed.add(index)


@quick
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_every_item_comes_once_and_each_source_in_order(counts: list[int]) -> None:
    async def story() -> None:
        sources = Sources()
        parts = [sources.source(index, count) for index, count in enumerate(counts)]
        seen = [item async for item in interleaved(parts)]
        for index, count in enumerate(counts):
            assert [item for one, item in seen if one == index] == list(range(count))
        assert len(seen) == sum(counts)
        assert sources.closed == set(range(len(counts)))

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


def test_a_failure_ends_them_all() -> None:
    async def story() -> None:
        sources = Sources()
        parts = [
            sources.source(0, 1, wait=True),
            sources.source(1, 1, error=KeyError("x")),
            sources.source(2, 10**9),
        ]
        with pytest.raises(KeyError):
            async for _ in interleaved(parts):
                pass
        assert sources.closed == {0, 1, 2}

    asyncio.run(asyncio.wait_for(story(), WAIT_S))


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_reader_that_stops_closes_them_all_and_none_ran_away(how: str) -> None:
    async def story() -> None:
        sources = Sources()
        parts = [sources.source(0, 10**9), sources.source(1, 1, wait=True)]
        reached = asyncio.Event()

        async def read() -> None:
            async with aclosing(interleaved(parts)) as items:
                seen = 0
                async for _ in items:
                    seen += 1
                    if seen == 5:
                        reached.set()
                        if how == "close":
                            return
                        await forever()

        reading = asyncio.create_task(read())
        await reached.wait()
        if how == "cancel":
            reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert sources.closed == {0, 1}
        assert len(sources.made) < 10

    asyncio.run(asyncio.wait_for(story(), WAIT_S))

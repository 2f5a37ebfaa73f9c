"""Tasks beside their owner: none ends unseen, none outlives its owner. Pauses between tries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.background import Background, Backoff


async def fail() -> None:
    await asyncio.sleep(0)
    raise ZeroDivisionError("by a bug")


def test_each_error_is_reported_at_once(caplog: pytest.LogCaptureFixture) -> None:
    reported: list[tuple[str, str]] = []

    def failed(task: asyncio.Task[Any], error: BaseException) -> None:
        reported.append((task.get_name(), str(error)))

    async def story() -> None:
        told, logged = Background(failed), Background()
        await asyncio.wait({told.start(fail(), "counting"), logged.start(fail(), "dividing")})
        assert told.tasks == logged.tasks == frozenset()

    asyncio.run(story())
    assert reported == [("counting", "by a bug")]
    [record] = caplog.records
    assert record.getMessage() == "dividing failed"
    assert record.exc_info[0] is ZeroDivisionError


def test_closing_ends_all_tasks_also_those_that_others_start(caplog: pytest.LogCaptureFixture) -> None:
    ended = []

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def story() -> None:
        background = Background()

        async def work() -> None:
            try:
                await wait("first")
            finally:
                background.start(wait("second"), "cleaning up")
                await asyncio.sleep(0)

        background.start(work(), "working")
        await asyncio.sleep(0)
        await background.close()
        assert background.tasks == frozenset()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(story())
    assert ended == ["first", "second"]
    assert caplog.records == []


@given(st.floats(0.01, 60), st.floats(1, 1e4), st.integers(0, 10**9))
def test_pauses_double_up_to_their_limit(first_s: float, most_s: float, failures: int) -> None:
    backoff = Backoff(first_s, most_s)
    pause_s, next_s = backoff.after(failures), backoff.after(failures + 1)
    assert backoff.after(0) == min(first_s, most_s) <= pause_s <= next_s <= most_s
    assert next_s in (most_s, 2 * pause_s) or failures >= 64

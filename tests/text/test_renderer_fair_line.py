"""The tokenizer's queue when one client sends much."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxtp.errors import RequestError
from mlxtp.text.renderer import MOST_OWN, WorkerQueue, _Lane

WAIT_S = 20


def test_a_newcomer_waits_for_one_piece_of_work_of_a_client_with_many() -> None:
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def held() -> None:
        begun.set()
        go_on.wait(WAIT_S)

    def noting(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    async def story() -> None:
        queue = WorkerQueue()
        many = [asyncio.create_task(queue.run(held, "many"))]
        await asyncio.to_thread(begun.wait, WAIT_S)
        many += [asyncio.create_task(queue.run(noting("many"), "many")) for _ in range(20)]
        await asyncio.sleep(0)
        gone = many.pop()
        gone.cancel()
        newcomer = asyncio.create_task(queue.run(noting("newcomer"), "other"))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*many, newcomer)

    asyncio.run(story())
    assert order.index("newcomer") <= 1
    assert len(order) == 20


def test_little_text_to_be_counted_waits_for_one_client() -> None:
    go_on = threading.Event()

    async def story() -> None:
        queue = WorkerQueue()
        waiting = [
            asyncio.create_task(queue.run(lambda: go_on.wait(WAIT_S), client, size))
            for client, size in [("other", 0), *[("one", MOST_OWN // 8)] * 8]
        ]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="at most") as refused:
            await queue.run(lambda: None, "one", MOST_OWN // 8)
        assert refused.value.status == 429
        others = queue.run(lambda: 1, "other", MOST_OWN), queue.run(lambda: 2, "one")
        go_on.set()
        assert await asyncio.gather(*others) == [1, 2]
        await asyncio.gather(*waiting)

    asyncio.run(story())


def test_a_queue_that_is_closed_ends_its_process_behind_all_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(_Lane, "_drop", lambda _lane: order.append("end"))

    def held() -> None:
        begun.set()
        go_on.wait(WAIT_S)

    async def story() -> None:
        queue = _Lane(Path())
        waiting = [asyncio.create_task(queue.run(held))]
        await asyncio.to_thread(begun.wait, WAIT_S)
        waiting += [asyncio.create_task(queue.run(lambda: order.append("work"))) for _ in range(2)]
        await asyncio.sleep(0)
        queue.close()
        go_on.set()
        await asyncio.gather(*waiting)
        await asyncio.to_thread(queue.run_blocking, lambda: None)

    asyncio.run(story())
    assert order == ["work", "work", "end"]

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

from mlxtp.api.request_body import Bodies, Body
from mlxtp.api.request_context import RequestContext, answering


def test_one_clients_bodies_are_parsed_between_anothers() -> None:
    """A has 30 that wait when B's only one comes: it is the next, or the one after."""

    async def parsed() -> list[str]:
        bodies = Bodies(cast(Any, None), 1 << 20, 60.0)
        order: list[str] = []
        began, goes = threading.Event(), threading.Event()

        def of(client: str) -> Body:
            with answering(RequestContext("", 0.0, client)):
                return Body(bodies)

        def first(_: bytes) -> None:
            began.set()
            goes.wait(10)

        tasks = [asyncio.ensure_future(of("A").parsed(first, slow=True))]
        await asyncio.to_thread(began.wait, 10)
        for client in (*["A"] * 30, "B"):
            parse = lambda _data, client=client: order.append(client)  # noqa: E731
            tasks.append(asyncio.ensure_future(of(client).parsed(parse, slow=True)))
        await asyncio.sleep(0)
        goes.set()
        await asyncio.gather(*tasks)
        return order

    order = asyncio.run(parsed())
    assert order.index("B") < 2
    assert len(order) == 31

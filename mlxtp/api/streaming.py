"""Long answers: clients that leave, and comments that keep proxies from timing out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
PARTS_AT_ONCE = 16  # parts of one answer before other tasks may run

COMMENT = b": mlxtp\n\n"  # a server-sent event without content


class Closable(Protocol):
    async def aclose(self) -> None: ...


class ClientGone(Exception):
    """Signal that the client closed its connection and cannot read the answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` as a task, and cancel it at once when the client goes away; raises ClientGone then.

    The request's body must have been read. Returns or raises only after `work` has cleaned up.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class AnswerStream(Response):
    """Response that sends the parts of an answer as they are made. `parts` handles its own failures.

    Headers go out at once. After each `keep_alive_s` of silence, it sends the bytes that `idle` returns.
    `source`, from which the parts are made, is closed however the stream ends, even before it began.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes],
        source: Closable,
        keep_alive_s: float,
        idle: Callable[[], bytes],
        media_type: str,
    ) -> None:
        self._parts = parts
        self._source = source
        self._keep_alive_s = keep_alive_s
        self._idle = idle
        self._quiet_since = 0.0
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that leaves is not an error.
        with suppress(ClientGone, OSError):
            async with aclosing(self._source):
                if scope["method"] == "HEAD":
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await _send_body(send, b"", more=False)
                    return
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._parts) as parts:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._quiet_since = asyncio.get_running_loop().time()
            keeper = asyncio.create_task(self._keep_alive(send))
            try:
                at_once = 0
                async for part in parts:
                    if part:
                        await _send_body(send, part)
                        self._quiet_since = asyncio.get_running_loop().time()
                    at_once += 1
                    if at_once == PARTS_AT_ONCE:
                        # Neither `parts` nor `send` has to wait: let other tasks, and a disconnect, run.
                        at_once = 0
                        await asyncio.sleep(0)
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
        await _send_body(send, b"", more=False)

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wait_s = self._quiet_since + self._keep_alive_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                self._quiet_since = loop.time()
                if part := self._idle():
                    await _send_body(send, part)


async def interleaved(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield the items of several sources in the order of their arrival.

    Each source is at most one item ahead of the reader, so that none starves or runs away. Raises the first
    failure; however it ends, all sources are closed.
    """
    queue: asyncio.Queue[_Handed[T]] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(source, queue)) for source in sources]
    try:
        running = len(pumps)
        while running:
            handed = await queue.get()
            if isinstance(handed, Exception):
                raise handed
            if handed is None:
                running -= 1
            else:
                yield handed[0]
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


_Handed = tuple[T] | Exception | None  # an item, a source's failure, or its end (None)


async def _pump(source: AsyncGenerator[T], queue: asyncio.Queue[_Handed[T]]) -> None:
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put((item,))
        await queue.put(None)
    except Exception as error:  # noqa: BLE001 - the reader of the queue raises it
        await queue.put(error)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})

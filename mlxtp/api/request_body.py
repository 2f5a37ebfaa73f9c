"""Bodies of requests, read within limits, and counted until their prompts are tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from ..errors import Code, RequestError
from ..text.json_limits import SHORT
from .backend import Backend

T = TypeVar("T")

MAX_BODY_BYTES = 16 * 1024 * 1024
BODY_S = 60.0
#: Bytes of all bodies and of the text in them. The first 64 KiB of each do not count.
MAX_BODIES_BYTES = 96 * 1024 * 1024
WIDE = 4  # bytes of a character in Python, in a text that is not ASCII
#: Runs slow parsing, one body after the other, so that threads that open models stay free.
_PARSING = ThreadPoolExecutor(1, "parsing")


class Body:
    """The body of one request. It takes room, together with its text, until it is released."""

    def __init__(self, bodies: Bodies) -> None:
        self.size = 0  # bytes
        self._bodies = bodies
        self._taken = 0
        self._parts: list[bytes] = []
        self._data = b""

    async def parsed(self, parse: Callable[[bytes], T], *, slow: bool = False) -> T:
        """Return the result of `parse` for the whole body, once. Raises as it does.

        `slow`: `parse` may take long even for a short body.
        """
        data, self._data = self._data, b""
        if not slow and self.size <= SHORT:
            return parse(data)
        work = partial(copy_context().run, parse, data)
        return await asyncio.get_running_loop().run_in_executor(_PARSING, work)

    def release(self) -> None:
        """Give the room back. May be repeated."""
        self._bodies.room += self._taken
        self._taken = 0

    def _take(self, size: int) -> bool:
        """Take room for `size` bytes in all; False where there is too little.

        Bodies that began later give way. Otherwise, many simultaneous bodies would all be refused.
        """
        bodies, more = self._bodies, max(size - SHORT - self._taken, 0)
        if self not in bodies.coming:
            return False
        later = [each for each in bodies.coming[bodies.coming.index(self) + 1 :] if each._taken]
        if more > bodies.room + sum(each._taken for each in later):
            later = [self]
        while more > bodies.room and later:
            later.pop()._give_way()
        if self not in bodies.coming:
            return False
        self._taken += more
        bodies.room -= more
        return True

    def _give_way(self) -> None:
        self._bodies.coming.remove(self)
        self._parts.clear()
        self.release()

    async def read(self, request: Request, limit: int) -> None:
        """Read the body. Raises RequestError 413 for one that is too large, 503 where there is no room.

        A body that is too large is not kept. A client that is still sending would not see the reply, so up to
        4 times the limit is read and discarded.
        """
        declared = request.headers.get("content-length", "")
        size = int(declared) if declared.isdecimal() else 0
        refused = self._bodies.backend.shortage() if size > SHORT else None
        if size <= 4 * limit:
            size = 0
            async for part in request.stream():
                size += len(part)
                if refused is None and size <= limit and self._take(size):
                    self._parts.append(part)
                else:
                    self._parts.clear()
                if size > 4 * limit:
                    break
        if size > limit:
            raise RequestError(f"the body is larger than {limit} bytes", status=413)
        self.size, self._data = size, b"".join(self._parts)
        self._parts.clear()
        plain = self._data.isascii() and b"\\u" not in self._data
        if refused is None and not self._take(size if plain else WIDE * size):
            refused = RequestError(
                "the bodies of other requests leave no room; retry later", Code.OVERLOADED, status=503
            )
        if refused is not None:
            raise refused


class Bodies:
    """The room for all bodies. `limit`: the most bytes of one, `body_s`: the time to send it."""

    def __init__(self, backend: Backend, limit: int, body_s: float) -> None:
        self.room = MAX_BODIES_BYTES  # bytes
        self.coming: list[Body] = []  # Bodies that are being read and have room, the earliest first.
        self.backend = backend
        self._limit = limit
        self._body_s = body_s

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Body]:
        """Yield the whole body of a request. Raises RequestError 408, 413 or 503."""
        body = Body(self)
        self.coming.append(body)
        try:
            try:
                async with asyncio.timeout(self._body_s):
                    await body.read(request, self._limit)
            except TimeoutError:
                detail = f"the body was not complete within {self._body_s:g} s"
                raise RequestError(detail, status=408) from None
            finally:
                with suppress(ValueError):  # it gave way
                    self.coming.remove(body)
            yield body
        finally:
            body.release()

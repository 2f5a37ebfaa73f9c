"""Responses in the background: they go on when their client leaves, and end with the agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..adapter import SSE, Json, named_event
from ..streaming import COMMENT, AnswerStream
from .responses_store import ResponseStore, StoredResponse

RUNNING = ("queued", "in_progress")  #: Statuses of a response that is not over.

EVENTS_AT_ONCE = 64  # of a stored stream, for a slow reader


class BackgroundResponse(Response):
    """The first reply to a request, and then its work, which needs no client.

    The work is a part of the request, whose key, limits, metrics and log line count it until it is over.
    """

    def __init__(self, store: ResponseStore, kept: StoredResponse, work: AnswerStream) -> None:
        self._store = store
        self._kept = kept
        self._work = work
        self._first = (
            Response(kept.body, media_type="application/json")
            if kept.events is None
            else replayed(kept, -1, work.keep_alive_s, AsyncExitStack())
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(self._worked())
            self._kept.cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, working.cancel)
            await self._first(scope, receive, send)

    async def _worked(self) -> None:
        kept = self._kept
        try:
            await self._work.drained(self._record)
        except asyncio.CancelledError:
            if kept.status in RUNNING:
                response: Json = json.loads(kept.body) | {"status": "cancelled"}
                number = len(kept.events or ())
                event = {"type": "response.cancelled", "response": response, "sequence_number": number}
                self._store.record(kept, [named_event(event)], response)
            raise
        finally:
            kept.cancel = None
            _wake(kept)

    def _record(self, part: bytes) -> None:
        self._store.record(self._kept, [event + b"\n\n" for event in part.split(b"\n\n")[:-1]])
        _wake(self._kept)


def replayed(kept: StoredResponse, after: int, keep_alive_s: float, end: AsyncExitStack) -> AnswerStream:
    """Return a stream of the events after that number, as far as they are there and as they come.

    It closes `end` at its end.
    """
    return AnswerStream(_events(kept, after + 1), end, keep_alive_s, lambda: COMMENT, SSE)


async def over(kept: StoredResponse) -> None:
    """Wait until a response is over."""
    while kept.cancel is not None:
        await kept.changed.wait()


async def _events(kept: StoredResponse, at: int) -> AsyncGenerator[bytes]:
    assert kept.events is not None
    while True:
        if found := kept.events[at : at + EVENTS_AT_ONCE]:
            at += len(found)
            yield b"".join(found)
        elif kept.cancel is None:
            return
        else:
            await kept.changed.wait()


def _wake(kept: StoredResponse) -> None:
    kept.changed.set()
    kept.changed = asyncio.Event()

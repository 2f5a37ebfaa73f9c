"""A request of a local client: its tokens so far, and those that the client has yet to read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from ..api.backend import Progress, StreamEnd, TokenEvent, Tokens, TokenStream
from ..api.request_metrics import UNWATCHED, SequenceMeter
from ..errors import Code, MlxtpError
from ..wire.messages import Accepted, Generate, Prefilled
from .forwarded_request import ForwardedItem, RequestBackend
from .retry_policy import RequestRecord

#: Tokens, more or less, that may wait for a client. The request of a client further behind ends.
MAX_UNREAD = 16_384


_QUEUED = Progress("queued")


class ClientRequest:
    """Implementation of `api.backend.TokenStream`. Closing it early cancels the request, even if never
    iterated.

    It outlives the group that works on it: `again` returns the message for the next group.
    """

    def __init__(self, generate: Generate, abandon: Callable[[ClientRequest], None]) -> None:
        self.generate = generate
        self.uid = 0  #: Its uid at the backend; 0 while no backend has it.
        self.backend: RequestBackend | None = None
        self.elsewhere = False  #: True if that backend is on another Mac.
        self.strikes = 0
        self.times = 0  #: Number of times it was sent to a group.
        self.pending: asyncio.TimerHandle | None = None  #: Ends the request, unless a group takes it before.
        self.deadline: asyncio.TimerHandle | None = None  #: Ends the request, unless it is complete before.
        self.watch: SequenceMeter = UNWATCHED  #: Counts its tokens and its end.
        self._got: list[int] = []
        self._got_before = 0
        self._prefill = _QUEUED
        self._prefill_began = 0.0
        self._items: asyncio.Queue[ForwardedItem] = asyncio.Queue()
        self._abandon = abandon
        self._judged = asyncio.Event()
        self._refusal: MlxtpError | None = None
        self._ended = False

    # --- called by the gateway -----------------------------------------------------------------------

    def again(self, uid: int) -> Generate:
        """Return the message for the part that is missing, under a new uid."""
        self._got_before = len(self._got)
        self._prefill = _QUEUED
        self.times += 1
        tokens = (*self.generate.tokens, *self._got) if self._got else self.generate.tokens
        return replace(self.generate, uid=uid, tokens=tokens, answered=len(self._got), strikes=self.strikes)

    @property
    def got(self) -> int:
        """Number of tokens so far."""
        return len(self._got)

    @property
    def record(self) -> RequestRecord:
        """State of the request, should the group fail now."""
        return RequestRecord(
            self.strikes, len(self._got) - self._got_before, self.length, running=self.uid != 0
        )

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.generate.tokens) + len(self._got)

    def accept(self) -> None:
        if not self._judged.is_set():
            self.watch.accepted()
        self._judged.set()
        self.wait_no_more()

    def advance(self, event: Accepted | Prefilled) -> None:
        """Record rank 0's acceptance or prefill progress."""
        if isinstance(event, Accepted):
            self.accept()
            return
        now = time.monotonic()
        if self._prefill is _QUEUED:
            self._prefill_began = now
        total = len(self.generate.tokens) + self._got_before
        time_ms = round(1000 * (now - self._prefill_began))
        self._prefill = Progress("prefill", total, event.cached, event.computed, time_ms)

    def wait_no_more(self) -> None:
        """End the wait for a group: one has taken the request, or none has to."""
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None

    def put(self, item: ForwardedItem) -> None:
        behind = False
        if isinstance(item, Tokens):
            self._got += item.tokens
            behind = self._items.qsize() >= MAX_UNREAD
        else:
            self._no_deadline()
            self._end_watch(item)
            if isinstance(item, MlxtpError) and not self._judged.is_set():
                self._refusal = item
                self._judged.set()
        if self.pending is not None or not self._judged.is_set():
            self.accept()
        self._items.put_nowait(item)
        if behind:
            self._abandon(self)
            detail = f"the client is more than {MAX_UNREAD} tokens behind in reading its answer"
            self.put(MlxtpError(detail, Code.CLIENT_TOO_SLOW))

    # --- called by HTTP ------------------------------------------------------------------------------

    async def accepted(self) -> None:
        try:
            await self._judged.wait()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if self._refusal is not None:
            self._ended = True
            raise self._refusal

    def progress(self) -> Progress:
        if self.pending is not None:
            return Progress("restarting")
        return Progress() if len(self._got) > self._got_before else self._prefill

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._items.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self._ended = not isinstance(item, Tokens)
        if isinstance(item, MlxtpError):
            raise item
        return item

    async def aclose(self) -> None:
        self._ended = True
        self._no_deadline()
        self.watch.leave()
        self._abandon(self)

    def _end_watch(self, item: StreamEnd | MlxtpError) -> None:
        if isinstance(item, StreamEnd):
            self.watch.end(item)
        else:
            self.watch.fail(item)

    def _no_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

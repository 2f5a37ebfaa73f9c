"""A request whose client is connected to this agent: what it has got, and what its client has yet to read."""

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

MAX_UNREAD = 16_384
"""Tokens, more or less, that may wait for a client. One that is further behind gets no more."""


_QUEUED = Progress("queued")


class ClientRequest:
    """Implements `api.backend.TokenStream`. Closing it before its end cancels the request, even if never
    iterated.

    It outlives the group that works on it: `again` is what the next group is asked.
    """

    def __init__(self, generate: Generate, abandon: Callable[[ClientRequest], None]) -> None:
        self.generate = generate
        self.uid = 0
        """Under which the desk knows it; 0 while none does."""
        self.backend: RequestBackend | None = None
        self.elsewhere = False
        """Whether that desk is on another Mac."""
        self.strikes = 0
        self.times = 0
        """How often it was asked."""
        self.pending: asyncio.TimerHandle | None = None
        """Ends it, unless a group takes it before."""
        self.deadline: asyncio.TimerHandle | None = None
        """Ends it, unless it ends before."""
        self.watch: SequenceMeter = UNWATCHED
        """Counts what comes of it."""
        self._got: list[int] = []
        self._got_before = 0
        self._prefill = _QUEUED
        self._prefill_began = 0.0
        self._items: asyncio.Queue[ForwardedItem] = asyncio.Queue()
        self._abandon = abandon
        self._judged = asyncio.Event()
        self._refusal: MlxtpError | None = None
        self._ended = False

    # --- what the gateway does -----------------------------------------------------------------------

    def again(self, uid: int) -> Generate:
        """The message that asks for what is missing, under a new uid."""
        self._got_before = len(self._got)
        self._prefill = _QUEUED
        self.times += 1
        tokens = (*self.generate.tokens, *self._got) if self._got else self.generate.tokens
        return replace(self.generate, uid=uid, tokens=tokens, answered=len(self._got), strikes=self.strikes)

    @property
    def got(self) -> int:
        """Tokens that it has."""
        return len(self._got)

    @property
    def record(self) -> RequestRecord:
        """How it stands should the group fail now."""
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
        """A group has taken it up, or none has to."""
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

    # --- what HTTP takes out -------------------------------------------------------------------------

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

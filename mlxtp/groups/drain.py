"""Orderly end of an agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from ..api.admin import Json
from ..cluster.node import ClusterNode
from ..gateway.gateway import Gateway
from .groups import ABOUT_TO_STOP, Groups

log = logging.getLogger(__name__)

LOOK_S = 0.1  #: Seconds between checks for open requests of a drain.
NEWS_S = 1.0  #: Seconds after which a client that watches a drain gets a reply even without news.


class Drain:
    """Orderly end of one agent: it takes no new requests, finishes those it has, and leaves when it can.

    `over` is set once it may end, or has to.
    """

    def __init__(
        self,
        node: ClusterNode,
        gateway: Gateway,
        groups: Groups,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.over = asyncio.Event()
        self._node = node
        self._gateway = gateway
        self._groups = groups
        self._clock = clock
        self._until: float | None = None
        self._looking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    @property
    def begun(self) -> bool:
        """True once a drain has begun."""
        return self._looking is not None

    @property
    def left_s(self) -> float | None:
        """Seconds that open requests may still take; None for as long as they need."""
        return None if self._until is None else max(self._until - self._clock(), 0.0)

    def start(self, within_s: float | None = None) -> None:
        """Take no new requests, and end within this time even with open ones. The earliest time holds."""
        if within_s is not None:
            until = self._clock() + within_s
            self._until = until if self._until is None else min(until, self._until)
        limit = "" if self._until is None else f", {self.left_s:.0f} s at most"
        log.info("draining: open requests: %d%s", self._gateway.open_requests, limit)
        if self._looking is not None:
            return
        self._gateway.closing = ABOUT_TO_STOP
        self._node.drain()
        self._looking = asyncio.ensure_future(self._check())

    async def _check(self) -> None:
        before = None
        while not self._finished():
            if before != (before := self._gateway.open_requests):
                self._announce()
            await asyncio.sleep(LOOK_S)
        self.over.set()
        self._announce()

    def _finished(self) -> bool:
        left = self._gateway.open_requests
        if self.left_s == 0.0:
            log.info("the time to drain is over; open requests: %d", left)
            return True
        if left or not self._groups.may_leave:
            return False
        log.info("drained")
        return True

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def drain_progress(self) -> Json:
        """Return the open requests once they changed, or after NEWS_S."""
        if not self.over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEWS_S):
                    await self._news.wait()
        return self.now()

    def now(self) -> Json:
        """Return the open requests and the state of the drain."""
        return {
            "draining": self.begun,
            "over": self.over.is_set(),
            "open_requests": self._gateway.open_requests,
            "left_s": self.left_s,
        }

    def close(self) -> None:
        """Stop checking."""
        if self._looking is not None:
            self._looking.cancel()

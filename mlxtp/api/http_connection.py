"""HTTP connections that end when their clients stall, for uvicorn's h11 protocol.

uvicorn waits without limit for the rest of a request, and for a client to read. Here, a connection that makes
no progress is cut: uvicorn then reports to the application that the client has gone, which cancels the
request on every rank. A body that arrives too slowly is refused before that (`api/app.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from contextvars import Context
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import Code
from .http_errors import error_body

log = logging.getLogger(__name__)

#: Bytes that the system may hold for a client that does not read; asyncio holds one chunk more, with TLS 64
#: KiB.
UNREAD_BYTES = 256 * 1024
#: Bytes that a slow client must read in `stall_s`. With TLS, up to 48 KiB more, as the data in asyncio's
#: socket below it is not counted.
LEAST_READ_BYTES = 16 * 1024
BEHIND_BYTES = 64 * 1024  # bytes of further requests, while one is answered
#: Half of the descriptors that an agent requests; the others are for ranks, links and files.
MAX_CONNECTIONS = 2048
MAX_REFUSALS = 512  # Further connections that get an answer 503; those beyond are cut without one.
MOST_CONNECTIONS = MAX_CONNECTIONS + MAX_REFUSALS
#: Connections of one address: a chat app for a school has a thousand, and other clients still find room.
MAX_PER_ADDRESS = MAX_CONNECTIONS * 3 // 4
MOST_PER_ADDRESS = MAX_PER_ADDRESS + MAX_REFUSALS // 4
_ENDED = (h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)


class HttpConnection(H11Protocol):
    """HTTP connection. `request_s`: the time to send a request. `stall_s`: the time to read waiting data."""

    request_s = 90.0
    stall_s = 60.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sending_request = _Alarm(self.loop)
        self._not_reading = _Alarm(self.loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = address_of(self)
        own = sum(address_of(other) == address for other in self.connections)
        if own > MAX_PER_ADDRESS:
            self.app = _refusing(
                f"{MAX_PER_ADDRESS} connections of {address} are open, the most for one address; retry later"
            )
        elif len(self.connections) > MAX_CONNECTIONS:
            self.app = _refusing(
                f"{MAX_CONNECTIONS} connections are open, the most this server takes; retry later"
            )
        if len(self.connections) > MOST_CONNECTIONS or own > MOST_PER_ADDRESS:
            # at once, as more connections may arrive in this iteration of the event loop
            self.connections.discard(self)
            transport.abort()  # a client that was refused so often ignores the answers
            return
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES)
        # `pause_writing` comes with the first byte left over. asyncio's TLS calls it at that size, its TCP
        # above it: with 0, TLS would pause before the first answer, for ever.
        transport.set_write_buffer_limits(high=1 if transport.get_extra_info("ssl_object") else 0)
        self._watch_request()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state not in _ENDED:  # no further request can come or be answered
            Context().run(self._received, data)

    def _received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_request()

    def handle_events(self) -> None:
        """Handle events in an empty context. uvicorn calls this with all data, and at the end of an answer.

        The caller's context may be that of a finished request, whose id must not appear in these log lines.
        """
        Context().run(self._handle_events)

    def _handle_events(self) -> None:
        self._drop_blank_lines()
        super().handle_events()
        self._watch_behind()

    def connection_lost(self, exc: Exception | None) -> None:
        self._sending_request.stop()
        self._not_reading.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        self._not_reading.stop()
        super().resume_writing()

    # --- deadlines -----------------------------------------------------------------------------------

    def _drop_blank_lines(self) -> None:
        """Drop blank lines before a request (RFC 9112, 2.2): old clients send one after a body."""
        if self.conn.their_state is h11.IDLE:
            waiting = self.conn.trailing_data[0]
            if blank := len(waiting) - len(waiting.lstrip(b"\r\n")):
                self.conn._receive_buffer.maybe_extract_at_most(blank)

    def _watch_behind(self) -> None:
        """Resume reading. uvicorn stops when data follows a request, and would not notice a lost client."""
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY, *_ENDED):
            return
        if len(self.conn.trailing_data[0]) <= BEHIND_BYTES:
            self.flow.resume_reading()
        else:
            self._cut(f"sent more than {BEHIND_BYTES} bytes behind a request that was not answered")

    def _watch_request(self) -> None:
        """Start or stop the request's deadline. Between two requests, `timeout_keep_alive` applies."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._sending_request.stop()
        elif not self._sending_request.running:
            why = f"sent no whole request within {self.request_s:g} s"
            self._sending_request.start(self.request_s, lambda: self._cut(why))

    def _watch_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._not_reading.start(self.stall_s, lambda: self._has_it_read(unread))

    def _has_it_read(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() >= LEAST_READ_BYTES:
            self._watch_reading()
        else:
            self._cut(f"did not read for {self.stall_s:g} s")

    def _cut(self, why: str) -> None:
        log.info("closing the connection of the client at %s, which %s", self.client, why)
        self.transport.abort()


def connection_class(stall_s: float, request_s: float) -> type[HttpConnection]:
    """Return a connection class with these deadlines; uvicorn makes the objects."""
    return type("Connection", (HttpConnection,), {"stall_s": stall_s, "request_s": request_s})


class _Alarm:
    """A timer that calls once, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        return self._timer is not None

    def start(self, delay_s: float, call: Callable[[], None]) -> None:
        self.stop()
        self._timer = self._loop.call_later(delay_s, call)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def address_of(connection: Any) -> str:
    """Return the address at the other end of one of uvicorn's connections; empty where there is none."""
    return str(connection.client[0]) if connection.client else ""


def _refusing(detail: str) -> ASGIApp:
    """Return an app that refuses all requests on a surplus connection."""
    body = json.dumps(error_body(detail, Code.OVERLOADED.value, 503)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"5"),
        (b"connection", b"close"),
    ]

    async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return refuse

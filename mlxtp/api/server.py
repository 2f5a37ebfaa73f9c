"""HTTP server on a socket, in the caller's event loop. It closes the connections of clients that stall.

uvicorn waits forever for the rest of a request, and for a client to read. This server cuts a connection that
makes no progress, which cancels its request. It does so during the TLS handshake, too, unseen by uvicorn.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import re
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from ..admission_counter import AdmissionCounter
from ..errors import Code, ConfigError
from .access_log import ForeignLines
from .adapter import error_body
from .guard import ADMITTED, address_of, source_of
from .request_body import SHARE
from .sockets import MOST_BYTES, PATH, ResponseSockets

# --- places of connections --------------------------------------------------------------------------------


RESERVED = 64  #: Places that loopback alone may take.


@dataclass(eq=False, slots=True)
class Place:
    """Place of one connection. `close` cuts it. `refusal`: why all its requests are refused; else "".

    `key` is the hash of the latest request's key.
    """

    close: Callable[[], None]
    source: str
    local: bool
    known: bool = False
    refusal: str = ""
    key: str = ""


class Places:
    """All places: up to `most`, and `most_of_one` address, are served; some more only get a refusal.

    A connection is silent until the server has admitted a complete request head. Once half of all places are
    taken, each newcomer closes the oldest silent connection, but another machine never closes one of this
    Mac. One key takes at most SHARE of what other keys leave, across all addresses.
    """

    def __init__(self, most: int, most_of_one: int, refused: int, refused_of_one: int) -> None:
        self._most = most
        self._most_elsewhere = most - min(RESERVED, most // 8)
        self._most_of_one = most_of_one
        self._open = AdmissionCounter(refused, refused_of_one)
        self._local = 0
        self._of_key: Counter[str] = Counter()  # connections from elsewhere
        #: By `local` and `known`, the oldest first: silent connections, and known ones between two requests.
        self._weak: dict[tuple[bool, bool], dict[Place, None]] = {
            (local, known): {} for local in (False, True) for known in (False, True)
        }

    def enter(self, address: str, close: Callable[[], None]) -> Place | None:
        """Return a place, possibly by closing another connection; None if there is none at all."""
        place = Place(close, *source_of(address))
        if self._open.total >= self._most // 2:
            self._close_oldest(place.local, known=False)
        if not self._has_room(place.local):
            self._close_oldest(place.local, known=True)
        has_room = self._has_room(place.local)
        if self._open.admit(place.source):
            return None
        if self._open.of(place.source) > self._most_of_one:
            place.refusal = (
                f"{self._most_of_one} connections of {place.source} are open, the most for one address"
            )
        elif not has_room:
            place.refusal = f"{self._most} connections are open, the most this server takes"
        self._local += place.local
        self._weak[place.local, False][place] = None
        return place

    def admit(self, place: Place, key: str = "") -> str:
        """Admit a request of this connection. Return why not if its key has too many; else ""."""
        if key and key != place.key and place.source and not place.local:
            own = self._of_key[key]
            others = self._of_key.total() - own - bool(place.key)
            if own >= max((self._most_elsewhere - others) * SHARE, 1):
                return f"{own} connections with this key are open, all that it may have; use fewer"
            self._count(place, key)
        self._weak[place.local, place.known].pop(place, None)
        place.known = True
        return ""

    def rest(self, place: Place) -> None:
        if place.known and place.source:
            self._weak[place.local, True][place] = None

    def release(self, place: Place) -> None:
        """Give a place back. May be repeated."""
        self._weak[place.local, place.known].pop(place, None)
        if place.source:
            self._open.release(place.source)
            self._local -= place.local
            place.source = ""  # given back
            self._count(place, "")

    def _count(self, place: Place, key: str) -> None:
        if place.key:
            self._of_key[place.key] -= 1
            if not self._of_key[place.key]:
                del self._of_key[place.key]  # else keys that are gone would take memory
        if key:
            self._of_key[key] += 1
        place.key = key

    def _has_room(self, local: bool) -> bool:
        total = self._open.total
        return total < self._most and (local or total - self._local < self._most_elsewhere)

    def _close_oldest(self, local: bool, *, known: bool) -> None:
        """Close another machine's connection, else, for a `local` newcomer, one of this Mac."""
        for own in (False, True)[: 1 + local]:
            if (oldest := next(iter(self._weak[own, known]), None)) is not None:
                self.release(oldest)
                oldest.close()
                return


# --- connections ------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

#: Bytes that the system may hold for a client that does not read. asyncio holds a chunk more, TLS 64 KiB.
UNREAD_BYTES = 256 * 1024
#: Bytes that a slow client must read in `stall_s`. With TLS up to 48 KiB more, because the count
#: leaves out the data in the socket below.
LEAST_READ_BYTES = 16 * 1024
BEHIND_BYTES = 64 * 1024  # bytes of further requests while the server answers one
#: Half of the descriptors that an agent requests; the others are for ranks, links and files.
MAX_CONNECTIONS = 2048
MAX_REFUSALS = 512  # further connections get a 503; any beyond are cut without an answer
MOST_CONNECTIONS = MAX_CONNECTIONS + MAX_REFUSALS
#: Connections of one address: enough for a school's chat app with a thousand, and some left for others.
MAX_PER_ADDRESS = MAX_CONNECTIONS * 3 // 4
MOST_PER_ADDRESS = MAX_PER_ADDRESS + MAX_REFUSALS // 4
#: Bytes of a small chunk of a body, and the most of them in one request: each is an event, and the event loop
#: handles all that have arrived before anything else.
SMALL_CHUNK, MOST_SMALL = 256, 1000
_NO_HANDSHAKE = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%b"
)
_ENDED = (h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)


class _CountingConnection(h11.Connection):
    """Parser that calls `cut`, and pauses, when a request has more than MOST_SMALL small chunks."""

    cut: Callable[[str], None]
    _small = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._small = 0
        elif isinstance(event, h11.Data) and event.chunk_start and event.chunk_end:
            self._small += len(event.data) < SMALL_CHUNK
            if self._small > MOST_SMALL:
                self.cut(f"sent more than {MOST_SMALL} chunks of less than {SMALL_CHUNK} bytes")
                return h11.PAUSED
        return event


class HttpConnection(H11Protocol):
    """HTTP connection. `request_s`: the time to send a request. `stall_s`: the time to read waiting data."""

    request_s = 90.0
    stall_s = 60.0
    places: Places  #: Shared by all connections of this server.
    lines: ForeignLines
    place: Place | None = None  #: Its own; with TLS, taken at the handshake.
    _switched = False  # it is a WebSocket

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = _CountingConnection(h11.SERVER)
        self.conn.cut = self._cut
        self._sending_request = _Alarm(self.loop)
        self._not_reading = _Alarm(self.loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _GuardedTransport(transport)))
        place = self.place = self.place or self.places.enter(address_of(self.client), transport.abort)
        if place is None:
            # at once, as more connections may arrive in this iteration of the event loop
            self.connections.discard(self)
            transport.abort()  # a client refused so often ignores the answers
            return
        if place.refusal:
            self.app = _refusing(f"{place.refusal}; retry later")
        else:
            self.app_state = {ADMITTED: partial(self.places.admit, place)}
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES)
        # Pause writing at the first byte left over. asyncio pauses at this size with TLS, above it with TCP.
        # With 0, TLS would pause before the first answer, forever.
        transport.set_write_buffer_limits(high=1 if transport.get_extra_info("ssl_object") else 0)
        self._watch_request()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state not in _ENDED:  # no further request can arrive or be answered
            Context().run(self._feed, data)

    def _feed(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_request()

    def _should_upgrade(self) -> bool:
        """Return True for a handshake; any other upgrade is a plain request."""
        asked = self.scope["method"], self.scope["path"], self._get_upgrade()
        return asked == ("GET", PATH, b"websocket") and self.place is not None and not self.place.refusal

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._switched = True
        super().handle_websocket_upgrade(event)
        socket = cast(SocketConnection, self.transport.get_protocol())
        socket.before = self
        if not socket.handshake_initiated:  # the parser of websockets refused the head, and said nothing
            found: Any = socket.conn.handshake_exc
            words = f"this request opens no WebSocket: {found.__cause__ or found!s:.200}"
            body = json.dumps(error_body(words, Code.BAD_REQUEST.value, 400)).encode()
            self.transport.write(_NO_HANDSHAKE % (len(body), body))
            self.transport.close()

    def handle_events(self) -> None:
        """Handle events in an empty context: the caller's may belong to a finished request."""
        Context().run(self._handle_events)

    def _handle_events(self) -> None:
        self._drop_blank_lines()
        super().handle_events()
        self._watch_behind()

    def connection_lost(self, exc: Exception | None) -> None:
        self._sending_request.stop()
        self._not_reading.stop()
        if self.place is not None:
            self.places.release(self.place)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        if self.place is not None:
            self.places.rest(self.place)
        super().on_response_complete()

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
        if self._switched or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
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
        if self.lines.admit(address_of(self.client)):
            log.info("closing the connection of the client at %s, which %s", self.client, why)
        self.transport.abort()


class SocketConnection(WebSocketsSansIOProtocol):
    """WebSocket. `before`: the HTTP connection that it was, which has its place and watches its reading.

    A client that sends more than MOST_SMALL parts of messages, pings and pongs in a minute is cut off.
    """

    before: HttpConnection
    _small, _since = 0, 0.0

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.before.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        Context().run(super().data_received, data)

    def handle_cont(self, event: Frame) -> None:
        if self._few():
            super().handle_cont(event)

    def handle_ping(self) -> None:
        if self._few():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._few():
            super().handle_pong(event)

    def _few(self) -> bool:
        if (now := self.loop.time()) - self._since > 60.0:
            self._small, self._since = 0, now
        self._small += 1
        if self._small == MOST_SMALL + 1:
            self.before._cut(f"sent more than {MOST_SMALL} small frames")
        return self._small <= MOST_SMALL

    def pause_writing(self) -> None:
        super().pause_writing()
        self.before.pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.before.resume_writing()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()


class _GuardedTransport:
    """A transport that drops writes once its connection is closing.

    uvicorn notices the close one iteration of the event loop later, after a whole burst of parts.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.write = partial(_write_unless_closing, transport)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _write_unless_closing(transport: asyncio.Transport, data: bytes) -> None:
    if not transport.is_closing():
        transport.write(data)


def connection_class(stall_s: float, request_s: float) -> type[HttpConnection]:
    """Return a connection class with these deadlines; uvicorn makes the objects."""
    places = Places(MAX_CONNECTIONS, MAX_PER_ADDRESS, MOST_CONNECTIONS, MOST_PER_ADDRESS)
    named = {"stall_s": stall_s, "request_s": request_s, "places": places, "lines": ForeignLines()}
    return type("Connection", (HttpConnection,), named)


class _Alarm:
    """A timer that calls once unless stopped."""

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


# --- TLS below them ---------------------------------------------------------------------------------------


HANDSHAKE_S = 10.0


class TlsHandshake(SSLProtocol):
    """TLS of one connection. `all_` contains it while the TCP connection is open."""

    def __init__(
        self, connection: HttpConnection, context: ssl.SSLContext, handshake_s: float, all_: set[TlsHandshake]
    ) -> None:
        nobody_waits: Any = None
        limit_s: Any = handshake_s
        super().__init__(
            connection.loop, connection, context, nobody_waits,
            server_side=True, ssl_handshake_timeout=limit_s,
        )  # fmt: skip
        self._connection = connection
        self._all = all_
        self._tcp: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._tcp = transport
        address = address_of(transport.get_extra_info("peername"))
        self._connection.place = self._connection.places.enter(address, transport.abort)
        if self._connection.place is None:
            transport.abort()
        else:
            self._all.add(self)
            super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self in self._all:
            self._all.remove(self)
        if self._connection.place is not None:
            self._connection.places.release(self._connection.place)
        super().connection_lost(exc)

    def end_handshake(self) -> None:
        """Cut the connection unless uvicorn already knows it."""
        if self._tcp is not None and self._connection not in self._connection.connections:
            self._tcp.abort()


# --- the server -------------------------------------------------------------------------------------------


_BACKLOG = 1024
_IDLE_CONNECTION_S = 75
_PING_S, _PONG_S = 60.0, 300.0  # of a WebSocket; an agent that runs a tool may answer late
_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; clients may connect at once. Port 0 takes any free one.

    Raises ConfigError: port in use, no such address, not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's delay only for an explicit protocol; otherwise reused connections wait 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(_cannot_listen(host, port, error)) from error
    except OverflowError:
        sock.close()
        raise ConfigError(f"port {port} is not from 0 to 65535") from None
    return sock


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    stop: asyncio.Event,
    *,
    tls: ssl.SSLContext | None = None,
    grace_s: int = 2,
    stall_s: float = HttpConnection.stall_s,
    request_s: float = HttpConnection.request_s,
    handshake_s: float = HANDSHAKE_S,
) -> None:
    """Serve until `stop` is set or the task is cancelled, then take at most about `grace_s` to finish.

    Closes a connection if its client leaves an answer unread for `stall_s`, or needs more than `request_s` to
    send a request. Closes `sock`. The caller handles signals.
    """
    connection = connection_class(stall_s, request_s)
    config = uvicorn.Config(
        _cut_off_quietly(ResponseSockets(_in_origin_form(app))),
        http=connection,
        ws=SocketConnection,
        ws_max_size=MOST_BYTES,
        ws_ping_interval=_PING_S,
        ws_ping_timeout=_PONG_S,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_IDLE_CONNECTION_S,
        timeout_graceful_shutdown=grace_s,
    )
    config.load()
    secured: set[TlsHandshake] = set()
    if tls is not None:  # uvicorn's own TLS takes only files, and sees a connection only after its handshake
        config.http_protocol_class = lambda **of_uvicorn: TlsHandshake(  # type: ignore[assignment]
            connection(**of_uvicorn), tls, handshake_s, secured
        )

    def few(record: logging.LogRecord) -> bool:
        """Limit uvicorn's log lines about input that is not HTTP. They have no address."""
        if "websockets" in record.pathname:  # the access log has each handshake
            return record.levelno >= logging.WARNING and connection.lines.admit("what is no WebSocket")
        return record.msg != "Invalid HTTP request received." or connection.lines.admit("what is no HTTP")

    logging.getLogger("uvicorn.error").addFilter(few)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        stopping.cancel()
        for each in tuple(secured):
            each.end_handshake()
        await serving
        if cancelled := tuple(server.server_state.tasks):
            await asyncio.wait(cancelled, timeout=grace_s)
        logging.getLogger("uvicorn.error").removeFilter(few)


def _in_origin_form(app: ASGIApp) -> ASGIApp:
    """Accept whole URLs (RFC 9112, 3.2.2). Add their host to Host, so the guard checks both."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if match := _ABSOLUTE.fullmatch(scope["raw_path"]):
            authority, path = match[1], match[2] or b"/"
            headers = [*scope["headers"], (b"host", authority)]
            scope = {**scope, "raw_path": path, "path": unquote(path.decode("ascii")), "headers": headers}
        await app(scope, receive, send)

    return wrapped


def _cut_off_quietly(app: ASGIApp) -> ASGIApp:
    """End a request quietly when it is cancelled after the grace period, without a traceback."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):  # the end of the request's own task
            await app(scope, receive, send)

    return wrapped


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    where = f"{host} port {port}"
    match error.errno:
        case errno.EADDRINUSE:
            remedy = "stop that, or choose another port by --http HOST:PORT"
            return f"{where} is in use, by another program or another mlxtp (a demo, say); {remedy}"
        case errno.EACCES:
            return f"no permission to listen on {where}; choose a port from 1024 on"
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this Mac"
        case _:
            return f"cannot listen on {where}: {error.strerror or error}"

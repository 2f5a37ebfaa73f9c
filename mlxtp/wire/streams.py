"""Links for asyncio: a `Session` over two streams, and TLS streams from an acceptor or a client."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from ..admission_counter import AdmissionCounter
from ..errors import Code, LinkError, ProtocolError
from .certificates import NodeIdentity
from .messages import Message
from .session import Received, Session
from .tls import GOODBYE_S, HANDSHAKE_S, Peer, explained, judge_client

# --- a link ----------------------------------------------------------------------------------------------

_READ_BYTES = 64 * 1024


class StreamLink:
    """One end of a link in an event loop. One task receives; any may send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: Session) -> None:
        self.protocol = protocol
        self._reader = reader
        self._writer = writer
        self.closed = False  #: by this end
        #: Takes the CPU seconds of decoding; returns the seconds to wait before reading more. May raise.
        self.pace: Callable[[float], float] = lambda _cpu_s: 0.0

    @classmethod
    async def from_socket(cls, sock: socket.socket, protocol: Session) -> StreamLink:
        """Take over a connected stream socket. Raises OSError."""
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, protocol)

    def send(self, message: Message) -> int:
        """Pass a message to the transport; a lost peer may show only later. Raises as `Session.send`."""
        if self._writer.is_closing():
            raise LinkError(f"{self.protocol.link}: the connection is closed")
        self._writer.write(self.protocol.send(message))
        return self.protocol.seq

    async def drain(self) -> None:
        """Wait until the peer has taken most of the sent bytes. Raises LinkError (LINK_LOST)."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise LinkError(f"{self.protocol.link}: cannot send: {error}") from error

    async def receive(self) -> list[Received]:
        """Wait for messages; return [] only after an orderly end or `close`. Cancellation loses none. Raises
        LinkError (LINK_LOST) without a peer, and the errors of `Session.receive_data`.
        """
        while True:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError:
                data = b""
            if self.closed:
                return []
            if not data:
                self.protocol.receive_eof()
                return []
            began = time.thread_time()
            received = self.protocol.receive_data(data)
            pause_s = self.pace(time.thread_time() - began)
            if received:
                return received
            await asyncio.sleep(pause_s)

    @property
    def unsent_bytes(self) -> int:
        # A closed transport may have dropped its buffer; get_write_buffer_size would then raise.
        return 0 if self._writer.is_closing() else self._writer.transport.get_write_buffer_size()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        # Wake a task in `receive`: an unreachable peer never replies to TLS's close message.
        self._reader.set_exception(ConnectionAbortedError())
        self._writer.close()

    async def wait_closed(self) -> None:
        with contextlib.suppress(OSError):  # the connection may have broken before
            await self._writer.wait_closed()


# --- TLS: an acceptor with limits on unauthenticated peers, and the client's connection ------------------
# A stranger has shown no certificate of this cluster yet. Strangers beyond the limits are closed at once.

MAX_STRANGERS = 32
MAX_STRANGERS_PER_SOURCE = 2
ACCEPT_PAUSE_S = 0.2  #: before the next attempt when the system had no room for another connection

_NOT_LISTENING = frozenset((errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP))
_READ_LIMIT = 256 * 1024

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Peer], Awaitable[None]]


class TlsAcceptor:
    """Acceptor of TLS connections on a listening socket, as long as `run` runs.

    `on_connection(reader, writer, peer)` owns the connection and handles its errors until it returns.
    Joiners, and members that `belongs` refuses, count as strangers until then. At most `strangers` may be
    connected, and `per_source` from one address (loopback is unlimited with `exempt_loopback`).
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        on_connection: Handler,
        *,
        handshake_s: float = HANDSHAKE_S,
        strangers: int = MAX_STRANGERS,
        per_source: int = MAX_STRANGERS_PER_SOURCE,
        exempt_loopback: bool = True,
        belongs: Callable[[NodeIdentity], bool] = lambda _identity: True,
    ) -> None:
        sock.setblocking(False)
        self.turned_away: Counter[str] = Counter()  #: refused connections by reason
        self.context = context  #: for new connections; may be replaced
        self._sock = sock
        self._on_connection = on_connection
        self._handshake_s = handshake_s
        self._exempt_loopback = exempt_loopback
        self._belongs = belongs
        self._strangers = AdmissionCounter(strangers, per_source)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accept until cancelled. Raises OSError only if the socket no longer listens."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    sock, address = await loop.sock_accept(self._sock)
                except OSError as error:
                    if error.errno in _NOT_LISTENING:
                        raise
                    self.turned_away["no room in the system"] += 1
                    await asyncio.sleep(ACCEPT_PAUSE_S)  # the system sends no event when it has room
                    continue
                self._let_in(sock, str(address[0]))
                await asyncio.sleep(0)  # even in a flood of connections, other tasks run
        finally:
            self._sock.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _let_in(self, sock: socket.socket, source: str) -> None:
        if why := self._strangers.admit(source, exempt=self._is_exempt(source)):
            self.turned_away[why] += 1
            sock.close()
            return
        task = asyncio.create_task(self._attend(sock, source))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attend(self, sock: socket.socket, source: str) -> None:
        writer: asyncio.StreamWriter | None = None
        is_stranger = True
        try:
            try:
                reader, writer = await self._handshake(sock)
                peer = judge_client(writer.get_extra_info("ssl_object"), source)
            except (OSError, ProtocolError):
                self.turned_away["no handshake" if writer is None else "not authentic"] += 1
                return
            if peer.identity is not None and self._belongs(peer.identity):
                is_stranger = False
                self._strangers.release(source)
            await self._on_connection(reader, writer, peer)
            writer.close()
        finally:
            if is_stranger:
                self._strangers.release(source)
            if writer is not None and not writer.is_closing():
                writer.transport.abort()

    async def _handshake(self, sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_READ_LIMIT, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            sock,
            ssl=self.context,
            ssl_handshake_timeout=self._handshake_s,
            ssl_shutdown_timeout=GOODBYE_S,
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    def _is_exempt(self, source: str) -> bool:
        return self._exempt_loopback and ipaddress.ip_address(source.partition("%")[0]).is_loopback


async def open_tls(
    host: str, port: int, context: ssl.SSLContext, alpn: str, deadline_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a TLS connection with `alpn`; only the peer's first message shows that it accepts our certificate.
    Raises what `explained` returns, and ProtocolError (NOT_AUTHENTIC).
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(
                host,
                port,
                limit=_READ_LIMIT,
                ssl=context,
                server_hostname="",
                ssl_handshake_timeout=deadline_s,
                ssl_shutdown_timeout=GOODBYE_S,
            )
    except OSError as error:
        raise explained(error, where, deadline_s) from None
    if writer.get_extra_info("ssl_object").selected_alpn_protocol() != alpn:
        writer.transport.abort()
        raise ProtocolError(f"{where} does not speak {alpn}", Code.NOT_AUTHENTIC)
    return reader, writer

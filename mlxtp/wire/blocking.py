"""Links for threads: a `Session` over a blocking socket, and functions that open such sockets."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

from ..errors import Code, LinkError
from .messages import Message
from .session import Received, Session
from .tls import TlsSocket

_READ_BYTES = 64 * 1024
_RETRY_S = 0.05
_BACKLOG = 16


class BlockingLink:
    """One end of a link. Any thread may send or close; one thread receives. No thread waits for the socket
    while it holds the protocol's lock, so a peer that does not read cannot block `receive`.
    """

    def __init__(self, sock: socket.socket | TlsSocket, protocol: Session, send_timeout_s: float) -> None:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # One timeout serves both directions; after it, `receive` continues to wait.
        sock.settimeout(send_timeout_s)
        self.protocol = protocol
        self._sock = sock
        self._send_timeout_s = send_timeout_s
        self._turn_to_send = threading.Lock()
        self._protocol_lock = threading.Lock()
        self._closed = False

    def send(self, message: Message) -> int:
        """Send a message; return its frame's seq. Raises as `Session.send`, and LinkError, which closes it:
        LINK_TIMEOUT if the peer did not take all of it within `send_timeout_s`, LINK_LOST without a peer.
        """
        with self._turn_to_send:
            with self._protocol_lock:
                if self._closed:
                    raise LinkError(f"{self.protocol.link}: closed at this end")
                data = self.protocol.send(message)
                seq = self.protocol.seq
            try:
                self._sock.sendall(data)
            except TimeoutError:
                self.close()
                late = f"{type(message).__name__} was not taken within {self._send_timeout_s:g} s"
                raise LinkError(f"{self.protocol.link}: {late}", Code.LINK_TIMEOUT) from None
            except OSError as error:
                self.close()
                raise LinkError(f"{self.protocol.link}: cannot send: {error}") from error
        return seq

    def receive(self, timeout_s: float | None = None) -> list[Received]:
        """Wait for messages; return [] only after an orderly end or `close`. Raises LinkError (LINK_LOST
        without a peer, LINK_TIMEOUT after `timeout_s` seconds), and as `Session.receive_data`.
        """
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if ends_at is not None and not self._readable(ends_at - time.monotonic()):
                late = f"nothing came within {timeout_s:g} s"
                raise LinkError(f"{self.protocol.link}: {late}", Code.LINK_TIMEOUT)
            try:
                data: bytes | None = self._sock.recv(_READ_BYTES)
            except TimeoutError:
                data = None  # no complete TLS record yet
            except OSError:
                data = b""
            with self._protocol_lock:
                if self._closed:
                    return []
                if data is None:
                    continue
                if not data:
                    self.protocol.receive_eof()
                    return []
                received = self.protocol.receive_data(data)
            if received:
                return received

    def close(self) -> None:
        """Close the link and wake threads that wait in `receive` or `send`. May be called again."""
        with self._protocol_lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(OSError):  # the peer may have been faster
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _readable(self, timeout_s: float) -> bool:
        descriptor = self._sock.fileno()
        if descriptor < 0:
            return True  # closed at this end; the next read reports it
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(max(timeout_s, 0.0) * 1000))


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen on `host` at `port`, by default a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def connect(address: str, deadline_s: float) -> socket.socket:
    """Connect to "host:port"; retry while refused. Raises LinkError, LINK_TIMEOUT at the deadline."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + deadline_s
    while (left := deadline - time.monotonic()) > 0:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=left)
        except ConnectionRefusedError:
            time.sleep(min(_RETRY_S, left))  # no event reports that a remote port opens
        except TimeoutError:
            break
        except OSError as error:
            raise LinkError(f"cannot connect to {address}: {error}") from error
    raise LinkError(f"no answer from {address} within {deadline_s:g} s", Code.LINK_TIMEOUT)

"""A link for asyncio: a `Session` over a pair of streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from ..errors import LinkError
from .messages import Message
from .session import Received, Session

_READ_BYTES = 64 * 1024


class StreamLink:
    """One end of a link in an event loop. One task receives; any may send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: Session) -> None:
        self.protocol = protocol
        self._reader = reader
        self._writer = writer
        self._closed = False

    @classmethod
    async def from_socket(cls, sock: socket.socket, protocol: Session) -> StreamLink:
        """Take over a connected stream socket, such as one end of a socket pair. Raises OSError."""
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, protocol)

    def send(self, message: Message) -> int:
        """Hand one message to the transport, without waiting, and return the seq of its frame.

        Raises LinkError (LINK_LOST) when the transport is closed, and what `Session.send` raises. The loss of
        the peer may show only in `drain` and `receive`.
        """
        if self._writer.is_closing():
            raise LinkError(f"{self.protocol.link}: the connection is closed")
        self._writer.write(self.protocol.send(message))
        return self.protocol.seq

    async def drain(self) -> None:
        """Wait until the peer has taken most of what was sent. Raises LinkError (LINK_LOST)."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise LinkError(f"{self.protocol.link}: cannot send: {error}") from error

    async def receive(self) -> list[Received]:
        """Wait for messages and return them.

        Returns [] only at the end: the link ended in order, or `close` was called at this end. Raises
        LinkError (LINK_LOST) when the peer is gone, and what `Session.receive_data` raises. Nothing is lost
        when the waiting task is cancelled.
        """
        while True:
            data = await self._read()
            if self._closed:
                return []
            if not data:
                self.protocol.receive_eof()
                return []
            received = self.protocol.receive_data(data)
            if received:
                return received

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait because the peer does not read."""
        # A closed transport may have dropped its buffer; get_write_buffer_size would then raise.
        return 0 if self._writer.is_closing() else self._writer.transport.get_write_buffer_size()

    def close(self) -> None:
        """End the link; bytes that were sent still go out. May be repeated.

        A task in `receive` wakes at once, because an unreachable peer never answers TLS's close message.
        """
        if self._closed:
            return
        self._closed = True
        self._reader.set_exception(ConnectionAbortedError())
        self._writer.close()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed, for any reason."""
        with contextlib.suppress(OSError):  # it may have broken before it closed
            await self._writer.wait_closed()

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(_READ_BYTES)
        except OSError:
            return b""

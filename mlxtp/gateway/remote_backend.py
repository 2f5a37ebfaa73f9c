"""Requests between agents: from the agent of the client to the agent with rank 0, and answers back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

from ..background import Background, log_failure
from ..errors import Code, LinkError, MlxtpError
from ..wire.codecs import Message
from ..wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Delta,
    Error,
    Finished,
    Generate,
    Hello,
    Prefilled,
    RequestEvent,
    ScoredDelta,
    Welcome,
)
from ..wire.session import LinkKind, Session, Side
from ..wire.streams import StreamLink
from .gateway import Gateway

log = logging.getLogger(__name__)

#: Bytes that may wait for an agent that does not read. Then its link is cut.
MAX_UNSENT_BYTES = 8 * 1024 * 1024


class RemoteBackend:
    """A `RequestBackend` whose rank 0 is on another Mac. `lost` is called once, when its link ends."""

    def __init__(
        self,
        connection: StreamLink,
        on_event: Callable[[RequestEvent], None],
        lost: Callable[[MlxtpError], None],
    ) -> None:
        self._connection = connection
        self._on_event = on_event
        self._lost = lost
        self._background = Background(self._failed)
        self._task = self._background.start(self._read_all(), "reading a requests link")

    @classmethod
    async def greet(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_event: Callable[[RequestEvent], None],
        lost: Callable[[MlxtpError], None],
    ) -> RemoteBackend:
        """Greet the other end. Raises LinkError or ProtocolError."""
        connection = StreamLink(reader, writer, Session(LinkKind.REQUESTS, Side.UPPER, 0))
        await connection.receive()  # its Hello; anything else is out of order
        connection.send(Welcome(PROTOCOL_VERSION, b""))
        return cls(connection, on_event, lost)

    def send(self, message: Message) -> None:
        """Send a message. Raises LinkError when the link has ended."""
        self._connection.send(message)

    async def _read_all(self) -> None:
        error: MlxtpError = LinkError("the agent with rank 0 closed its link", Code.LINK_LOST)
        try:
            while batch := await self._connection.receive():
                for received in batch:
                    match received.message:
                        case Accepted() | Prefilled() | Delta() | ScoredDelta() | Finished():
                            self._on_event(received.message)
                        case Error() if received.message.uid:
                            self._on_event(received.message)
        except MlxtpError as failure:
            error = failure
        self._connection.close()
        self._lost(error)

    def _failed(self, reading: asyncio.Task[None], error: BaseException) -> None:
        """End the link after a bug, so that its requests do not wait for ever."""
        log_failure(reading, error)
        self._connection.close()
        self._lost(LinkError(f"{type(error).__name__}: {error}", Code.INTERNAL))

    def drop(self) -> None:
        """End the link now, without calling `lost`."""
        self._task.cancel()
        self._connection.close()

    async def close(self) -> None:
        """End the link and wait until it has ended."""
        await self._background.close()
        self._connection.close()


async def serve_requests(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gateway: Gateway
) -> None:
    """Serve the other end: give its requests to the gateway until the link ends, then cancel them all."""
    connection = StreamLink(reader, writer, Session(LinkKind.REQUESTS, Side.LOWER, 0))
    cancels: dict[int, Callable[[], None]] = {}

    def tell(message: Message) -> None:
        """Send a message. Never fails: the reader below notices a link that is gone or full."""
        if connection.unsent_bytes > MAX_UNSENT_BYTES:
            writer.transport.abort()
            return
        with contextlib.suppress(MlxtpError):
            connection.send(message)
        if isinstance(message, (Finished, Error)):
            cancels.pop(message.uid, None)

    def generate(request: Generate) -> None:
        try:
            cancels[request.uid] = gateway.relay(request, tell)
        except MlxtpError as error:
            tell(Error(error.code, error.detail, request.uid))

    try:
        connection.send(Hello(PROTOCOL_VERSION, 0, os.getpid(), os.urandom(16), b""))
        while batch := await connection.receive():
            for received in batch:
                match received.message:
                    case Generate():
                        generate(received.message)
                    case Cancel() if received.message.uid in cancels:
                        cancels.pop(received.message.uid)()
    except MlxtpError as error:
        log.debug("a requests link ended: %s", error.detail)
    finally:
        connection.close()  # first: a request that is cut off must not look like a cancelled one
        for cancel in list(cancels.values()):
            cancel()

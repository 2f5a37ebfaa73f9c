"""TLS below HTTP connections. uvicorn itself sees a connection only after its handshake."""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any

from .http_connection import MOST_CONNECTIONS, MOST_PER_ADDRESS, HttpConnection

HANDSHAKE_S = 10.0


class TlsHandshake(SSLProtocol):
    """TLS of one connection, which is in `all_` from TCP's start to its end."""

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
        self.address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._tcp = transport
        self._all.add(self)
        self.address = (transport.get_extra_info("peername") or ("",))[0]
        own = sum(other.address == self.address for other in self._all)
        if len(self._all) > MOST_CONNECTIONS or own > MOST_PER_ADDRESS:
            self._all.discard(self)  # at once, as in `HttpConnection`
            transport.abort()
        else:
            super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._all.discard(self)
        super().connection_lost(exc)

    def end_handshake(self) -> None:
        """Cut the connection, unless uvicorn already knows it."""
        if self._tcp is not None and self._connection not in self._connection.connections:
            self._tcp.abort()

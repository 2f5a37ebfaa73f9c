"""HTTP server on a socket, inside the caller's event loop."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import unquote

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ConfigError
from .http_connection import HttpConnection, connection_class
from .tls_handshake import HANDSHAKE_S, TlsHandshake

_BACKLOG = 1024
_IDLE_CONNECTION_S = 75
_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; clients may connect at once. Port 0 takes any free one.

    Raises ConfigError in plain words: port in use, no such address, not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's delay only if the protocol is named: else reused connections wait 40 ms.
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
    grace_s: int = 5,
    stall_s: float = HttpConnection.stall_s,
    request_s: float = HttpConnection.request_s,
    handshake_s: float = HANDSHAKE_S,
) -> None:
    """Serve until `stop` is set or the task is cancelled, then take at most about `grace_s` to finish.

    By HTTPS with `tls`, else by HTTP. Requests still open after `grace_s` are cancelled and their connections
    closed. So is a connection whose client leaves its answer unread for `stall_s`, or needs more than
    `request_s` to send a request. Closes `sock`. Signals are left to the caller.
    """
    connection = connection_class(stall_s, request_s)
    config = uvicorn.Config(
        _cut_off_quietly(_in_origin_form(app)),
        http=connection,
        ws="none",
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
        make = partial(_secured, connection, tls, handshake_s, secured)
        config.http_protocol_class = make  # type: ignore[assignment]
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


def _secured(
    connection: type[HttpConnection],
    context: ssl.SSLContext,
    handshake_s: float,
    all_: set[TlsHandshake],
    **of_uvicorn: Any,
) -> TlsHandshake:
    return TlsHandshake(connection(**of_uvicorn), context, handshake_s, all_)


def _in_origin_form(app: ASGIApp) -> ASGIApp:
    """Accept whole URLs, as clients send to a proxy and as RFC 9112 requires (3.2.2).

    The URL's host is added to Host: the guard requires both to be this Mac.
    """

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
            return (
                f"{where} is in use by another program; stop it, or choose another port by --http HOST:PORT"
            )
        case errno.EACCES:
            return f"no permission to listen on {where}; choose a port from 1024 on"
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this Mac"
        case _:
            return f"cannot listen on {where}: {error.strerror or error}"

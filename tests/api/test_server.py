from __future__ import annotations

import asyncio
import signal
import socket
from typing import Any

import pytest

from mlxtp.api.app import create_app
from mlxtp.api.server import bind, serve
from mlxtp.errors import ConfigError

from .conftest import BYTE_LEVEL, WAIT_S, FakeBackend, Loaded, forever, then

REQUEST = b'{"messages": [{"role": "user", "content": "hello"}], "stream": true}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(REQUEST)


def test_a_port_in_use_is_said_in_plain_words() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"port {port} is in use, by .* another mlxtp .* --http HOST:PORT"
        ):
            bind("127.0.0.1", port)


def test_other_reasons_not_to_listen() -> None:
    with pytest.raises(ConfigError, match="not an address of this Mac"):
        bind("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="not from 0 to 65535"):
        bind("127.0.0.1", 70_000)
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_stopping_takes_bounded_time_and_ends_open_requests(loaded: dict[str, Loaded], how: str) -> None:
    backend = FakeBackend(loaded[BYTE_LEVEL].text, then([], forever))

    async def story() -> bytes:
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        sock, stop = bind("127.0.0.1", 0), asyncio.Event()
        host, port = sock.getsockname()
        serving = asyncio.create_task(serve(create_app(backend), sock, stop, grace_s=0))
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(HEAD + REQUEST)
        await reader.readuntil(b": mlxtp\n\n")
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
        if how == "stop":
            stop.set()
        else:
            serving.cancel()
        rest = await asyncio.wait_for(reader.read(), WAIT_S)
        await asyncio.wait_for(asyncio.gather(serving, return_exceptions=True), WAIT_S)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, port)
        return rest

    rest: Any = asyncio.run(story())
    assert backend.all_closed()
    assert b"[DONE]" not in rest
    assert not rest.endswith(b"0\r\n\r\n")  # the body's end is missing: the client sees a broken answer


def test_a_bound_socket_takes_connections_before_anybody_serves() -> None:
    with bind("127.0.0.1", 0) as sock:
        socket.create_connection(sock.getsockname(), timeout=WAIT_S).close()

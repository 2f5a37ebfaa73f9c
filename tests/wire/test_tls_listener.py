"""The doorman: who is heard, who is not, and that strangers in numbers are nothing to the members."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxtp.errors import Code, LinkError, MlxtpError, ProtocolError
from mlxtp.wire import streams as module
from mlxtp.wire.messages import SessionEnd
from mlxtp.wire.session import LinkKind, Session, Side
from mlxtp.wire.streams import Handler, StreamLink, TlsAcceptor, open_tls
from mlxtp.wire.tls import (
    ALPN_CONTROL,
    ALPN_DECODE,
    ALPN_JOIN,
    ALPN_REQUESTS,
    Peer,
    join_context,
    member_context_client,
    member_context_server,
)

from .members import Member, founder, member_of
from .test_tls import careless

TIMEOUT_S = 5.0
"""Far longer than anything here takes: a test that reaches it fails."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class House:
    """A member that listens on loopback, and what its doorman let in."""

    doorman: TlsAcceptor
    port: int
    running: asyncio.Task[None]
    second: Member
    peers: list[Peer] = field(default_factory=list)

    async def knock(self, context: ssl.SSLContext, alpn: str) -> Streams:
        return await open_tls("127.0.0.1", self.port, context, alpn, TIMEOUT_S)

    async def member(self, alpn: str = ALPN_CONTROL) -> Streams:
        return await self.knock(member_context_client(self.second.credentials, alpn), alpn)

    async def plain(self, source: str = "127.0.0.1") -> Streams:
        """A TCP connection that does not begin its handshake."""
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0))

    async def turned_away(self, reason: str, times: int) -> None:
        await eventually(lambda: self.doorman.turned_away[reason] == times)

    async def strangers(self, count: int) -> None:
        await eventually(lambda: self.doorman._strangers.total == count)


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it waits for is not announced
        await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> tuple[Member, Member]:
    folder = tmp_path_factory.mktemp("members")
    first = founder(folder)
    return first, member_of(first, folder)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1000):
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def house(
    members: tuple[Member, Member], handler: Handler = echo, **options: Any
) -> AsyncIterator[House]:
    first, second = members
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    peers: list[Peer] = []

    async def noting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer) -> None:
        peers.append(peer)
        await handler(reader, writer, peer)

    doorman = TlsAcceptor(listener, member_context_server(first.credentials), noting, **options)
    running = asyncio.create_task(doorman.run())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield House(doorman, listener.getsockname()[1], running, second, peers)
    finally:
        running.cancel()
        ended, _ = await asyncio.wait([running], timeout=TIMEOUT_S)
        assert ended, "the doorman does not go"


async def gone(reader: asyncio.StreamReader) -> bool:
    """Return whether the other end hangs up without a message."""
    try:
        return await reader.read(1) == b""
    except OSError:
        return True


Members = tuple[Member, Member]


@pytest.mark.parametrize("alpn", [ALPN_CONTROL, ALPN_REQUESTS])
async def test_a_member_is_heard(members: Members, alpn: str) -> None:
    async with house(members) as here:
        reader, writer = await here.member(alpn)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        (peer,) = here.peers
        assert (peer.alpn, peer.address) == (alpn, "127.0.0.1")
        assert peer.identity.node_id == members[1].identity.node_id
        assert here.doorman._strangers.total == 0
        writer.close()


async def test_a_joiner_is_heard_on_the_join_protocol_only(members: Members) -> None:
    async with house(members) as here:
        reader, writer = await here.knock(join_context(), ALPN_JOIN)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        assert [peer.identity for peer in here.peers] == [None]
        writer.close()
        for alpn in (ALPN_CONTROL, ALPN_REQUESTS):
            reader, writer = await here.knock(careless(alpn), alpn)
            writer.write(b"let me in")
            assert await gone(reader)
        assert here.doorman.turned_away == {"not authentic": 2}
        assert len(here.peers) == 1


async def test_a_member_of_another_cluster_is_not_heard(members: Members, tmp_path: Path) -> None:
    stranger = founder(tmp_path)
    context = careless()
    context.load_cert_chain(stranger.credentials.member, stranger.credentials.key)
    async with house(members) as here:
        with contextlib.suppress(MlxtpError):  # it may hear of it during the handshake or after it
            reader, writer = await here.knock(context, ALPN_CONTROL)
            writer.write(b"let me in")
            assert await gone(reader)
        await here.turned_away("no handshake", 1)
        assert here.peers == []
        await here.strangers(0)


async def test_a_link_is_closed_at_once_though_the_other_end_is_silent(members: Members) -> None:
    """The last word of a peer whose cable is out is not waited for."""
    first, second = members
    context = member_context_server(first.credentials)
    context.num_tickets = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        shaken = asyncio.create_task(asyncio.to_thread(lambda: shake(listener, context)))
        port = listener.getsockname()[1]
        to_member = member_context_client(second.credentials, ALPN_CONTROL)
        reader, writer = await open_tls("127.0.0.1", port, to_member, ALPN_CONTROL, TIMEOUT_S)
        with await shaken:  # it reads nothing from here on
            link = StreamLink(reader, writer, Session(LinkKind.CONTROL, Side.LOWER, 0))
            reading = asyncio.create_task(link.receive())
            await asyncio.sleep(0)
            for _ in range(2):
                link.close()
                assert link.unsent_bytes == 0
                for _ in range(5):
                    await asyncio.sleep(0)
                assert reading.done()
                assert reading.result() == []
                with pytest.raises(LinkError, match="closed"):
                    link.send(SessionEnd())
            writer.transport.abort()


def shake(listener: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    plain, _ = listener.accept()
    return context.wrap_socket(plain, server_side=True)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01"])
async def test_a_handshake_that_is_not_finished_is_cut(members: Members, sent: bytes) -> None:
    async with house(members, handshake_s=0.2) as here:
        start = time.monotonic()
        reader, writer = await here.plain()
        writer.write(sent)
        assert await gone(reader)
        assert time.monotonic() - start >= 0.2
        await here.strangers(0)
        assert here.doorman.turned_away == {"no handshake": 1}
        writer.close()


async def test_the_33rd_stranger_is_closed_unheard(members: Members) -> None:
    async with house(members) as here:
        inside = await here.member()
        waiting = [await here.plain() for _ in range(32)]
        reader, writer = await here.plain()
        assert await gone(reader)
        writer.close()
        assert here.doorman.turned_away == {"too many": 1}
        assert here.doorman._strangers.total == 32
        inside[1].write(b"still here")
        assert await inside[0].readexactly(10) == b"still here"
        waiting[7][1].close()
        await here.strangers(31)
        another = await here.member()
        another[1].write(b"hello")
        assert await another[0].readexactly(5) == b"hello"
        for _, stranger in waiting:
            stranger.close()
        await here.strangers(0)


async def test_one_address_may_have_two(members: Members) -> None:
    async with house(members, exempt_loopback=False) as here:
        waiting = [await here.plain() for _ in range(2)]
        reader, writer = await here.plain()
        assert await gone(reader)
        writer.close()
        assert here.doorman.turned_away == {"too many from one address": 1}
        try:
            other = await here.plain("127.0.0.2")
        except OSError:
            pytest.skip("this system has one loopback address only")
        await here.strangers(3)
        for _, stranger in (*waiting, other):
            stranger.close()
        await here.strangers(0)
        inside = await here.member()
        inside[1].write(b"hello")
        assert await inside[0].readexactly(5) == b"hello"


async def test_a_joiner_counts_until_it_is_answered_and_a_member_does_not_count(members: Members) -> None:
    answered = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer) -> None:
        writer.write(b"wait")
        await answered.wait()

    async with house(members, wait, strangers=1) as here:
        for _ in range(3):
            reader, _ = await here.member()
            await reader.readexactly(4)
        joiner, _ = await here.knock(join_context(), ALPN_JOIN)
        await joiner.readexactly(4)
        refused, writer = await here.plain()
        assert await gone(refused)
        writer.close()
        answered.set()
        assert await gone(joiner)
        await here.strangers(0)
        await here.knock(join_context(), ALPN_JOIN)


async def test_a_foreign_mac_counts_as_a_stranger_with_a_certificate_too(members: Members) -> None:
    second = members[1].identity
    async with house(members, strangers=2, belongs=lambda who: who.node_id != second.node_id) as here:
        known = [await here.member() for _ in range(2)]
        await here.strangers(2)
        refused, writer = await here.plain()
        assert await gone(refused)
        writer.close()
        for _, each in known:
            each.close()
        await here.strangers(0)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS])
async def test_an_accept_that_fails_is_tried_again(
    members: Members, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(module, "ACCEPT_PAUSE_S", 0.01)
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, iter(range(3))

    async def failing(sock: socket.socket) -> tuple[socket.socket, object]:
        if next(failures, None) is not None:
            raise OSError(number, "no")
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", failing)
    async with house(members) as here:
        _, writer = await here.member()
        assert here.doorman.turned_away == {"no room in the system": 3}
        writer.close()


async def test_a_socket_that_does_not_listen_is_the_end(members: Members) -> None:
    doorman = TlsAcceptor(socket.socket(), member_context_server(members[0].credentials), echo)
    with pytest.raises(OSError, match="Invalid argument"):
        await asyncio.wait_for(doorman.run(), TIMEOUT_S)


async def test_a_flood_leaves_the_loop_to_others(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, accepted = asyncio.get_running_loop(), 0

    async def flood(sock: socket.socket) -> tuple[socket.socket, object]:
        nonlocal accepted
        accepted += 1
        if accepted > 1000:
            await asyncio.Event().wait()
        return socket.socket(), ("127.0.0.1", 1)

    monkeypatch.setattr(loop, "sock_accept", flood)
    async with house(members, strangers=0) as here:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert accepted < 10
        await here.turned_away("too many", 1000)


async def test_when_the_doorman_goes_everything_is_closed(members: Members) -> None:
    async with house(members) as here:
        inside, stranger = await here.member(), await here.plain()
        inside[1].write(b"hello")
        await inside[0].readexactly(5)
        await here.strangers(1)
        here.running.cancel()
        assert await asyncio.wait([here.running], timeout=TIMEOUT_S / 2) == ({here.running}, set())
        assert await gone(inside[0])
        assert await gone(stranger[0])
        assert here.doorman._strangers.total == 0
        with pytest.raises(OSError, match="Connect call failed"):
            await here.plain()


def opening(
    members: Members, port: int, alpn: str = ALPN_CONTROL, deadline_s: float = TIMEOUT_S
) -> MlxtpError:
    async def knock() -> None:
        await open_tls(
            "127.0.0.1", port, member_context_client(members[1].credentials, alpn), alpn, deadline_s
        )

    with pytest.raises(MlxtpError, match=rf"^127\.0\.0\.1:{port}") as caught:
        asyncio.run(knock())
    return caught.value


def test_no_agent_is_there(members: Members) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        error = opening(members, closed.getsockname()[1])
    assert (type(error), error.code) == (LinkError, Code.LINK_LOST)


def test_no_agent_replies(members: Members) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = opening(members, silent.getsockname()[1], deadline_s=0.1)
    assert (type(error), error.code) == (LinkError, Code.LINK_TIMEOUT)
    assert "within 0.1 s" in error.detail


@pytest.mark.parametrize("alpn", [ALPN_DECODE, ALPN_CONTROL])
async def test_another_cluster_answers_or_speaks_otherwise(
    members: Members, tmp_path: Path, alpn: str
) -> None:
    other = founder(tmp_path)
    first = members[0] if alpn is ALPN_DECODE else other
    async with house((first, other)) as here:
        with pytest.raises(ProtocolError) as caught:
            await here.knock(member_context_client(members[1].credentials, alpn), alpn)
        assert caught.value.code is Code.NOT_AUTHENTIC
        expected = "does not speak mlxtp-decode" if alpn is ALPN_DECODE else "certificate is not of this"
        assert expected in caught.value.detail
        assert here.peers == []

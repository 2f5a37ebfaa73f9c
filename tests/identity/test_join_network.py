"""Joining over real connections: two Macs, and attackers in between."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlxtp.errors import Code, LinkError, MlxtpError, ProtocolError, RemoteProtocolError, UserError
from mlxtp.identity.join_network import answer_joiner, ask_to_join
from mlxtp.identity.join_protocol import (
    Admitted,
    Granted,
    Host,
    Joiner,
    JoinToken,
    TokenIssuer,
    read_token,
    redirect,
)
from mlxtp.identity.store import Identity, Store
from mlxtp.wire.certificates import authority_hash
from mlxtp.wire.frames import encode
from mlxtp.wire.messages import Message, Ping
from mlxtp.wire.peer_messages import JoinOffer
from mlxtp.wire.session import LinkKind, Session, Side
from mlxtp.wire.streams import StreamLink, TlsAcceptor, open_tls
from mlxtp.wire.tls import (
    ALPN_CONTROL,
    ALPN_JOIN,
    Peer,
    join_context,
    member_context_client,
    member_context_server,
)

from ..wire.members import Member, founder, member_of

TIMEOUT_S = 5.0
"""Far longer than anything here takes: a test that reaches it fails."""
NOW = 1_800_000_000.0


@dataclass
class House:
    """A member that listens, and lets others in if it can. What it did with each joiner is in `outcomes`."""

    member: Member
    port: int = 0
    now: float = NOW
    elsewhere: JoinOffer | None = None
    deadline_s: float = TIMEOUT_S
    outcomes: asyncio.Queue[Admitted | MlxtpError | None] = field(default_factory=asyncio.Queue)
    controllers: asyncio.Queue[Peer] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.desk = TokenIssuer(
            self.member.identity.cluster_id, authority_hash(self.member.membership.authority)
        )

    def token(self) -> str:
        return self.desk.issue(secrets.token_bytes(16), self.now).text()

    def host(self) -> Host | JoinOffer:
        if self.elsewhere is not None:
            return self.elsewhere
        identity = self.member.identity
        return Host(
            self.member.authority,
            self.member.membership.certificate,
            self.desk,
            secrets.token_bytes(32),
            members={identity.node_id: identity.fingerprint},
            peers=(f"127.0.0.1:{self.port}",),
        )

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer) -> None:
        if peer.alpn == ALPN_JOIN:
            try:
                admitted = await answer_joiner(reader, writer, self.host(), lambda: self.now, self.deadline_s)
            except MlxtpError as error:
                self.outcomes.put_nowait(error)
            else:
                self.outcomes.put_nowait(admitted)
        else:
            self.controllers.put_nowait(peer)
            await reader.read()


@asynccontextmanager
async def listening(house: House) -> AsyncIterator[House]:
    listener = socket.create_server(("127.0.0.1", 0))
    house.port = listener.getsockname()[1]
    running = asyncio.create_task(
        TlsAcceptor(listener, member_context_server(house.member.credentials), house.attend).run()
    )
    try:
        async with asyncio.timeout(2 * TIMEOUT_S):
            yield house
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@dataclass(frozen=True)
class Macs:
    first: Member
    elsewhere: Member
    folder: Path

    def new(self) -> tuple[Store, Identity]:
        store = Store(self.folder / secrets.token_hex(4))
        return store, store.load_or_create()


@pytest.fixture(scope="module")
def macs(tmp_path_factory: pytest.TempPathFactory) -> Macs:
    folder = tmp_path_factory.mktemp("macs")
    return Macs(founder(folder), founder(folder), folder)


def joiner(identity: Identity, token: str | JoinToken) -> Joiner:
    read = token if isinstance(token, JoinToken) else read_token(token)
    return Joiner(read, identity.node_id, identity.key, "mini", secrets.token_bytes(32))


async def join(port: int, identity: Identity, token: str | JoinToken) -> Granted:
    return await ask_to_join("127.0.0.1", port, joiner(identity, token), TIMEOUT_S)


async def test_a_mac_joins_and_is_a_member(macs: Macs) -> None:
    async with listening(House(macs.first)) as house:
        store, identity = macs.new()
        granted = await join(house.port, identity, house.token())
        assert await house.outcomes.get() == Admitted(identity.node_id, "mini", identity.fingerprint)
        assert granted.peers == (f"127.0.0.1:{house.port}",)
        joined = store.save_membership(granted.membership)
        assert joined.cluster_id == macs.first.identity.cluster_id
        context = member_context_client(store.credentials, ALPN_CONTROL)
        _, writer = await open_tls("127.0.0.1", house.port, context, ALPN_CONTROL, TIMEOUT_S)
        peer = await house.controllers.get()
        assert (peer.identity.node_id, peer.identity.fingerprint) == (identity.node_id, identity.fingerprint)
        writer.close()


@asynccontextmanager
async def impostor(
    context: ssl.SSLContext, *messages: Message
) -> AsyncIterator[tuple[int, asyncio.Future[bytes]]]:
    """Something that speaks TLS and passes messages on; its future has every byte a joiner says to it."""
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for seq, message in enumerate(messages, 1):
            writer.write(encode(message, 0, seq))
        with contextlib.suppress(OSError):
            heard.set_result(await reader.read())
        writer.close()

    server = await asyncio.start_server(attend, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1], heard
    finally:
        server.close()


def offer_of(member: Member) -> JoinOffer:
    return JoinOffer(member.membership.authority, secrets.token_bytes(32))


@pytest.mark.parametrize(
    ("offered", "error", "why"),
    [("elsewhere", UserError, "and another cluster answered"),
     ("first", ProtocolError, "was not made by the authority"),
     ("", RemoteProtocolError, "may not send Ping in state new")],
    ids=["another cluster", "an attacker in between", "before an offer"],
)  # fmt: skip
async def test_a_joiner_says_nothing_to_who_is_no_member_of_its_cluster(
    macs: Macs, offered: str, error: type[MlxtpError], why: str
) -> None:
    """An attacker in between has everything but a certificate of that cluster."""
    context = member_context_server(macs.elsewhere.credentials)
    said = offer_of(getattr(macs, offered)) if offered else Ping()
    async with impostor(context, said) as (port, heard), asyncio.timeout(TIMEOUT_S):
        with pytest.raises(error, match=why):
            await join(port, macs.new()[1], House(macs.first).token())
        assert await heard == b""


async def test_a_joiner_does_speak_to_a_member_of_its_cluster(macs: Macs) -> None:
    """So that the silence above means something."""
    context = member_context_server(macs.first.credentials)
    async with impostor(context, offer_of(macs.first)) as (port, heard):
        asking = asyncio.create_task(
            ask_to_join("127.0.0.1", port, joiner(macs.new()[1], House(macs.first).token()), 0.3)
        )
        with pytest.raises(LinkError, match=r"did not answer within 0\.3 s") as caught:
            await asking
        assert caught.value.code is Code.LINK_TIMEOUT
        assert len(await heard) > 300


async def test_a_joiner_that_does_not_ask(macs: Macs) -> None:
    async with listening(House(macs.first, deadline_s=0.1)) as house:
        reader, writer = await open_tls("127.0.0.1", house.port, join_context(), ALPN_JOIN, TIMEOUT_S)
        error = await house.outcomes.get()
        assert isinstance(error, LinkError)
        assert error.code is Code.LINK_TIMEOUT
        await reader.read()
        writer.close()


async def test_a_joiner_that_breaks_the_rules(macs: Macs) -> None:
    async with listening(House(macs.first)) as house:
        for said, code in (
            (encode(Ping(), 0, 1), Code.OUT_OF_ORDER),
            (b"GET / HTTP/1.1\r\n", Code.FRAME_OVERSIZE),
            (b"\0\0\x10\1", Code.FRAME_OVERSIZE),
        ):
            reader, writer = await open_tls("127.0.0.1", house.port, join_context(), ALPN_JOIN, TIMEOUT_S)
            writer.write(said)
            error = await house.outcomes.get()
            assert isinstance(error, RemoteProtocolError)
            assert error.code is code
            await reader.read()
            writer.close()


async def test_a_joiner_that_asks_who_told_it_to_go_elsewhere(macs: Macs) -> None:
    second = member_of(macs.first, macs.folder)
    offer = redirect(second.membership.authority, secrets.token_bytes(32), "studio", ())
    async with listening(House(second, elsewhere=offer)) as house:
        reader, writer = await open_tls("127.0.0.1", house.port, join_context(), ALPN_JOIN, TIMEOUT_S)
        connection = StreamLink(reader, writer, Session(LinkKind.JOIN, Side.LOWER, 0))
        await connection.receive()
        asking = joiner(macs.new()[1], House(macs.first).token())
        certificate = writer.get_extra_info("ssl_object").getpeercert(True)
        connection.send(asking.on_offer(offer_of(second), certificate))
        error = await house.outcomes.get()
        assert isinstance(error, RemoteProtocolError)
        connection.close()

"""The control port: joiners that are sent on, members' requests, and who is not let in. Real TLS."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mlxtp.cluster.admission import ask_to_join
from mlxtp.cluster.joining import AskElsewhere, Granted, Joiner
from mlxtp.cluster.tokens import Desk, Token, read_token
from mlxtp.errors import Code, MlxtpError, UserError
from mlxtp.node.door import Door, bind_control
from mlxtp.node.requests_link import RemoteDesk
from mlxtp.wire.certificates import authority_hash, new_key
from mlxtp.wire.doorman import open_tls
from mlxtp.wire.joining import MAX_ADDRESS, MAX_PEERS, NONCE_BYTES
from mlxtp.wire.tls import ALPN_REQUESTS, member_context_client

from ..wire.members import Member, founder, member_of
from .one_node import A, Node, by_hand
from .scenes import run, sees, within


class House:
    """A member's door. `first` founded the cluster, which may be the same."""

    def __init__(self, first: Member, member: Member, home: Path) -> None:
        self.first, self.member = first, member
        self.node = Node(member, home)
        sock = bind_control("127.0.0.1", 0)
        self.port = sock.getsockname()[1]
        self.door = Door(sock, member.store, member.identity, self.node.cluster)
        self.open = asyncio.ensure_future(self.door.run())

    def token(self) -> Token:
        """A token that some other founder's desk issued; only the cluster is right."""
        identity = self.first.identity
        desk = Desk(identity.cluster_id, authority_hash(self.first.membership.authority))
        return desk.issue(secrets.token_bytes(16), time.monotonic())

    async def join(self, token: Token) -> Granted:
        joiner = Joiner(token, secrets.token_hex(16), new_key(), "newcomer", secrets.token_bytes(NONCE_BYTES))
        return await ask_to_join("127.0.0.1", self.port, joiner)

    async def requests(self, member: Member) -> tuple[RemoteDesk, list[MlxtpError]]:
        context = member_context_client(member.credentials, ALPN_REQUESTS)
        reader, writer = await open_tls("127.0.0.1", self.port, context, ALPN_REQUESTS, 5.0)
        lost: list[MlxtpError] = []
        try:
            return await RemoteDesk.open(reader, writer, lambda _: None, lost.append), lost
        except BaseException:
            writer.transport.abort()
            raise


def play(folder: Path, story: Callable[[House], Awaitable[None]], *, founders: bool = False) -> None:
    async def scene() -> None:
        first = founder(folder)
        house = House(first, first if founders else member_of(first, folder), folder / "home")
        (folder / "home").mkdir()
        try:
            await within(story(house))
        finally:
            house.open.cancel()
            await asyncio.wait({house.open})
            await house.node.cluster.close()

    with by_hand():
        run(scene())


def test_who_knocks_at_another_door_is_sent_to_the_founder_s(tmp_path: Path) -> None:
    """With all of its addresses that could be told; the one at which it is known to answer comes first."""

    async def story(house: House) -> None:
        with pytest.raises(AskElsewhere, match="the Mac that founded this cluster can"):
            await house.join(house.token())
        a = house.node.meet(A)
        a.remote = "10.0.5.1"
        house.node.cluster.knowledge.addresses[A] = (
            "nonsense", "10.0.0.1:99999", "x" * MAX_ADDRESS + ":1", *(f"10.0.{i}.1:4711" for i in range(8))
        )  # fmt: skip
        with pytest.raises(AskElsewhere, match="mac-a can, at") as elsewhere:
            await house.join(house.token())
        assert elsewhere.value.addresses == tuple(f"10.0.{i}.1:4711" for i in (5, 0, 1, 2))

    play(tmp_path, story)


def test_a_newcomer_is_told_where_the_others_are(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        node = house.node
        node.meet(A)
        node.cluster.knowledge.addresses[A] = ("nonsense", *(f"10.0.0.{i}:4711" for i in range(1, 30)))
        node.cluster.listens_at = lambda _: ("10.0.0.99:4711",)
        token = read_token(house.door.token())
        granted = await house.join(token)
        assert granted.peers == ("10.0.0.99:4711", *(f"10.0.0.{i}:4711" for i in range(1, MAX_PEERS)))
        await sees(lambda: len(node.cluster.coordination.roster.members()) == 3)
        with pytest.raises(UserError):
            await house.join(token)

    play(tmp_path, story, founders=True)


def test_a_member_that_is_removed_has_no_requests_any_more(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        other = member_of(house.first, tmp_path)
        cluster = house.node.cluster
        cluster.admit(other.identity.node_id, "other", other.identity.fingerprint)
        desk, lost = await house.requests(other)
        stays, still = await house.requests(member_of(house.first, tmp_path))
        assert len(house.door._requests) == 2
        cluster.remove(other.identity.node_id)
        await sees(lambda: lost)
        await sees(lambda: len(house.door._requests) == 1)
        with pytest.raises(MlxtpError):
            await house.requests(other)
        assert still == []
        for each in (desk, stays):
            await each.close()

    play(tmp_path, story)


def test_an_address_that_another_agent_has_is_named() -> None:
    with bind_control("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"--control 127\.0\.0\.1:{port} cannot be used.*Another"
        ) as refused:
            bind_control("127.0.0.1", port)
    assert refused.value.code is Code.CONFIG

"""The control port: joiners that are sent on, members' requests, and who is not let in. Real TLS."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from mlxtp import audit
from mlxtp.cluster.control_port import ControlPort, bind_control
from mlxtp.errors import Code, ConfigError, MlxtpError, UserError
from mlxtp.groups.forwarding import RemoteBackend, serve_requests
from mlxtp.identity.join_network import ask_to_join
from mlxtp.identity.join_protocol import (
    AskElsewhere,
    Denied,
    Granted,
    Joiner,
    JoinToken,
    TokenIssuer,
    read_token,
)
from mlxtp.logs import keep_audit
from mlxtp.settings import AUDIT_LOG
from mlxtp.wire.certificates import authority_hash, new_key
from mlxtp.wire.cluster_messages import TokenIssued, TokenWanted
from mlxtp.wire.messages import Cancel, Generate
from mlxtp.wire.peer_messages import MAX_ADDRESS, MAX_PEERS, NONCE_BYTES
from mlxtp.wire.streams import open_tls
from mlxtp.wire.tls import ALPN_CONTROL, ALPN_REQUESTS, member_context_client

from ..gateway.test_gateway import DEPLOYMENT, GROUP, MODEL, TEXT, FakeRanks
from ..groups.one_node import CLOCK, A, B, Node, by_hand
from ..groups.scenes import run, sees, within
from ..played import scenes
from ..wire.members import Member, founder, member_of


class House:
    """A member's door. `first` founded the cluster, which may be the same."""

    def __init__(self, first: Member, member: Member, home: Path) -> None:
        self.first, self.member = first, member
        self.node = Node(member, home)
        sock = bind_control("127.0.0.1", 0)
        self.port = sock.getsockname()[1]
        self.door = ControlPort(
            sock,
            member.credentials,
            self.node.parts.node,
            self.node.parts.tokens,
            partial(serve_requests, gateway=self.node.parts.gateway),
        )
        self.open = asyncio.ensure_future(self.door.run())

    def token(self) -> JoinToken:
        """A token that some other founder's desk issued; only the cluster is right."""
        identity = self.first.identity
        desk = TokenIssuer(identity.cluster_id, authority_hash(self.first.membership.authority))
        return desk.issue(secrets.token_bytes(16), time.monotonic())

    async def join(self, token: JoinToken) -> Granted:
        joiner = Joiner(token, secrets.token_hex(16), new_key(), "newcomer", secrets.token_bytes(NONCE_BYTES))
        return await ask_to_join("127.0.0.1", self.port, joiner)

    async def requests(self, member: Member) -> tuple[RemoteBackend, list[MlxtpError]]:
        context = member_context_client(member.credentials, ALPN_REQUESTS)
        reader, writer = await open_tls("127.0.0.1", self.port, context, ALPN_REQUESTS, 5.0)
        lost: list[MlxtpError] = []
        try:
            return await RemoteBackend(reader, writer, lambda _: None, lost.append).greet(), lost
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
            await house.node.parts.close()

    with by_hand():
        run(scene())


played = scenes(play, "tmp_path")
played_by_founders = scenes(partial(play, founders=True), "tmp_path")


@played()
async def test_who_knocks_at_another_door_is_sent_to_the_holders_of_the_authority(house: House) -> None:
    """With all addresses that could be told; that at which a Mac is known to answer is its first."""
    with pytest.raises(AskElsewhere, match="the Mac that founded this cluster can"):
        await house.join(house.token())
    a, b = house.node.meet(A), house.node.meet(B)
    house.node.holds(A, house.first)
    a.remote = "10.0.5.1"
    house.node.parts.node.peer_info.addresses[A] = (
        "nonsense", "10.0.0.1:99999", "x" * MAX_ADDRESS + ":1", *(f"10.0.{i}.1:4711" for i in range(8))
    )  # fmt: skip
    with pytest.raises(AskElsewhere, match="mac-a can, at") as elsewhere:
        await house.join(house.token())
    assert elsewhere.value.addresses == tuple(f"10.0.{i}.1:4711" for i in (5, 0, 1, 2))
    house.node.holds(B, house.first)
    with pytest.raises(AskElsewhere, match="mac-a or mac-f can, at") as elsewhere:
        await house.join(house.token())
    assert elsewhere.value.addresses == ("10.0.5.1:4711", "10.0.0.9:4711", "10.0.0.1:4711", "10.0.1.1:4711")
    a.close()
    with pytest.raises(AskElsewhere) as elsewhere:  # who is here comes first
        await house.join(house.token())
    assert elsewhere.value.addresses[0] == "10.0.0.9:4711"
    b.close()


@played_by_founders()
async def test_a_token_of_another_holder_is_no_end_of_the_search(house: House) -> None:
    with pytest.raises(Denied, match="not known here"):
        await house.join(house.token())
    house.node.meet(A)
    house.node.holds(A, house.first)
    with pytest.raises(
        AskElsewhere, match=r"does not know this join token.*; mac-a may have made it, at"
    ) as at:
        await house.join(house.token())
    assert at.value.addresses == ("10.0.0.9:4711",)
    used = read_token(await house.node.parts.tokens.token())
    await house.join(used)
    with pytest.raises(Denied, match="was used before"):
        await house.join(used)


@played_by_founders()
async def test_a_newcomer_is_told_where_the_others_are(house: House) -> None:
    node = house.node
    node.meet(A)
    node.parts.node.peer_info.addresses[A] = ("nonsense", *(f"10.0.0.{i}:4711" for i in range(1, 30)))
    node.parts.node.introduction.addresses = lambda: ("10.0.0.99:4711",)
    token = read_token(await house.node.parts.tokens.token())
    granted = await house.join(token)
    assert granted.peers == ("10.0.0.99:4711", *(f"10.0.0.{i}:4711" for i in range(1, MAX_PEERS)))
    await sees(lambda: len(node.parts.node.replica.roster.members()) == 3)
    with pytest.raises(UserError):
        await house.join(token)


def test_the_audit_log_tells_who_came_in_by_which_token_and_who_did_not(tmp_path: Path) -> None:
    path, secret = tmp_path / AUDIT_LOG, ""

    async def story(house: House) -> None:
        nonlocal secret
        node = house.node.parts.node
        secret = await house.node.parts.tokens.token()
        await house.join(read_token(secret))
        with pytest.raises(UserError):
            await house.join(read_token(secret))
        await sees(lambda: "join_refused" in path.read_text())
        [joined] = node.replica.roster.members().keys() - {node.node_id}
        node.enrolment.remove(joined)
        house.node.meet(A)  # a member that another Mac let in
        node.desired.serve("org/tiny", keep_s=60)
        node.desired.serve("org/tiny", keep_s=90)  # that loads nothing
        node.desired.serve("org/big", replace=True)
        node.desired.unload_all()

    keep_audit(tmp_path)
    try:
        play(tmp_path, story, founders=True)
    finally:
        audit.log.handlers.clear()
    made, joined, refused, removed, *served = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["event"] for each in (made, joined, refused, removed)] == [
        "token_made", "member_joined", "join_refused", "member_removed"
    ]  # fmt: skip
    assert made["token"] == joined["token"] == refused["token"]
    assert made["member"] == joined["by"]
    assert joined["member"] == refused["member"] == removed["member"] == "newcomer"
    assert "was used before" in refused["message"]
    assert [(each["event"], each["model"], each["by"]) for each in served] == [
        ("model_served", "org/tiny", "this agent"),
        ("model_unloaded", "org/tiny", "this agent"),
        ("model_served", "org/big", "this agent"),
        ("model_unloaded", "org/big", "this agent"),
    ]
    token = read_token(secret)
    for hidden in (secret, token.secret.hex(), token.key.hex(), token.id.hex()):
        assert hidden not in path.read_text()


@played_by_founders()
async def test_what_a_removed_member_prepared_lets_no_mac_in(house: House, tmp_path: Path) -> None:
    """It asked for tokens while it was one. Whom it let in before is listed."""
    node = house.node
    other = member_of(house.first, tmp_path)
    node_id = other.identity.node_id
    node.parts.node.enrolment.admit(node_id, "other", other.identity.fingerprint)
    link = node.meet(node_id)
    node.hear(link, *(TokenWanted(bytes((number,)) * 16) for number in range(2)))
    used, kept = (read_token(issued.token) for issued in link.heard(TokenIssued))
    await house.join(used)
    await sees(lambda: len(node.parts.node.replica.roster.members()) == 3)
    [friend] = node.parts.node.replica.roster.let_in(node_id)
    entry = node.parts.node.replica.roster.members()[friend]
    assert (entry.name, entry.address, entry.at) == ("newcomer", "127.0.0.1", int(CLOCK.now))
    node.parts.node.enrolment.remove(node_id)
    with pytest.raises(Denied, match="the member that requested this join token was removed or left"):
        await house.join(kept)
    await house.join(read_token(await house.node.parts.tokens.token()))


@played()
async def test_a_member_that_is_removed_has_no_requests_any_more(house: House, tmp_path: Path) -> None:
    other = member_of(house.first, tmp_path)
    cluster = house.node.parts
    cluster.node.enrolment.admit(other.identity.node_id, "other", other.identity.fingerprint)
    third = member_of(house.first, tmp_path)
    with pytest.raises(MlxtpError):  # who has no control link could vanish unnoticed
        await house.requests(third)
    house.node.meet(third.identity.node_id)
    with pytest.raises(MlxtpError):  # the node has a link, under another key
        await house.requests(third)
    for each in (other, third):
        house.node.meet(each.identity.node_id, fingerprint=each.identity.fingerprint)
    desk, lost = await house.requests(other)
    stays, still = await house.requests(third)
    assert len(house.door._requests) == 2
    cluster.node.enrolment.remove(other.identity.node_id)
    await sees(lambda: lost)
    await sees(lambda: len(house.door._requests) == 1)
    counted: list[int] = []

    async def called(*_: object) -> None:
        counted.append(house.door._acceptor._strangers.total)

    cluster.node.links.called = called  # type: ignore[method-assign]
    context = member_context_client(other.credentials, ALPN_CONTROL)
    _, silent = await open_tls("127.0.0.1", house.port, context, ALPN_CONTROL, 5.0)
    await sees(lambda: counted == [1])  # as a stranger, whose places are few
    silent.close()
    with pytest.raises(MlxtpError):
        await house.requests(other)
    assert still == []
    for link in (desk, stays):
        await link.close()


@played()
async def test_requests_of_a_member_that_vanished_end_at_rank_0(house: House, tmp_path: Path) -> None:
    """Its requests link may look well for hours: nothing is sent that way."""
    gateway, ranks = house.node.parts.gateway, FakeRanks()
    gateway.serve(GROUP, DEPLOYMENT, cast(Any, ranks), MODEL, TEXT)
    vanishes, stays = (member_of(house.first, tmp_path) for _ in range(2))
    links = [
        house.node.meet(each.identity.node_id, fingerprint=each.identity.fingerprint)
        for each in (vanishes, vanishes, stays)
    ]
    desk, lost = await house.requests(vanishes)
    other, still = await house.requests(stays)
    for each in (desk, other):
        each.send(Generate(1, (1, 2), 9))
    await sees(lambda: gateway.open_requests == 2)
    links[0].close()
    await asyncio.sleep(0)
    assert gateway.open_requests == 2  # it has another control link
    links[1].close()
    await sees(lambda: gateway.open_requests == 1)
    assert len(ranks.sent_of(Cancel)) == 1
    await sees(lambda: lost)
    assert still == []
    for each in (desk, other):
        await each.close()


def test_an_address_that_is_not_there_or_that_another_agent_has_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"--control 192\.0\.2\.7:0: no interface of this Mac has .* has .*127"
    ):
        bind_control("192.0.2.7", 0)
    with bind_control("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"--control 127\.0\.0\.1:{port} cannot be used.*Another"
        ) as refused:
            bind_control("127.0.0.1", port)
    assert refused.value.code is Code.CONFIG

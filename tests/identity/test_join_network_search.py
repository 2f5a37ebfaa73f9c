"""A Mac's search for the one that lets it in, beside announcements of others. Real TLS."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from mlxtp.cluster.state_file import forget
from mlxtp.config import Settings
from mlxtp.discovery.addresses import DiscoveredPeer
from mlxtp.errors import ConfigError, UserError
from mlxtp.identity import join_network
from mlxtp.identity.join_network import JoinResult, enter
from mlxtp.identity.join_protocol import Denied, Host, TokenIssuer
from mlxtp.identity.store import Store
from mlxtp.wire.certificates import Authority, authority_hash, new_key

from ..cluster.test_control_port import House
from ..groups.one_node import by_hand
from ..groups.scenes import run, sees, within
from ..played import scenes
from ..wire.members import founder, member_of


class Street:
    """The doors of a cluster and of another one, and announcements on the network."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        first, other = founder(folder), founder(folder)
        self.cluster_id = first.identity.cluster_id
        self.house, self.other = (House(each, each, self._home()) for each in (first, other))
        member = member_of(first, folder)
        self.member = House(first, member, self._home())
        self.announced: dict[str, None] = {}
        self.tell: Callable[[], None] = lambda: None
        street = self

        class Network:
            def __init__(self, on_change: Callable[[tuple[DiscoveredPeer, ...]], None], _warn: Any) -> None:
                street.tell = lambda: on_change(tuple(map(street._sighting, street.announced)))

            async def start(self, _advert: object, _only: object) -> None:
                street.tell()

            async def close(self) -> None:
                street.tell = lambda: None

        monkeypatch.setattr(join_network, "Discovery", Network)

    def _home(self) -> Path:
        home = self.folder / f"home-{len(list(self.folder.iterdir()))}"
        home.mkdir()
        return home

    def _sighting(self, address: str) -> DiscoveredPeer:
        return DiscoveredPeer("1" * 32, self.cluster_id, "mini", (address,), True, 1)

    def announce(self, *ports: int) -> None:
        """A program at each of these ports says that it is of the cluster."""
        self.announced |= dict.fromkeys(f"127.0.0.1:{port}" for port in ports)
        self.tell()

    async def enter(self, token: str, *peers: int, discovery: bool = True) -> JoinResult:
        settings = Settings(
            self._home(), "", 0, 1, "tiny", cluster=True, name="mini", join=token, discovery=discovery,
            peers=tuple(f"127.0.0.1:{port}" for port in peers),
        )  # fmt: skip
        return await enter(settings, Store(settings.home), partial(forget, settings.home))


def play(folder: Path, monkeypatch: pytest.MonkeyPatch, story: Callable[[Street], Awaitable[None]]) -> None:
    async def scene() -> None:
        street = Street(folder, monkeypatch)
        houses = (street.house, street.other, street.member)
        try:
            await within(story(street))
        finally:
            for house in houses:
                house.open.cancel()
            await asyncio.wait({house.open for house in houses})
            for house in houses:
                await house.node.parts.close()

    with by_hand():
        run(scene())


played = scenes(play, "tmp_path", "monkeypatch")


@played()
async def test_a_false_announcement_keeps_no_mac_out(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is all that is heard at first."""
    doorman = street.other.door._acceptor
    attend, attended = doorman._on_connection, asyncio.Event()

    async def note(*connection: Any) -> None:
        try:
            await attend(*connection)
        finally:
            attended.set()

    monkeypatch.setattr(doorman, "_on_connection", note)
    street.announce(street.other.port)
    entering_ = asyncio.ensure_future(street.enter(await street.house.node.parts.tokens.token()))
    await attended.wait()
    street.announce(street.house.port)
    entered = await entering_
    assert entered.joined
    assert entered.identity.cluster_id == street.cluster_id
    node_id = entered.identity.node_id
    await sees(lambda: node_id in street.house.node.parts.node.replica.roster.members())


@played()
async def test_a_mac_that_never_replies_delays_no_one(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_network, "PATIENCE_S", (1000.0,))
    with closing(socket.create_server(("127.0.0.1", 0), backlog=20)) as silent:
        street.announce(silent.getsockname()[1], street.member.port)
        # A member that cannot let anybody in names the Mac that can.
        cluster = street.member.node.parts
        first = street.house.member.identity.node_id
        for members in street.house.node.parts.node.replica.roster.messages():
            cluster.node.enrolment.received(cast(Any, None), members)
        cluster.node.peer_info.addresses[first] = (f"127.0.0.1:{street.house.port}",)
        assert (await street.enter(await street.house.node.parts.tokens.token())).joined


@played()
async def test_the_no_of_a_mac_without_the_authority_is_one_more_address_that_did_not_work(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removed member has a certificate for ever."""
    monkeypatch.setattr(join_network, "FIND_S", 1000.0)
    removed = street.member.member.membership
    desk = TokenIssuer(street.cluster_id, authority_hash(removed.authority))
    refused: list[str] = []

    def offer(at: str) -> Host:
        refused.append(at)
        forger = Authority(removed.authority, new_key())
        return Host(forger, removed.certificate, desk, bytes(32), members={})

    monkeypatch.setattr(street.member.door, "_offer", offer)
    street.announce(street.member.port)
    entering_ = asyncio.ensure_future(street.enter(await street.house.node.parts.tokens.token()))
    await sees(lambda: refused)
    street.announce(street.house.port)
    assert (await entering_).joined


@played()
async def test_the_no_of_the_right_mac_is_the_end(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_network, "FIND_S", 1000.0)
    token = await street.house.node.parts.tokens.token()
    street.announce(street.other.port, street.house.port)
    assert (await street.enter(token)).joined
    with pytest.raises(Denied, match="this join token was used before"):
        await street.enter(token)


@played()
async def test_an_address_of_another_cluster_that_was_typed_is_said_at_once(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another Mac may still be found."""
    monkeypatch.setattr(join_network, "FIND_S", 1000.0)
    token = await street.house.node.parts.tokens.token()
    with pytest.raises(UserError, match=r"^the join token is for .* and another cluster answered"):
        await street.enter(token, street.other.port, discovery=False)
    assert (await street.enter(token, street.other.port, street.house.port, discovery=False)).joined
    street.announce(street.house.port)
    assert (await street.enter(await street.house.node.parts.tokens.token(), street.other.port)).joined


@played()
async def test_a_member_stays_one_with_a_token_of_its_cluster_alone(street: Street) -> None:
    own, other = [await each.node.parts.tokens.token() for each in (street.house, street.other)]
    member = street.member.member
    settings = Settings(street._home(), "", 0, 1, "tiny", cluster=True, join=own)
    entered = await enter(settings, member.store, lambda: pytest.fail("it is a member"))
    assert (entered.identity.node_id, entered.joined) == (member.identity.node_id, False)
    with pytest.raises(ConfigError, match=r"is a member of cluster .*, the token is for"):
        await enter(replace(settings, join=other), member.store, lambda: None)


@pytest.mark.slow
@played()
async def test_when_no_mac_is_found_what_was_is_said(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_network, "FIND_S", 1.0)
    token = await street.house.node.parts.tokens.token()
    with pytest.raises(ConfigError, match="announced itself on this network within 1 s"):
        await street.enter(token)
    street.announce(street.other.port)
    with pytest.raises(ConfigError, match=r"could not be joined within 1 s: .* another cluster answered"):
        await street.enter(token)

"""Rotations of the authority among several nodes. Real certificates and TLS, links in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlxtp.cluster.cluster_state import Roster
from mlxtp.errors import Code, ConfigError, UserError
from mlxtp.identity import validity
from mlxtp.identity.join_protocol import read_token
from mlxtp.identity.store import Store
from mlxtp.identity.validity import DAY_S, OVERLAP_S, own_time
from mlxtp.wire.certificates import MemberCertificates, NodeIdentity, authority_hash, new_key, read_node
from mlxtp.wire.cluster_messages import Members
from mlxtp.wire.codecs import Message
from mlxtp.wire.frames import encode
from mlxtp.wire.tls import (
    AGENT_ALPNS,
    ALPN_CONTROL,
    member_context_client,
    member_context_server,
    peer_identity,
)

from ..groups.one_node import CLOCK, FakeLink, Node, by_hand
from ..groups.scenes import run, sees, within
from ..wire.members import LASTING, Member, founder, member_of
from ..wire.test_tls import handshake


class Wire(FakeLink):
    """One end of a link in memory. `far` is the other one."""

    far: Wire

    def __init__(self, node: Node, peer: NodeIdentity, boot_id: str) -> None:
        super().__init__(
            next(node._numbers), peer.node_id, boot_id, node.parts.node.identity.cluster_id, node
        )
        self.fingerprint = peer.fingerprint
        self.open = True

    def send(self, message: Message) -> None:
        super().send(message)
        if self.open:
            asyncio.get_running_loop().call_soon(self.far.arrives, message)

    def arrives(self, message: Message) -> None:
        encode(message, 0, 1)
        if self.open:
            self._node.parts.node.links.received(cast(Any, self), message)

    def close(self, goodbye: bool = False) -> None:
        for end in (self, self.far):
            if end.open:
                end.open = False
                end._node.parts.node.links.down(cast(Any, end), "closed", False)


class Mac:
    """A member that can be started and ended."""

    def __init__(self, name: str, member: Member, folder: Path) -> None:
        self.name = name
        self.store = member.store
        self.home = folder / name
        self.home.mkdir()
        self.node: Node | None = None
        self._renewing: asyncio.Future[None] | None = None

    @property
    def up(self) -> Node:
        assert self.node is not None
        return self.node

    @property
    def held(self) -> MemberCertificates:
        membership = self.store.load().membership
        assert membership is not None
        return membership

    @property
    def node_id(self) -> str:
        return self.store.load().node_id

    def start(self) -> None:
        self.node = Node(Member(self.store, self.store.load_or_create()), self.home)
        self._renewing = asyncio.ensure_future(self.node.parts.renewal.run())

    async def end(self) -> None:
        if self.node is None:
            return
        assert self._renewing is not None
        self._renewing.cancel()
        for link in list(self.node.parts.node.links.links()):
            link.close()
        await self.node.parts.close()
        self.node = None


class Desk:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._first = founder(folder)
        self.macs: list[Mac] = [Mac("anna", self._first, folder)]
        for name in ("ben", "carl"):
            self.macs.append(Mac(name, member_of(self._first, folder), folder))
        self.anna, self.ben, self.carl = self.macs

    def link(self, one: Mac, other: Mac) -> str:
        """Link two Macs as TLS and both nodes permit. Returns the code of a refusal; empty for none."""
        server, client = handshake(
            member_context_server(one.store.credentials, AGENT_ALPNS),
            member_context_client(other.store.credentials, ALPN_CONTROL),
        )
        errors = [end.exception() for end in (server, client)]
        if any(errors):
            for end in (server, client):
                if end.exception() is None:
                    end.result().close()
            return "tls"
        seen = {one: peer_identity(server.result()), other: peer_identity(client.result())}
        for end in (server, client):
            end.result().close()
        for mac, there in ((one, other), (other, one)):
            error = mac.up.parts.node.introduction.judge(seen[mac], there.up.parts.node.introduction.hello())
            if error is not None:
                return error.code
        ends = [
            Wire(mac.up, seen[mac], there.up.parts.node.boot_id)
            for mac, there in ((one, other), (other, one))
        ]
        ends[0].far, ends[1].far = ends[1], ends[0]
        for end in ends:
            links = end._node.parts.node.links
            links._links[end.number] = cast(Any, end)
            assert links.up(cast(Any, end))
        return ""

    def tick(self) -> None:
        """A second passes: beats, and a look at who has moved."""
        CLOCK.now += 1.0
        for mac in self.macs:
            if mac.node is not None:
                mac.node.parts.node.gossip.beat()
                mac.node.parts.node.rounds.due(CLOCK.now)

    async def sees(self, condition: Callable[[], object], what: str) -> None:
        def passes() -> object:
            self.tick()
            return condition()

        await asyncio.sleep(0.01)  # what the last tick sent arrives
        await sees(passes, what)

    async def together(self, *macs: Mac) -> None:
        """Start these, link each two, and wait until each knows all others."""
        for mac in macs:
            mac.start()
        for at, mac in enumerate(macs):
            for other in macs[at + 1 :]:
                assert self.link(mac, other) == ""
        here = {mac.node_id for mac in macs}
        await self.sees(
            lambda: all(here <= mac.up.parts.node.replica.roster.members().keys() for mac in macs),
            "all know all",
        )
        await self.sees(
            lambda: self.anna.node_id in macs[-1].up.parts.node.replica.roster.holders(), "holder"
        )

    async def all_follow(self, *macs: Mac, ended: bool) -> bytes:
        """Wait until these have certificates of one authority. Return it."""

        def done() -> bool:
            held = [mac.held for mac in macs]
            return (
                len({each.authority for each in held}) == 1
                and all(each.moved for each in held)
                and all((each.former == b"") is ended for each in held)
            )

        await self.sees(done, "all follow")
        return macs[0].held.authority


def play(folder: Path, story: Callable[[Desk], Awaitable[None]]) -> None:
    async def scene() -> None:
        desk = Desk(folder)
        try:
            await within(story(desk))
        finally:
            for mac in desk.macs:
                await mac.end()

    with by_hand(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(CLOCK, "now", time.monotonic())
        run(scene())


def rotate(mac: Mac, *, at_once: bool = False) -> Awaitable[None]:
    return mac.up.parts.rotation.rotate(at_once=at_once)


def test_every_member_moves_over_its_links_and_then_the_former_authority_ends(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        anna, ben, carl = desk.anna, desk.ben, desk.carl
        await desk.together(anna, ben, carl)
        before, leaf = anna.held.authority, carl.held.certificate
        await anna.up.parts.authority.hand_over(ben.node_id)
        await desk.sees(lambda: ben.node_id in carl.up.parts.node.replica.roster.holders(), "ben holds")
        with pytest.raises(UserError, match="does not hold the cluster's authority; run this command on"):
            await rotate(carl)
        await rotate(anna)
        next_one = ben.store.load().authority
        assert next_one is not None
        assert (next_one.certificate, carl.held.authority) == (anna.held.authority, before)
        authority = await desk.all_follow(anna, ben, carl, ended=True)
        assert authority != before
        assert carl.held.certificate != leaf
        for mac in (anna, ben):
            kept = mac.store.load().authority
            assert kept is not None
            assert kept.certificate == authority
            token = read_token(await mac.up.parts.tokens.token())
            assert token.authority_hash == authority_hash(authority)
        assert carl.up.parts.rotation.who_moved()["until"] == ""
        # A newcomer believes what the former authority signed, by the word of a member.
        new = Mac("dora", member_of(Member(ben.store, ben.store.load()), tmp_path), tmp_path)
        desk.macs.append(new)
        new.start()
        assert desk.link(new, carl) == ""
        names = {mac.node_id for mac in desk.macs}
        roster = new.up.parts.node.replica
        await desk.sees(lambda: roster.roster.members().keys() == names, "dora knows all")
        assert all(roster.roster.members()[mac.node_id].admission for mac in (anna, ben, carl))

    play(tmp_path, story)


@pytest.mark.parametrize("what", ["save_membership", "end_former"])
def test_a_disk_that_is_full_for_a_while_costs_no_link_and_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    tried, write = [], getattr(Store, what)

    def fails(store: Store, *args: Any) -> Any:
        tried.append(store)
        if len(tried) < 4:
            raise ConfigError("member.pem cannot be written: No space left on device")
        return write(store, *args)

    async def story(desk: Desk) -> None:
        await desk.together(desk.anna, desk.carl)
        monkeypatch.setattr(Store, what, fails)
        await rotate(desk.anna)
        await desk.sees(lambda: len(tried) >= 4, "they are tried again")
        assert desk.carl.up.parts.node.links.nodes() == {desk.anna.node_id}
        await desk.all_follow(desk.anna, desk.carl, ended=True)

    play(tmp_path, story)


def test_a_member_that_was_away_moves_when_it_comes_back_in_time(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        anna, ben, carl = desk.anna, desk.ben, desk.carl
        await desk.together(anna, ben, carl)
        await carl.end()
        await rotate(anna)
        await desk.all_follow(anna, ben, ended=False)
        progress = ben.up.parts.rotation.who_moved
        await desk.sees(lambda: len(cast(list[str], progress()["moved"])) == 2, "two have moved")
        assert progress()["until"] == validity.day(own_time() + OVERLAP_S)
        assert len(cast(list[str], progress()["to_come"])) == 1
        with pytest.raises(UserError, match="--at-once ends it now"):
            await rotate(anna)
        carl.start()
        assert desk.link(carl, ben) == ""  # which does not hold the key
        await desk.sees(lambda: carl.held.authority == ben.held.authority, "carl follows")
        assert not carl.held.moved
        assert desk.link(carl, anna) == ""
        await desk.all_follow(anna, ben, carl, ended=True)

    play(tmp_path, story)


def test_who_comes_after_the_time_or_was_removed_stays_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 0.0
    now = own_time
    monkeypatch.setattr(validity.time, "time", lambda real=validity.time.time: real() + ahead)

    async def story(desk: Desk) -> None:
        nonlocal ahead
        anna, ben, carl = desk.anna, desk.ben, desk.carl
        await desk.together(anna, ben, carl)
        await carl.end()
        await rotate(anna)
        await desk.all_follow(anna, ben, ended=False)
        ahead = OVERLAP_S - DAY_S
        desk.tick()
        assert anna.held.former
        anna.up.parts.node.enrolment.remove(carl.node_id)
        carl.start()
        assert desk.link(anna, carl) == Code.REMOVED_NODE
        await carl.end()
        ahead = OVERLAP_S + DAY_S
        await desk.all_follow(anna, ben, ended=True)
        carl.start()
        assert desk.link(carl, anna) == desk.link(anna, carl) == "tls"
        assert now() > 0

    play(tmp_path, story)


def test_a_stolen_key_ends_at_once_and_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(desk: Desk) -> None:
        anna, ben, carl = desk.anna, desk.ben, desk.carl
        await desk.together(anna, ben, carl)
        stolen = anna.store.load().authority
        assert stolen is not None
        await carl.end()
        await rotate(anna, at_once=True)
        await desk.all_follow(anna, ben, ended=True)
        carl.start()
        assert desk.link(carl, anna) == "tls"
        thief = Mac("thief", Member(Store(tmp_path / "t"), Store(tmp_path / "t").load_or_create()), tmp_path)
        ours = thief.store.load()
        forged = stolen.certify(ours.node_id, ours.key.public_key(), *LASTING)
        thief.store.save_membership(MemberCertificates(forged, stolen.certificate))
        thief.start()
        desk.macs.append(thief)
        assert desk.link(ben, thief) == "tls"

    play(tmp_path, story)


def test_while_both_count_the_former_key_makes_no_new_members(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        anna, ben, carl = desk.anna, desk.ben, desk.carl
        await desk.together(anna, ben, carl)
        stolen = anna.store.load().authority
        assert stolen is not None
        await carl.end()
        await rotate(anna)
        await desk.all_follow(anna, ben, ended=False)
        identity = NodeIdentity(
            "d" * 32, stolen and anna.store.load().cluster_id, "5" * 64, own_time() + DAY_S
        )
        former = stolen.certify("d" * 32, new_key().public_key(), *LASTING)
        identity = read_node(former)
        hello = anna.up.parts.node.introduction.hello()
        error = ben.up.parts.node.introduction.judge(identity, replace(hello, node_id="d" * 32, boot_id="x"))
        assert error is not None
        assert "of the former authority" in error.detail

    play(tmp_path, story)


def test_two_rotations_at_one_time_end_in_one_authority(tmp_path: Path) -> None:
    """Anna and Ben hold the key and do not reach each other; then they meet."""

    async def story(desk: Desk) -> None:
        anna, ben, carl = desk.anna, desk.ben, desk.carl
        await desk.together(anna, ben, carl)
        await anna.up.parts.authority.hand_over(ben.node_id)
        await desk.sees(lambda: ben.node_id in carl.up.parts.node.replica.roster.holders(), "ben holds")
        for link in list(ben.up.parts.node.links.links()):
            link.close()
        await rotate(anna)
        await rotate(ben)
        await desk.sees(lambda: carl.held.moved and carl.held.former, "carl follows anna")
        assert anna.held.authority != ben.held.authority
        assert desk.link(anna, ben) == ""
        assert desk.link(carl, ben) in ("", "tls")
        authority = await desk.all_follow(anna, ben, carl, ended=True)
        for mac in (anna, ben):
            kept = mac.store.load().authority
            assert kept is not None
            assert kept.certificate == authority

    play(tmp_path, story)


def test_a_holder_that_was_away_gets_the_key_when_it_comes_back(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        anna, ben, carl = desk.anna, desk.ben, desk.carl
        await desk.together(anna, ben, carl)
        await anna.up.parts.authority.hand_over(ben.node_id)
        await desk.sees(lambda: ben.node_id in carl.up.parts.node.replica.roster.holders(), "ben holds")
        await ben.end()
        await rotate(anna)
        await desk.all_follow(anna, carl, ended=False)
        ben.start()
        assert desk.link(ben, carl) == ""
        await desk.sees(lambda: ben.held.authority == carl.held.authority, "ben follows")
        assert ben.store.load().authority is None  # what it has is the former key
        assert desk.link(ben, anna) == ""
        authority = await desk.all_follow(anna, ben, carl, ended=True)
        kept = ben.store.load().authority
        assert kept is not None
        assert kept.certificate == authority

    play(tmp_path, story)


def test_a_holder_that_is_killed_after_it_made_the_next_key_goes_on_when_it_starts(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        anna, ben, carl = desk.anna, desk.ben, desk.carl
        await desk.together(anna, ben, carl)
        await anna.end()
        anna.store.rotate(own_time(), at_once=False)
        anna.start()
        for mac in (ben, carl):
            assert desk.link(anna, mac) == ""
        await desk.all_follow(anna, ben, carl, ended=True)

    play(tmp_path, story)


def test_no_clock_alone_ends_the_former_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(desk: Desk) -> None:
        anna, ben, carl = desk.anna, desk.ben, desk.carl
        await desk.together(anna, ben, carl)
        await carl.end()
        await rotate(anna)
        await desk.all_follow(anna, ben, ended=False)
        await ben.end()
        with monkeypatch.context() as patch:
            patch.setattr(validity, "own_time", lambda: LASTING[0] + 3650 * DAY_S)
            for _ in range(3):
                desk.tick()
            assert anna.held.former
        carl.start()
        assert desk.link(carl, anna) == ""
        ben.start()
        assert desk.link(ben, anna) == ""
        await desk.all_follow(anna, ben, carl, ended=True)

    play(tmp_path, story)


def test_a_rotation_makes_room_for_members_where_many_were_removed(tmp_path: Path) -> None:
    """Also on a Mac that was away when they were removed; and no word of a member brings one back."""

    async def story(desk: Desk) -> None:
        anna, ben, carl = desk.anna, desk.ben, desk.carl
        await desk.together(anna, ben, carl)
        gone = [f"{n:032x}" for n in range(40)]

        def rosters() -> list[Roster]:
            return [mac.up.parts.node.replica.roster for mac in desk.macs]

        for node_id in gone:
            anna.up.parts.node.enrolment.admit(node_id, "gone", node_id * 2)
        await desk.sees(lambda: all(len(each.entries) == 43 for each in rosters()), "all know them")
        lasting = Members(anna.up.parts.node.replica.roster.messages()[0].entries[:20])
        await carl.end()
        anna.up.parts.node.enrolment.remove(*gone)
        await rotate(anna)
        await desk.all_follow(anna, ben, ended=False)
        carl.start()
        for mac in (anna, ben):
            assert desk.link(mac, carl) == ""
        await desk.all_follow(anna, ben, carl, ended=True)
        await desk.sees(lambda: all(len(each.entries) == 3 for each in rosters()), "room for others")
        assert len({each.digest() for each in rosters()}) == 1
        order = [mac.node_id for mac in desk.macs]
        assert sorted(order) == sorted(rosters()[0].members()), "each is still a member"
        assert anna.node_id in rosters()[2].holders()
        ben.up.parts.node.links.send(carl.node_id, lasting)
        for _ in range(3):
            desk.tick()
            await asyncio.sleep(0.01)
        assert [len(each.entries) for each in rosters()] == [3, 3, 3]

    play(tmp_path, story)

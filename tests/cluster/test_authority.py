"""The authority's key on its way to another Mac: what is taken, what is not, and who says so."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from mlxtp import audit
from mlxtp.admin.handlers import Admin
from mlxtp.cluster.state_file import RosterSaved
from mlxtp.errors import UserError
from mlxtp.identity import private_files
from mlxtp.identity.store import AUTHORITY
from mlxtp.logs import keep_audit
from mlxtp.settings import AUDIT_LOG
from mlxtp.verbs import HandOver, LeaveCluster
from mlxtp.wire.certificates import found, key_to_pem, new_key
from mlxtp.wire.cluster_messages import AuthorityHandover, AuthorityKept, Members

from ..groups.one_node import A, B, FakeLink, Node, play
from ..played import scenes
from ..wire.members import Member, founder, member_of

played = scenes(play, "tmp_path", "member")


NONCE = b"n" * 16


def handover(mac: Member, **changes: Any) -> AuthorityHandover:
    authority = mac.authority
    return replace(AuthorityHandover(NONCE, authority.certificate, key_to_pem(authority.key)), **changes)


@pytest.fixture
def first(tmp_path: Path) -> Member:
    return founder(tmp_path)


@pytest.fixture
def member(first: Member, tmp_path: Path) -> Member:
    return member_of(first, tmp_path)


@pytest.fixture
def events(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """What the audit log has on the authority."""
    keep_audit(tmp_path)
    yield lambda: [
        each
        for each in map(json.loads, (tmp_path / AUDIT_LOG).read_text().splitlines())
        if each["event"].startswith("authority")
    ]
    audit.log.handlers.clear()


def problem(link: FakeLink) -> str:
    [kept] = link.heard(AuthorityKept)
    assert kept.nonce == NONCE
    link.sent.clear()
    return kept.problem


def test_a_member_takes_the_authority_from_a_holder_and_lets_macs_in(
    tmp_path: Path, first: Member, member: Member, events: Callable[[], list[dict[str, Any]]]
) -> None:
    async def story(node: Node) -> None:
        a, me = node.meet(A), node.parts.node
        with pytest.raises(UserError, match="the Mac that founded this cluster"):
            await node.parts.tokens.token()
        node.holds(A, first)
        node.hear(a, handover(first))
        assert problem(a) == ""
        assert set(me.replica.roster.holders()) == {A, me.node_id}
        assert member.store.load().authority is not None
        assert (member.store.folder / AUTHORITY).stat().st_mode & 0o777 == 0o600
        assert await node.parts.tokens.token()
        me.enrolment.admit("c" * 32, "newcomer", "c" * 64)
        assert me.replica.roster.members()["c" * 32].admission
        me.enrolment.remove(A)
        assert me.replica.roster.holders() == [me.node_id]

    play(tmp_path, member, story)
    assert [(each["event"], each["by"]) for each in events()] == [("authority_taken", "mac-a")]


def test_what_no_holder_sends_or_does_not_belong_together_is_not_kept(
    tmp_path: Path, first: Member, member: Member, events: Callable[[], list[dict[str, Any]]]
) -> None:
    other, rsa_key = founder(tmp_path), cast(Any, rsa.generate_private_key(65537, 2048))

    async def story(node: Node) -> None:
        a = node.meet(A)
        node.hear(a, handover(first))
        assert "that Mac does not hold it" in problem(a)
        node.holds(A, first)
        for changes, why in (
            ({"key": key_to_pem(new_key())}, "do not belong together"),
            ({"key": b"no key"}, "no private key"),
            ({"certificate": b"nonsense"}, "no certificate of a cluster"),
            ({"certificate": first.membership.certificate}, "no certificate of a cluster"),
            ({"certificate": found("c1" * 8, rsa_key).certificate}, "no certificate of a cluster"),
        ):
            node.hear(a, handover(first, **changes))
            assert why in problem(a)
        node.hear(a, handover(other))
        assert "the authority of another cluster" in problem(a)
        assert not (member.store.folder / AUTHORITY).exists()
        assert node.parts.node.replica.roster.holders() == [A]
        assert a.heard(Members) == []

    play(tmp_path, member, story)
    assert {each["event"] for each in events()} == {"authority_refused"}


@played()
async def test_a_full_disk_leaves_no_part_of_the_key(
    node: Node, first: Member, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    a = node.meet(A)
    node.holds(A, first)
    with monkeypatch.context() as patch:
        patch.setattr(private_files, "to_disk", full)
        node.hear(a, handover(first))
    assert "No space left on device" in problem(a)
    assert node.parts.node.replica.roster.holders() == [A]
    assert node.parts.node.identity.authority is None
    assert not [each for each in member.store.folder.iterdir() if AUTHORITY in each.name]
    node.hear(a, handover(first))
    assert problem(a) == ""


async def handing(node: Node, link: FakeLink, asking: Awaitable[Any], problem: str = "") -> Any:
    """Return the outcome of a hand-over that the other Mac confirms, or refuses."""
    task = asyncio.ensure_future(asking)
    await asyncio.sleep(0)
    [handed] = link.heard(AuthorityHandover)
    link.sent.clear()
    if not problem:
        node.holds(link.node_id, Member(None, node.parts.node.identity))  # type: ignore[arg-type]
    node.hear(link, AuthorityKept(handed.nonce, problem))
    await asyncio.sleep(0)
    node.hear(link, RosterSaved(node.parts.node.replica.digest))
    return await task


def test_a_holder_hands_the_authority_over_and_gives_it_up_once_it_is_confirmed(
    tmp_path: Path, first: Member, events: Callable[[], list[dict[str, Any]]]
) -> None:
    async def story(node: Node) -> None:
        admin, me = Admin(node.parts, first.store).members, node.parts.node
        a, b = node.meet(A), node.meet(B)
        with pytest.raises(UserError, match="no member is called 'nobody'"):
            await admin.hand_over(HandOver("nobody", sure=True))
        assert (await admin.hand_over(HandOver("mac-a", move=True)))["holders"] == ["studio"]
        assert a.heard(AuthorityHandover) == [], "it was not confirmed yet"
        with pytest.raises(UserError, match="mac-a did not take the cluster's authority: its disk is full"):
            await handing(
                node, a, admin.hand_over(HandOver("mac-a", move=True, sure=True)), "its disk is full"
            )
        assert me.replica.roster.holders() == [me.node_id]
        answer = await handing(node, a, admin.hand_over(HandOver("mac-a", sure=True)))
        assert answer == {"name": "mac-a", "node_id": A, "moved": False, "holders": ["studio", "mac-a"]}
        assert b.heard(AuthorityHandover) == [], "only the two Macs exchange it"
        answer = await handing(node, a, admin.hand_over(HandOver("mac-a", move=True, sure=True)))
        assert (answer["moved"], answer["holders"]) == (True, ["mac-a"])
        assert not (first.store.folder / AUTHORITY).exists()
        with pytest.raises(UserError, match=r"this Mac does not hold the cluster's authority.* on mac-a"):
            await admin.hand_over(HandOver("mac-f", sure=True))
        with pytest.raises(UserError, match="mac-a holds the cluster's authority, so only another Mac"):
            me.enrolment.remove(A)
        assert admin.leave(LeaveCluster())["members"] == 2, "another Mac lets others in"

    play(tmp_path, first, story)
    found = [(each["event"], each.get("member")) for each in events()]
    assert found == [
        ("authority_refused", "mac-a"), ("authority_given", "mac-a"), ("authority_given", "mac-a"),
        ("authority_given_up", None),
    ]  # fmt: skip


def test_a_mac_that_cannot_forget_the_key_still_holds_it(
    tmp_path: Path, first: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(node: Node) -> None:
        a, me = node.meet(A), node.parts.node
        monkeypatch.setattr(first.store, "drop_authority", (tmp_path / "gone").unlink)
        with pytest.raises(UserError, match="the key could not be removed"):
            await handing(
                node,
                a,
                Admin(node.parts, first.store).members.hand_over(HandOver("mac-a", move=True, sure=True)),
            )
        assert set(me.replica.roster.holders()) == {me.node_id, A}
        assert await node.parts.tokens.token()

    play(tmp_path, first, story)


def test_a_mac_that_starts_with_the_key_says_so(tmp_path: Path, first: Member, member: Member) -> None:
    """Also if it was stated meanwhile that it has none: a crash came before the key was removed."""
    member.store.save_authority(first.authority)
    holder = Member(member.store, member.store.load())

    async def story(node: Node) -> None:
        me = node.parts.node
        assert me.replica.roster.holders() == [me.node_id]
        me.enrolment.hold(replace(me.identity, authority=None))
        assert me.replica.roster.holders() == []
        await me.save()

    play(tmp_path, holder, story)

    async def later(node: Node) -> None:
        assert node.parts.node.replica.roster.holders() == [holder.identity.node_id]

    play(tmp_path, holder, later)

"""Renewal of certificates: by whom, for whom, and who comes in although its certificate has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlxtp.cluster.state_changes import RosterProofs
from mlxtp.errors import Code, ConfigError
from mlxtp.identity.store import Identity, Store
from mlxtp.identity.validity import CERTIFICATE_S, DAY_S, own_time
from mlxtp.wire.certificates import (
    MemberCertificates,
    NodeIdentity,
    check_node,
    fingerprint,
    key_id,
    new_key,
    point_of,
    read_node,
)
from mlxtp.wire.cluster_messages import CertificateIssued, CertificateWanted, Members, RosterEntry

from ..groups.one_node import A, B, FakeLink, Node, play
from ..groups.scenes import sees
from ..wire.members import Member, founder, member_of

NONCE = b"n" * 16
KEY, OTHER_KEY = new_key().public_key(), new_key().public_key()
FOREVER = (0.0, 1e12)


def asked(node: Node, link: FakeLink, key: object = KEY) -> CertificateIssued:
    """Return the reply to a request for the certificate of this key."""
    node.hear(link, CertificateWanted(NONCE, point_of(key)))  # type: ignore[arg-type]
    reply: CertificateIssued = link.heard(CertificateIssued)[-1]
    assert bool(reply.certificate) != bool(reply.problem)
    return reply


def test_the_holder_renews_for_a_member_and_its_key_alone(tmp_path: Path) -> None:
    first = founder(tmp_path)

    async def story(node: Node) -> None:
        link = node.meet(A, fingerprint=fingerprint(KEY))
        renewed = check_node(asked(node, link).certificate, first.membership.authority)
        assert (renewed.node_id, renewed.fingerprint) == (A, fingerprint(KEY))
        assert abs(renewed.ends - own_time() - CERTIFICATE_S) < 60
        other = node.meet(B)
        assert asked(node, other).problem == "its key is not the one that it showed"
        node.hear(other, CertificateWanted(NONCE, b"\4" * 65))
        assert other.heard(CertificateIssued)[-1].problem == "its key is not one on the curve P-256"

    play(tmp_path, first, story)


def test_a_member_has_one_certificate_made_an_hour_and_only_a_due_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = founder(tmp_path)

    async def story(node: Node) -> None:
        link = node.meet(A, fingerprint=fingerprint(KEY))
        assert {asked(node, link).certificate for _ in range(100)} == {asked(node, link).certificate}
        made = [each for each in caplog.records if "renews the certificate" in each.getMessage()]
        assert [each.foreign for each in made] == [True]  # type: ignore[attr-defined]
        other, signer = node.meet(B, fingerprint=fingerprint(OTHER_KEY)), key_id(first.membership.authority)
        shown = replace(other.identity, ends=own_time() + CERTIFICATE_S - DAY_S, signer=signer)
        other.identity = shown
        assert "its certificate is not due: it ends on" in asked(node, other, OTHER_KEY).problem
        other.identity = replace(shown, signer="of the former authority")
        assert asked(node, other, OTHER_KEY).certificate

    caplog.set_level("INFO")
    play(tmp_path, first, story)


def test_a_key_that_was_removed_or_replaced_gets_no_certificate(tmp_path: Path) -> None:
    first = founder(tmp_path)

    async def story(node: Node) -> None:
        renewal = node.parts.renewal
        link = node.meet(A, fingerprint=fingerprint(KEY))
        enrolment = node.parts.node.enrolment
        enrolment.admit(A, "mac", fingerprint(new_key().public_key()))  # it joined again under another key
        assert "not on the list of members" in asked(node, link).problem
        other = new_key().public_key()
        second = node.meet(B, fingerprint=fingerprint(other))
        enrolment.remove(B)
        node.hear(second, CertificateWanted(NONCE, point_of(other)))
        assert second.heard(CertificateIssued) == []  # a removed member is not heard at all
        with pytest.raises(Exception, match="not on the list of members"):
            renewal._granted(second, CertificateWanted(NONCE, point_of(other)))  # type: ignore[arg-type]

    play(tmp_path, first, story)


def test_a_holder_whose_disk_is_full_goes_on_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, tried = founder(tmp_path), []
    monkeypatch.setattr("mlxtp.cluster.authority.RENEWAL_LOOK_S", 0.0)

    def fails(_store: Store, _membership: MemberCertificates) -> Identity:
        tried.append(1)
        raise ConfigError("member.pem cannot be written: No space left on device")

    monkeypatch.setattr(Store, "save_membership", fails)

    async def story(node: Node) -> None:
        monkeypatch.setattr(node.parts.renewal, "_is_due", lambda: True)
        running = asyncio.ensure_future(node.parts.renewal.run())
        await sees(lambda: len(tried) > 1 or running.done())
        assert not running.done()
        running.cancel()

    play(tmp_path, first, story)


def test_only_a_mac_with_the_authority_s_key_renews(tmp_path: Path) -> None:
    member = member_of(founder(tmp_path), tmp_path)

    async def story(node: Node) -> None:
        link = node.meet(A, fingerprint=fingerprint(KEY))
        assert "does not hold the authority's key" in asked(node, link).problem

    play(tmp_path, member, story)


def with_founder(node: Node, first: Member) -> FakeLink:
    """Have a member learn who founded its cluster, and link the two."""
    ours = first.identity
    entry = RosterEntry(ours.node_id, "anna", ours.fingerprint, False, 1)
    link = node.meet(ours.node_id, fingerprint=ours.fingerprint)
    node.hear(link, Members((RosterProofs(ours).own(entry),)))
    assert node.parts.node.replica.roster.holders() == [ours.node_id]
    return link


def renews(tmp_path: Path, story: Callable[[Node, Member, FakeLink, Member], Awaitable[None]]) -> None:
    """Play a member that has a certificate of an earlier version, and a link to the founder."""
    first = founder(tmp_path)
    member = member_of(first, tmp_path)
    forever = first.authority.certify(member.identity.node_id, member.identity.key.public_key(), *FOREVER)
    old = member.store.save_membership(MemberCertificates(forever, first.membership.authority))

    async def scene(node: Node) -> None:
        renewed: list[None] = []
        renewal = node.parts.renewal
        renewal.on_renewed(lambda: renewed.append(None))
        link = with_founder(node, first)
        running = asyncio.ensure_future(renewal.run())
        try:
            await story(node, member, link, first)
        finally:
            running.cancel()
        assert len(renewed) == (node.parts.node.identity is not old)

    play(tmp_path, replace(member, identity=old), scene)


def test_a_member_asks_the_holder_and_shows_the_new_certificate_without_a_restart(tmp_path: Path) -> None:
    async def story(node: Node, member: Member, link: FakeLink, first: Member) -> None:
        await sees(lambda: link.heard(CertificateWanted))
        wanted = link.heard(CertificateWanted)[-1]
        assert wanted.public_key == point_of(member.identity.key.public_key())
        ours = node.parts.node.identity
        fresh = first.authority.certify(ours.node_id, ours.key.public_key(), own_time(), CERTIFICATE_S)
        node.hear(link, CertificateIssued(wanted.nonce, fresh, ""))
        await sees(lambda: node.parts.node.identity is not ours)
        kept = member.store.load()
        assert kept.membership is not None
        assert kept.membership.certificate == fresh
        assert (kept.node_id, kept.fingerprint) == (ours.node_id, ours.fingerprint)

    renews(tmp_path, story)


def test_a_certificate_that_is_not_this_mac_s_replaces_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(node: Node, member: Member, link: FakeLink, first: Member) -> None:
        await sees(lambda: link.heard(CertificateWanted))
        ours = node.parts.node.identity
        other = first.authority.certify(ours.node_id, KEY, own_time(), CERTIFICATE_S)
        node.hear(link, CertificateIssued(link.heard(CertificateWanted)[-1].nonce, other, ""))
        await sees(lambda: "did not renew this Mac's certificate" in caplog.text)
        kept = member.store.load().membership
        assert kept is not None
        assert node.parts.node.identity is ours
        assert read_node(kept.certificate).ends > own_time() + 1000 * DAY_S

    renews(tmp_path, story)


def test_who_comes_in_with_a_certificate_that_has_ended(tmp_path: Path) -> None:
    first = founder(tmp_path)
    member = member_of(first, tmp_path)
    gone = own_time() - 700 * DAY_S

    def judged(node: Node, link: FakeLink) -> Code | None:
        identity = NodeIdentity(link.node_id, link.hello.cluster_id, link.fingerprint, gone)
        hello = replace(node.parts.node.introduction.hello(), node_id=link.node_id, boot_id="other")
        error = node.parts.node.introduction.judge(identity, hello)
        if error is not None and error.code is Code.CERTIFICATE_ENDED:
            for words in ("by its own clock it is 20", "by that of studio 20", "holds the authority's key"):
                assert words in error.detail
        return error.code if error is not None else None

    async def at_the_holder(node: Node) -> None:
        link = node.meet(A, fingerprint=fingerprint(KEY))
        assert judged(node, link) is None  # its link begins with a renewal
        stranger = FakeLink(99, B, "boot", node.parts.node.identity.cluster_id, node)
        assert judged(node, stranger) is Code.CERTIFICATE_ENDED
        node.parts.node.enrolment.remove(A)
        assert judged(node, link) is Code.REMOVED_NODE

    async def at_a_member(node: Node) -> None:
        link = node.meet(A, fingerprint=fingerprint(KEY))
        assert judged(node, link) is Code.CERTIFICATE_ENDED
        assert judged(node, with_founder(node, first)) is None

    (tmp_path / "there").mkdir()
    play(tmp_path / "there", first, at_the_holder)
    play(tmp_path, member, at_a_member)

"""One authority after another: who follows whom, and what TLS makes of it meanwhile."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from mlxtp.errors import ProtocolError
from mlxtp.identity import store
from mlxtp.identity.private_files import write_private
from mlxtp.identity.validity import OVERLAP_S, Successor, ends_at, followed, is_at_once, keys, successor
from mlxtp.wire.certificates import (
    Authority,
    MemberCertificates,
    fingerprint,
    found,
    key_to_pem,
    new_key,
    read_node,
)
from mlxtp.wire.cluster_messages import MAX_PAST
from mlxtp.wire.tls import (
    AGENT_ALPNS,
    ALPN_CONTROL,
    Credentials,
    member_context_client,
    member_context_server,
)

from ..wire.members import LASTING, founder, member_of
from ..wire.test_tls import handshake

CLUSTER, NODE = "c1" * 8, "a1" * 16
KEY = new_key()
NOW = LASTING[0] // 1


def member(authority: Authority) -> MemberCertificates:
    return MemberCertificates(authority.certify(NODE, KEY.public_key(), *LASTING), authority.certificate)


def follows(held: MemberCertificates, to: Successor) -> MemberCertificates | None:
    return followed(held, to.authority.certificate, to.cross, to.past)


def moved(held: MemberCertificates, to: Successor) -> MemberCertificates:
    """A member that follows, and has a certificate of the next authority."""
    there = follows(held, to) or held
    return replace(there, certificate=to.authority.certify(NODE, KEY.public_key(), *LASTING), bridge=b"")


FIRST = found(CLUSTER, new_key())
HELD = member(FIRST)
NEXT = successor(FIRST, (), NOW, at_once=False)
AFTER = successor(NEXT.authority, NEXT.past, NOW, at_once=False)


def test_a_member_follows_the_next_authority_and_trusts_both() -> None:
    there = follows(HELD, NEXT)
    assert there is not None
    assert (there.authority, there.former) == (NEXT.authority.certificate, FIRST.certificate)
    assert (there.certificate, there.moved) == (HELD.certificate, False)
    assert (ends_at(there), is_at_once(there)) == (NOW + OVERLAP_S, False)
    assert follows(there, NEXT) is None
    assert moved(HELD, NEXT).moved
    assert (ends_at(HELD), is_at_once(HELD)) == (0.0, False)
    beyond = follows(moved(HELD, NEXT), AFTER)
    assert beyond is not None
    assert (beyond.authority, beyond.former) == (AFTER.authority.certificate, NEXT.authority.certificate)


def test_signatures_of_authorities_before_are_believed_by_newcomers_too() -> None:
    ours = [fingerprint(each.key.public_key()) for each in (AFTER.authority, NEXT.authority, FIRST)]
    newcomer = member(AFTER.authority)
    assert [fingerprint(key) for key in keys(newcomer)] == ours[:1]
    informed = follows(newcomer, AFTER)
    assert informed is not None
    assert [fingerprint(key) for key in keys(informed)] == ours
    assert informed.former == b""  # it trusts no certificate of theirs
    many, past = FIRST, ()
    for _ in range(MAX_PAST + 2):
        made = successor(many, past, NOW, at_once=False)
        many, past = made.authority, made.past
    assert len(past) == MAX_PAST


def test_what_no_authority_of_this_cluster_signed_leads_nowhere() -> None:
    stranger = found(CLUSTER, new_key())
    theirs = successor(stranger, (), NOW, at_once=False)
    assert follows(HELD, theirs) is None
    forged = replace(theirs, cross=stranger.vouch(theirs.authority.certificate))
    assert follows(HELD, replace(forged, past=(theirs.authority.vouch(FIRST.certificate),))) is None
    # The right cross certificate, for another key; a past that the next one does not vouch for; none at all.
    assert follows(HELD, replace(NEXT, authority=theirs.authority)) is None
    assert follows(HELD, replace(NEXT, past=theirs.past)) is None
    assert follows(HELD, replace(NEXT, past=())) is None
    assert follows(HELD, AFTER) is None  # it was away for one whole authority
    other = found("c2" * 8, new_key())
    assert follows(HELD, replace(NEXT, authority=other)) is None
    for garbage in (b"", b"\0", NEXT.cross[:-1]):
        assert follows(HELD, replace(NEXT, cross=garbage)) is None
        assert follows(HELD, replace(NEXT, past=(garbage,))) is None
        assert followed(HELD, garbage, NEXT.cross, NEXT.past) is None


def test_an_authority_that_has_ended_names_no_successor() -> None:
    """As of a key that was stolen: nothing that its thief signs replaces the next authority."""
    there = replace(moved(HELD, successor(FIRST, (), NOW, at_once=True)), former=b"")
    for at_once in (False, True):
        thief = [successor(FIRST, (), NOW, at_once=at_once) for _ in range(4)]
        assert all(follows(there, each) is None for each in thief)


@pytest.mark.parametrize("kinds", [(False, False, False), (False, True, False), (True, True, False)])
def test_all_choose_one_of_several_that_rotated_at_one_time(kinds: tuple[bool, ...]) -> None:
    """In each order of hearing of them. One that ends the former at once comes first."""
    made = [successor(FIRST, (), NOW, at_once=at_once) for at_once in kinds]
    chosen = set()
    for order in permutations(made):
        held = HELD
        for each in order:
            held = follows(held, each) or held
        chosen.add(held.authority)
        assert held.former == FIRST.certificate
    [authority] = chosen
    assert any(kinds) is is_at_once(held)
    assert authority in [each.authority.certificate for each in made]


# --- the file, and TLS --------------------------------------------------------------------------------


def stories() -> Iterator[tuple[str, MemberCertificates]]:
    """Every stage of a member's certificates."""
    both = sorted(
        (successor(FIRST, (), NOW, at_once=False) for _ in range(2)),
        key=lambda each: follows(moved(HELD, NEXT), each) is None,
    )
    yield "as ever", HELD
    yield "following", follows(HELD, NEXT) or HELD
    yield "moved", moved(HELD, NEXT)
    yield "the former ended", replace(moved(HELD, NEXT), former=b"")
    yield "twice", moved(moved(HELD, NEXT), AFTER)
    one, other = both
    for first, second in ((one, other), (other, one)):
        if follows(moved(HELD, first), second) is not None:
            yield "moved to one that lost", follows(moved(HELD, first), second) or HELD


STORIES = dict(stories())


@pytest.mark.parametrize("stage", STORIES)
def test_the_file_of_a_member_gives_back_what_was_written(stage: str) -> None:
    assert len(STORIES) == 6
    assert MemberCertificates.from_pem(STORIES[stage].to_pem()) == STORIES[stage]


def connects(folder: Path, server: MemberCertificates, client: MemberCertificates) -> bool:
    files = []
    for name, held in (("server", server), ("client", client)):
        files.append(Credentials(folder / f"{name}.key", folder / f"{name}.pem"))
        files[-1].key.write_bytes(key_to_pem(KEY))
        files[-1].member.write_bytes(held.to_pem())
    ends = handshake(
        member_context_server(files[0], AGENT_ALPNS), member_context_client(files[1], ALPN_CONTROL)
    )
    errors = [end.exception() for end in ends]
    for end in ends:
        if end.exception() is None:
            end.result().close()
    assert all(error is None or isinstance(error, ProtocolError | ssl.SSLError) for error in errors)
    return errors == [None, None]


@pytest.mark.parametrize("stage", [each for each in STORIES if each not in ("the former ended", "twice")])
def test_members_at_all_stages_of_a_rotation_connect(tmp_path: Path, stage: str) -> None:
    """Also one that was away when it began, and one that moved to an authority that lost."""
    for other in ("as ever", "moved"):
        assert connects(tmp_path, STORIES[stage], STORIES[other])
        assert connects(tmp_path, STORIES[other], STORIES[stage])


def test_who_comes_after_the_end_is_refused(tmp_path: Path) -> None:
    assert not connects(tmp_path, STORIES["the former ended"], HELD)
    assert connects(tmp_path, STORIES["the former ended"], STORIES["moved"])
    assert not connects(tmp_path, STORIES["the former ended"], STORIES["following"])
    assert read_node(HELD.certificate).signer != read_node(STORIES["moved"].certificate).signer


# --- the files of the Mac that makes it -----------------------------------------------------------------


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_rotation_that_is_cut_short_goes_on_at_the_next_start_or_never_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    first = founder(tmp_path)
    left = writes

    def cut_short(path: Path, data: bytes) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        write_private(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_private", cut_short)
        with contextlib.suppress(KeyboardInterrupt):
            first.store.rotate(NOW, at_once=False)
    before = first.store.load()  # as the doctor reads it
    assert (before.authority is None) is (writes == 1)
    kept = first.store.load_or_create()
    assert kept.membership is not None
    assert kept.authority is not None
    assert kept.authority.certificate == kept.membership.authority
    assert (kept.membership.authority == first.membership.authority) is (writes == 0)
    assert kept.membership.moved
    assert bool(kept.membership.former) is (writes > 0)
    assert first.store.load_or_create().membership == kept.membership


def test_the_key_of_a_former_authority_goes_with_it(tmp_path: Path) -> None:
    first = founder(tmp_path)
    member = member_of(first, tmp_path)
    member.store.save_authority(first.authority)
    made = first.store.rotate(NOW, at_once=False)
    assert made.membership is not None
    there = followed(
        member.membership, made.membership.authority, made.membership.cross, made.membership.past
    )
    assert there is not None
    assert member.store.save_membership(there).authority is None
    assert (member.store.folder / store.AUTHORITY).exists()
    own = made.authority.certify(  # type: ignore[union-attr]
        member.identity.node_id, member.identity.key.public_key(), *LASTING
    )
    member.store.save_membership(replace(there, certificate=own))
    ended = member.store.end_former()
    assert ended.membership is not None
    assert ended.membership.former == b""
    assert not (member.store.folder / store.AUTHORITY).exists()

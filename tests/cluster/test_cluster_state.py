"""Members' knowledge of each other: the same reports, in any order, make the same knowledge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.cluster.cluster_state import (
    MAX_ENTRIES,
    NO_CLAIM,
    ClusterState,
    LeaderClaim,
    Replica,
    Roster,
    stronger,
)
from mlxtp.errors import RemoteProtocolError, UserError
from mlxtp.wire.cluster_messages import MAX_MEMBERS, RosterEntry
from mlxtp.wire.frames import encode

from ..placement.made_up_macs import unsealed
from .deployed import only


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LeaderClaim(2, "b"), LeaderClaim(1, "a")),
        (LeaderClaim(2, "a"), LeaderClaim(2, "b")),
        (LeaderClaim(1, "z"), NO_CLAIM),
    ],
)
def test_the_later_term_is_stronger_then_the_smaller_id(one: LeaderClaim, other: LeaderClaim) -> None:
    assert stronger(one, other) == stronger(other, one) == one


_ids = st.sampled_from("abc")
_entry = st.builds(
    RosterEntry,
    node_id=_ids,
    name=_ids,
    fingerprint=st.sampled_from("xyz"),
    removed=st.booleans(),
    version=st.integers(1, 3),
)
_beliefs = st.builds(
    ClusterState,
    claim=st.just(NO_CLAIM) | st.builds(LeaderClaim, st.integers(1, 3), _ids),
    roster=st.lists(_entry, max_size=4).map(lambda entries: Roster().merged(entries)),
    epoch=st.integers(0, 3),
)


def merged(one: ClusterState, other: ClusterState) -> ClusterState:
    """The state that both members hold after they met."""
    return ClusterState(
        stronger(one.claim, other.claim),
        one.deployments.merged(other.deployments),
        one.roster.merged(other.roster.entries),
        max(one.epoch, other.epoch),
    )


@given(_beliefs, _beliefs, _beliefs)
def test_merging_needs_no_order(one: ClusterState, two: ClusterState, three: ClusterState) -> None:
    assert merged(one, two) == merged(two, one)
    assert merged(merged(one, two), three) == merged(one, merged(two, three))
    assert merged(one, one) == one


@given(st.lists(_entry, max_size=6))
def test_a_removed_member_stays_removed_after_any_merge(entries: list[RosterEntry]) -> None:
    roster = Roster().merged(entries)
    for entry in entries:
        if entry.removed:
            assert roster.removed(entry.fingerprint)
    assert not {e.fingerprint for e in roster.members().values()} & {
        e.fingerprint for e in entries if e.removed
    }


def roster(*names: str) -> Roster:
    found = Roster()
    for name in names:
        found = found.admitting(name, f"mac-{name}", f"key-{name}", unsealed)
    return found


def test_a_removed_member_is_no_member_and_its_key_is_never_admitted_again() -> None:
    less = roster("a", "b").removing("b", unsealed)
    assert list(less.members()) == ["a"]
    assert less.removed("key-b")
    assert not less.removed("key-a")
    with pytest.raises(UserError, match="mac-b was removed"):
        less.admitting("b", "mac-b", "key-b", unsealed)
    assert list(less.admitting("b", "mac-b", "another key", unsealed).members()) == ["a", "b"]


def test_a_new_key_ends_the_old_one() -> None:
    renewed = roster("a", "b").admitting("b", "mac-b", "key-2", unsealed)
    assert renewed.members()["b"].fingerprint == "key-2"
    assert renewed.removed("key-b")


def test_removing_a_stranger_is_a_mistake_that_is_told() -> None:
    with pytest.raises(UserError, match="no member has the node id z"):
        roster("a").removing("z", unsealed)


def test_there_is_room_for_64_members() -> None:
    full = roster(*(f"n{i}" for i in range(MAX_MEMBERS)))
    with pytest.raises(UserError, match="at most 64 members"):
        full.admitting("one", "more", "key", unsealed)
    assert (
        len(full.removing("n3", unsealed).admitting("one", "more", "key", unsealed).members()) == MAX_MEMBERS
    )


def test_two_macs_that_each_admit_the_last_member_agree_on_one() -> None:
    both = roster(*(f"n{i}" for i in range(MAX_MEMBERS - 1)))
    one, other = both.admitting("x", "x", "x", unsealed), both.admitting("y", "y", "y", unsealed)
    assert (one.surplus(), other.surplus()) == ([], [])
    merged = one.merged(other.entries)
    assert merged == other.merged(one.entries)
    assert set(merged.members()) == set(one.members())
    assert merged.surplus() == ["y"]
    freed = merged.removing("n3", unsealed)
    assert (freed.surplus(), "y" in freed.members()) == ([], True)


def test_a_roster_is_bounded() -> None:
    entries = [RosterEntry(f"{i}", "", f"{i}", True, 1) for i in range(MAX_ENTRIES)]
    full = Roster().merged(entries)
    with pytest.raises(RemoteProtocolError, match="513"):
        full.merged([RosterEntry("z", "", "z", True, 1)])
    with pytest.raises(UserError, match="512"):
        full.admitting("z", "", "z", unsealed)


def test_the_digest_tells_rosters_apart() -> None:
    digests = {found.digest() for found in (roster("a"), roster("b"), roster("a", "b"), Roster())}
    assert len(digests) == 4
    assert all(0 <= digest < 2**63 for digest in digests)
    one, other = roster("a", "b"), Roster()
    assert other.merged(one.entries).digest() == one.digest()


def test_a_long_roster_travels_in_several_frames() -> None:
    proofs = ("9" * 32, "1" * 64, 1 << 40, "5" * 160, 1 << 40, "6" * 130, "7" * 160, "8" * 160)
    proofs += (False, 1 << 40, "9" * 160)
    whole = Roster().merged(
        [RosterEntry(f"{i:032x}", "n" * 80, f"{i:064x}", True, 1, *proofs) for i in range(150)]
    )
    messages = whole.messages()
    assert [len(message.entries) for message in messages] == [24, 24, 24, 24, 24, 24, 6]
    assert all(encode(message, 0, 1) for message in messages)
    found = Roster()
    for message in reversed(messages):
        found = found.merged(message.entries)
    assert found == whole


def test_a_counter_that_leaps_is_refused_and_changes_nothing() -> None:
    replica = Replica("b", ClusterState())
    assert replica.desires(only(4, "c", "llama"))
    for leap in (
        lambda: replica.desires(only(1 << 40, "c", "qwen")),
        lambda: replica.desires(only(1 << 40, "c", "")),
        lambda: replica.enrols([RosterEntry("c", "mini", "key", False, 1 << 40)]),
        lambda: replica.saw_epoch(1 << 40),
    ):
        with pytest.raises(RemoteProtocolError, match="too far ahead"):
            leap()
    assert [row.name for row in replica.deployments.live()] == ["llama"]
    assert (replica.roster, replica.epoch) == (Roster(), 0)

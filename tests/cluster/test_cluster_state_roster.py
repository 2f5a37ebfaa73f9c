"""Signatures of the roster: what a member can say of others, and what the others believe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlxtp.cluster.cluster_state import Roster, is_founder
from mlxtp.cluster.state_changes import RosterProofs
from mlxtp.wire.cluster_messages import RosterEntry

from ..placement.made_up_macs import unsealed
from ..wire.members import Member, founder, member_of

Change = Callable[[RosterEntry], RosterEntry]


class Desk:
    """A founder and three members that the founder admitted; all hold the same roster."""

    def __init__(self, folder: Path) -> None:
        first, self.folder = founder(folder), folder
        self.macs = [first, *(member_of(first, folder) for _ in range(3))]
        self.first, self.rogue, self.mini, self.air = self.macs
        self.stranger = founder(folder)
        self.proofs = {
            mac.identity.node_id: RosterProofs(mac.identity) for mac in (*self.macs, self.stranger)
        }
        roster = Roster()
        for mac in self.macs:
            roster = self.admitted(roster, mac)
        self.roster = roster

    def admitted(self, roster: Roster, mac: Member, by: Member | None = None) -> Roster:
        proofs, identity = self.proofs[(by or self.first).identity.node_id], mac.identity
        seal = proofs.own if mac is self.first else lambda entry: proofs.admission(entry, "", "10.0.0.7", 9)
        return roster.admitting(identity.node_id, "mac", identity.fingerprint, seal)

    def removed(self, roster: Roster, mac: Member, by: Member) -> Roster:
        return roster.removing(mac.identity.node_id, self.proofs[by.identity.node_id].removal)

    def stated(self, roster: Roster, mac: Member, *, holds: bool = True) -> Roster:
        """Return the roster in which the founder has stated who holds the authority."""
        seal = self.proofs[self.first.identity.node_id].holding
        return roster.stating(mac.identity.node_id, seal, holds=holds)

    def give(self, mac: Member) -> None:
        """From now on this Mac has the authority's key."""
        proofs = self.proofs[mac.identity.node_id]
        proofs.identity = replace(proofs.identity, authority=self.first.authority)

    def joining(self) -> Member:
        """Return a Mac that no roster has yet."""
        mac = member_of(self.first, self.folder)
        self.proofs[mac.identity.node_id] = RosterProofs(mac.identity)
        return mac

    def hears(self, held: Roster, told: Roster) -> Roster:
        """Return the roster that the mini holds after it got another one."""
        return held.merged(self.proofs[self.mini.identity.node_id].proven(told.entries, held))

    def removes(self, held: Roster, mac: Member, by: Member) -> bool:
        """Return whether the others accept that member's removal."""
        return mac.identity.node_id not in self.hears(held, self.removed(held, mac, by)).members()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_gossip_invents_no_member(desk: Desk) -> None:
    ghost = RosterEntry("9" * 32, "ghost", "9" * 64, False, 9)
    forged = desk.proofs[desk.stranger.identity.node_id].admission(ghost)
    copied = replace(ghost, admission=desk.roster.entries[0].admission)
    for entry in (ghost, forged, copied, replace(ghost, admission="no hex")):
        assert desk.hears(desk.roster, Roster((entry,))) == desk.roster


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: replace(entry, name="another"),
        lambda entry: replace(entry, node_id="9" * 32),
        lambda entry: replace(entry, version=entry.version + 5),
        lambda entry: replace(entry, admitted_by="9" * 32),
        lambda entry: replace(entry, address="10.0.0.8"),
        lambda entry: replace(entry, at=10),
        lambda entry: replace(entry, removed=True),
        lambda entry: replace(entry, removed_in=70),
    ],
)
def test_gossip_changes_no_member(desk: Desk, change: Change) -> None:
    told = Roster(tuple(map(change, desk.roster.entries)))
    assert desk.hears(desk.roster, told) == desk.roster


def test_no_member_removes_a_holder_of_the_authority_but_another_holder_does(desk: Desk) -> None:
    def removes(held: Roster, mac: Member, by: Member) -> bool:
        entry = held.by_key(mac.identity.fingerprint)
        assert entry is not None
        proofs = desk.proofs[by.identity.node_id]
        gone = proofs.removal(replace(entry, removed=True, removed_in=held.newest() + 1))
        return desk.hears(held, Roster((gone,))).removed(mac.identity.fingerprint)

    assert not removes(desk.roster, desk.first, desk.rogue)
    held = desk.stated(desk.roster, desk.air)
    assert not removes(held, desk.air, desk.rogue)
    assert removes(held, desk.air, desk.air), "it may leave"
    desk.give(desk.air)
    assert removes(held, desk.first, desk.air)
    assert removes(held, desk.air, desk.first)
    moved = desk.stated(held, desk.first, holds=False)
    assert moved.holders() == [desk.air.identity.node_id]
    assert removes(moved, desk.first, desk.rogue)


def test_who_holds_the_authority_is_what_the_authority_signed_last(desk: Desk) -> None:
    air, rogue = desk.air.identity, desk.rogue.identity
    held = desk.stated(desk.roster, desk.air)
    assert desk.hears(desk.roster, held) == desk.hears(Roster(), held) == held
    assert held.holders() == [desk.first.identity.node_id, air.node_id]
    dropped = desk.stated(held, desk.air, holds=False)
    assert desk.hears(dropped, held) == dropped, "what was stated earlier does not come back"
    assert dropped.holders() == [desk.first.identity.node_id]
    entry, proven = held.by_key(rogue.fingerprint), held.by_key(air.fingerprint)
    assert entry is not None
    assert proven is not None
    stranger = desk.proofs[desk.stranger.identity.node_id]
    for claim in (
        replace(entry, holds=True, holds_in=90),
        replace(entry, holds=True, holds_in=proven.holds_in, holding=proven.holding),
        stranger.holding(replace(entry, holds=True, holds_in=90)),
        replace(proven, holds_in=91),
        replace(proven, holds=False),
    ):
        assert desk.hears(held, Roster((claim,))) == held
    assert desk.removed(held, desk.air, desk.first).holders() == [desk.first.identity.node_id]


def test_a_holder_is_no_longer_removed_by_what_a_member_signed_before(desk: Desk) -> None:
    """A member removed it while another Mac handed it the authority: all agree, in any order."""
    removed = desk.removed(desk.roster, desk.air, desk.rogue)
    held = desk.stated(desk.roster, desk.air)
    assert removed.removed(desk.air.identity.fingerprint)
    assert desk.hears(removed, held).entries == desk.hears(held, removed).entries == held.entries
    by_first = desk.removed(held, desk.air, desk.first)
    entry = held.by_key(desk.air.identity.fingerprint)
    assert entry is not None
    rogue = desk.proofs[desk.rogue.identity.node_id]
    later = Roster((rogue.removal(replace(entry, removed=True, removed_in=99)),))
    for start in (removed, held):
        for told in (removed, later):
            assert desk.hears(desk.hears(start, by_first), told).removed(desk.air.identity.fingerprint)


def test_two_holders_admit_and_remove_at_one_time(desk: Desk) -> None:
    held = desk.stated(desk.roster, desk.air)
    desk.give(desk.air)
    one, other = desk.joining(), desk.joining()
    here, there = desk.admitted(held, one), desk.admitted(held, other, by=desk.air)
    assert here.newest() == there.newest()
    both = desk.hears(here, there)
    assert both == desk.hears(there, here)
    assert {one.identity.node_id, other.identity.node_id} < set(both.members())
    gone, kept = desk.removed(both, one, desk.first), desk.removed(both, one, desk.air)
    assert desk.hears(gone, kept) == desk.hears(kept, gone)
    once, again = desk.admitted(held, one), desk.admitted(held, one, by=desk.air)
    assert desk.hears(once, again) == desk.hears(again, once)


def test_what_a_holder_removed_holds_when_it_is_none_any_longer(desk: Desk) -> None:
    held = desk.stated(desk.roster, desk.air)
    desk.give(desk.air)
    removed = desk.removed(held, desk.rogue, desk.air)
    later = desk.stated(removed, desk.air, holds=False)
    for knows in (Roster(), desk.roster, held):
        assert desk.hears(knows, later) == later
    assert not desk.removes(later, desk.mini, desk.rogue), "a removed member removes no other"


def test_a_removal_in_the_name_of_the_authority_takes_its_signature(desk: Desk) -> None:
    gone = desk.removed(desk.roster, desk.air, desk.rogue).by_key(desk.air.identity.fingerprint)
    by_first = desk.removed(desk.roster, desk.mini, desk.first).by_key(desk.mini.identity.fingerprint)
    assert gone is not None
    assert by_first is not None
    for forged in ("no hex", by_first.authorized, gone.removal):
        assert desk.hears(desk.roster, Roster((replace(gone, authorized=forged),))) == desk.roster


def test_a_member_that_joins_by_its_own_token_becomes_no_founder(desk: Desk) -> None:
    rogue, authority = desk.rogue.identity, desk.proofs[desk.first.identity.node_id]
    held = desk.roster.admitting(
        rogue.node_id, "mac", rogue.fingerprint, lambda entry: authority.admission(entry, rogue.node_id)
    )
    entry = held.by_key(rogue.fingerprint)
    assert entry is not None
    assert not is_founder(entry)
    assert desk.removes(held, desk.rogue, desk.mini)


def test_a_removal_is_taken_from_members_alone_and_for_that_key_alone(desk: Desk) -> None:
    assert not desk.removes(desk.roster, desk.air, desk.stranger)
    gone = desk.roster.removing(desk.air.identity.node_id, unsealed)
    assert desk.hears(desk.roster, gone) == desk.roster, "no one signed it"
    proof = desk.removed(desk.roster, desk.air, desk.rogue).by_key(desk.air.identity.fingerprint)
    entry = desk.roster.by_key(desk.mini.identity.fingerprint)
    assert entry is not None
    moved = replace(
        entry, removed=True, removed_in=proof.removed_in, remover=proof.remover, removal=proof.removal
    )
    for wrong in (moved, replace(proof, removed_in=proof.removed_in + 1), replace(proof, remover="")):
        assert desk.hears(desk.roster, Roster((wrong,))) == desk.roster


def test_a_removed_member_removes_no_other_afterwards(desk: Desk) -> None:
    for by in (desk.first, desk.rogue):
        held = desk.removed(desk.roster, desk.rogue, by)
        assert not desk.removes(held, desk.air, desk.rogue)


def test_what_a_member_removed_before_it_went_stays_removed_for_those_who_hear_later(desk: Desk) -> None:
    told = desk.removed(desk.roster, desk.air, desk.rogue)
    told = desk.removed(told, desk.rogue, desk.first)
    assert desk.hears(desk.roster, told) == desk.hears(Roster(), told) == told


def test_one_member_cannot_void_what_another_removed_by_an_early_date(desk: Desk) -> None:
    held = desk.removed(desk.roster, desk.air, desk.mini)
    by_mini = held.by_key(desk.air.identity.fingerprint)
    entry = desk.roster.by_key(desk.mini.identity.fingerprint)
    assert by_mini is not None
    assert entry is not None
    rogue = desk.proofs[desk.rogue.identity.node_id]
    backdated = rogue.removal(replace(entry, removed=True, removed_in=1))
    told = desk.roster.merged([backdated])
    before = desk.hears(desk.roster, told)
    assert before.removed(desk.mini.identity.fingerprint)
    assert desk.hears(before, held).removed(desk.air.identity.fingerprint)


def test_members_known_by_their_certificates_alone_remove_each_other(desk: Desk) -> None:
    old = [RosterEntry(each.node_id, each.name, each.fingerprint, False, 3) for each in desk.roster.entries]
    held = Roster(tuple(old))
    assert desk.removes(held, desk.air, desk.rogue)
    renamed = replace(old[0], name="another")
    assert desk.hears(held, Roster((renamed,))) == held


def test_a_member_known_by_its_certificate_alone_gets_the_entry_that_the_authority_signed(desk: Desk) -> None:
    air = desk.air.identity
    met = Roster().admitting(air.node_id, "as it says", air.fingerprint, unsealed)
    held = desk.hears(met, desk.roster)
    assert held == desk.roster
    assert desk.hears(held, met) == held

"""Shared state of the cluster as one member knows it, and the merge of two members' states. Pure.

Merging needs no order: members that received the same messages, in any order and however often, agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import Code, RemoteProtocolError, UserError
from ..wire.certificates import fingerprint, key_at
from ..wire.cluster_messages import MAX_ENTERED, MAX_MEMBERS, Beat, Members, RosterEntry
from .deployments import NO_DEPLOYMENTS, DeploymentTable

#: Members and removed members. Removals are never forgotten, because a forgotten key would be admitted again.
MAX_ENTRIES = 512


@dataclass(frozen=True, slots=True)
class LeaderClaim:
    """Claim that `node_id` coordinates in `term`. Terms only grow; each new coordinator begins one."""

    term: int = 0
    node_id: str = ""


NO_CLAIM = LeaderClaim()


def stronger(one: LeaderClaim, other: LeaderClaim) -> LeaderClaim:
    """Return the claim of the later term; within one term, that of the smaller node id."""
    return min(one, other, key=lambda claim: (-claim.term, claim.node_id))


#: Returns the entry with the signature of the member that admits or removes.
Seal = Callable[[RosterEntry], RosterEntry]


@dataclass(frozen=True, slots=True)
class Roster:
    """Members of the cluster, and removed ones: one entry for each key fingerprint, in their order.

    A removed key stays removed, even if another version of its entry differs. An entry's version is that of
    the whole roster when it was written, so versions order members by age. `roster` judges signatures.
    """

    entries: tuple[RosterEntry, ...] = ()

    def members(self) -> dict[str, RosterEntry]:
        """Return up to 64 members by node id, the oldest first. Of one node's keys the latest counts."""
        return {entry.node_id: entry for entry in self._by_age()[:MAX_MEMBERS]}

    def surplus(self) -> list[str]:
        """Return the node ids of the latest members, for which there is no room.

        Two Macs that each admit the 64th member at one time cause that. All leave out the same one.
        """
        return [entry.node_id for entry in self._by_age()[MAX_MEMBERS:]]

    def holders(self) -> list[str]:
        """Return the node ids of the members that hold the authority's key, by its signature."""
        return [node_id for node_id, entry in self.members().items() if is_holder(entry)]

    def removed(self, fingerprint: str) -> bool:
        """Return True when this key was removed from the cluster, or its node has a later key."""
        mine = self.by_key(fingerprint)
        return mine is not None and (
            mine.removed
            or any(
                entry.node_id == mine.node_id and not entry.removed and _age(entry) > _age(mine)
                for entry in self.entries
            )
        )

    @property
    def orphaned(self) -> bool:
        """True once each Mac that held the authority's key has left or was removed."""
        return not self.holders() and any(map(is_holder, self.entries))

    def by_key(self, fingerprint: str) -> RosterEntry | None:
        """Return the entry of a key."""
        return next((entry for entry in self.entries if entry.fingerprint == fingerprint), None)

    def let_in(self, *node_ids: str) -> list[str]:
        """Return the members that these nodes admitted, directly or through others, the oldest first."""
        members, found = self.members(), list(node_ids)
        for node_id, entry in members.items():  # a member is younger than the one that admitted it
            if entry.admitted_by in found and node_id not in found:
                found.append(node_id)
        return found[len(node_ids) :]

    def merged(self, entries: Iterable[RosterEntry]) -> Roster:
        """Merge another member's entries.

        Raises RemoteProtocolError for more entries than any cluster can have had.
        """
        by_key = {entry.fingerprint: entry for entry in self.entries}
        for entry in entries:
            by_key[entry.fingerprint] = _joined(by_key.get(entry.fingerprint, entry), entry)
        if len(by_key) > MAX_ENTRIES:
            raise RemoteProtocolError(
                f"a roster of {len(by_key)} entries; {MAX_ENTRIES} is the most", Code.FIELD_INVALID
            )
        return Roster(tuple(by_key[fingerprint] for fingerprint in sorted(by_key)))

    def admitting(self, node_id: str, name: str, fingerprint: str, seal: Seal) -> Roster:
        """Add this member. Its other keys stop counting.

        Raises UserError when the key was removed before, or there is no room.
        """
        if self.removed(fingerprint):
            raise UserError(
                f"{name} was removed from this cluster; on it, `mlxtp cluster leave` and `mlxtp node --join "
                "TOKEN` bring it back"
            )
        members = self.members()
        if node_id not in members and len(members) >= MAX_MEMBERS:
            raise UserError(
                f"a cluster has at most {MAX_MEMBERS} members; remove one with `mlxtp cluster remove NODE`"
            )
        entry = seal(RosterEntry(node_id, name, fingerprint, False, self._next_version()))
        if len({fingerprint, *(each.fingerprint for each in self.entries)}) > MAX_ENTRIES:
            raise UserError(
                f"this cluster has had {MAX_ENTRIES} members, all it can remember; found a new cluster"
            )
        return self.merged([entry])

    def stating(self, node_id: str, seal: Seal, *, holds: bool) -> Roster:
        """State that this member holds the authority's key, or no longer does."""
        entry = self.members()[node_id]
        return self.merged([seal(replace(entry, holds=holds, holds_in=self._next_version()))])

    def removing(self, node_id: str, seal: Seal) -> Roster:
        """Remove this member. Raises UserError when there is none."""
        if node_id not in {entry.node_id for entry in self.entries}:
            raise UserError(
                f"no member has the node id {node_id}; `mlxtp cluster members` lists the node ids"
            )
        version = self._next_version()
        return self.merged(
            seal(replace(entry, removed=True, removed_in=version))
            for entry in self.entries
            if entry.node_id == node_id and not entry.removed
        )

    def digest(self) -> int:
        """Digest of 63 bits, by which two members notice that their rosters differ."""
        digest = hashlib.sha256(repr([_parts(entry) for entry in self.entries]).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def messages(self) -> tuple[Members, ...]:
        """Split the roster into as many messages as it takes."""
        starts = range(0, max(len(self.entries), 1), MAX_ENTERED)
        return tuple(Members(self.entries[start : start + MAX_ENTERED]) for start in starts)

    def newest(self) -> int:
        """Return the highest version of anything in it; 0 for an empty roster."""
        return max(map(_newest, self.entries), default=0)

    def _next_version(self) -> int:
        return 1 + self.newest()

    def _by_age(self) -> list[RosterEntry]:
        """Return the entry that counts of each node that was not removed, the oldest first."""
        latest = {
            entry.node_id: entry
            for entry in sorted((each for each in self.entries if not each.removed), key=_age)
        }
        return sorted(latest.values(), key=_age)


def is_founder(entry: RosterEntry) -> bool:
    """Return True for the Mac that founded the cluster: the authority signed that it admitted itself."""
    return bool(entry.admission) and entry.admitted_by == entry.node_id


def is_holder(entry: RosterEntry) -> bool:
    """Return True for a member that holds the authority's key. At first the founder does."""
    return entry.holds if entry.holding else is_founder(entry)


def remover_of(entry: RosterEntry) -> str:
    """Return the fingerprint of the key that signed an entry's removal; empty for none."""
    try:
        return fingerprint(key_at(bytes.fromhex(entry.remover)))
    except ValueError:
        return ""


def admission_of(entry: RosterEntry) -> tuple[str | int, ...]:
    """Return the part of an entry that the authority signs."""
    key = (entry.node_id, entry.name, entry.fingerprint, entry.version)
    return (*key, entry.admitted_by, entry.address, entry.at)


def removal_of(entry: RosterEntry) -> tuple[str | int, ...]:
    """Return the removal of an entry; the remover signs the first two, the authority the first three."""
    return (entry.fingerprint, entry.removed_in, entry.remover, entry.removal, entry.authorized)


def holding_of(entry: RosterEntry) -> tuple[str | int, ...]:
    """Return the part of an entry that says whether the member holds the authority's key, and its proof."""
    return (entry.fingerprint, entry.holds_in, entry.holds, entry.holding)


def _joined(one: RosterEntry, other: RosterEntry) -> RosterEntry:
    """Merge two entries of one key. What is signed beats what is not; then the later one wins.

    A member that has no authority removes no holder of its key, whichever of the two came first.
    """
    if one == other and not (one.removed and is_holder(one)):
        return one
    later = max(
        one, other, key=lambda each: (bool(each.admission), each.version, admission_of(each), each.admission)
    )
    gone = max(
        one,
        other,
        key=lambda each: (bool(each.removal), _binds_holders(each), each.removed_in, removal_of(each)),
    )
    held = max(one, other, key=lambda each: (bool(each.holding), holding_of(each)[1:]))
    merged = replace(
        later,
        removed=one.removed or other.removed,
        removed_in=gone.removed_in,
        remover=gone.remover,
        removal=gone.removal,
        authorized=gone.authorized,
        holds=held.holds,
        holds_in=held.holds_in,
        holding=held.holding,
    )
    if merged.removed and is_holder(merged) and not _binds_holders(merged):
        return replace(merged, **NOT_REMOVED)
    return merged


def _binds_holders(entry: RosterEntry) -> bool:
    """Return True for a removal by the authority, or by the removed member itself."""
    return bool(entry.authorized) or (bool(entry.removal) and remover_of(entry) == entry.fingerprint)


#: Fields of an entry without a removal.
NOT_REMOVED: Mapping[str, Any] = {
    "removed": False, "removed_in": 0, "remover": "", "removal": "", "authorized": ""
}  # fmt: skip


def _newest(entry: RosterEntry) -> int:
    return max(entry.version, entry.removed_in, entry.holds_in)


def _age(entry: RosterEntry) -> tuple[int, str]:
    return (entry.version, entry.fingerprint)


def _parts(entry: RosterEntry) -> tuple[object, ...]:
    return (*admission_of(entry), entry.admission, entry.removed, *removal_of(entry), *holding_of(entry))


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The whole shared state. `epoch` is the highest number of an epoch that any member has reported."""

    claim: LeaderClaim = NO_CLAIM
    deployments: DeploymentTable = NO_DEPLOYMENTS
    roster: Roster = Roster()
    epoch: int = 0


#: Counters grow by ones. A node that is this far ahead is broken, and leaves no room to count on.
LEAP = 1 << 32


class Replica:
    """The shared state as node `self_id` has it, but for the claim. At first that is what it `kept`."""

    def __init__(self, self_id: str, kept: ClusterState) -> None:
        self.self_id = self_id
        self.deployments = kept.deployments
        self.epoch = kept.epoch
        self._hold(kept.roster)

    def lacks(self, beat: Beat) -> tuple[bool, bool]:
        """Return two flags: the sender of a beat lacks this node's deployments, and its roster."""
        return beat.desired != self.deployments.digest, beat.roster != self.digest

    # --- messages of other members

    def desires(self, table: DeploymentTable) -> bool:
        """Take in a member's deployments. True when they change this node's: keep them, and send them on."""
        before = self.deployments
        check_leaps((table.newest, before.newest))
        self.deployments = before.merged(table)
        return self.deployments != before

    def enrols(self, entries: Iterable[RosterEntry]) -> bool:
        """Take in a member's roster. True when it changes this node's: keep it, and send it on."""
        before, entries = self.roster, tuple(entries)
        youngest = before.newest()
        check_leaps(*((_newest(entry), youngest) for entry in entries))
        self._hold(before.merged(entries))
        return self.roster != before

    def saw_epoch(self, number: int) -> None:
        """Note that an epoch of this number exists."""
        check_leaps((number, self.epoch))
        self.epoch = max(self.epoch, number)

    # --- requests at this node

    def admit(self, node_id: str, name: str, fingerprint: str, seal: Seal) -> None:
        """Add a member that joined through this node. Raises UserError as `Roster.admitting` does."""
        self._hold(self.roster.admitting(node_id, name, fingerprint, seal))

    def state_holder(self, node_id: str, seal: Seal, *, holds: bool) -> None:
        """State that a member holds the authority's key, or no longer does."""
        self._hold(self.roster.stating(node_id, seal, holds=holds))

    def remove(self, node_id: str, seal: Seal) -> None:
        """Remove a member, as a user at this node requested. Raises UserError when there is none."""
        self._hold(self.roster.removing(node_id, seal))

    def _hold(self, roster: Roster) -> None:
        self.roster, self.digest = roster, roster.digest()
        self.names = {node_id: entry.name for node_id, entry in roster.members().items()}


def check_leaps(*counts: tuple[int, int]) -> None:
    """Raise RemoteProtocolError when of a pair (received, held) the first cannot have come by counting."""
    for told, held in counts:
        if told > held + LEAP:
            raise RemoteProtocolError(
                f"counter {told} is too far ahead: the last one was {held}", Code.FIELD_INVALID
            )

"""Shared state of the cluster as one member knows it, and the merge of two members' states. Pure.

Merging needs no order: members that received the same messages, in any order and however often, agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..errors import Code, RemoteProtocolError, UserError
from ..wire.cluster_messages import MAX_MEMBERS, MAX_TOLD, Beat, Members, RosterEntry
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
        by_age = sorted(
            (entry for entry in self.entries if not entry.removed),
            key=_age,
        )
        latest = {entry.node_id: entry for entry in by_age}
        oldest = sorted(latest.values(), key=_age)
        return {entry.node_id: entry for entry in oldest[:MAX_MEMBERS]}

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

    def founder(self) -> str:
        """Return the node id of the Mac that founded the cluster, by the authority's signature, or ""."""
        return next((entry.node_id for entry in self.entries if is_founder(entry)), "")

    def holders(self) -> list[str]:
        """Return the node ids of the members that hold the authority's key, by its signature."""
        return [node_id for node_id, entry in self.members().items() if is_founder(entry)]

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

    def fitting(self, entries: Iterable[RosterEntry], self_id: str) -> tuple[RosterEntry, ...]:
        """Return those of another member's `entries` for which this roster of node `self_id` has room.

        The latest members are left out when there are too many. Removals, and entries of keys or nodes known
        here, always have room; `merged` bounds the list as a whole.
        """
        keys = {entry.fingerprint for entry in self.entries}
        nodes = {self_id, *(entry.node_id for entry in self.entries if not entry.removed)}
        fit = []
        for entry in sorted(entries, key=_age):
            if not entry.removed and entry.fingerprint not in keys:
                if len(nodes | {entry.node_id}) > MAX_MEMBERS:
                    continue
                nodes.add(entry.node_id)
            fit.append(entry)
        return tuple(fit)

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
        starts = range(0, max(len(self.entries), 1), MAX_TOLD)
        return tuple(Members(self.entries[start : start + MAX_TOLD]) for start in starts)

    def newest(self) -> int:
        """Return the highest version of an entry or a removal; 0 for an empty roster."""
        return max((max(entry.version, entry.removed_in) for entry in self.entries), default=0)

    def _next_version(self) -> int:
        return 1 + self.newest()


def is_founder(entry: RosterEntry) -> bool:
    """Return True for the Mac that founded the cluster: the authority signed that it admitted itself."""
    return bool(entry.admission) and entry.admitted_by == entry.node_id


def admission_of(entry: RosterEntry) -> tuple[str | int, ...]:
    """Return the part of an entry that the authority signs."""
    key = (entry.node_id, entry.name, entry.fingerprint, entry.version)
    return (*key, entry.admitted_by, entry.address, entry.at)


def removal_of(entry: RosterEntry) -> tuple[str | int, ...]:
    """Return the removal of an entry; the remover signs the first two."""
    return (entry.fingerprint, entry.removed_in, entry.remover, entry.removal)


def _joined(one: RosterEntry, other: RosterEntry) -> RosterEntry:
    """Merge two entries of one key. A signed admission beats an unsigned one; then the later one wins."""
    later = max(
        one, other, key=lambda each: (bool(each.admission), each.version, admission_of(each), each.admission)
    )
    gone = max(one, other, key=lambda each: (bool(each.removal), each.removed_in, each.remover, each.removal))
    return replace(
        later,
        removed=one.removed or other.removed,
        removed_in=gone.removed_in,
        remover=gone.remover,
        removal=gone.removal,
    )


def _age(entry: RosterEntry) -> tuple[int, str]:
    return (entry.version, entry.fingerprint)


def _parts(entry: RosterEntry) -> tuple[object, ...]:
    return (*admission_of(entry), entry.admission, entry.removed, *removal_of(entry))


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
        self.overfull = False  #: True once a node has reported more members than a cluster can have.
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
        """Take in a member's roster. True when it changes this node's: keep it, and send it on.

        Members without room are left out, see `overfull`.
        """
        before, entries = self.roster, tuple(entries)
        youngest = before.newest()
        check_leaps(*((max(entry.version, entry.removed_in), youngest) for entry in entries))
        fitting = before.fitting(entries, self.self_id)
        self.overfull |= len(fitting) < len(entries)
        self._hold(before.merged(fitting))
        return self.roster != before

    def saw_epoch(self, number: int) -> None:
        """Note that an epoch of this number exists."""
        check_leaps((number, self.epoch))
        self.epoch = max(self.epoch, number)

    # --- requests at this node

    def admit(self, node_id: str, name: str, fingerprint: str, seal: Seal) -> None:
        """Add a member that joined through this node. Raises UserError as `Roster.admitting` does."""
        self._hold(self.roster.admitting(node_id, name, fingerprint, seal))

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

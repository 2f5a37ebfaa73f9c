"""What every member holds to be true of the cluster, and how two members' beliefs become one. Pure.

Merging needs no order: whoever hears the same things, in whatever order and however often, believes the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..errors import Code, RemoteProtocolError, UserError
from ..wire.control import MAX_MEMBERS, DesiredState, Members, RosterEntry

MAX_ENTRIES = 512
"""Members and those that were removed. Removals are never forgotten: the key would be let in again."""


@dataclass(frozen=True, slots=True)
class Claim:
    """`node_id` coordinates in `term`. Terms only grow; each new coordinator begins one."""

    term: int = 0
    node_id: str = ""


NOBODY = Claim()


def stronger(one: Claim, other: Claim) -> Claim:
    """The later term's; of one term, the smaller node id's."""
    return min(one, other, key=lambda claim: (-claim.term, claim.node_id))


NOTHING = DesiredState(0, "", "", "auto")
"""What is desired before anybody has said anything."""


def newer(one: DesiredState, other: DesiredState) -> DesiredState:
    """What rests on the later word of a person, however many requests have chosen since an earlier one; then
    the later version; of one version, the smaller writer's.

    Two people may have spoken at once, apart. What one of them pinned then counts more than what requests
    chose after the other.
    """
    return min(
        one,
        other,
        key=lambda desired: (
            -desired.said, not desired.pinned, -desired.version, desired.writer, desired.model, desired.nodes
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Roster:
    """Who belongs to the cluster: one entry for each key fingerprint, in their order.

    A key that was removed stays so, whatever version says otherwise. An entry's version is that of the whole
    roster when it was written, so that members can be told apart by age.
    """

    entries: tuple[RosterEntry, ...] = ()

    def members(self) -> dict[str, RosterEntry]:
        """By node id, the oldest first, 64 at most; of one node's keys the latest counts."""
        by_age = sorted(
            (entry for entry in self.entries if not entry.removed),
            key=lambda entry: (entry.version, entry.fingerprint),
        )
        latest = {entry.node_id: entry for entry in by_age}
        oldest = sorted(latest.values(), key=lambda entry: (entry.version, entry.fingerprint))
        return {entry.node_id: entry for entry in oldest[:MAX_MEMBERS]}

    def removed(self, fingerprint: str) -> bool:
        """Whether this key was removed from the cluster."""
        return any(entry.removed for entry in self.entries if entry.fingerprint == fingerprint)

    def merged(self, entries: Iterable[RosterEntry]) -> Roster:
        """With what another member has. Raises RemoteProtocolError for more than any cluster can have had."""
        by_key = {entry.fingerprint: entry for entry in self.entries}
        for entry in entries:
            mine = by_key.get(entry.fingerprint, entry)
            later = max(mine, entry, key=lambda one: (one.version, one.node_id, one.name))
            by_key[entry.fingerprint] = replace(later, removed=mine.removed or entry.removed)
        if len(by_key) > MAX_ENTRIES:
            raise RemoteProtocolError(
                f"a roster of {len(by_key)} entries; {MAX_ENTRIES} is the most", Code.FIELD_INVALID
            )
        return Roster(tuple(by_key[fingerprint] for fingerprint in sorted(by_key)))

    def admitting(self, node_id: str, name: str, fingerprint: str) -> Roster:
        """With this member. Its other keys stop counting.

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
        older = [replace(entry, removed=True) for entry in self.entries if entry.node_id == node_id]
        entry = RosterEntry(node_id, name, fingerprint, False, self._next_version())
        kept = [one for one in older if one.fingerprint != fingerprint]
        others = Roster(tuple(one for one in self.entries if one.node_id != node_id))
        if len(others.entries) + len(kept) >= MAX_ENTRIES:
            raise UserError(
                f"this cluster has had {MAX_ENTRIES} members, which is all it can remember; found a new one"
            )
        return others.merged([*kept, entry])

    def fitting(self, entries: Iterable[RosterEntry], self_id: str) -> tuple[RosterEntry, ...]:
        """Those of `entries`, told by another member, for which this roster of node `self_id` has room.

        Without the members that would be too many, the latest first. What concerns a key or a node that is
        known here, and each removal, has room; the list as a whole is bounded by `merged`.
        """
        keys = {entry.fingerprint for entry in self.entries}
        nodes = {self_id, *(entry.node_id for entry in self.entries if not entry.removed)}
        fit = []
        for entry in sorted(entries, key=lambda entry: (entry.version, entry.fingerprint)):
            if not entry.removed and entry.fingerprint not in keys:
                if len(nodes | {entry.node_id}) > MAX_MEMBERS:
                    continue
                nodes.add(entry.node_id)
            fit.append(entry)
        return tuple(fit)

    def removing(self, node_id: str) -> Roster:
        """Without this member. Raises UserError when there is none."""
        if node_id not in {entry.node_id for entry in self.entries}:
            raise UserError(
                f"no member has the node id {node_id}; `mlxtp cluster members` shows who has which"
            )
        version = self._next_version()
        return self.merged(
            replace(entry, removed=True, version=version)
            for entry in self.entries
            if entry.node_id == node_id
        )

    def digest(self) -> int:
        """63 bits by which two members notice that they do not hold the same."""
        digest = hashlib.sha256(repr([_parts(entry) for entry in self.entries]).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def messages(self) -> tuple[Members, ...]:
        """As it is sent, in as many messages as it takes."""
        starts = range(0, max(len(self.entries), 1), MAX_MEMBERS)
        return tuple(Members(self.entries[start : start + MAX_MEMBERS]) for start in starts)

    def _next_version(self) -> int:
        return 1 + max((entry.version for entry in self.entries), default=0)


def _parts(entry: RosterEntry) -> tuple[object, ...]:
    return (entry.fingerprint, entry.node_id, entry.name, entry.removed, entry.version)


@dataclass(frozen=True, slots=True)
class Beliefs:
    """All of it. `epoch` is the highest number of an epoch that anybody has heard of."""

    claim: Claim = NOBODY
    desired: DesiredState = NOTHING
    roster: Roster = Roster()
    epoch: int = 0

    def merged(self, other: Beliefs) -> Beliefs:
        """What both come to believe when they meet."""
        return Beliefs(
            stronger(self.claim, other.claim),
            newer(self.desired, other.desired),
            self.roster.merged(other.roster.entries),
            max(self.epoch, other.epoch),
        )

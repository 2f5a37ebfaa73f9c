"""Shared state of the cluster, members and deployments, as one member knows it, and its merge.

Members that received the same messages, in any order and however often, agree. Each deployment has its own
version, and a removal is also a row. A table may not know a row, have it, or know that it is over. Between
two tables, the later knowledge wins.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any

from ..errors import Code, RemoteProtocolError, UserError
from ..wire.certificates import fingerprint, key_at
from ..wire.cluster_messages import (
    MAX_ENTERED,
    MAX_MEMBERS,
    MAX_TOLD,
    Beat,
    Deployment,
    Deployments,
    Members,
    RosterEntry,
)
from ..wire.codecs import record

# --- deployments ----------------------------------------------------------------------------------------

MAX_LIVE = 64  #: Deployments that count. Separated sides may add more; the first in order count.
MAX_REMOVED = 256  #: Removed rows that an edit keeps; the floor covers older removals.
PINNED = -1  #: `keep_s` of a user's deployment.
KEEP_S = 600  #: Default `keep_s` of a deployment for a client's request.
YIELDS = 2**32 - 1  #: `keep_s` of a deployment that stays until another needs its room.
LONGEST_S = 2**32 - 2  #: The longest `keep_s`, in effect forever.
LEAST_S = 2  #: Seconds for a client's next request to a model that ends after its answer.
#: Live and removed rows of any table, merged from separated sides. Beyond, the last live deployments are left
#: out, and the floor covers the oldest removals.
MOST_LIVE, MOST_REMOVED = 256, 512
GROUPS_A_MAC = 16  #: Groups for each Mac, for all deployments: as many as ranks of one host (`MAX_OF_HOST`).
MAX_ROWS = 1024  #: Rows of a table from another member.


def most_groups(rows: Iterable[Deployment], macs: int) -> Mapping[str, int]:
    """Return the most groups of each deployment: its replicas, at most one for each Mac, and GROUPS_A_MAC in
    total for each Mac, but at least one. If replicas exceed that, one more group carries the reason.
    """
    most, left = {}, macs * GROUPS_A_MAC
    for row in rows:
        placed = max(min(row.replicas or macs, macs, left), 1)
        most[row.name], left = placed + (row.replicas > placed), left - placed
    return most


def name_of(model: str) -> str:
    if model.startswith(("/", "~", ".")):
        return model.rstrip("/").rpartition("/")[2] or model
    return model.partition("@")[0]


def left_s(row: Deployment, unused_s: float) -> float:
    """Return the seconds until a deployment ends without requests; infinite if it stays."""
    if row.pinned or row.keep_s >= LONGEST_S:
        return math.inf
    return max(row.keep_s, LEAST_S) - unused_s


def _digest(content: object) -> int:
    """Return 63 bits that show two members that their contents differ."""
    return int.from_bytes(hashlib.sha256(repr(content).encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class DeploymentTable:
    """`rows` in the order of names, including removed rows. Versions are Lamport clocks. Missing rows up to
    version `floor` are over, so that old removals need no row.
    """

    rows: tuple[Deployment, ...] = ()
    floor: int = 0

    def live(self) -> tuple[Deployment, ...]:
        """Return up to 64 deployments: first the pinned, by when they were; then the others, latest first."""
        return self._live[:MAX_LIVE]

    def get(self, name: str) -> Deployment | None:
        row = self._by_name.get(name)
        return None if row is None or row.removed else row

    @cached_property
    def most_groups(self) -> Callable[[int], Mapping[str, int]]:
        return cache(partial(most_groups, self.live()))

    @cached_property
    def newest(self) -> int:
        return max(self.floor, *(row.version for row in self.rows), 0)

    @cached_property
    def digest(self) -> int:
        return _digest((self.floor, [_rank(row) for row in self.rows]))

    def messages(self) -> tuple[Deployments, ...]:
        last = max(len(self.rows) - 1, 0) // MAX_TOLD
        return tuple(
            Deployments(self.rows[part * MAX_TOLD : (part + 1) * MAX_TOLD], self.floor, part < last)
            for part in range(last + 1)
        )

    # --- changes

    def setting(self, row: Deployment, writer: str, *, alone: bool = False) -> DeploymentTable:
        """Add or change a deployment as the node `writer`, in a new version; `alone`: remove all others.
        Raises UserError if there is no room.
        """
        others = [each.name for each in self._live if each.name != row.name]
        if len(others) >= MAX_LIVE and not alone:
            raise UserError(f"{MAX_LIVE} models are deployed, the most; `mlxtp unload MODEL` makes room")
        return self._edited([row, *(_removed(name) for name in others if alone)], writer)

    def removing(self, writer: str, *names: str) -> DeploymentTable:
        return self._edited([_removed(name) for name in names if self.get(name) is not None], writer)

    def merged(self, other: DeploymentTable) -> DeploymentTable:
        rows = {**self._outlasting(other), **other._outlasting(self)}
        return _table(rows, max(self.floor, other.floor))

    # --- details

    @cached_property
    def _by_name(self) -> Mapping[str, Deployment]:
        return {row.name: row for row in self.rows}

    @cached_property
    def _live(self) -> tuple[Deployment, ...]:
        return tuple(sorted((row for row in self.rows if not row.removed), key=_place))

    def _outlasting(self, other: DeploymentTable) -> dict[str, Deployment]:
        """Return the rows that `other` also has, or does not know yet: the rest is over."""
        kept = {}
        for name, row in self._by_name.items():
            rival = other._by_name.get(name)
            news = row.version > other.floor and (rival is None or _rank(row) > _rank(rival))
            if news or row == rival:
                kept[name] = row
        return kept

    def _edited(self, rows: Iterable[Deployment], writer: str) -> DeploymentTable:
        version, edited = 1 + self.newest, {}
        for row in rows:
            was = self.get(row.name)
            since = _since(was) if was is not None and was.pinned and row.pinned else 0
            edited[row.name] = replace(row, version=version, writer=writer, since=since)
        return _table({**self._by_name, **edited}, self.floor, MAX_REMOVED)


NO_DEPLOYMENTS = DeploymentTable()


def received(rows: Iterable[Deployment], floor: int) -> DeploymentTable:
    """Return the table that another member sent. Raises RemoteProtocolError for an impossible table."""
    by_name: dict[str, Deployment] = {}
    for row in rows:
        if row.name in by_name or not row.name or bool(row.model) == row.removed:
            raise RemoteProtocolError(f"no table has such a row: {row!r:.300}", Code.FIELD_INVALID)
        by_name[row.name] = row
    return _table(by_name, floor)


def _table(rows: Mapping[str, Deployment], floor: int, removed: int = MOST_REMOVED) -> DeploymentTable:
    """Return the table of these rows, without removals that the floor covers, and without surplus rows.

    It never fails: that would cut the link to an honest member that relays another member's inventions.
    """
    removals = sorted((row.version for row in rows.values() if row.removed), reverse=True)
    floor = max(floor, *removals[removed : removed + 1], 0)
    live = sorted((row for row in rows.values() if not row.removed), key=_place)[:MOST_LIVE]
    kept = [*live, *(row for row in rows.values() if row.removed and row.version > floor)]
    return DeploymentTable(tuple(sorted(kept, key=lambda row: row.name)), floor)


def _removed(name: str) -> Deployment:
    return Deployment(name, removed=True, keep_s=0)


def _since(row: Deployment) -> int:
    return row.since or row.version


def _place(row: Deployment) -> tuple[bool, int, str, str]:
    return (False, _since(row), "", row.name) if row.pinned else (True, -row.version, row.writer, row.name)


_CONTENT = attrgetter(
    *(each.name for each in fields(Deployment) if each.name not in ("version", "writer", "removed"))
)


def _rank(row: Deployment) -> tuple[object, ...]:
    """Return the rank of a row among rows of one name: by version, then pinned rows outrank others."""
    return row.version, row.pinned, not row.removed, row.writer, *_CONTENT(row)


# --- members --------------------------------------------------------------------------------------------

MAX_ENTRIES = 512  #: Members, including all removed ones: a forgotten removal would let a key in again.
FULL = f"a cluster has at most {MAX_MEMBERS} members; remove one with `mlxtp cluster remove NODE`"
BACK = "`mlxtp cluster leave` and `mlxtp node --join TOKEN` bring it back"


@dataclass(frozen=True, slots=True)
class LeaderClaim:
    """Claim that `node_id` coordinates in `term`. Terms only grow; each new coordinator begins the next."""

    term: int = 0
    node_id: str = ""


NO_CLAIM = LeaderClaim()


def stronger(one: LeaderClaim, other: LeaderClaim) -> LeaderClaim:
    return min(one, other, key=lambda claim: (-claim.term, claim.node_id))


Seal = Callable[[RosterEntry], RosterEntry]  #: Signs an entry as the member that admits or removes.


@dataclass(frozen=True, slots=True)
class Roster:
    """Present and removed members of the cluster: an entry for each key, in the order of fingerprints.

    A removed key stays removed. An entry has the roster's version at the time of its writing.
    """

    entries: tuple[RosterEntry, ...] = ()

    def members(self) -> dict[str, RosterEntry]:
        """Return up to 64 members by node id, the oldest first, each with its latest key."""
        return {entry.node_id: entry for entry in self._by_age()[:MAX_MEMBERS]}

    def surplus(self) -> list[str]:
        """Return the members beyond 64, as when two Macs admit the 64th at the same time."""
        return [entry.node_id for entry in self._by_age()[MAX_MEMBERS:]]

    def holders(self) -> list[str]:
        return [node_id for node_id, entry in self.members().items() if is_holder(entry)]

    def removed(self, fingerprint: str) -> bool:
        """Return True if this key was removed from the cluster, or its node has a later key."""
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
        """True once all Macs that held the authority's key have left or were removed."""
        return not self.holders() and any(map(is_holder, self.entries))

    def by_key(self, fingerprint: str) -> RosterEntry | None:
        return next((entry for entry in self.entries if entry.fingerprint == fingerprint), None)

    def let_in(self, *node_ids: str) -> list[str]:
        """Return the members that these nodes admitted, directly or through others, the oldest first."""
        members, found = self.members(), list(node_ids)
        for node_id, entry in members.items():  # a member is younger than its admitter
            if entry.admitted_by in found and node_id not in found:
                found.append(node_id)
        return found[len(node_ids) :]

    def merged(self, entries: Iterable[RosterEntry]) -> Roster:
        """Merge another member's entries. Raises RemoteProtocolError for too many."""
        by_key = {entry.fingerprint: entry for entry in self.entries}
        for entry in entries:
            by_key[entry.fingerprint] = _joined(by_key.get(entry.fingerprint, entry), entry)
        if len(by_key) > MAX_ENTRIES:
            raise RemoteProtocolError(
                f"a roster of {len(by_key)} entries; {MAX_ENTRIES} is the most", Code.FIELD_INVALID
            )
        return Roster(tuple(by_key[fingerprint] for fingerprint in sorted(by_key)))

    def admitting(self, node_id: str, name: str, fingerprint: str, seal: Seal) -> Roster:
        """Add this member; its other keys stop counting. Raises UserError for a removed key, or no room."""
        if self.removed(fingerprint):
            raise UserError(f"{name} was removed from this cluster; on it, {BACK}")
        members = self.members()
        if node_id not in members and len(members) >= MAX_MEMBERS:
            raise UserError(FULL)
        entry = seal(RosterEntry(node_id, name, fingerprint, False, self._next_version()))
        if len({fingerprint, *(each.fingerprint for each in self.entries)}) > MAX_ENTRIES:
            raise UserError(
                f"this cluster has had {MAX_ENTRIES} members, all it can remember; "
                "found a new cluster to go on"
            )
        return self.merged([entry])

    def stating(self, node_id: str, seal: Seal, *, holds: bool) -> Roster:
        entry = self.members()[node_id]
        return self.merged([seal(replace(entry, holds=holds, holds_in=self._next_version()))])

    def removing(self, node_id: str, seal: Seal) -> Roster:
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
        return _digest([_parts(entry) for entry in self.entries])

    def messages(self) -> tuple[Members, ...]:
        starts = range(0, max(len(self.entries), 1), MAX_ENTERED)
        return tuple(Members(self.entries[start : start + MAX_ENTERED]) for start in starts)

    def newest(self) -> int:
        return max(map(_newest, self.entries), default=0)

    def _next_version(self) -> int:
        return 1 + self.newest()

    def _by_age(self) -> list[RosterEntry]:
        latest = {
            entry.node_id: entry
            for entry in sorted((each for each in self.entries if not each.removed), key=_age)
        }
        return sorted(latest.values(), key=_age)


def is_founder(entry: RosterEntry) -> bool:
    """Return True for the founder: the authority signed that it admitted itself."""
    return bool(entry.admission) and entry.admitted_by == entry.node_id


def is_holder(entry: RosterEntry) -> bool:
    """Return True for a holder of the authority's key, which is the founder at first."""
    return entry.holds if entry.holding else is_founder(entry)


def remover_of(entry: RosterEntry) -> str:
    try:
        return fingerprint(key_at(bytes.fromhex(entry.remover)))
    except ValueError:
        return ""


#: Fields that an admission sets.
ADMITTED = ("node_id", "name", "version", "admitted_by", "address", "at", "admission")


def fields_of(entry: RosterEntry, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in names}


def admission_of(entry: RosterEntry) -> tuple[str | int, ...]:
    key = (entry.node_id, entry.name, entry.fingerprint, entry.version)
    return (*key, entry.admitted_by, entry.address, entry.at)


def removal_of(entry: RosterEntry) -> tuple[str | int, ...]:
    """Return an entry's removal; the remover signs the first two fields, the authority the first three."""
    return (entry.fingerprint, entry.removed_in, entry.remover, entry.removal, entry.authorized)


def holding_of(entry: RosterEntry) -> tuple[str | int, ...]:
    return (entry.fingerprint, entry.holds_in, entry.holds, entry.holding)


def _joined(one: RosterEntry, other: RosterEntry) -> RosterEntry:
    """Merge two entries of one key. A signed part beats an unsigned one; then the later wins.

    A removal of a holder of the authority's key counts only if the authority or the holder signed it.
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
        **fields_of(gone, ("removed_in", "remover", "removal", "authorized")),
        **fields_of(held, ("holds", "holds_in", "holding")),
    )
    if merged.removed and is_holder(merged) and not _binds_holders(merged):
        return replace(merged, **NOT_REMOVED)
    return merged


def _binds_holders(entry: RosterEntry) -> bool:
    return bool(entry.authorized) or (bool(entry.removal) and remover_of(entry) == entry.fingerprint)


NOT_REMOVED: Mapping[str, Any] = {
    "removed": False, "removed_in": 0, "remover": "", "removal": "", "authorized": ""
}  # fmt: skip


def _newest(entry: RosterEntry) -> int:
    return max(entry.version, entry.removed_in, entry.holds_in)


def _age(entry: RosterEntry) -> tuple[int, str]:
    return (entry.version, entry.fingerprint)


def _parts(entry: RosterEntry) -> tuple[object, ...]:
    return (*admission_of(entry), entry.admission, entry.removed, *removal_of(entry), *holding_of(entry))


# --- entries as text, for members of another protocol version and for the disk ---------------------------

TEXT_VERSION = 1  #: Independent of the protocol's version: readers ignore unknown fields.
READS = f"roster={TEXT_VERSION}"  #: In the `versions` of a hello: this agent reads the text.
MAX_TEXT = 1 << 20  #: Characters, enough for 512 entries.
_ENTRY = record(RosterEntry)
_NAMES = [each.name for each in fields(RosterEntry)]


def roster_text(entries: Iterable[RosterEntry]) -> str:
    return json.dumps({"version": TEXT_VERSION, "roster": [_ENTRY.to_wire(each) for each in entries]})


def roster_entries(text: str) -> tuple[RosterEntry, ...]:
    """Return the entries that this version understands; none if the text is damaged or of another version."""
    try:
        table = json.loads(text)
        rows = table["roster"][:MAX_ENTRIES] if table["version"] == TEXT_VERSION else ()
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()
    return tuple(entry for row in rows if (entry := _entry(row)) is not None)


def _entry(row: Any) -> RosterEntry | None:
    try:
        entry: RosterEntry = _ENTRY.from_wire({name: row[name] for name in _NAMES})
    except (ValueError, TypeError, KeyError):
        return None
    return entry


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The whole shared state. `epoch` is the highest epoch that any member reported."""

    claim: LeaderClaim = NO_CLAIM
    deployments: DeploymentTable = NO_DEPLOYMENTS
    roster: Roster = Roster()
    epoch: int = 0


LEAP = 1 << 32  #: Counters grow by ones. A node that is this far ahead is broken, and would exhaust them.


class Replica:
    """The shared state as node `self_id` knows it, without the claim; at first, its saved state (`kept`)."""

    def __init__(self, self_id: str, kept: ClusterState) -> None:
        self.self_id = self_id
        self.deployments = kept.deployments
        self.epoch = kept.epoch
        self.hold(kept.roster)

    @property
    def most_groups(self) -> Mapping[str, int]:
        return self.deployments.most_groups(len(self.names))

    def shown_groups(self, row: Deployment) -> int:
        """Return how many groups of a deployment to show if none runs: one if it has no fixed number."""
        return self.most_groups.get(row.name, 0) if row.replicas else 1

    def lacks(self, beat: Beat) -> tuple[bool, bool]:
        """Return whether the sender of a beat lacks this node's deployments, and its roster."""
        return beat.desired != self.deployments.digest, beat.roster != self.digest

    # --- messages of other members

    def desires(self, table: DeploymentTable) -> bool:
        """Take in a member's deployments. Return True if they change this node's: save and relay them."""
        before = self.deployments
        check_leaps((table.newest, before.newest))
        self.deployments = before.merged(table)
        return self.deployments != before

    def enrols(self, entries: Iterable[RosterEntry]) -> bool:
        """Take in a member's roster. Return True if it changes this node's: save and relay it."""
        before, entries = self.roster, tuple(entries)
        youngest = before.newest()
        check_leaps(*((_newest(entry), youngest) for entry in entries))
        self.hold(before.merged(entries))
        return self.roster != before

    def saw_epoch(self, number: int) -> None:
        check_leaps((number, self.epoch))
        self.epoch = max(self.epoch, number)

    def hold(self, roster: Roster) -> None:
        self.roster, self.digest = roster, roster.digest()
        self.names = {node_id: entry.name for node_id, entry in roster.members().items()}


def check_leaps(*counts: tuple[int, int]) -> None:
    """Raise RemoteProtocolError if in a pair (received, held) the first is a LEAP ahead."""
    for told, held in counts:
        if told > held + LEAP:
            raise RemoteProtocolError(
                f"counter {told} is too far ahead: the last one was {held}", Code.FIELD_INVALID
            )

"""Table of deployments: the models that the cluster should serve, and the merge of two members' tables. Pure.

Each row is known by its name, and versioned by itself, so that `serve A` at one Mac and `serve B` at another
both hold. A removal is a row, too. Merging is commutative, associative and idempotent: of each row, a table
either has no knowledge, or has it, or counts it as over, and of two tables the later knowledge holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import Code, RemoteProtocolError, UserError
from ..wire.cluster_messages import MAX_TOLD, Deployment, Deployments

MAX_LIVE = 64  #: Deployments that count. Two sides that added more while they were separated keep the first.
MAX_REMOVED = 256  #: Removed rows that an edit keeps; older ones are covered by the floor.
PINNED = -1  #: `keep_s` of a deployment that a user asked for.
KEEP_S = 600  #: `keep_s` of one that a client's request chose.
YIELDS = 2**32 - 1  #: `keep_s` of one that stays until another one needs its room.
LONGEST_S = 2**32 - 2  #: The most seconds of `keep_s`; in effect for ever.
LEAST_S = 2  #: Seconds that a client has between two requests of a model that ends after its answer.
MAX_ROWS = 1024  #: Rows of any table, removed ones of several separated sides included.


def name_of(model: str) -> str:
    """Return the name of a model's deployment: OWNER/NAME without its revision, or the name of a folder."""
    if model.startswith(("/", "~", ".")):
        return model.rstrip("/").rpartition("/")[2] or model
    return model.partition("@")[0]


def left_s(row: Deployment, unused_s: float) -> float:
    """Return the seconds until a deployment ends, if no request comes; infinite for one that stays."""
    if row.pinned or row.keep_s >= LONGEST_S:
        return math.inf
    return max(row.keep_s, LEAST_S) - unused_s


@dataclass(frozen=True)
class DeploymentTable:
    """Rows by name, removed ones included. `rows` are in the order of their names.

    Rows up to version `floor` that this table does not have are over: they were removed or replaced. So the
    oldest removals need no rows. Versions are Lamport clocks: one more than the highest that is in the table.
    """

    rows: tuple[Deployment, ...] = ()
    floor: int = 0

    def live(self) -> tuple[Deployment, ...]:
        """Return up to 64 deployments: pinned ones first, in that order; then the others, latest first."""
        return self._live[:MAX_LIVE]

    def get(self, name: str) -> Deployment | None:
        """Return the deployment of this name, unless it is removed."""
        row = self._by_name.get(name)
        return None if row is None or row.removed else row

    @cached_property
    def newest(self) -> int:
        """The highest version in the table; 0 for a new one."""
        return max(self.floor, *(row.version for row in self.rows), 0)

    @cached_property
    def digest(self) -> int:
        """Digest of 63 bits, by which two members notice that their tables differ."""
        digest = hashlib.sha256(repr((self.floor, [_rank(row) for row in self.rows])).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def messages(self) -> tuple[Deployments, ...]:
        """Split the table into as many messages as it takes; the receiver merges it as a whole."""
        last = max(len(self.rows) - 1, 0) // MAX_TOLD
        return tuple(
            Deployments(self.rows[part * MAX_TOLD : (part + 1) * MAX_TOLD], self.floor, part < last)
            for part in range(last + 1)
        )

    # --- changes

    def setting(self, row: Deployment, writer: str, *, alone: bool = False) -> DeploymentTable:
        """Add a deployment, or change the one of its name, as the node `writer`. It gets a new version.

        `alone`: remove all others. Raises UserError when there is no room.
        """
        others = [each.name for each in self._live if each.name != row.name]
        if len(others) >= MAX_LIVE and not alone:
            raise UserError(f"{MAX_LIVE} models are deployed, the most; `mlxtp unload MODEL` makes room")
        return self._edited([row, *(_removed(name) for name in others if alone)], writer)

    def removing(self, writer: str, *names: str) -> DeploymentTable:
        """Remove the deployments of these names, as the node `writer`. Other names are ignored."""
        return self._edited([_removed(name) for name in names if self.get(name) is not None], writer)

    def merged(self, other: DeploymentTable) -> DeploymentTable:
        """Merge another member's table. Raises RemoteProtocolError if the two have too many rows."""
        rows = {**self._outlasting(other), **other._outlasting(self)}
        return _table(rows, max(self.floor, other.floor))

    # --- details

    @cached_property
    def _by_name(self) -> Mapping[str, Deployment]:
        return {row.name: row for row in self.rows}

    @cached_property
    def _live(self) -> tuple[Deployment, ...]:
        live = [row for row in self.rows if not row.removed]
        pinned = sorted((row for row in live if row.pinned), key=lambda row: (_since(row), row.name))
        others = sorted((row for row in live if not row.pinned), key=lambda row: (-row.version, row.writer))
        return (*pinned, *others)

    def _outlasting(self, other: DeploymentTable) -> dict[str, Deployment]:
        """Return the rows that `other` has as well, or does not know of yet: the rest is over."""
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
        by_name = {**self._by_name, **edited}
        removals = sorted((row.version for row in by_name.values() if row.removed), reverse=True)
        return _table(by_name, max(self.floor, *removals[MAX_REMOVED : MAX_REMOVED + 1], 0))


NO_DEPLOYMENTS = DeploymentTable()


def received(rows: Iterable[Deployment], floor: int) -> DeploymentTable:
    """Return the table that another member, or an earlier start, wrote.

    Raises RemoteProtocolError for one that no member can have.
    """
    by_name: dict[str, Deployment] = {}
    for row in rows:
        if row.name in by_name or not row.name or bool(row.model) == row.removed:
            raise RemoteProtocolError(f"no table has such a row: {row!r:.300}", Code.FIELD_INVALID)
        by_name[row.name] = row
    return _table(by_name, floor)


def _table(rows: Mapping[str, Deployment], floor: int) -> DeploymentTable:
    """Return the table of these rows, without removals that the floor covers."""
    kept = [row for row in rows.values() if row.version > floor or not row.removed]
    if len(kept) > MAX_ROWS:
        raise RemoteProtocolError(
            f"a table of {len(kept)} deployments; {MAX_ROWS} is the most", Code.FIELD_INVALID
        )
    return DeploymentTable(tuple(sorted(kept, key=lambda row: row.name)), floor)


def _removed(name: str) -> Deployment:
    return Deployment(name, removed=True, keep_s=0)


def _since(row: Deployment) -> int:
    """Return the version that pinned a row; changes of a pinned one leave its place."""
    return row.since or row.version


def _rank(row: Deployment) -> tuple[object, ...]:
    """Return the order of rows of one name: of one version, the pinned row outranks the others."""
    return (
        row.version, row.pinned, not row.removed, row.writer, row.name, row.model, row.replicas, row.nodes,
        row.on, row.keep_s, row.since, row.parallel, row.split,
    )  # fmt: skip

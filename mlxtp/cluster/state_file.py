"""State that survives an agent's restart: `state.json` in its home; and reports of other nodes' disks.

The file is replaced as a whole. An unreadable file is renamed and reported, never overwritten. A second file
has the removed members: a Mac that lost `state.json` still refuses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RemoteProtocolError, UserError, in_words
from ..identity.private_files import write_private
from ..wire.cluster_messages import MAX_MEMBERS, Deployment, RosterEntry
from ..wire.codecs import U63, FieldCodec, NodeRow, holding, integer, located, records, text, texts
from .cluster_state import (
    MAX_ENTRIES,
    MAX_ROWS,
    ClusterState,
    DeploymentTable,
    LeaderClaim,
    Roster,
    received,
    roster_entries,
    roster_text,
)
from .links import ReportTable

log = logging.getLogger(__name__)

FILE = "state.json"
FORMAT = 4  #: The only format to be read.
MAX_ADDRESSES = 16  #: Addresses kept of each peer.
_MAX_BYTES = 32 << 20
REMOVALS = "removals"  #: File of removed members, which outlives an unusable `FILE`.
_SUM = 16  #: Hex digits of the checksum before each of its lines.

#: Codec of each field, and where it is in a `ClusterState`.
_FIELDS: Mapping[str, tuple[FieldCodec, str]] = {
    "deployments": (records(Deployment, 0, MAX_ROWS), "deployments.rows"),
    "floor": (integer(0, U63), "deployments.floor"),
    "roster": (records(RosterEntry, 0, MAX_ENTRIES), "roster.entries"),
    "epoch": (integer(0, U63), "epoch"),
    "term": (integer(0, U63), "claim.term"),
    "coordinator": (text(32), "claim.node_id"),
}
_ADDRESSES = texts(MAX_ADDRESSES, 300)  # a host name has up to 253 characters
_NODE_ID = text(32)


@dataclass(frozen=True, slots=True)
class SavedState:
    """Content of the file. `peers` has the last addresses ("ip:port") of each node."""

    beliefs: ClusterState = field(default_factory=ClusterState)
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def to_text(kept: SavedState) -> str:
    """Return the file's text. Raises ValueError for an unreadable state."""
    table: dict[str, Any] = {"format": FORMAT}
    for name, (codec, place) in _FIELDS.items():
        table[name] = codec.to_wire(attrgetter(place)(kept.beliefs))
    table["peers"] = {node_id: list(addresses[:MAX_ADDRESSES]) for node_id, addresses in kept.peers.items()}
    text = json.dumps(table, indent=1) + "\n"
    from_text(text)
    return text


def from_text(text: str) -> SavedState:
    """Parse the file's text. Raises ValueError with its fault."""
    table = json.loads(text)
    if type(table) is not dict or type(table.get("format")) is not int:
        raise ValueError("it has no format number")
    if table["format"] != FORMAT:
        raise ValueError(f"it has format {table['format']}; this version reads format {FORMAT}")
    expected = {"format", "peers", *_FIELDS}
    if table.keys() != expected:
        raise ValueError(f"it should have exactly the fields {', '.join(sorted(expected))}")
    values = {}
    for name, (codec, _) in _FIELDS.items():
        try:
            values[name] = codec.from_wire(table[name])
        except ValueError as error:
            raise ValueError(located(name, error)) from None
    state = ClusterState(
        LeaderClaim(values["term"], values["coordinator"]),
        _table(values["deployments"], values["floor"]),
        Roster().merged(values["roster"]),
        values["epoch"],
    )
    return SavedState(state, _peers(table["peers"]))


def _table(rows: tuple[Deployment, ...], floor: int) -> DeploymentTable:
    try:
        return received(rows, floor)
    except RemoteProtocolError as error:
        raise ValueError(f"deployments: {error.detail}") from None


def _peers(value: Any) -> dict[str, tuple[str, ...]]:
    if type(value) is not dict or len(value) > MAX_MEMBERS:
        raise ValueError(f"peers: expected a map of at most {MAX_MEMBERS} node ids")
    try:
        return {_NODE_ID.from_wire(node_id): _ADDRESSES.from_wire(found) for node_id, found in value.items()}
    except ValueError as error:
        raise ValueError(f"peers: expected {error}") from None


def load(home: Path) -> tuple[SavedState, str]:
    """Return this home's saved state, and a sentence for users if it was unusable. Raises UserError."""
    kept, problem = _load(home)
    roster = kept.beliefs.roster
    for entry in removals_at(home).values():
        with contextlib.suppress(RemoteProtocolError):  # too many
            roster = roster.merged([entry])
    return replace(kept, beliefs=replace(kept.beliefs, roster=roster)), problem


def _load(home: Path) -> tuple[SavedState, str]:
    path = home / FILE
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return SavedState(), ""
    except IsADirectoryError:
        return SavedState(), _unusable(path, "it is a folder")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it is longer than {_MAX_BYTES} bytes")
        return from_text(data.decode()), ""
    except (ValueError, RecursionError) as error:
        return SavedState(), _unusable(path, error)


def removals_at(home: Path) -> dict[str, RosterEntry]:
    """Return the removed members in the file of removals, by fingerprint; skip damaged lines."""
    try:
        with (home / REMOVALS).open("rb") as file:
            data = file.read(_MAX_BYTES)
    except OSError:
        return {}
    return {
        entry.fingerprint: entry
        for line in data.split(b"\n")
        if line[:_SUM] == _sum(line[_SUM:])
        for entry in roster_entries(line[_SUM:].decode(errors="replace"))
        if entry.removed
    }


def _sum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:_SUM].encode()


def _line(entry: RosterEntry) -> bytes:
    text = roster_text([entry]).encode()
    return _sum(text) + text + b"\n"


def save(home: Path, kept: SavedState) -> None:
    """Replace the file, and after a new removal the file of removals. Raises UserError."""
    try:
        write_private(home / FILE, to_text(kept).encode())
        gone = {entry.fingerprint: entry for entry in kept.beliefs.roster.entries if entry.removed}
        if gone and (whole := (before := removals_at(home)) | gone) != before:
            write_private(home / REMOVALS, b"".join(map(_line, whole.values())))
    except ConfigError as error:
        raise UserError(f"{error.detail}. The state of this node is not saved") from None


def forget(home: Path) -> None:
    """Remove the state of an earlier cluster. Raises UserError if that fails."""
    path = home / FILE
    with in_words(UserError, f"{path} of an earlier cluster cannot be removed"):
        if path.is_dir():
            _set_aside(path)
        path.unlink(missing_ok=True)
        (home / REMOVALS).unlink(missing_ok=True)


def _unusable(path: Path, why: object) -> str:
    aside = _set_aside(path)
    return (
        f"{path} could not be used ({why}). It was set aside as {aside.name}; this node starts without "
        "it and takes the desired state from the other members"
    )


def _set_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.unusable-{number}")).exists():
        number += 1
    with in_words(UserError, f"{path} cannot be used, nor renamed"):
        path.replace(aside)
    return aside


# --- this node's writes, and reports of other members' writes --------------------------------------------

ELSEWHERE_S = 5.0  #: Seconds that a removal waits for another member's disk.


class RosterSaved(NodeRow, number=0x54):
    """Digest of the roster on a node's disk."""

    LAST = True

    roster: int = holding(integer(0, U63))


class Saving:
    """Writes `state.json` after changes, and at each tick until that works. Reports a roster once on disk."""

    def __init__(self, home: Path, reports: ReportTable) -> None:
        self.home = home
        self._reports = reports
        self._disk = ThreadPoolExecutor(1, "saving")
        self._turn = asyncio.Lock()
        self._latest: SavedState | None = None  # in the file; None while that is uncertain
        self._roster: Roster | None = None  # in the file
        self._problem = ""
        self._closed = False
        self._reported = asyncio.Event()
        reports.on(lambda _node_id, _saved: self._reported.set(), RosterSaved)

    async def save(self, kept: SavedState) -> str:
        """Write the state, unless the file has it, or this is closed. Return the problem, or ""."""
        async with self._turn:
            if kept != self._latest and not self._closed:
                await self._write(kept)
            return self._problem

    async def _write(self, kept: SavedState) -> None:
        self._latest = None  # a cancelled call may still write
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, save, self.home, kept)
        except UserError as error:
            if error.detail != self._problem:
                log.error("%s", error.detail)
            self._problem = error.detail
            return
        self._latest, self._problem = kept, ""
        if self._roster != kept.beliefs.roster:
            self._roster = kept.beliefs.roster
            self._reports.publish(RosterSaved, RosterSaved(self._roster.digest()))

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._disk.shutdown)

    async def elsewhere(self, roster: Callable[[], Roster]) -> list[str]:
        """Wait for other members' disks to have the roster; return these members, or [] after ELSEWHERE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ELSEWHERE_S):
                while not (found := self._having(roster())):
                    self._reported.clear()
                    await self._reported.wait()
                return found
        return []

    def _having(self, roster: Roster) -> list[str]:
        saved, members = RosterSaved(roster.digest()), roster.members()
        return [node for node, row in self._reports.others(RosterSaved) if row == saved and node in members]

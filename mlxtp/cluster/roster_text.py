"""Roster as text that all versions read: for members of another protocol version, and for the disk. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from ..wire.cluster_messages import RosterEntry
from ..wire.codecs import record
from .cluster_state import MAX_ENTRIES

#: Version of the text. It does not follow the protocol's: new fields need no other one, as readers ignore
#: what they do not know. A reader ignores the text of another version.
VERSION = 1
READS = f"roster={VERSION}"  #: One of the `versions` of a hello, by which an agent says that it reads these.
MAX_CHARACTERS = 1 << 20  #: Of one text: 512 entries, and as much again.
#: Values of fields that an earlier version did not write.
DEFAULTS = {each.name: each.default for each in fields(RosterEntry) if each.default is not MISSING}

_ENTRY = record(RosterEntry)
_NAMES = [each.name for each in fields(RosterEntry)]


def to_text(entries: Iterable[RosterEntry]) -> str:
    """Return the entries as ASCII, on one line."""
    return json.dumps({"version": VERSION, "roster": [_ENTRY.to_wire(each) for each in entries]})


def from_text(text: str) -> tuple[RosterEntry, ...]:
    """Return the entries that this version understands; none of a text that is damaged or of another one."""
    try:
        table = json.loads(text)
        rows = table["roster"][:MAX_ENTRIES] if table["version"] == VERSION else ()
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()
    return tuple(entry for row in rows if (entry := _entry(row)) is not None)


def _entry(row: Any) -> RosterEntry | None:
    try:
        entry: RosterEntry = _ENTRY.from_wire(DEFAULTS | {name: row[name] for name in _NAMES if name in row})
    except (ValueError, TypeError):
        return None
    return entry

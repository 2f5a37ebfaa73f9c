"""RDMA devices between ranks: the matrix for JACCL, and its checks.

Given an entry on the diagonal or a cable with one end, JACCL forms a wrong group or raises a misleading
error. Code that makes or uses a matrix therefore calls `fault` first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

Entry = str | None
#: `matrix[i][j]` names the devices of rank i with cables to rank j: "rdma_en5", or several, separated by
#: commas; None or "" for none.
Matrix = tuple[tuple[Entry, ...], ...]

MAX_SIZE = 8  #: most ranks that JACCL joins
MAX_LANES = 4  #: most devices between two neighbors of a ring
MAX_NAME = 60
MAX_ENTRY = MAX_LANES * (MAX_NAME + 1)  #: characters of one entry

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


def devices(entry: Entry) -> tuple[str, ...]:
    return tuple(entry.split(",")) if entry else ()


def flat(matrix: Matrix) -> tuple[str, ...]:
    return tuple(entry or "" for row in matrix for entry in row)


def square(entries: Sequence[str], size: int) -> Matrix:
    """Return a matrix of `entries`, given row by row. Raises ValueError unless there are size²."""
    if len(entries) != size * size:
        raise ValueError(f"an RDMA matrix of {size} ranks has {size * size} entries, not {len(entries)}")
    return tuple(tuple(entries[start : start + size]) for start in range(0, len(entries), size))


def device_file(matrix: Matrix) -> str:
    """Return the JSON text that JACCL reads: null, a name, or a list of names."""
    named = [[devices(entry) for entry in row] for row in matrix]
    return json.dumps(
        [[each if len(each) > 1 else each[0] if each else None for each in row] for row in named]
    )


def peers(rank: int, size: int, *, ring: bool) -> list[int]:
    if ring:
        return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    return [peer for peer in range(size) if peer != rank]


def fault(matrix: Matrix, *, ring: bool) -> str | None:
    """Return the first fault of a matrix, as a message for its author; None if JACCL can use it. In a `ring`,
    neighbors need a cable, all with equally many devices. Otherwise, every two ranks need one.
    """
    size = len(matrix)
    if not 2 <= size <= MAX_SIZE:
        return f"JACCL joins 2 to {MAX_SIZE} ranks; this RDMA matrix has {size} rows"
    for rank, row in enumerate(matrix):
        if len(row) != size:
            needs = f"it needs one for each of {size} ranks"
            return f"row {rank} of the RDMA matrix has {len(row)} entries; {needs}"
    for rank, row in enumerate(matrix):
        if wrong := _fault_of_row(rank, row):
            return wrong
    pairs = [(rank, peer) for rank in range(size) for peer in peers(rank, size, ring=ring)]
    return _fault_of_pairs(matrix, pairs, ring=ring)


def _fault_of_row(rank: int, row: tuple[Entry, ...]) -> str | None:
    if row[rank]:
        return f"rank {rank} has {row[rank]} as its RDMA device to itself; that entry stays empty"
    used: dict[str, int] = {}
    for peer, entry in enumerate(row):
        for name in devices(entry):
            if len(name) > MAX_NAME or not _NAME.fullmatch(name):
                return f"{name!r} of rank {rank} cannot be the name of an RDMA device, such as rdma_en5"
            if name in used:
                twice = f"rank {rank} has {name} for rank {used[name]} and again for rank {peer}"
                return f"{twice}; one device serves one cable"
            used[name] = peer
    return None


def _fault_of_pairs(matrix: Matrix, pairs: list[tuple[int, int]], *, ring: bool) -> str | None:
    for rank, peer in pairs:
        ours, theirs = matrix[rank][peer], matrix[peer][rank]
        if ours and not theirs:
            alone = f"rank {rank} has {ours} for rank {peer}, which has no RDMA device for rank {rank}"
            return f"{alone}; a cable has two ends"
        if not ours and not theirs:
            need = "each two neighbours of a ring" if ring else "each two ranks of a mesh"
            return f"ranks {rank} and {peer} have no RDMA device for each other; {need} need a cable"
    lanes = {(rank, peer): len(devices(matrix[rank][peer])) for rank, peer in pairs}
    most = max(lanes.values())
    rank, peer = max(lanes, key=lanes.__getitem__)
    if most > MAX_LANES:
        return f"rank {rank} has {most} RDMA devices for rank {peer}; JACCL uses at most {MAX_LANES}"
    if ring and len(set(lanes.values())) > 1:
        (one, other), fewer = min(lanes.items(), key=lambda item: item[1])
        unlike = (
            f"rank {rank} has {most} RDMA devices for rank {peer}, rank {one} has {fewer} for rank {other}"
        )
        return f"{unlike}; all neighbours of a ring need equally many"
    for (rank, peer), count in lanes.items():
        if count != (back := lanes[peer, rank]):
            unlike = f"rank {rank} has {count} RDMA devices for rank {peer} and {back} the other way"
            return f"{unlike}; a cable has two ends"
    return None

"""Measurements of fabrics: sizes and rounds, kept results, and their use in placement.

A result is valid for the same nodes, in any order, over the same kind of fabric.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from ..wire.cluster_messages import FabricResult
from ..wire.codecs import record
from ..wire.messages import MAX_TIMED_BYTES, MAX_TIMED_ROUNDS
from .cost_model import Collective, sum_share
from .faults import MUCH_SLOWER

SIZES = tuple(1024 * 4**i for i in range(8))  #: Bytes: 1 KiB to 16 MiB.
CHAIN_BYTES = SIZES[0]
EACH_S = 0.15  #: Approximate seconds for timing one kind of collective over one size.
SLOW_S = 0.5  #: A slower collective ends the measurement: the next size takes about four times as long.
MOST_ROUNDS = 100
LINK_BYTES = SIZES[6]  #: Size of the sums that judge a new group's links.
LINK_TRIES = 3  #: Number of these sums; the fastest counts, because a busy Mac slows others.
_TEXT = 1

_RECORD = record(FabricResult)


def sizes(row_bytes: int) -> tuple[int, ...]:
    """Return the sizes of collectives to time, in bytes, ascending. `row_bytes`: of a decoded token, or 0."""
    row = (row_bytes,) if 0 < row_bytes <= MAX_TIMED_BYTES else ()
    return tuple(sorted({*SIZES, *row}))


def rounds(once_s: float) -> int:
    """Return how many collectives of `once_s` fit in `EACH_S`, at least one."""
    return max(1, min(int(EACH_S / max(once_s, 1e-9)), MOST_ROUNDS, MAX_TIMED_ROUNDS))


def check(result: FabricResult) -> FabricResult:
    """Return the result. Raises ValueError, with the fault, if it is impossible."""
    try:
        result = _RECORD.from_wire(_RECORD.to_wire(result))
    except (TypeError, OverflowError, struct.error) as error:
        raise ValueError(str(error)) from None
    if len(result.nodes) < 2 or len(set(result.nodes)) < len(result.nodes):
        raise ValueError(f"nodes: expected several, each once, not {len(result.nodes)}")
    if not len(result.sizes) == len(result.sums_s) == len(result.gathers_s):
        raise ValueError("expected as many sums and gathers as sizes")
    if list(result.sizes) != sorted(set(result.sizes)):
        raise ValueError("sizes: expected them to grow")
    return result


def merged(kept: Iterable[FabricResult], more: Iterable[FabricResult]) -> tuple[FabricResult, ...]:
    """Return the newest result for each group and fabric, at most `MOST`, the oldest first."""
    newest = {}
    for each in sorted([*kept, *more], key=lambda result: result.at):
        newest[frozenset(each.nodes), each.backend, each.kind, each.fast_fences] = each
    return tuple(sorted(newest.values(), key=lambda result: result.at))[-FabricResult.MOST :]


def find(
    results: Iterable[FabricResult], nodes: Iterable[str], kind: str, *, fast_fences: bool
) -> FabricResult | None:
    asked = (frozenset(nodes), kind, fast_fences)
    matching = [r for r in results if (frozenset(r.nodes), r.kind, r.fast_fences) == asked]
    return matching[-1] if matching else None


def measured(results: Iterable[FabricResult], *, fast_fences: bool) -> tuple[Collective, ...]:
    """Return the measurements with such fences: placement prefers them to assumptions."""
    return tuple(
        Collective(each.kind, each.collective_s, frozenset(each.nodes), each.metal, bandwidth(each))
        for each in results
        if not each.metal or each.fast_fences == fast_fences
    )


def bandwidth(result: FabricResult) -> float:
    """Return the bytes/s of a link, by the extra time of the largest sum over the smallest; or 0."""
    more_s = result.sums_s[-1] - result.sums_s[0]
    more_bytes = (result.sizes[-1] - result.sizes[0]) * sum_share(len(result.nodes))
    return more_bytes / more_s if more_s > 0 else 0.0


def slow_link(kind: str, expected: float, ranks: int, seconds: float) -> str:
    """Return a warning if a sum of `LINK_BYTES` carries far less than `expected` bytes/s; else ""."""
    carried = LINK_BYTES * sum_share(ranks) / max(seconds, 1e-9)
    if carried * MUCH_SLOWER > expected:
        return ""
    return f"{kind} carries {carried / 1e6:,.1f} MB/s, where {expected / 1e6:,.0f} MB/s are expected"


# --- as text ----------------------------------------------------------------------------------------


def from_json(table: Any) -> FabricResult:
    """Return the result in an object of JSON. Raises ValueError."""
    names = [field.name for field in fields(FabricResult)]
    if type(table) is not dict or table.keys() != {*names}:
        raise ValueError(f"a table of exactly {', '.join(names)} is expected")
    return check(FabricResult(**table))


def to_text(results: Sequence[FabricResult]) -> str:
    return json.dumps({"format": _TEXT, "results": [asdict(each) for each in results]}, indent=1)


def from_text(text: str) -> tuple[FabricResult, ...]:
    """Parse a text of `to_text`. Raises ValueError for any other."""
    table = json.loads(text)
    if type(table) is not dict or table.get("format") != _TEXT or type(table.get("results")) is not list:
        raise ValueError(f"a table of format {_TEXT} is expected")
    return merged((), map(from_json, table["results"]))

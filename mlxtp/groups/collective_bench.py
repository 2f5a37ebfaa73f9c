"""Timing the collectives of a group: which, over how many bytes, how often."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import MlxtpError
from ..models.inspect import read_config
from ..placement import measurements
from ..placement.model_shape import shape_of
from ..wire.messages import CollectivesTimed

_ACTIVATION_BYTES = 2

#: Times collectives on all ranks: kind, bytes of each rank, how many.
Time = Callable[[str, int, int], Awaitable[CollectivesTimed]]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, as in FabricResult."""

    metal: bool
    collective_s: float
    sizes: tuple[int, ...]
    sums_s: tuple[float, ...]
    gathers_s: tuple[float, ...]


async def measure(clock: Time, row_bytes: int) -> Times:
    """Time collectives of all sizes, small ones first. Sizes that would take too long are left out.

    This node decides how many of each to run, after one of them was timed; all ranks get the same number.
    """

    async def timed(kind: str, size: int) -> float:
        once = (await clock(kind, size, 1)).seconds
        count = measurements.rounds(once)
        return (await clock(kind, size, count)).seconds if count > 1 else once

    first = await clock("chain", measurements.CHAIN_BYTES, 1)
    count = measurements.rounds(first.seconds)
    chain = await clock("chain", measurements.CHAIN_BYTES, count)
    sizes, sums, gathers = [], [], []
    for size in measurements.sizes(row_bytes):
        sizes.append(size)
        sums.append(await timed("sum", size))
        gathers.append(await timed("gather", size))
        if max(sums[-1], gathers[-1]) > measurements.SLOW_S:
            break
    return Times(chain.metal, chain.seconds, tuple(sizes), tuple(sums), tuple(gathers))


def row_bytes(folder: Path) -> int:
    """Return the bytes of one token's row in a collective of the model in `folder`; 0 if it is unreadable."""
    try:
        shape = shape_of(read_config(folder), name=folder.name)
    except MlxtpError:
        return 0
    return shape.hidden * _ACTIVATION_BYTES

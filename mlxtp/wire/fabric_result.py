"""Measurements of the collectives of one group of ranks.

`groups/fabric_bench.py` measures them, `FabricReport` carries them, `placement/measurements.py` keeps and
judges them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import U63, holding
from .codecs import boolean, choice, integer, integers, number, numbers, text, texts

MAX_SIZES = 16
_NODES = 8
_SHORTEST_S, _LONGEST_S = 1e-9, 1e4  #: limits of a plausible time: a nanosecond, and some hours


@dataclass(frozen=True, slots=True)
class FabricResult:
    """Seconds that collectives took, on the slowest rank, over `sizes` bytes of each rank.

    `nodes` are node ids in rank order; `backend` and `kind` describe how they were joined. A fence depends on
    `fast_fences` and `metal` (a GPU computes). `at` is the time of day, in seconds since 1970. `collective_s`
    is one of a chain of small sums within one graph, its fence included. `sums_s` and `gathers_s` have one
    for each of `sizes`, which grow, run one after the other.
    """

    nodes: tuple[str, ...] = holding(texts(_NODES, 32))
    backend: str = holding(choice("ring", "jaccl"))
    kind: str = holding(text(60))
    fast_fences: bool = holding(boolean())
    metal: bool = holding(boolean())
    at: int = holding(integer(0, U63))
    collective_s: float = holding(number(_SHORTEST_S, _LONGEST_S))
    sizes: tuple[int, ...] = holding(integers(1, 2**31 - 1, 1, MAX_SIZES))
    sums_s: tuple[float, ...] = holding(numbers(_SHORTEST_S, _LONGEST_S, MAX_SIZES))
    gathers_s: tuple[float, ...] = holding(numbers(_SHORTEST_S, _LONGEST_S, MAX_SIZES))

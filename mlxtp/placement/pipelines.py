"""Cuts of a model into stages, by the memory and the speed of the Macs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise

from ..wire.messages import CountedShare
from .cost_model import (
    RankHardware,
    RankMemory,
    StageCosts,
    Workload,
    hardware_of,
    rank_memory,
    rank_needs,
    stage_costs,
    stages,
    usable_bytes,
)
from .model_shape import ModelShape, StageRules
from .tables import Chip
from .topology import MemberMachine

_NEAR = 0.999  #: The search ends if no split can be faster than this share of the best time so far.
_MODELS_KEPT = 32  #: Models with cached sizes of stages, of up to 2 MB each.

Seconds = Callable[[int, int, int], float]  #: For a stage's number, its first layer, and the next stage's.


@dataclass(frozen=True, slots=True)
class Cut:
    """A model in stages: layers, memory and costs of each rank, in rank order."""

    split: tuple[int, ...]
    memory: tuple[RankMemory, ...]
    costs: tuple[StageCosts, ...]


class _StageSizes:
    """Cache of bytes and seconds of all stages of a model, from one layer to before another."""

    def __init__(self, shape: ModelShape, context: int, workload: Workload) -> None:
        self.stage = cache(shape.stage)
        self.needed = cache(lambda begin, end: sum(rank_needs(self.stage(begin, end), 1, context)))
        costs_on = cache(lambda chip: cache(lambda *at: stage_costs(self.stage(*at), RankHardware("", chip))))

        def seconds_of(chip: Chip, count: int) -> Callable[[int, int], float]:
            costs = costs_on(chip)
            return cache(lambda begin, end: costs(begin, end).request_s(workload, count))

        self.seconds_of = cache(seconds_of)  #: For layers on a chip, as one of so many stages.


_stage_sizes = lru_cache(_MODELS_KEPT)(_StageSizes)


def counted_shares(shape: ModelShape, ranks: int, split: Sequence[int]) -> tuple[CountedShare, ...]:
    """Return each rank's expected memory: of its layers in `split`, else of its share of all layers."""

    def counted(begin: int, end: int, parts: int) -> CountedShare:
        share, layers = shape.stage(begin, end), shape.model.layers
        kv = sum(layer.kv_token_bytes - layer.kv_window_bytes for layer in layers[begin:end])
        own = layers[-1].kv_token_bytes if share.mtp_kv_bytes else 0
        return CountedShare(share.rank_weights(parts), kv // min(parts, shape.kv_heads) + own)

    return tuple(counted(*span, 1) for span in stages(split)) or (counted(0, shape.layers, ranks),) * ranks


class StageCutter:
    """Search for each rank's layers, with KV caches of `context` tokens; `shared`: all on one machine."""

    def __init__(self, shape: ModelShape, context: int, workload: Workload, *, shared: bool = False) -> None:
        self._shared = shared
        self._layers = shape.layers
        self._rules = shape.rules
        self._context = context
        self._sizes = _stage_sizes(shape, context, workload)
        self._latest = cache(partial(shape.rules.latest, shape.layers))
        self._cuts: dict[object, Cut | None] = {}  #: By group, for all its fabrics.

    def split(self, ranks: Sequence[MemberMachine]) -> tuple[int, ...]:
        """Return the layers of each rank that make the slowest stage fastest; () without room. Neighbors are
        level, too: no move of a layer makes the slower of the two faster.
        """
        seconds = self._seconds(ranks)
        found = self._filled(seconds, len(ranks), math.inf)
        low, high = 0.0, _slowest_s(seconds, found)
        while low < high * _NEAR:
            middle = (low + high) / 2
            if better := self._filled(seconds, len(ranks), middle):
                found, high = better, _slowest_s(seconds, better)
            else:
                low = middle
        return _counts(_levelled(seconds, found, self._rules))

    def cut(self, ranks: Sequence[MemberMachine], split: tuple[int, ...] = ()) -> Cut | None:
        """Return the cut by `split`, or the best cut; None without room."""
        key = (tuple(rank.node_id for rank in ranks), split)
        if key not in self._cuts:
            found = split or self.split(ranks)
            self._cuts[key] = self._cut(ranks, found) if found else None
        return self._cuts[key]

    def _cut(self, ranks: Sequence[MemberMachine], split: tuple[int, ...]) -> Cut:
        pairs = [
            (rank, self._sizes.stage(*layers)) for rank, layers in zip(ranks, stages(split), strict=True)
        ]
        sharing = len(ranks) if self._shared else 1
        return Cut(
            split,
            tuple(rank_memory(rank, stage, 1, self._context, sharing=sharing) for rank, stage in pairs),
            tuple(stage_costs(stage, hardware_of(rank)) for rank, stage in pairs),
        )

    def room(self, ranks: Sequence[MemberMachine]) -> tuple[int, ...]:
        """Return the layers that fit on each rank, if the first stages take as many as possible."""
        seconds, layers = self._seconds(ranks), self._layers
        borders = self._most(seconds, len(ranks) - 1, math.inf, least=0)
        rest = range(1, layers - borders[-1] + 1)
        last = bisect_left(rest, math.inf, key=lambda count: seconds(len(ranks) - 1, layers - count, layers))
        return last, *_counts(borders)

    # --- the search: stages in the order of layers, with ascending borders ----------------------------

    def _seconds(self, ranks: Sequence[MemberMachine]) -> Seconds:
        """Return a function for the seconds of a stage: infinite if it does not fit."""
        order, sharing = ranks[::-1], len(ranks) if self._shared else 1
        available = [usable_bytes(rank) // sharing for rank in order]
        costs = [self._sizes.seconds_of(hardware_of(rank).chip, len(ranks)) for rank in order]

        @cache
        def seconds(at: int, begin: int, end: int) -> float:
            if begin == end or self._sizes.needed(begin, end) > available[at]:
                return math.inf
            return costs[at](begin, end)

        return seconds

    def _filled(self, seconds: Seconds, count: int, limit_s: float) -> list[int]:
        """Return the borders of stages under `limit_s` each; [] if they do not fit all layers."""
        borders = self._most(seconds, count, limit_s, least=1)
        return borders if borders[-1] == self._layers and len({*borders}) == len(borders) else []

    def _most(self, seconds: Seconds, count: int, limit_s: float, least: int) -> list[int]:
        """Return the borders of `count` such stages, each the longest that leaves `least` to later stages."""
        borders, latest = [0], [self._layers] * count
        if least:
            latest = self._latest(count) or [0] * count
        for at in range(count):
            begin = borders[-1]
            ends = range(begin + 1, latest[at] + 1)
            most = begin + bisect_left(ends, limit_s, key=partial(seconds, at, begin))
            borders.append(self._rules.end(begin, most))
        return borders


def _slowest_s(seconds: Seconds, borders: Sequence[int]) -> float:
    return max((seconds(at, *stage) for at, stage in enumerate(pairwise(borders))), default=0.0)


def _levelled(seconds: Seconds, borders: list[int], rules: StageRules) -> list[int]:

    def allowed_s(at: int, begin: int, end: int) -> float:
        return math.inf if rules.flaw(begin, end) else seconds(at, begin, end)

    moved = True
    while moved:
        moved = False
        for at in range(1, len(borders) - 1):
            begin, now, end = borders[at - 1 : at + 2]
            steps = (now, rules.border(now - 1, -1), rules.border(now + 1, 1))
            slower_s = {mid: max(allowed_s(at - 1, begin, mid), allowed_s(at, mid, end)) for mid in steps}
            borders[at] = min(slower_s, key=slower_s.__getitem__)  # `now` unless another is better
            moved = moved or borders[at] != now
    return borders


def _counts(borders: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in pairwise(borders))[::-1]

"""Cuts of a model into stages, by the memory and the speed of the Macs. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from .cost_model import (
    RankHardware,
    RankMemory,
    StageCosts,
    headroom_bytes,
    rank_memory,
    stage_costs,
    stages,
)
from .model_shape import ModelShape, PartShape
from .topology import MemberMachine
from .workload import Workload

_HALVINGS = 20  #: Of the interval in which the time of the slowest stage is searched.


@dataclass(frozen=True, slots=True)
class StageRank:
    """One rank of a pipeline: its hardware, its Mac, and how many ranks share that."""

    hardware: RankHardware
    member: MemberMachine
    sharing: int = 1


@dataclass(frozen=True, slots=True)
class Cut:
    """A model in stages: layers, memory and costs of each rank, in rank order."""

    split: tuple[int, ...]
    memory: tuple[RankMemory, ...]
    costs: tuple[StageCosts, ...]


class StageCutter:
    """Search for the layers of each rank, with KV caches of `context` tokens. Ranks are in rank order.

    A stage costs the seconds that it computes for the requests of `workload`. So the slowest one bounds their
    number per second.
    """

    def __init__(self, shape: ModelShape, context: int, workload: Workload) -> None:
        self._shape = shape
        self._context = context
        self._workload = workload
        self._cuts: dict[object, Cut | None] = {}  #: A group has one for all its fabrics.
        self._known: dict[tuple[RankHardware, int], tuple[list[float], dict[PartShape, float]]] = {}
        #: Seconds of a stage by its rank, the number of stages and its layers.
        self._stages: dict[tuple[StageRank, int, int, int], float] = {}

    def split(self, ranks: Sequence[StageRank]) -> tuple[int, ...]:
        """Return the layers of each rank that make the slowest stage fastest; () for no room."""
        places = self._places(ranks)
        high = max(place.seconds[-1] + place.ends_s for place in places)
        found = self._filled(places, high)
        low = 0.0
        for _ in range(_HALVINGS if found else 0):
            middle = (low + high) / 2
            if better := self._filled(places, middle):
                found, high = better, middle
            else:
                low = middle
        return tuple(reversed(self._levelled(ranks, found)))

    def cut(self, ranks: Sequence[StageRank], split: tuple[int, ...] = ()) -> Cut | None:
        """Return the cut with so many layers each, or the best one; None where there is no room for that."""
        key = (tuple(rank.member.node_id for rank in ranks), split)
        if key not in self._cuts:
            found = split or self.split(ranks)
            self._cuts[key] = self._cut(ranks, found) if found else None
        return self._cuts[key]

    def _cut(self, ranks: Sequence[StageRank], split: tuple[int, ...]) -> Cut:
        shapes = [self._shape.stage(*layers) for layers in stages(split)]
        pairs = list(zip(ranks, shapes, strict=True))
        return Cut(
            split,
            tuple(rank_memory(r.member, shape, 1, self._context, sharing=r.sharing) for r, shape in pairs),
            tuple(stage_costs(shape, r.hardware) for r, shape in pairs),
        )

    def room(self, ranks: Sequence[StageRank]) -> tuple[int, ...]:
        """Return the layers for which each rank has room, where the first stages take as many as they can."""
        return tuple(reversed(self._most(self._places(ranks), math.inf, least=0)))

    # --- the search, over places: the first stage first ----------------------------------------------

    def _filled(self, places: Sequence[_Place], limit_s: float) -> list[int]:
        """Return the layers of stages that take at most `limit_s` each; [] if they have no room for all."""
        found = self._most(places, limit_s, least=1)
        return found if sum(found) == self._shape.layers and all(found) else []

    def _most(self, places: Sequence[_Place], limit_s: float, least: int) -> list[int]:
        """Return the most layers of each stage behind those before, with `least` left to each of the rest."""
        found: list[int] = []
        begin = 0
        for place in places:
            end = self._shape.layers - least * (len(places) - 1 - len(found))
            end = max(begin, min(end, place.most(begin, limit_s)))
            found.append(end - begin)
            begin = end
        return found

    def _places(self, ranks: Sequence[StageRank]) -> list[_Place]:
        sums, needs, fixed = self._needs
        found = []
        for rank in reversed(ranks):
            seconds, took = self._seconds(rank.hardware, len(ranks))
            here = (rank is ranks[-1], rank is ranks[0])
            ends = [end for end, is_here in zip(self._shape.ends, here, strict=True) if is_here]
            available = rank_memory(
                rank.member, self._nothing, 1, self._context, sharing=rank.sharing
            ).available
            room = available - fixed - sum(needs[end] for end in ends)
            found.append(_Place(seconds, sums, sum(took[end] for end in ends), room))
        return found

    def _levelled(self, ranks: Sequence[StageRank], counts: list[int]) -> list[int]:
        """Move layers between neighbours as long as the slower of the two gains.

        The search adds up layers. In a stage, those that compute and those that read overlap, and share the
        room that is kept free.
        """
        if not counts:
            return counts

        def seconds(at: int, begin: int, end: int) -> float:
            rank = ranks[-1 - at]
            if (key := (rank, len(ranks), begin, end)) not in self._stages:
                self._stages[key] = math.inf
                shape = self._shape.stage(begin, end)
                if (
                    begin < end
                    and rank_memory(rank.member, shape, 1, self._context, sharing=rank.sharing).fits
                ):
                    costs = stage_costs(shape, rank.hardware)
                    self._stages[key] = costs.request_s(self._workload, len(ranks))
            return self._stages[key]

        borders = list(accumulate(counts, initial=0))
        moved = True
        while moved:
            moved = False
            for i in range(1, len(ranks)):
                begin, now, end = borders[i - 1 : i + 2]
                slower_s = {
                    at: max(seconds(i - 1, begin, at), seconds(i, at, end)) for at in (now, now - 1, now + 1)
                }
                borders[i] = min(slower_s, key=slower_s.__getitem__)  # `now` unless another one is better
                moved = moved or borders[i] != now
        return [end - begin for begin, end in pairwise(borders)]

    # --- sums over layers, and what each kind of part costs ------------------------------------------

    @cached_property
    def _kinds(self) -> dict[PartShape, ModelShape]:
        """Parts of unlike sizes, of which a model has two to five, as models of nothing else."""
        shape = self._shape
        return {part: shape.part(part) for part in {*shape.each_layer, *shape.ends}}

    @cached_property
    def _nothing(self) -> ModelShape:
        return self._shape.part()

    @cached_property
    def _needs(self) -> tuple[list[int], dict[PartShape, int], int]:
        """Bytes of all layers before each layer, those of each kind of part, and those of a rank without."""
        fixed = headroom_bytes(0)
        needs = {}
        for part, shape in self._kinds.items():
            headroom = headroom_bytes(part.weight_bytes) - fixed + 1  # it is rounded down
            needs[part] = part.weight_bytes + shape.rank_kv(1, self._context) + headroom
        return list(accumulate((needs[part] for part in self._shape.each_layer), initial=0)), needs, fixed

    def _seconds(self, rank: RankHardware, ranks: int) -> tuple[list[float], dict[PartShape, float]]:
        """Return the seconds of all layers before each layer on a rank, and those of each kind of part."""
        if (key := (rank, ranks)) not in self._known:
            took = {
                part: stage_costs(shape, rank).request_s(self._workload, ranks)
                for part, shape in self._kinds.items()
            }
            before = list(accumulate((took[part] for part in self._shape.each_layer), initial=0.0))
            self._known[key] = before, took
        return self._known[key]


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a stage: seconds and bytes of all layers before each layer, seconds of its ends, its room."""

    seconds: Sequence[float]
    bytes: Sequence[int]
    ends_s: float
    room: int

    def most(self, begin: int, limit_s: float) -> int:
        """Return the layer before which a stage from `begin` on has to end."""
        in_time = bisect_right(self.seconds, self.seconds[begin] + limit_s - self.ends_s)
        return min(in_time, bisect_right(self.bytes, self.bytes[begin] + self.room)) - 1

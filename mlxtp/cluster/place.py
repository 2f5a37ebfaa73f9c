"""The one planner: which group runs on which Macs, in which order, over which fabric. Pure.

What runs well keeps its Macs. Each deployment gets one group first, in order, and then its replicas: on a Mac
of its own, else free Macs together, else beside other groups. Macs that are left go to the first that gain by
them. The memory of a Mac is one account; agents on one machine share one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from heapq import heappop, heappush

from ..placement.candidates import Fabrics, preference
from ..placement.cost_model import (
    ALONE,
    FABRICS,
    JACCL,
    RankMemory,
    rank_memory,
    stages,
    usable_bytes,
)
from ..placement.faults import is_scarce
from ..placement.formation import FailedGroup
from ..placement.model_shape import MAX_RANKS, ModelShape, unknown_shape
from ..placement.planner import DEFAULT_CONTEXT, Placement, PlacementOptions, left_out, plan
from ..placement.topology import MemberMachine, Topology
from ..wire.cluster_messages import Deployment, GroupAssignment
from .cluster_state import most_groups

#: Macs among which a group is searched, the fastest ones: the time of a search grows with the square.
MOST_PLANNED = 12
MUCH = 1.1  #: Factor by which another place must be faster to be worth a word: estimates waver.
_IN_USE = "in use by another group"  #: State of RDMA on a Mac.


@dataclass(frozen=True)
class WantedDeployment:
    """One row, and what is known of its model."""

    row: Deployment
    options: PlacementOptions  #: with `nodes` as the row has it
    shape: ModelShape | None = None  #: None until a Mac has read the configuration; then the size counts
    weight_bytes: int = 0  #: 0 while unknown
    lacks: Mapping[str, str] = field(default_factory=dict)  #: by node id: why a Mac cannot load the model
    unused_s: float = 0.0  #: since its last request, or another number that orders deployments alike
    tried: tuple[FailedGroup, ...] = ()  #: failed at any time; nothing that runs is moved there

    def with_failed(self, failed: tuple[FailedGroup, ...]) -> WantedDeployment:
        return replace(self, options=replace(self.options, failed=failed))

    @cached_property
    def planned(self) -> ModelShape:
        """Its shape; one that cannot be divided stands for a model of which only the size is known."""
        return self.shape or unknown_shape(self.row.name, self.weight_bytes)


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One group as its owner reports it."""

    group: str
    ranks: tuple[str, ...]  #: node ids in rank order, the owner first; () between two epochs
    kind: str = ""
    split: tuple[int, ...] = ()
    ready: bool = True
    open_requests: int = 0
    held_bytes: Mapping[str, int] = field(default_factory=dict)  #: counts while the model's size is unknown
    used: bool = True  #: it was asked something since it is ready
    between: bool = False  #: it has no epoch, and is about to


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A group that failed too often for this version of its row, until an agent starts beside `boots`."""

    reason: str
    version: int
    boots: frozenset[str]


@dataclass(frozen=True, slots=True)
class PlaceView:
    """All inputs of a decision. Of two reports of a group the first that suits its row counts."""

    members: Sequence[MemberMachine]
    wanted: Sequence[WantedDeployment]  #: in the order of deployments
    running: Sequence[GroupReport] = ()
    draining: Collection[str] = frozenset()
    flapping: Collection[str] = frozenset()
    given_up: Mapping[str, GivenUp] = field(default_factory=dict)
    #: By group: its place in the decision before, which may be about to form.
    places: Mapping[str, GroupAssignment] = field(default_factory=dict)
    macs: int = 0  #: number of members, also those that are away


@dataclass(frozen=True, slots=True)
class PlaceDecision:
    """Assignments in the order of deployments, without what the coordinator adds to them."""

    assignments: tuple[GroupAssignment, ...]
    gives_way: tuple[str, ...] = ()  #: deployments to remove because others need the room
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  #: by group, for people


def place(view: PlaceView) -> PlaceDecision:
    """Return which group runs where. The same view always gives the same decision."""
    packing = _Packing(view)
    packing.keep()
    for wanted in view.wanted:
        packing.seat_first(wanted)
    for wanted in view.wanted:
        packing.seat_replicas(wanted)
    packing.part()
    packing.extend()
    new = {group: seat for group, seat in packing.seats.of.items() if not seat.kept}
    notes = {group: (*packing.facts.left_out(group), *seat.notes) for group, seat in new.items()}
    return PlaceDecision(tuple(packing.assignments()), tuple(packing.gone), notes)


@dataclass(frozen=True, slots=True)
class _Seat:
    """Macs of a group in rank order, the bytes that each rank needs, and its least KV cache among them.

    `kept`: it runs there. The rest as in `GroupAssignment`.
    """

    ranks: tuple[str, ...]
    each: tuple[int, ...]
    kv: int
    kind: str = ALONE
    split: tuple[int, ...] = ()
    kept: bool = False
    faster: str = ""
    notes: tuple[str, ...] = ()


def _seat_of(ranks: tuple[str, ...], memory: Sequence[RankMemory]) -> _Seat:
    return _Seat(ranks, tuple(rank.needed for rank in memory), max(rank.kv for rank in memory))


class _Seats:
    """Seats of groups, and the account of each Mac, by node id. `shared`: one account for all."""

    def __init__(self, usable: Mapping[str, int], *, shared: bool) -> None:
        self.usable = usable
        self.shared = shared
        self.of: dict[str, _Seat] = {}
        self.on: dict[str, set[str]] = {node: set() for node in usable}  #: Groups with a rank there.
        self._taken = dict.fromkeys(usable, 0)

    def put(self, group: str, seat: _Seat) -> None:
        self.drop(group)
        self.of[group] = seat
        for node in seat.ranks:
            self.on[node].add(group)
        self._count(seat, 1)

    def drop(self, group: str) -> None:
        if seat := self.of.pop(group, None):
            for node in seat.ranks:
                self.on[node].discard(group)
            self._count(seat, -1)

    def back(self, before: Mapping[str, _Seat]) -> None:
        for group in [each for each, seat in self.of.items() if seat is not before.get(each)]:
            self.drop(group)
        for group in before.keys() - self.of.keys():
            self.put(group, before[group])

    def left(self, node: str) -> int:
        """Return the bytes of this Mac that are not set aside; less than 0 if memory has shrunk."""
        return self.usable[node] - self._taken[node]

    def kv_mib(self, seat: _Seat) -> int:
        """Return a rank's room for KV caches: the least, and an equal share of what its Mac has left."""
        ranks = {n: sum(map(len, self.on.values())) if self.shared else len(self.on[n]) for n in seat.ranks}
        if max(ranks.values()) == (len(seat.ranks) if self.shared else 1):
            return 0
        return max(1, seat.kv + min(max(0, self.left(n) // ranks[n]) for n in ranks) >> 20)

    def movable(self, node: str) -> str:
        """Return the group on this Mac, if it is the only one, needs no other Mac and does not run yet."""
        there = "" if self.shared or len(self.on[node]) != 1 else next(iter(self.on[node]))
        return there if there and not self.of[there].kept and len(self.of[there].ranks) == 1 else ""

    def _count(self, seat: _Seat, sign: int) -> None:
        for rank, needed in zip(seat.ranks, seat.each, strict=True):
            for node in self.usable if self.shared else (rank,):
                self._taken[node] += sign * needed


class _Facts:
    """A view, looked up: members with the preferred first, the best report of each group, what ranks need."""

    def __init__(self, view: PlaceView) -> None:
        self.view = view
        self.members = {m.node_id: m for m in sorted(view.members, key=lambda m: m.node_id)}
        self.shared = Topology(view.members).is_one_machine
        if self.shared:
            held = sum(m.held_bytes for m in view.members)
            self.members = {node: replace(m, held_bytes=held) for node, m in self.members.items()}
        self.usable = {node: usable_bytes(m) for node, m in self.members.items()}
        self.order = sorted(self.members, key=self._preference)
        self.by_name = {wanted.row.name: wanted for wanted in view.wanted}
        self.need = cache(self._need)
        self.allowed = {name: self._allowed(wanted) for name, wanted in self.by_name.items()}
        self.reports: dict[str, GroupReport] = {}  #: The best one of each group.
        for each in sorted(self._known(), key=lambda report: (not self.suits(report), not report.ready)):
            self.reports.setdefault(each.group, each)
        self.most = most_groups([each.row for each in view.wanted], max(view.macs, len(view.members)))
        self.groups = {name: self._groups(wanted) for name, wanted in self.by_name.items()}
        turns = (each for groups in self.groups.values() for each in enumerate(groups))
        #: Places of groups in the order in which they are seated: replicas come after all first groups.
        self.turn = {
            group: turn for turn, (_, group) in enumerate(sorted(turns, key=lambda each: each[0] > 0))
        }

    def _known(self) -> Iterator[GroupReport]:
        """Yield the reports of wanted groups; those that are not ready are where their owners form them.

        One that is on its way to end, because another owner has the group now, does not count.
        """
        for report in self.view.running:
            place = self.view.places.get(report.group)
            if _name(report.group) not in self.by_name:
                continue
            if report.ready or place is None:
                if report.ranks:
                    yield report
            elif report.between or report.ranks[0] == place.owner:
                yield replace(report, ranks=place.ranks, kind=place.kind, split=place.split)

    def _preference(self, node: str, model: str = "") -> tuple[object, ...]:
        return node in self.view.flapping, *preference(self.members[node], model)

    def _allowed(self, wanted: WantedDeployment) -> list[str]:
        on, model = wanted.row.on, wanted.planned.name
        order = sorted(self.members, key=lambda node: self._preference(node, model))
        return [n for n in order if n not in self.view.draining and (not on or n in on)]

    def _groups(self, wanted: WantedDeployment) -> list[str]:
        """Return the ids of the groups that are wanted: what runs well, what else runs, new ones."""
        name, reports = wanted.row.name, self.reports
        count = min(wanted.row.replicas or max(1, len(self.allowed[name])), self.most[name])
        running = {group for group in reports if _name(group) == name}

        def key(group: str) -> tuple[object, ...]:
            report = reports.get(group)
            return not self.well(group), report is None or not report.ready, report is None, _index(group)

        return sorted(running | {f"{name}#{i}" for i in range(count)}, key=key)[:count]

    def well(self, group: str) -> bool:
        report, wanted = self.reports.get(group), self.by_name[_name(group)]
        if report is None or self.again(group) or self._moves_on(group) or self.given_up(wanted, group):
            return False
        return self.suits(report)

    def again(self, group: str) -> bool:
        place = self.view.places.get(group)
        return place is not None and place.again != self.by_name[_name(group)].row.again

    def _moves_on(self, group: str) -> bool:
        """Return whether a person's word has given it another place than the one where it still runs."""
        report, place = self.reports.get(group), self.view.places.get(group)
        if report is None or place is None or not (report.ready and self.by_name[_name(group)].row.again):
            return False
        there = report.ranks == place.ranks and (
            len(place.ranks) == 1 or (report.kind, report.split) == (place.kind, place.split)
        )
        return not there and self.members.keys() >= set(place.ranks)

    def suits(self, report: GroupReport) -> bool:
        wanted = self.by_name[_name(report.group)]
        options, size, way = wanted.options, len(report.ranks), "pipeline" if report.split else "tensor"
        if not set(self.allowed[wanted.row.name]) >= set(report.ranks):
            return False
        if options.nodes not in ("auto", "all", size) or (options.split and options.split != report.split):
            return False
        if size > 1 and report.kind in FABRICS and options.parallel not in ("auto", way):
            return False
        lack = set(report.ranks) & wanted.lacks.keys()
        return report.ready or not (0 < len(lack) < size or self._failed(report, options))

    def _failed(self, report: GroupReport, options: PlacementOptions) -> bool:
        if len(report.ranks) == 1 or report.kind not in FABRICS:
            return False
        topology = Topology(list(self.members.values()), options.rdma, options.fabric_networks)
        wired = Fabrics(self.members, topology).wired(report.kind, report.ranks, options)
        return wired.verdict == "refused"

    def given_up(self, wanted: WantedDeployment, group: str) -> str:
        given = self.view.given_up.get(group)
        boots = {m.boot_id for m in self.view.members}
        return given.reason if given and given.version == wanted.row.version and boots <= given.boots else ""

    def _need(self, name: str, size: int, split: tuple[int, ...] = ()) -> _Seat:
        """Return what each of so many ranks needs, or those of a pipeline, without the Macs."""
        wanted, any_member = self.by_name[name], next(iter(self.members.values()))
        shape = wanted.planned
        context = min(wanted.options.max_context or DEFAULT_CONTEXT, shape.max_context)
        if (len(split), sum(split)) == (size, shape.layers):  # not where one machine has several ranks
            cut = [rank_memory(any_member, shape.stage(*layers), 1, context) for layers in stages(split)]
            return _seat_of((), cut)
        return _seat_of((), [rank_memory(any_member, shape, size, context)] * size)

    def left_out(self, group: str) -> list[str]:
        name, lacks = _name(group), self.by_name[_name(group)].lacks
        return left_out((self.members[node].name, lacks.get(node, "")) for node in self.allowed[name])

    def must(self, group: str) -> str:
        """Return the Mac that owns a group best if it can: the one that runs it, else the last one."""
        report = self.reports.get(group)
        if self.again(group):
            return ""
        stay = self.members.keys() - self.view.draining
        if report and not self._moves_on(group) and stay >= set(report.ranks):
            return report.ranks[0]  # not as its row has it now: it changes it in place
        place = self.view.places.get(group)
        return place.owner if place else ""


class _Packing:
    def __init__(self, view: PlaceView) -> None:
        self.facts = _Facts(view)
        self.view = view
        self.seats = _Seats(self.facts.usable, shared=self.facts.shared)
        self.gone: list[str] = []

    # --- groups that run -----------------------------------------------------------------------------

    def keep(self) -> None:
        """Seat the groups that run well where they run; one that forms again, over the best fabric there.

        Of two replicas on one Mac, which a coordinator that did not know the first has made, one moves.
        """
        for groups in self.facts.groups.values():
            for group in [each for each in groups if self.facts.well(each)]:
                if not any(self.seats.on[node] & set(groups) for node in self.facts.reports[group].ranks):
                    self._stay(group)
        for group in list(self.seats.of):
            report, wanted = self.facts.reports[group], self.facts.by_name[_name(group)]
            if report.between and len(report.ranks) > 1:
                again = replace(wanted, options=replace(wanted.options, nodes=len(report.ranks)))
                seat = self.seats.of[group]
                self.seats.drop(group)
                if not self._spread(again, group, report.ranks):
                    self.seats.put(group, seat)

    def _stay(self, group: str) -> None:
        report, name = self.facts.reports[group], _name(group)
        seat = self.facts.need(name, len(report.ranks), report.split)
        if not self.facts.by_name[name].planned.weight_bytes:
            held = max(report.held_bytes.values(), default=0)
            seat = replace(seat, each=(held,) * len(report.ranks))
        self.seats.put(
            group, replace(seat, ranks=report.ranks, kind=report.kind, split=report.split, kept=True)
        )

    def _linger(self, wanted: WantedDeployment, group: str) -> None:
        """Leave a group on Macs that are about to stop, or that it was to leave, if it has no other place."""
        report, on = self.facts.reports.get(group), wanted.row.on or self.facts.members
        if group in self.seats.of or report is None:
            return
        if not self.facts.members.keys() & set(on) >= set(report.ranks):
            return
        stay = [node for node in report.ranks if node not in self.view.draining]
        need = self.facts.need(wanted.row.name, len(report.ranks), report.split)
        needed = dict(zip(report.ranks, need.each, strict=True))
        leaves = len(stay) < len(report.ranks) or self.facts.again(group)
        if leaves and all(self.seats.left(node) >= needed[node] for node in stay):
            self._stay(group)

    # --- new groups ----------------------------------------------------------------------------------

    def seat_first(self, wanted: WantedDeployment) -> None:
        """Seat one group of a deployment; replicas and deployments after it give way if it needs the room."""
        groups = self.facts.groups[wanted.row.name]
        if wanted.row.name in self.gone or any(group in self.seats.of for group in groups):
            return
        group = next((each for each in groups if not self.facts.given_up(wanted, each)), "")
        # Where all that is left has failed before, it may have passed.
        if group and not (
            self._seat(wanted, group)
            or (wanted.options.failed and self._seat(wanted.with_failed(()), group))
            or self._make_room(wanted, group)
        ):
            self._linger(wanted, group)

    def seat_replicas(self, wanted: WantedDeployment) -> None:
        groups, full = self.facts.groups[wanted.row.name], False
        if not any(group in self.seats.of for group in groups):
            return
        for group in groups:
            if group not in self.seats.of and not self.facts.given_up(wanted, group):
                full = full or not self._seat(wanted, group)
                self._linger(wanted, group)

    def _pool(self, wanted: WantedDeployment) -> list[str]:
        """Return the Macs that may serve another group of a deployment, the preferred first."""
        groups = set(self.facts.groups[wanted.row.name])
        return [
            node
            for node in self.facts.allowed[wanted.row.name]
            if node not in wanted.lacks and groups.isdisjoint(self.seats.on[node])
        ]

    def _seat(self, wanted: WantedDeployment, group: str) -> bool:
        """Seat a group: alone on a free Mac, on several free ones, beside another group, or over all.

        Where a way to share is set, the ways over several Macs come first.
        """
        seats, pool, options = self.seats, self._pool(wanted), wanted.options
        if not wanted.planned.weight_bytes or not pool:
            return False
        alone = options.nodes in ("auto", "all", 1)
        free = [node for node in pool if not seats.on[node]]
        steady = [node for node in free if node not in self.view.flapping]
        if options.nodes == "auto" and options.parallel != "auto":
            ways = dict.fromkeys(map(tuple, (steady, free, pool)))
            if any(self._spread(wanted, group, macs, fewest=2) for macs in ways):
                return True
        if not all(seats.on.values()):
            if alone and self._alone(group):
                return True
            if self._spread(wanted, group, steady) or (free != steady and self._spread(wanted, group, free)):
                return True
        need = self.facts.need(wanted.row.name, 1)
        if alone and (able := [node for node in pool if seats.left(node) >= need.each[0]]):
            best = min(able, key=lambda node: len(seats.on[node]))  # the preferred one of these
            seats.put(group, replace(need, ranks=(best,)))
            return True
        return self._spread(wanted, group, pool)

    def _alone(self, group: str) -> bool:
        """Give a group a Mac of its own; groups that do not run yet move on to other free ones for it.

        The earliest group that moves comes as late as possible.
        """
        seats, mover = self.seats, group
        comes: dict[str, str] = {}  #: By node, the group that would move there.
        front: list[tuple[int, str]] = []  #: Macs whose group may move on; the latest group is first.
        while True:
            must, need = self.facts.must(mover), self.facts.need(_name(mover), 1)
            pool = [n for n in self._pool(self.facts.by_name[_name(mover)]) if n not in comes]
            for node in sorted(pool, key=lambda node: node != must):
                if not seats.on[node] and seats.left(node) >= need.each[0]:
                    self._move(mover, node, comes)
                    return True
                if seats.usable[node] >= need.each[0] and (there := seats.movable(node)):
                    comes[node] = mover
                    heappush(front, (-self.facts.turn[there], node))
            if not front:
                return False
            (mover,) = seats.on[heappop(front)[1]]

    def _move(self, group: str, node: str, comes: Mapping[str, str]) -> None:
        """Seat a group on a free Mac, and on the one that it leaves the group that comes there."""
        while True:
            before = self.seats.of.get(group)
            self.seats.put(group, replace(self.facts.need(_name(group), 1), ranks=(node,)))
            if before is None or before.ranks[0] not in comes:
                return
            node = before.ranks[0]
            group = comes[node]

    def _spread(self, wanted: WantedDeployment, group: str, pool: Sequence[str], *, fewest: int = 1) -> bool:
        """Seat a group where the planner has it among these Macs, unless that is on less than `fewest`."""
        shape, name, must = wanted.planned, wanted.row.name, self.facts.must(group)
        left = {node: self.seats.left(node) for node in pool}
        sizes = [n for n in range(fewest, min(MAX_RANKS, len(pool)) + 1) if not shape.obstacles(n)]
        needs = {
            n: self.facts.need(name, n).each[0] for n in sizes if wanted.options.nodes in ("auto", "all", n)
        }
        least = min(needs.values(), default=0)
        if shape.cuttable and wanted.options.parallel != "tensor" and len(pool) > 1:
            least = shape.weight_bytes // shape.layers  # of a stage of one layer
        elif not any(sum(room >= need for room in left.values()) >= n for n, need in needs.items()):
            return False  # the planner needs longer to find that
        able = [node for node in pool if left[node] >= least]
        if sum(left[node] for node in able) < shape.weight_bytes:
            return False
        place = {node: place for place, node in enumerate(self.facts.allowed[name])}
        able.sort(key=lambda node: (node != must, place.get(node, len(place))))
        placement = self._plan(wanted, able[:MOST_PLANNED], must)
        chosen = placement.chosen
        if chosen is None or chosen.nodes < fewest:
            return False
        seat = _seat_of(chosen.ranks, chosen.memory)
        self.seats.put(group, replace(seat, kind=chosen.kind, split=chosen.split, notes=placement.notes))
        return True

    def _plan(self, wanted: WantedDeployment, nodes: Sequence[str], must: str = "") -> Placement:
        """Return the planner's choice among these Macs, with what other groups leave of them."""
        members, seats = [], self.seats
        for node in nodes:
            member = replace(self.facts.members[node], taken_bytes=seats.usable[node] - seats.left(node))
            if any(len(seats.of[group].ranks) > 1 for group in seats.on[node]):
                member = without_rdma(member)
            members.append(replace(member, lack=wanted.lacks.get(node, "")))
        return plan(members, wanted.planned, must, wanted.options)

    def _refusal(self, wanted: WantedDeployment) -> str:
        """Return why another group of a deployment has no place, with a number."""
        allowed, groups = self.facts.allowed[wanted.row.name], set(self.facts.groups[wanted.row.name])
        if not wanted.planned.weight_bytes and not wanted.lacks.keys() >= set(allowed):
            return f"the size of its model is known on 0 of {len(self.facts.members)} Macs"
        left = [node for node in allowed if groups.isdisjoint(self.seats.on[node])]
        if not allowed:
            return f"0 of the {len(self.facts.members)} Macs here may serve it and stay"
        if not left:
            macs = f"each of the {len(allowed)} Macs" if len(allowed) > 1 else "the 1 Mac"
            why = f"{macs} that may serve it has a group of it"
            several = any(len(seat.ranks) > 1 for group, seat in self.seats.of.items() if group in groups)
            return why + several * "; `mlxtp serve MODEL --nodes 1` has a group use one Mac"
        # Those that lack the model come first: people can mend that.
        left.sort(key=lambda node: (node not in wanted.lacks, -self.seats.left(node), node))
        left = left[:MAX_RANKS]
        why = self._plan(wanted, left).reason
        auto = replace(wanted, options=replace(wanted.options, nodes="auto"))
        if isinstance(wanted.options.nodes, int) and self._plan(auto, left).chosen is not None:
            why += "; `mlxtp serve MODEL --nodes auto` uses the Macs that are here"
        return why

    def part(self) -> None:
        """Move new groups that share a Mac, although one that they can have for themselves is still free."""
        for group in [each for groups in self.facts.groups.values() for each in groups]:
            seat = self.seats.of.get(group)
            if seat and not seat.kept and len(seat.ranks) == 1 and len(self.seats.on[seat.ranks[0]]) > 1:
                self._alone(group)

    # --- room ----------------------------------------------------------------------------------------

    def _make_room(self, wanted: WantedDeployment, group: str) -> bool:
        """Seat a group in place of as few others as need be; else leave all as it is."""
        before, units = dict(self.seats.of), self._giving_way(wanted)

        def fits(without: Sequence[tuple[str, ...]]) -> bool:
            self.seats.back(before)
            for each in (each for unit in without for each in unit):
                self.seats.drop(each)
            return self._seat(wanted, group)

        if not units or not fits(units):
            self.seats.back(before)
            return False
        for unit in reversed(units):
            if fits(fewer := [each for each in units if each is not unit]):
                units = fewer
        fits(units)
        names, seated = set(map(_name, before)), set(map(_name, self.seats.of))
        self.gone += [each.row.name for each in self.view.wanted if each.row.name in names - seated]
        return True

    def _giving_way(self, wanted: WantedDeployment) -> list[tuple[str, ...]]:
        """Return groups that may give way, in turn: replicas, then whole deployments by their last use."""
        place = self.view.wanted.index(wanted)
        replicas, whole = [], []
        for i, other in enumerate(self.view.wanted):
            seated = [group for group in self.facts.groups[other.row.name] if group in self.seats.of]
            replicas += [(group,) for group in seated[1:]]
            busy = any(
                self.facts.reports[group].open_requests for group in seated if group in self.facts.reports
            )
            if seated and i > place and not other.row.pinned and (wanted.row.pinned or not busy):
                whole.append((other.unused_s, i, tuple(seated)))
        return replicas[::-1] + [unit for _, _, unit in sorted(whole, reverse=True)]

    # --- the result ----------------------------------------------------------------------------------

    def extend(self) -> None:
        """Let the first deployments that may use more have Macs without a group."""
        free = [n for n in self.facts.order if not self.seats.on[n] and n not in self.view.flapping]
        for wanted in self.view.wanted:
            group = next((g for g in self.facts.groups[wanted.row.name] if g in self.seats.of), "")
            if not group:
                continue
            usable = set(self.facts.allowed[wanted.row.name]) - wanted.lacks.keys()
            more = [node for node in free if node in usable and wanted.options.nodes in ("auto", "all")]
            if not more and (len(self.seats.of[group].ranks) == 1 or not self.seats.of[group].kept):
                continue
            if not set(self.seats.of[group].ranks).isdisjoint(self.view.draining):
                continue
            before = self.seats.of[group]
            self.seats.drop(group)
            given = wanted.with_failed(wanted.tried) if before.kept else wanted
            if not self._spread(given, group, [*before.ranks, *more]):
                self.seats.put(group, before)
            elif before.kept:
                after = self.seats.of[group]
                self.seats.drop(group)
                faster = self._faster(wanted, before, after)
                moves = self._moves(wanted, self.facts.reports[group], after, faster=bool(faster))
                self.seats.put(group, after if moves else replace(before, faster=faster))
            free = [node for node in free if not self.seats.on[node]]

    def _moves(self, wanted: WantedDeployment, report: GroupReport, after: _Seat, *, faster: bool) -> bool:
        """Return whether a running group takes the place that was found for it among more Macs."""
        if not report.ready or len(after.ranks) <= len(report.ranks):
            return False
        ports = (port for node in after.ranks for port in self.facts.members[node].machine.ports)
        if report.kind in JACCL and any(is_scarce(port.formations) for port in ports):
            return False  # it works, and its place may be one that cannot form
        return wanted.options.nodes == "all" or (faster and not report.used and not report.open_requests)

    def _faster(self, wanted: WantedDeployment, before: _Seat, after: _Seat) -> str:
        """Return in words how much sooner a group would answer in another place; empty if not by much."""
        times = []
        for seat in (before, after):
            options = replace(wanted.options, nodes=len(seat.ranks), split=seat.split, failed=())
            if len(seat.ranks) > 1:
                backend = "jaccl" if seat.kind in JACCL else "ring"
                options = replace(options, backend=backend, parallel="pipeline" if seat.split else "tensor")
            found = self._plan(replace(wanted, options=options), seat.ranks, seat.ranks[0]).chosen
            times.append(found.request_seconds(options.workload) if found is not None else math.inf)
        if not times[1] * MUCH < times[0] < math.inf:
            return ""
        names = " + ".join(self.facts.members[node].name for node in after.ranks)
        work = wanted.options.workload.name
        return f"{after.kind} of {names}: {times[1]:.1f} s per {work} request instead of {times[0]:.1f}"

    def assignments(self) -> Iterator[GroupAssignment]:
        for wanted in self.view.wanted:
            row, why = wanted.row, ""
            groups = self.facts.groups[row.name] if row.name not in self.gone else []
            for group in sorted(groups, key=_index):
                found = GroupAssignment(group, row.name)
                if seat := self.seats.of.get(group):
                    yield replace(
                        found,
                        ranks=seat.ranks,
                        kind=seat.kind,
                        split=seat.split,
                        kv_mib=self.seats.kv_mib(seat),
                        faster=seat.faster,
                        again=row.again,
                    )
                elif given := self.facts.given_up(wanted, group):
                    yield replace(found, why=given)
                elif row.replicas or group == groups[0]:
                    why = why or self._refusal(wanted)
                    yield replace(found, why=why)


def without_rdma(member: MemberMachine) -> MemberMachine:
    """Return a Mac whose RDMA devices serve another group. A device serves one."""
    return replace(member, machine=replace(member.machine, rdma=_IN_USE))


def _name(group: str) -> str:
    return group.rpartition("#")[0]


def _index(group: str) -> int:
    return int(group.rpartition("#")[2])

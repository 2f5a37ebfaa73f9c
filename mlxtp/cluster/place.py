"""The planner of the whole cluster: assigns groups to Macs and fabrics, without I/O or clock.

A group that runs well keeps its Macs. In order, each deployment gets one group, then its replicas: on a free
Mac, else on several free Macs, else next to other groups. The first deployments that gain from the remaining
Macs get them. Each Mac has an account of its memory; agents on one machine share it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from heapq import heappop, heappush

from ..placement.candidates import Fabrics, preference
from ..placement.cost_model import ALONE, FABRICS, JACCL, RankMemory, rank_memory, stages, usable_bytes
from ..placement.faults import is_scarce
from ..placement.formation import FailedGroup
from ..placement.model_shape import MAX_RANKS, ModelShape, unknown_shape
from ..placement.planner import DEFAULT_CONTEXT, Placement, PlacementOptions, left_out, plan
from ..placement.topology import MemberMachine, Topology
from ..wire.cluster_messages import Deployment, GroupAssignment, Machine
from .cluster_state import most_groups

MOST_PLANNED = 12  #: Fastest Macs to consider for a group: the time of a search grows with the square.
MUCH = 1.1  #: Factor of speed that makes another place worth reporting: estimates are rough.
_IN_USE = "in use by another group"  #: State of RDMA on a Mac.


@dataclass(frozen=True)
class WantedDeployment:
    row: Deployment
    options: PlacementOptions  #: with `nodes` as the row has it
    shape: ModelShape | None = None  #: None until a Mac has read the configuration
    weight_bytes: int = 0  #: 0 while unknown
    lacks: Mapping[str, str] = field(default_factory=dict)  #: why a Mac cannot load the model, by node id
    unused_s: float = 0.0  #: since its last request, or a number with the same order of deployments
    tried: tuple[FailedGroup, ...] = ()  #: failed at any time: no running group moves there

    def with_failed(self, failed: tuple[FailedGroup, ...]) -> WantedDeployment:
        return replace(self, options=replace(self.options, failed=failed))

    @cached_property
    def planned(self) -> ModelShape:
        """Its shape; without one, an indivisible shape of its size."""
        return self.shape or unknown_shape(self.row.name, self.weight_bytes)


@dataclass(frozen=True, slots=True)
class GroupReport:
    group: str
    ranks: tuple[str, ...]  #: node ids in rank order, the owner first; () between two epochs
    kind: str = ""
    split: tuple[int, ...] = ()
    ready: bool = True
    open_requests: int = 0
    held_bytes: Mapping[str, int] = field(default_factory=dict)  #: counts while the model's size is unknown
    used: bool = True  #: it has had a request since it became ready
    between: bool = False  #: it is about to form an epoch


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A group that failed too often, until its row has another version, or an agent not in `boots` starts."""

    reason: str
    version: int
    boots: frozenset[str]


@dataclass(frozen=True, slots=True)
class PlaceView:
    """All inputs of a decision. If a group has two reports, the first that suits its row counts."""

    members: Sequence[MemberMachine]
    wanted: Sequence[WantedDeployment]  #: in the order of deployments
    running: Sequence[GroupReport] = ()
    draining: Collection[str] = frozenset()
    flapping: Collection[str] = frozenset()
    given_up: Mapping[str, GivenUp] = field(default_factory=dict)
    #: Places in the previous decision, by group: it may be about to form there.
    places: Mapping[str, GroupAssignment] = field(default_factory=dict)
    macs: int = 0  #: number of members, present or not


@dataclass(frozen=True, slots=True)
class PlaceDecision:
    """Assignments in the order of deployments, which the coordinator completes."""

    assignments: tuple[GroupAssignment, ...]
    gives_way: tuple[str, ...] = ()  #: deployments to remove because others need the room
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  #: by group, for people


def place(view: PlaceView) -> PlaceDecision:
    """Return the place of each group. Equal views give equal decisions."""
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
    """Place of a group. Other fields as in `GroupAssignment`."""

    ranks: tuple[str, ...]
    each: tuple[int, ...]  #: Bytes that each rank needs.
    kv: int  #: Bytes of these for KV caches, at least.
    kind: str = ALONE
    split: tuple[int, ...] = ()
    kept: bool = False  #: It runs there.
    faster: str = ""
    notes: tuple[str, ...] = ()


def _seat_of(ranks: tuple[str, ...], memory: Sequence[RankMemory]) -> _Seat:
    return _Seat(ranks, tuple(rank.needed for rank in memory), max(rank.kv for rank in memory))


class _Seats:
    """Seats of groups, and each Mac's account of memory; `shared`: one account for all Macs."""

    def __init__(self, usable: Mapping[str, int], *, shared: bool) -> None:
        self.usable = usable
        self.shared = shared
        self.of: dict[str, _Seat] = {}
        self.on: dict[str, set[str]] = {node: set() for node in usable}  #: Groups with a rank on a Mac.
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
        """Return a Mac's bytes that are not set aside; negative if its memory shrank."""
        return self.usable[node] - self._taken[node]

    def too_full(self, node: str, machine: Machine) -> bool:
        """Return True if several groups need more than a Mac has, even where no other program runs."""
        most = machine.gpu_bytes or machine.memory_bytes  # 0: not known yet
        return len(self.of if self.shared else self.on[node]) > 1 and 0 < most < self._taken[node]

    def kv_mib(self, seat: _Seat) -> int:
        """Return a rank's limit of KV caches: its least need, and an equal share of its Mac's free memory.
        0 if no Mac has a rank of another group.
        """
        ranks = {n: sum(map(len, self.on.values())) if self.shared else len(self.on[n]) for n in seat.ranks}
        if max(ranks.values()) == (len(seat.ranks) if self.shared else 1):
            return 0
        return max(1, seat.kv + min(max(0, self.left(n) // ranks[n]) for n in ranks) >> 20)

    def movable(self, node: str) -> str:
        """Return the only group on this Mac, if it uses no other Mac and does not run yet; else ""."""
        there = "" if self.shared or len(self.on[node]) != 1 else next(iter(self.on[node]))
        return there if there and not self.of[there].kept and len(self.of[there].ranks) == 1 else ""

    def _count(self, seat: _Seat, sign: int) -> None:
        for rank, needed in zip(seat.ranks, seat.each, strict=True):
            for node in self.usable if self.shared else (rank,):
                self._taken[node] += sign * needed


class _Facts:
    """Derived facts of a view: members by preference, the best report of each group, needs of ranks."""

    def __init__(self, view: PlaceView) -> None:
        self.view = view
        self.members = {m.node_id: m for m in sorted(view.members, key=lambda m: m.node_id)}
        self.shared = Topology(view.members).is_one_machine
        if self.shared:
            held = sum(m.held_bytes for m in view.members)
            self.members = {node: replace(m, held_bytes=held) for node, m in self.members.items()}
        self.usable = {node: usable_bytes(m) for node, m in self.members.items()}
        self.by_name = {wanted.row.name: wanted for wanted in view.wanted}
        self.need = cache(self._need)
        self.allowed = {name: self._allowed(wanted) for name, wanted in self.by_name.items()}
        self.reports: dict[str, GroupReport] = {}  #: The best report of each group.
        for each in sorted(self._known(), key=lambda report: (not self.suits(report), not report.ready)):
            self.reports.setdefault(each.group, each)
        self.most = most_groups([each.row for each in view.wanted], max(view.macs, len(view.members)))
        self.groups = {name: self._groups(wanted) for name, wanted in self.by_name.items()}
        turns = (each for groups in self.groups.values() for each in enumerate(groups))
        #: Turns of groups to be seated: all first groups, then replicas.
        self.turn = {
            group: turn for turn, (_, group) in enumerate(sorted(turns, key=lambda each: each[0] > 0))
        }

    def _known(self) -> Iterator[GroupReport]:
        """Yield the reports of wanted groups. A group that is not ready counts where its owner is to form it,
        and not at all at an earlier owner.
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

    def _preference(self, node: str, model: str) -> tuple[object, ...]:
        return node in self.view.flapping, *preference(self.members[node], model)

    def _allowed(self, wanted: WantedDeployment) -> list[str]:
        on, model = wanted.row.on, wanted.planned.name
        order = sorted(self.members, key=lambda node: self._preference(node, model))
        return [n for n in order if n not in self.view.draining and (not on or n in on)]

    def _groups(self, wanted: WantedDeployment) -> list[str]:
        """Return the ids of the wanted groups: groups that run well, other running groups, new groups."""
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
        """Return True if it still runs, but has another place since users requested a new placement."""
        report, place = self.reports.get(group), self.view.places.get(group)
        if report is None or place is None or not self.by_name[_name(group)].row.again:
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
        if report.kind in FABRICS and options.parallel not in ("auto", way):
            return False
        lack = set(report.ranks) & wanted.lacks.keys()
        return report.ready or not (0 < len(lack) < size or self._failed(report, options))

    def _failed(self, report: GroupReport, options: PlacementOptions) -> bool:
        if report.kind not in FABRICS:
            return False
        topology = Topology(list(self.members.values()), options.rdma, options.fabric_networks)
        wired = Fabrics(self.members, topology).wired(report.kind, report.ranks, options)
        return wired.verdict == "refused"

    def given_up(self, wanted: WantedDeployment, group: str) -> str:
        given = self.view.given_up.get(group)
        boots = {m.boot_id for m in self.view.members}
        return given.reason if given and given.version == wanted.row.version and boots <= given.boots else ""

    def _need(self, name: str, size: int, split: tuple[int, ...] = ()) -> _Seat:
        """Return a seat without Macs: the needs of so many ranks, or of a pipeline's stages."""
        wanted, any_member = self.by_name[name], next(iter(self.members.values()))
        shape = wanted.planned
        context = min(wanted.options.max_context or DEFAULT_CONTEXT, shape.max_context)
        if (len(split), sum(split)) == (size, shape.layers):  # not if one machine has several ranks
            cut = [rank_memory(any_member, shape.stage(*layers), 1, context) for layers in stages(split)]
            return _seat_of((), cut)
        return _seat_of((), [rank_memory(any_member, shape, size, context)] * size)

    def left_out(self, group: str) -> list[str]:
        name, lacks = _name(group), self.by_name[_name(group)].lacks
        return left_out((self.members[node].name, lacks.get(node, "")) for node in self.allowed[name])

    def must(self, group: str) -> str:
        """Return the preferred owner of a group: the present owner, else the last assigned; may be ""."""
        report = self.reports.get(group)
        if self.again(group):
            return ""
        stay = self.members.keys() - self.view.draining
        if report and not self._moves_on(group) and stay >= set(report.ranks):
            return report.ranks[0]  # even if its row changed: the owner forms it again in place
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
        """Seat groups that run well where they run; if they form again, over the best fabric of their Macs.

        If a coordinator put two replicas on one Mac, unaware of the first, or groups that need more than it
        has, one of them moves.
        """
        well = [each for groups in self.facts.groups.values() for each in groups if self.facts.well(each)]
        for group in sorted(well, key=lambda each: not self.facts.reports[each].ready):
            ranks, groups = self.facts.reports[group].ranks, set(self.facts.groups[_name(group)])
            if not any(self.seats.on[node] & groups for node in ranks):
                self._stay(group)
                if any(self.seats.too_full(node, self.facts.members[node].machine) for node in ranks):
                    self.seats.drop(group)
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
        """Leave a group without another place where it runs, even if these Macs are about to stop."""
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
        """Seat one group of a deployment; if it needs room, replicas and later deployments give way."""
        groups = self.facts.groups[wanted.row.name]
        if wanted.row.name in self.gone or any(group in self.seats.of for group in groups):
            return
        group = next((each for each in groups if not self.facts.given_up(wanted, each)), "")
        # If all remaining places failed before, try one of them: the cause may have passed.
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
        groups = set(self.facts.groups[wanted.row.name])
        return [
            node
            for node in self.facts.allowed[wanted.row.name]
            if node not in wanted.lacks and groups.isdisjoint(self.seats.on[node])
        ]

    def _seat(self, wanted: WantedDeployment, group: str) -> bool:
        """Seat a group: on a free Mac, on several free Macs, next to another group, or over all Macs.

        If the deployment sets how Macs share the model, try several Macs first.
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
            best = min(able, key=lambda node: len(seats.on[node]))  # the first of equals is preferred
            seats.put(group, replace(need, ranks=(best,)))
            return True
        return self._spread(wanted, group, pool)

    def _alone(self, group: str) -> bool:
        """Give a group a Mac of its own; groups that do not run yet may move to other free Macs for it, late
        groups rather than early ones.
        """
        seats, mover = self.seats, group
        comes: dict[str, str] = {}  #: The group that would move to a Mac, by node id.
        front: list[tuple[int, str]] = []  #: Macs whose group may move on, the latest group first.
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
        """Seat a group on a free Mac, and its successor of `comes` on the Mac that it leaves, and so on."""
        while True:
            before = self.seats.of.get(group)
            self.seats.put(group, replace(self.facts.need(_name(group), 1), ranks=(node,)))
            if before is None or before.ranks[0] not in comes:
                return
            node = before.ranks[0]
            group = comes[node]

    def _spread(self, wanted: WantedDeployment, group: str, pool: Sequence[str], *, fewest: int = 1) -> bool:
        """Seat a group at the planner's choice among these Macs, if that has at least `fewest` Macs."""
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
            return False  # a plan would take longer to find that
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
        """Return the planner's choice among these Macs, with the memory that other groups leave."""
        members, seats = [], self.seats
        for node in nodes:
            member = replace(self.facts.members[node], taken_bytes=seats.usable[node] - seats.left(node))
            if any(len(seats.of[group].ranks) > 1 for group in seats.on[node]):
                member = without_rdma(member)
            members.append(replace(member, lack=wanted.lacks.get(node, "")))
        return plan(members, wanted.planned, must, wanted.options)

    def _refusal(self, wanted: WantedDeployment) -> str:
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
        # Macs without the model first: users can fix that.
        left.sort(key=lambda node: (node not in wanted.lacks, -self.seats.left(node), node))
        left = left[:MAX_RANKS]
        why = self._plan(wanted, left).reason
        auto = replace(wanted, options=replace(wanted.options, nodes="auto"))
        if isinstance(wanted.options.nodes, int) and self._plan(auto, left).chosen is not None:
            why += "; `mlxtp serve MODEL --nodes auto` uses the Macs that are here"
        return why

    def part(self) -> None:
        """Move new groups that share a Mac although they could have a free Mac."""
        for group in [each for groups in self.facts.groups.values() for each in groups]:
            seat = self.seats.of.get(group)
            if seat and not seat.kept and len(seat.ranks) == 1 and len(self.seats.on[seat.ranks[0]]) > 1:
                self._alone(group)

    # --- room ----------------------------------------------------------------------------------------

    def _make_room(self, wanted: WantedDeployment, group: str) -> bool:
        """Seat a group in place of as few others as possible; if impossible, change nothing."""
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
        """Return the groups that may give way, in turn: replicas, then whole deployments by disuse."""
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
        """Give Macs without a group to the first deployments that can use more."""
        free = [n for n in self.facts.members if not self.seats.on[n] and n not in self.view.flapping]
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
        if not report.ready or len(after.ranks) <= len(report.ranks):
            return False
        ports = (port for node in after.ranks for port in self.facts.members[node].machine.ports)
        if report.kind in JACCL and any(is_scarce(port.formations) for port in ports):
            return False  # it works, and might not form at the new place
        return wanted.options.nodes == "all" or (faster and not report.used and not report.open_requests)

    def _faster(self, wanted: WantedDeployment, before: _Seat, after: _Seat) -> str:
        """Return in words how much faster another place is; empty if not much."""
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
    """Return a Mac without RDMA, because another group uses its devices."""
    return replace(member, machine=replace(member.machine, rdma=_IN_USE))


def _name(group: str) -> str:
    return group.rpartition("#")[0]


def _index(group: str) -> int:
    return int(group.rpartition("#")[2])

"""Which group runs on which Macs: laws for random clusters, and one example for each rule."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.cluster.cluster_state import GROUPS_A_MAC, most_groups
from mlxtp.cluster.place import GivenUp, GroupReport, PlaceDecision, PlaceView, WantedDeployment, place
from mlxtp.placement.candidates import Fabrics
from mlxtp.placement.cost_model import (
    ALONE,
    JACCL_MESH,
    RING_ETHERNET,
    RING_THUNDERBOLT,
    rank_memory,
    stages,
    usable_bytes,
)
from mlxtp.placement.formation import FailedGroup, links_of
from mlxtp.placement.model_shape import ModelShape
from mlxtp.placement.planner import PlacementOptions, plan
from mlxtp.placement.topology import MemberMachine, Topology
from mlxtp.wire.cluster_messages import Deployment, GroupAssignment

from ..placement.made_up_macs import GIB, all_pairs, cabled, changed, mac, node_id, on_lan
from ..placement.made_up_models import layered, shape
from ..placement.test_planner_properties import LOOP, desks

SMALL = shape(num_hidden_layers=8)  # 5 GB
MIDDLE = shape()  # 16 GB
LARGE = shape(num_hidden_layers=64)  # 30 GB
HUGE = shape(num_hidden_layers=96)  # 45 GB
WHOLE = shape(num_hidden_layers=64, num_key_value_heads=1)  # it cannot be divided
STAGES = layered(num_hidden_layers=64, num_key_value_heads=1)  # it can be cut
FOREVER = -1
NODES: list[str | int] = ["auto", "auto", "auto", "all", 1, 2]
WAYS = ("auto", "auto", "auto", "tensor", "pipeline")


def wanted(
    name: str, model: ModelShape | None = SMALL, nodes: str | int = "auto", **changes: Any
) -> WantedDeployment:
    of_row = {
        key: changes.pop(key) for key in ("replicas", "on", "keep_s", "version", "again") if key in changes
    }
    options = PlacementOptions(nodes=nodes, parallel=changes.pop("parallel", "auto"))
    return WantedDeployment(Deployment(name, **{"version": 1} | of_row), options, model, **changes)


def seen(
    members: Sequence[MemberMachine],
    rows: Sequence[WantedDeployment],
    running: Mapping[str, Sequence[str]] | None = None,
    **more: Any,
) -> PlaceView:
    reports = [GroupReport(group, tuple(ranks)) for group, ranks in (running or {}).items()]
    return PlaceView(members, rows, more.pop("reports", reports), **more)


def places(decision: PlaceDecision) -> dict[str, tuple[str, ...]]:
    return {each.group: each.ranks for each in decision.assignments}


def letters(nodes: Iterable[str]) -> str:
    return "".join("abcdefghij"[int(node, 16)] for node in nodes)


def where(view: PlaceView) -> dict[str, str]:
    """The Macs of each group, as letters."""
    return {group: letters(nodes) for group, nodes in places(place(view)).items()}


def ids(text: str) -> tuple[str, ...]:
    return tuple(node_id("abcdefghij".index(each)) for each in text)


def lan(*memory: int, **changes: Any) -> list[MemberMachine]:
    """Macs of these GiB, of which the GPU may have all."""
    return on_lan([mac(i, memory=each, **changes) for i, each in enumerate(memory)])


@dataclass
class Cluster:
    """Members, rows, and owners that do at once what they are assigned."""

    members: list[MemberMachine]
    rows: list[WantedDeployment]
    running: dict[str, GroupReport]
    lost: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    flapping: frozenset[str] = frozenset()

    def view(self) -> PlaceView:
        here = [m for m in self.members if m.node_id not in self.lost]
        return PlaceView(here, self.rows, tuple(self.running.values()), self.draining, self.flapping)

    def step(self) -> PlaceDecision:
        decision = place(self.view())
        self.rows = [each for each in self.rows if each.row.name not in decision.gives_way]
        before, self.running = self.running, {}
        for each in decision.assignments:
            if each.ranks:
                made = GroupReport(each.group, each.ranks, each.kind, each.split)
                now = before.get(each.group, made)
                same = (now.ranks, now.kind, now.split) == (made.ranks, made.kind, made.split)
                self.running[each.group] = now if same else made
        return decision

    def of(self, name: str) -> WantedDeployment:
        return next(each for each in self.rows if each.row.name == name)

    def used(self) -> dict[str, int]:
        """What ranks need, by Mac."""
        used: dict[str, int] = {}
        for group, report in self.running.items():
            model = self.of(group.rpartition("#")[0]).planned
            cut = [(model.stage(*layers), 1) for layers in stages(report.split)]
            for node, (part, size) in zip(
                report.ranks, cut or [(model, len(report.ranks))] * len(report.ranks), strict=True
            ):
                need = rank_memory(self.members[0], part, size, 8192).needed
                used[node] = used.get(node, 0) + need
        return used

    def settle(self) -> None:
        for _ in range(6):
            before = dict(self.running)
            self.step()
            if self.running == before:
                return
        pytest.fail("it moves for ever")


@st.composite
def rows(draw: st.DrawFn) -> list[WantedDeployment]:
    found = []
    for i in range(draw(st.integers(1, 5))):
        lacking = draw(st.sets(st.integers(0, 5), max_size=1))
        found.append(
            wanted(
                f"m{i}",
                draw(st.sampled_from((SMALL, MIDDLE, LARGE, WHOLE, STAGES, None))),
                draw(st.sampled_from(NODES)),
                parallel=draw(st.sampled_from(WAYS)),
                replicas=draw(st.sampled_from((1, 1, 2, 3, 0))),
                on=draw(st.sampled_from(((), (), ids("ab"), ids("c")))),
                keep_s=draw(st.sampled_from((FOREVER, 300))),
                weight_bytes=draw(st.sampled_from((0, 20 * GIB))),
                lacks={node_id(n): "it is still getting the model" for n in lacking},
                unused_s=draw(st.sampled_from((0.0, 10.0, 20.0))),
            )
        )
    return sorted(found, key=lambda each: not each.row.pinned)


clusters = st.builds(lambda macs, wishes: Cluster(macs, wishes, {}), desks(), rows())
NUMBER = re.compile(r"\d")


def check(cluster: Cluster) -> None:
    """Laws of every decision, and of the cluster that has obeyed it."""
    before, decision = dict(cluster.running), cluster.step()
    groups = [each.group for each in decision.assignments]
    assert len(set(groups)) == len(groups), "the same group twice"
    for each in decision.assignments:
        assert bool(each.owner) != bool(each.why)
        assert each.owner == (each.ranks[0] if each.ranks else "")
        assert len(set(each.ranks)) == len(each.ranks)
        assert NUMBER.search(each.why) or each.owner, each.why
        row = cluster.of(each.deployment)
        assert set(each.ranks) <= set(row.row.on or [m.node_id for m in cluster.members]) - cluster.lost
        assert row.options.nodes in ("auto", "all", len(each.ranks)) or not each.ranks
        stays = each.group in before and before[each.group].ranks == each.ranks
        assert stays or not (cluster.draining | row.lacks.keys()) & set(each.ranks)
    members, used = cluster.view().members, cluster.used()
    if Topology(members).is_one_machine:
        assert sum(used.values()) <= max((usable_bytes(m) for m in members), default=0)
    else:
        usable = {m.node_id: usable_bytes(m) for m in members}
        assert all(used[node] <= usable[node] for node in used)


some = st.sets(st.sampled_from(ids("abcdef")), max_size=2).map(frozenset)


@given(clusters, st.lists(st.tuples(some, some, some), max_size=3))
@settings(max_examples=60, deadline=None)
def test_any_cluster_comes_to_rest_after_any_losses_and_keeps_the_laws(
    cluster: Cluster, losses: list[tuple[frozenset[str], ...]]
) -> None:
    for lost, draining, flapping in [(frozenset[str](),) * 3, *losses]:
        cluster.lost, cluster.draining, cluster.flapping = lost, draining, flapping
        cluster.running = {g: r for g, r in cluster.running.items() if not lost & set(r.ranks)}
        if cluster.view().members:
            check(cluster)
            cluster.settle()
            at_rest = dict(cluster.running)
            check(cluster)
            assert cluster.running == at_rest


@given(clusters, st.sets(st.integers(0, 5), max_size=3))
@settings(max_examples=40, deadline=None)
def test_a_group_does_not_move_when_other_macs_come_and_go(cluster: Cluster, flapping: set[int]) -> None:
    cluster.settle()
    used = {node for report in cluster.running.values() for node in report.ranks}
    for lost in (flapping, set[int]()):
        cluster.lost = frozenset(map(node_id, lost)) - used
        found = places(place(cluster.view()))
        for group, report in cluster.running.items():
            assert found[group] == report.ranks


@given(st.lists(st.integers(0, 64), min_size=1, max_size=64), st.integers(1, 64))
def test_deployments_have_no_more_groups_than_their_macs_hold(replicas: list[int], macs: int) -> None:
    rows = [Deployment(f"m{i}", replicas=each) for i, each in enumerate(replicas)]
    most = most_groups(rows, macs)
    assert all(1 <= most[row.name] <= macs + 1 for row in rows)
    assert sum(most.values()) <= GROUPS_A_MAC * macs + 2 * len(rows)
    for row in rows[:GROUPS_A_MAC]:
        assert most[row.name] >= min(row.replicas or macs, macs), "all that can be served"


@given(clusters)
@settings(max_examples=40, deadline=None)
def test_a_later_deployment_takes_no_place_of_an_earlier_one(cluster: Cluster) -> None:
    served: set[str] = set()
    for count in range(1, len(cluster.rows) + 1):
        decision = place(PlaceView(cluster.members, cluster.rows[:count]))
        now = {each.deployment for each in decision.assignments if each.owner}
        assert served <= now
        served = now


@given(clusters)
@settings(max_examples=40, deadline=None)
def test_no_mac_has_two_new_groups_while_another_is_free_and_able(cluster: Cluster) -> None:
    cluster.step()
    used = {node for report in cluster.running.values() for node in report.ranks}
    machines = {m.node_id: m for m in cluster.members}
    if Topology(cluster.members).is_one_machine:
        return
    free = [m for node, m in machines.items() if node not in used]
    for group, report in cluster.running.items():
        others = [each for each, other in cluster.running.items() if set(other.ranks) & set(report.ranks)]
        if len(others) < 2:
            continue
        each = cluster.of(group.rpartition("#")[0])
        able = [
            m
            for m in free
            if m.node_id not in each.lacks
            and m.node_id in (each.row.on or machines)
            and (
                each.options.nodes in ("all", 1)
                or (each.options.nodes, each.options.parallel) == ("auto",) * 2
            )
            and rank_memory(m, each.planned, 1, 8192).fits
        ]
        assert not able, (group, report, able)


@given(clusters, st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_the_order_of_members_and_reports_does_not_matter(cluster: Cluster, seed: int) -> None:
    cluster.step()
    view, mixed = cluster.view(), random.Random(seed)
    turned = replace(
        view,
        members=mixed.sample(view.members, len(view.members)),
        running=mixed.sample(view.running, len(view.running)),
    )
    assert place(turned) == place(view)


@given(
    desks(), st.sampled_from((SMALL, MIDDLE, LARGE, STAGES)), st.sampled_from(NODES), st.sampled_from(WAYS)
)
@settings(max_examples=80, deadline=None)
def test_one_deployment_alone_gets_the_planners_choice_among_all(
    macs: list[MemberMachine], model: ModelShape, nodes: str | int, parallel: str
) -> None:
    row = wanted("m", model, nodes, parallel=parallel)
    held = (
        sum(m.held_bytes for m in macs) if Topology(macs).is_one_machine else None
    )  # all free the same memory
    best = plan(
        [replace(m, lack="", held_bytes=m.held_bytes if held is None else held) for m in macs],
        model,
        "",
        row.options,
    )
    only = place(PlaceView(macs, [row])).assignments[0]
    assert only.ranks == best.ranks
    if best.chosen is not None:
        assert (only.kind, only.split) == (best.chosen.kind, best.chosen.split)
    why, _, way_out = only.why.partition("; `mlxtp serve MODEL --nodes auto` uses the Macs that are here")
    assert (why, way_out) == (best.reason if not best.ranks else "", "")
    assert only.kv_mib == 0


def test_a_group_that_still_forms_where_another_one_comes_is_not_kept_there() -> None:
    """Its owner has yet to hear that another one has it."""
    macs, rows = lan(36, 20), [wanted("l", LARGE), wanted("m", MIDDLE)]
    forms, last = (
        [GroupReport("m#0", ids("a"), ready=False)],
        {"m#0": GroupAssignment("m#0", "m", ranks=ids("b"))},
    )
    assert where(seen(macs, rows, reports=forms, places=last)) == {"l#0": "a", "m#0": "b"}
    assert where(seen(macs, rows[1:], reports=forms)) == {"m#0": "a"}
    assert where(seen(lan(36, 1), rows[1:], reports=forms, places=last)) == {"m#0": "a"}, "it runs nowhere"
    assert where(seen(macs, rows[1:], reports=[GroupReport("m#0", ())])) == {"m#0": "a"}, "without ranks"
    pair = GroupAssignment("m#0", "m", ranks=ids("ab"), kind=RING_ETHERNET, split=(20, 12))
    view = seen(macs, [wanted("m", layered())], places={"m#0": pair}, reports=forms)
    assert place(view).assignments == (pair,), "the same owner is to form it otherwise"
    assert where(replace(view, running=[replace(forms[0], ranks=(), between=True)])) == {"m#0": "ab"}


def test_a_small_model_leaves_the_large_mac_to_one_that_needs_it() -> None:
    for macs in (lan(64, 16), lan(33, 16)):  # with room for both, and without
        view = seen(macs, [wanted("s"), wanted("l", LARGE)])
        assert where(view) == {"s#0": "b", "l#0": "a"}
        assert [each.kv_mib for each in place(view).assignments] == [0, 0], "each has its Mac for itself"
    runs = seen(lan(64, 16), [wanted("s"), wanted("l", LARGE)], {"s#0": ids("a")})
    assert where(runs) == {"s#0": "a", "l#0": "a"}, "what runs does not move"
    both = seen(lan(64, 64, 16), [wanted("x", nodes=2), wanted("l", LARGE, nodes=1)])
    assert where(both) == {"x#0": "ab", "l#0": "a"}, "nor does what needs two"


def test_a_group_gets_a_mac_of_exactly_the_bytes_that_it_needs() -> None:
    need, rows = rank_memory(mac(0), SMALL, 1, 8192).needed, [wanted("x", nodes=1, again=1)]
    last = {"x#0": GroupAssignment("x#0", "x", ranks=ids("a"))}
    for short, found in ((0, "a"), (1, "")):
        macs = [changed(mac(0), gpu_bytes=need - short)]
        assert where(seen(macs, rows)) == {"x#0": found}
        again = seen(macs, rows, {"x#0": ids("a")}, places=last, given_up={})
        assert where(again) == {"x#0": found}


def test_a_group_that_forms_stays_with_its_owner() -> None:
    """Two Macs whose free memory wavers would otherwise pass it to and fro."""
    rows, places = [wanted("x", nodes=1)], {"x#0": GroupAssignment("x#0", "x", ranks=ids("b"))}
    assert where(seen(lan(64, 64), rows)) == {"x#0": "a"}
    assert where(seen(lan(64, 60), rows, places=places)) == {"x#0": "b"}
    assert where(seen(lan(64, 1), rows, places=places)) == {"x#0": "a"}
    assert where(seen(lan(64, 64), rows, places=places, draining=ids("b"))) == {"x#0": "a"}
    assert where(seen(lan(64, 64), [wanted("x", nodes=2)], places=places)) == {"x#0": "ba"}


def test_the_latest_group_that_can_moves_for_one_that_needs_a_large_mac() -> None:
    """The first deployment keeps its Mac, although it fits the slowest one, too."""
    rows = [wanted("top", LARGE), wanted("small"), wanted("huge", HUGE)]
    assert where(seen(lan(64, 64, 40), rows)) == {"top#0": "a", "small#0": "c", "huge#0": "b"}
    rows = [wanted("x", replicas=2), wanted("y"), wanted("z", HUGE, replicas=2)]
    found = {"x#0": "a", "x#1": "e", "y#0": "b", "z#0": "c", "z#1": "d"}
    assert where(seen(lan(64, 64, 64, 64, 40), rows)) == found, "replicas are later"
    # Of "m" and "s" each fits one Mac less than the one before, and moves on for it.
    rows = [wanted("s", on=ids("abc")), wanted("m", MIDDLE, on=ids("ab")), wanted("l", LARGE, on=ids("a"))]
    assert where(seen(lan(64, 64, 64), rows)) == {"s#0": "c", "m#0": "b", "l#0": "a"}


def test_a_group_beside_that_of_several_macs_moves_to_one_that_stays_free() -> None:
    macs = [mac(i, memory=24, chip="Apple M3 Ultra" if i < 4 else "Apple M4 Max") for i in range(5)]
    macs = cabled(macs, [(i, (i + 1) % 5) for i in range(5)])
    rows = [wanted("x", nodes=2), wanted("y", nodes=1), wanted("z", nodes=1), wanted("w", nodes=2)]
    assert where(seen(macs, rows)) == {"x#0": "ab", "y#0": "e", "z#0": "d", "w#0": "cd"}


def test_replicas_come_after_the_first_group_of_every_deployment() -> None:
    rows = [wanted("x", replicas=3), wanted("y")]
    assert where(seen(lan(64, 64, 64), rows)) == {"x#0": "a", "x#1": "c", "x#2": "b", "y#0": "b"}
    all_of = [wanted("x", replicas=0)]
    assert where(seen(lan(64, 64, 64), all_of)) == {"x#0": "a", "x#1": "b", "x#2": "c"}, "one on each Mac"
    running = {f"a#{i}": ids(each) for i, each in ((7, "a"), (40, "b"))}
    found = [*where(seen(lan(16, 16), [wanted("a", replicas=64)], running))]
    assert {*found} >= {"a#7", "a#40"}
    assert found == sorted(found, key=lambda group: int(group[2:]))


def test_a_replica_without_a_place_says_how_many_macs_there_are() -> None:
    found = place(seen(lan(64, 64), [wanted("x", replicas=3)])).assignments[2]
    assert (found.owner, found.why) == ("", "each of the 2 Macs that may serve it has a group of it")
    alone = place(seen(lan(64), [wanted("x", replicas=2)])).assignments[1]
    assert alone.why == "the 1 Mac that may serve it has a group of it"
    [none] = place(seen(lan(64, 64), [wanted("x", replicas=0, on=ids("c"))])).assignments
    assert none.why == "0 of the 2 Macs here may serve it and stay"
    for model in (SMALL, None):
        lacks = wanted("x", model, lacks={node_id(0): "its disk is full"})
        assert "its disk is full" in place(seen(lan(64), [lacks])).assignments[0].why
    lacks = wanted("x", LARGE, nodes=1, lacks={node_id(9): "its disk is full"})
    assert "its disk is full" in place(seen(lan(*[8] * 10), [lacks])).assignments[0].why, "of the first told"
    for nodes, model, ends in ((2, SMALL, True), (1, LARGE, False), ("auto", LARGE, False)):
        [none] = place(seen(lan(8), [wanted("x", model, nodes)])).assignments
        assert none.why.endswith("; `mlxtp serve MODEL --nodes auto` uses the Macs that are here") is ends


def test_a_replica_that_lacks_a_place_beside_a_group_of_several_macs_says_how_to_get_one() -> None:
    found = place(seen(lan(64, 64), [wanted("x", replicas=2)], {"x#0": [node_id(0), node_id(1)]}))
    hint = "`mlxtp serve MODEL --nodes 1` has a group use one Mac"
    assert hint in found.assignments[1].why
    pair = {"x#0": ids("ab"), "x#1": ids("c")}
    assert hint in place(seen(lan(64, 64, 64), [wanted("x", replicas=3)], pair)).assignments[2].why
    rows, pair = [wanted("x", replicas=3), wanted("y", nodes=2)], {"y#0": ids("ab")}
    assert hint not in place(seen(lan(64, 64), rows, pair)).assignments[2].why


FIVE = cabled(lan(64, 64, 64, 64, 64), all_pairs(5))


def ready(group: str, ranks: str, kind: str = ALONE, **changes: Any) -> GroupReport:
    return GroupReport(group, ids(ranks), kind, **changes)


def test_a_faster_place_is_named_and_a_group_that_is_used_stays() -> None:
    rows = [wanted("x", nodes=1), wanted("y", LARGE, on=ids("bcde"))]
    reports = [ready("x#0", "a"), ready("y#0", "b")]
    found = {each.deployment: each for each in place(seen(FIVE, rows, reports=reports)).assignments}
    assert {name: letters(each.ranks) for name, each in found.items()} == {"x": "a", "y": "b"}
    assert found["x"].faster == "", "one Mac is wanted"
    assert re.fullmatch(
        r"JACCL mesh of b \+ c \+ d \+ e: 1.\.. s per chat request instead of 2.\..", found["y"].faster
    )
    assert place(seen(FIVE, rows, reports=reports, flapping=ids("d"))).assignments[1].faster == ""


def test_a_group_that_nobody_has_used_takes_a_faster_place() -> None:
    rows, fresh = [wanted("y", LARGE, on=ids("bcde"))], ready("y#0", "b", used=False)
    view = seen(FIVE, rows, reports=[fresh])
    [moved] = place(view).assignments
    assert (letters(moved.ranks), moved.kind, moved.faster) == ("bcde", JACCL_MESH, ""), "its owner stays"
    for stays in (
        replace(view, flapping=ids("d")),
        replace(view, running=[replace(fresh, ready=False)]),
        replace(view, running=[replace(fresh, open_requests=1)]),
        replace(view, members=FIVE[:3]),  # a few percent faster
    ):
        assert where(stays) == {"y#0": "b"}


def test_a_person_s_word_places_a_group_again_wherever_it_is_fastest() -> None:
    """Once: from then on it stays."""
    macs, ran = [mac(0, chip="Apple M4"), mac(1, chip="Apple M3 Ultra")], [ready("y#0", "a")]

    def found(asked: int, *last: GroupAssignment) -> GroupAssignment:
        row, places = wanted("y", again=asked), {each.group: each for each in last}
        return place(seen(on_lan(macs), [row], reports=ran, places=places)).assignments[0]

    before = GroupAssignment("y#0", "y", ranks=ids("a"), kind=ALONE)
    assert letters(found(0, before).ranks) == "a"
    moved = found(1, before)
    assert (letters(moved.ranks), moved.again) == ("b", 1)
    assert letters(found(1, moved).ranks) == "b", "it has yet to move there"
    ran = [ready("y#0", "b")]
    assert letters(found(1, moved).ranks) == "b"
    ran = [ready("y#0", "a")]
    assert letters(found(1).ranks) == "a", "a new coordinator does not know"
    assert letters(found(0, replace(moved, again=0)).ranks) == "a", "nobody has asked"
    assert letters(found(1, replace(moved, ranks=ids("c"))).ranks) == "a", "that Mac has left"
    for kind in (JACCL_MESH, RING_THUNDERBOLT):
        rows, pair = [wanted("y", LARGE, nodes=2, again=1)], ready("y#0", "ba", RING_THUNDERBOLT)
        moved = GroupAssignment("y#0", "y", ranks=pair.ranks, kind=kind, again=1)
        assert place(seen(FIVE[:2], rows, reports=[pair], places={"y#0": moved})).assignments[0].kind == kind


def test_a_group_that_is_to_have_all_macs_grows_even_if_it_is_used() -> None:
    rows, two = [wanted("x", nodes="all")], [ready("x#0", "ab", JACCL_MESH)]
    assert where(seen(FIVE[:2], rows, reports=[ready("x#0", "a")])) == {"x#0": "ab"}
    assert where(seen(FIVE[:4], rows, reports=two)) == {"x#0": "abcd"}
    others = [wanted("no", shape(num_hidden_layers=400), nodes=1), *rows, wanted("y", nodes="all")]
    view = seen(FIVE[:3], others, reports=[ready("x#0", "a"), ready("y#0", "b")])
    assert where(view) == {"no#0": "", "x#0": "ac", "y#0": "b"}, "the first that can"
    scarce = tuple(replace(port, formations=95) for port in FIVE[0].machine.ports)
    last = [changed(FIVE[0], ports=scarce), *FIVE[1:4]]
    assert where(seen(last, rows, reports=two)) == {"x#0": "ab"}, "a last formation is not risked"


def test_no_group_grows_onto_a_mac_that_is_about_to_stop_nor_forms_where_files_are_lacking() -> None:
    macs, rows = cabled(lan(64, 24), all_pairs(2)), [wanted("x", LARGE, nodes="all")]
    assert where(seen(macs, rows, reports=[ready("x#0", "a")])) == {"x#0": "ab"}
    assert where(seen(macs, rows, reports=[ready("x#0", "a")], draining=ids("a"))) == {"x#0": "a"}
    lacks = wanted("x", LARGE, lacks={node_id(1): "it is still getting the model"})
    pair = ready("x#0", "ab", JACCL_MESH)
    assert where(seen(macs, [lacks], reports=[replace(pair, ready=False)])) == {"x#0": "a"}
    decision = place(seen(macs, [lacks], reports=[pair]))
    assert (places(decision), decision.notes) == ({"x#0": pair.ranks}, {}), "it has loaded, and is not new"
    nowhere = replace(lacks, lacks=dict.fromkeys(pair.ranks, "it is still getting the model"))
    assert where(seen(macs, [nowhere], reports=[replace(pair, ready=False)])) == {"x#0": "ab"}, "it waits"


def test_a_new_group_says_which_macs_lack_its_model() -> None:
    lacks = wanted("x", SMALL, lacks={node_id(0): "its disk is full"})
    decision = place(seen(lan(64, 64), [lacks]))
    assert letters(places(decision)["x#0"]) == "b"
    assert decision.notes["x#0"] == ("a is left out: its disk is full",)
    note, *_ = place(seen(lan(24, 24), [wanted("x", LARGE)])).notes["x#0"]
    assert note.startswith("the ring over Ethernet, not JACCL: ")


def test_a_row_that_wants_another_way_to_share_has_its_group_form_anew() -> None:
    macs = cabled(lan(64, 64), all_pairs(2))
    tensor, stages = ready("x#0", "ab", JACCL_MESH), ready("x#0", "ab", JACCL_MESH, split=(20, 12))
    for parallel, report in (("pipeline", tensor), ("tensor", stages)):
        row = wanted("x", layered(), nodes=2, parallel=parallel)
        [found] = place(seen(macs, [row], reports=[report])).assignments
        assert bool(found.split) is (parallel == "pipeline")
    for report in (tensor, stages):
        [found] = place(seen(macs, [wanted("x", layered(), nodes=2)], reports=[report])).assignments
        assert (found.ranks, found.kind, found.split) == (report.ranks, report.kind, report.split)
    for split in ((20, 12), (12, 20)):
        row = wanted("x", layered(), nodes=2)
        row = replace(row, options=replace(row.options, split=split))
        assert place(seen(macs, [row], reports=[stages])).assignments[0].split == split
    used = {"y#0": ids("a"), "z#0": ids("b")}
    rows = [wanted("y", nodes=1), wanted("z", nodes=1), wanted("x", parallel="tensor")]
    assert where(seen(lan(64, 64), rows, used))["x#0"] == "ab", "rather than alone"


def failing(row: WantedDeployment, *failed: FailedGroup) -> WantedDeployment:
    return replace(row, options=replace(row.options, failed=failed))


def test_what_failed_is_planned_otherwise_and_as_a_last_resort_again() -> None:
    macs = cabled(lan(24, 24), all_pairs(2))
    row = wanted("x", LARGE)
    [first] = place(seen(macs, [row])).assignments
    assert (letters(first.ranks), first.kind) == ("ab", JACCL_MESH)
    wired = Fabrics({m.node_id: m for m in macs}, Topology(macs)).wired(first.kind, first.ranks, row.options)
    mesh = FailedGroup(JACCL_MESH, links_of(wired.ranks, wired.rdma), "it did not form")
    between = [GroupReport("x#0", first.ranks, first.kind, ready=False)]
    [second] = place(seen(macs, [failing(row, mesh)], reports=between)).assignments
    assert (letters(second.ranks), second.kind) == ("ab", RING_THUNDERBOLT)
    serves = [replace(between[0], ready=True)]
    assert place(seen(macs, [failing(row, mesh)], reports=serves)).assignments[0].kind == JACCL_MESH
    rings = [
        FailedGroup(kind, links_of(ids("ab"), ()), "it hung") for kind in (RING_THUNDERBOLT, RING_ETHERNET)
    ]
    [last] = place(seen(macs, [failing(row, mesh, *rings)], reports=between)).assignments
    assert letters(last.ranks) == "ab", "nothing else is left"


def test_a_group_that_forms_anew_takes_the_best_fabric_of_its_macs() -> None:
    """What was left out for its failures may not be any longer."""
    macs, row = FIVE[:2], wanted("x", LARGE, nodes=2)
    ring = ready("x#0", "ba", RING_THUNDERBOLT)
    for report, kind in (
        (ring, RING_THUNDERBOLT),
        (replace(ring, ready=False), RING_THUNDERBOLT),
        (replace(ring, ready=False, between=True), JACCL_MESH),
    ):
        [found] = place(seen(macs, [row], reports=[report])).assignments
        assert (letters(found.ranks), found.kind) == ("ba", kind)
    [found] = place(seen(macs, [row], reports=[ring])).assignments
    assert found.faster.startswith("JACCL mesh of b + a: "), "it says so meanwhile"
    between = GroupReport("x#0", ids("ab"), RING_ETHERNET, ready=False, between=True)
    for size in (64, 1):  # one Mac would do; and none would
        assert where(seen(lan(size, size), [wanted("x")], reports=[between])) == {"x#0": "ab"}
    pair = seen(lan(1, 1), [wanted("x")], reports=[replace(between, ready=True, between=False)])
    assert where(pair) == {"x#0": "ab"}
    every = seen(macs, [wanted("x", LARGE, nodes="all")], reports=[ring])
    assert place(every).assignments[0].kind == RING_THUNDERBOLT, "no more Macs are no reason to form anew"


def test_nothing_that_runs_is_moved_to_where_a_group_failed_before() -> None:
    """Not even once it may be planned again."""
    macs, alone = FIVE[:2], [ready("x#0", "a")]
    wired = Fabrics({m.node_id: m for m in macs}, Topology(macs)).wired(
        JACCL_MESH, ids("ab"), PlacementOptions()
    )
    pair = links_of(ids("ab"), ())
    tried = (
        FailedGroup(JACCL_MESH, links_of(wired.ranks, wired.rdma), "it hung"),
        *(FailedGroup(kind, pair, "it hung") for kind in (RING_THUNDERBOLT, RING_ETHERNET)),
    )
    for failed, found in (((), "ab"), (tried[:1], "ab"), (tried, "a")):
        [row] = [wanted("x", nodes="all", tried=failed)]
        assert where(seen(macs, [row], reports=alone)) == {"x#0": found}


def test_a_group_whose_cable_is_out_is_planned_otherwise_once_it_has_ended() -> None:
    macs = lan(24, 24)
    between = GroupReport("x#0", ids("ab"), JACCL_MESH, ready=False)
    [found] = place(seen(macs, [wanted("x", LARGE)], reports=[between])).assignments
    assert (letters(found.ranks), found.kind) == ("ab", RING_ETHERNET)
    [found] = place(seen(macs, [wanted("x", LARGE)], reports=[replace(between, ready=True)])).assignments
    assert found.kind == JACCL_MESH
    ends = (("a", "b"), ("b", "c"), ("a", "c"))
    named = {ids(a)[0]: {ids(b)[0]: f"rdma_{b}" for x in ends for b in x if a in x and b != a} for a in "abc"}
    row, pair = wanted("x", LARGE, nodes=2), replace(between, ranks=ids("ac"))
    by_hand = replace(row, options=replace(row.options, rdma=named))
    assert where(seen(lan(24, 24, 24), [by_hand], reports=[pair])) == {"x#0": "ac"}, "devices set by hand"
    cables = replace(row, options=replace(row.options, fabric_networks="thunderbolt"))
    over_lan = replace(between, kind=RING_ETHERNET)
    for each, found_there in ((row, "ab"), (cables, "")):
        assert where(seen(macs, [each], reports=[over_lan])) == {"x#0": found_there}


def test_a_changed_number_of_replicas_ends_those_that_do_not_run_well_first() -> None:
    running = {"x#0": ids("a"), "x#1": ids("b")}
    reports = [GroupReport(g, r, ready=g != "x#0") for g, r in running.items()]
    assert places(place(seen(lan(64, 64), [wanted("x", nodes=1)], reports=reports))) == {"x#1": ids("b")}
    forms, moves = GroupReport("x#1", ids("b"), ready=False), wanted("x", on=ids("a"))
    assert where(seen(lan(64, 64), [moves], reports=[forms])) == {"x#1": "a"}, "not for one that is new"


def test_a_row_for_other_macs_moves_its_group_and_a_new_version_alone_does_not() -> None:
    macs, running = lan(64, 64, 64), {"x#0": ids("c")}
    assert where(seen(macs, [wanted("x", nodes=1, version=7)], running)) == {"x#0": "c"}
    assert where(seen(macs, [wanted("x", nodes=1, on=ids("ab"))], running)) == {"x#0": "a"}
    moved = place(seen(macs, [wanted("x", nodes=2, version=7)], running)).assignments[0]
    assert (moved.owner, len(moved.ranks)) == (node_id(2), 2), "its owner goes on"


def test_a_group_leaves_a_draining_mac_if_another_is_able() -> None:
    running = {"x#0": ids("a")}
    assert where(seen(lan(64, 64), [wanted("x")], running, draining=ids("a"))) == {"x#0": "b"}
    for macs, row, found in (
        (lan(64, 8), wanted("x", LARGE), "a"),
        (lan(64), wanted("x"), "a"),
        (lan(64, 8), wanted("x", LARGE, on=ids("b")), ""),
    ):
        assert where(seen(macs, [row], running, draining=ids("a"))) == {"x#0": found}
    assert where(seen(lan(64), [wanted("x", nodes=2)], running)) == {"x#0": ""}, "its Mac stays"
    two = {"x#0": ids("a"), "x#1": ids("b")}
    assert where(seen(lan(64, 64), [wanted("x", replicas=2)], two, draining=ids("b")))["x#1"] == "b"
    pair = seen(lan(64, 64, 64), [wanted("x", nodes=2)], {"x#0": ids("ab")}, draining=ids("a"))
    assert where(pair) == {"x#0": "bc"}


def test_a_mac_that_comes_and_goes_gets_a_group_only_if_no_other_is_able() -> None:
    assert where(seen(lan(64, 64), [wanted("x")], flapping=ids("a"))) == {"x#0": "b"}
    assert where(seen(lan(64, 8), [wanted("x", LARGE)], flapping=ids("a"))) == {"x#0": "a"}
    fast = on_lan([mac(0), mac(1, chip="Apple M4"), mac(2, chip="Apple M4")])
    for flapping, found in (((), "a"), (ids("a"), "b")):
        there = where(seen(fast, [wanted("x", nodes=2)], flapping=flapping))["x#0"]
        assert (there[0], len(there)) == (found, 2)
        assert ("a" in there) == (found == "a")


def test_of_two_groups_of_one_name_the_ready_one_stays() -> None:
    reports = [GroupReport("x#0", ids("a"), ready=False), GroupReport("x#0", ids("b"))]
    assert where(seen(lan(64, 64), [wanted("x", nodes=1)], reports=reports)) == {"x#0": "b"}
    reports = [GroupReport("gone#0", ids("a")), GroupReport("x#0", ids("a"))]
    reports += [GroupReport("x#0", ids("c"), ready=False)]
    row = wanted("x", nodes=1, on=ids("bc"))
    assert where(seen(lan(64, 64, 64), [row], reports=reports)) == {"x#0": "c"}, "a wrong Mac is worse"


def test_of_two_replicas_that_run_on_one_mac_the_second_moves() -> None:
    """A coordinator that did not know yet of the one has made the other."""
    reports = [ready("r#0", "b"), ready("r#1", "b")]
    assert where(seen(lan(20, 8, 8), [wanted("r", replicas=2)], reports=reports)) == {"r#0": "b", "r#1": "a"}
    reports = [ready("r#0", "ab", RING_ETHERNET), ready("r#1", "bc", RING_ETHERNET)]
    view = seen(lan(20, 20, 20, 20), [wanted("r", replicas=2, nodes=2)], reports=reports)
    assert where(view) == {"r#0": "ab", "r#1": "cd"}


def test_of_groups_that_need_more_than_their_mac_has_the_first_ready_one_stays() -> None:
    """A coordinator that did not know yet of the one has made the other."""
    rows, both = [wanted("m", MIDDLE), wanted("l", LARGE)], [ready("m#0", "a"), ready("l#0", "a")]
    assert where(seen(lan(36, 8), rows, reports=both)) == {"m#0": "a", "l#0": ""}
    loading = [replace(both[0], ready=False), both[1]]
    assert where(seen(lan(36, 20), rows, reports=loading)) == {"m#0": "b", "l#0": "a"}
    machine = [changed(mac(i, memory=36), interfaces=(LOOP,)) for i in range(2)]
    apart = [both[0], ready("l#0", "b")]
    assert where(seen(machine, rows, reports=apart)) == {"m#0": "a", "l#0": ""}
    for less in (
        {"free_bytes": GIB},
        {"memory_bytes": 0, "gpu_bytes": 0},
    ):  # other programs took it; it is not known yet
        macs = [changed(each, **less) for each in lan(56, 8)]
        assert where(seen(macs, rows, reports=both)) == {"m#0": "a", "l#0": "a"}


def test_a_group_shares_the_mac_with_the_fewest_and_rather_has_several_free_ones() -> None:
    rows = [wanted(name, nodes=1) for name in "xyzw"]
    assert where(seen(lan(64, 64), rows)) == {"x#0": "a", "y#0": "b", "z#0": "a", "w#0": "b"}
    view = seen(lan(64, 24, 24), [rows[0], wanted("l", LARGE)], {"x#0": ids("a")})
    assert where(view) == {"x#0": "a", "l#0": "bc"}
    assert where(seen(lan(64, 64), rows[:2], {"x#0": ids("a"), "y#0": ids("a")})) == {"x#0": "a", "y#0": "a"}
    cut = wanted("l", layered(num_hidden_layers=48, num_key_value_heads=1), nodes=2)
    found = place(seen(lan(24, 24), [wanted("y", MIDDLE), cut], {"y#0": ids("a")})).assignments[1]
    layers = dict(zip(letters(found.ranks), found.split, strict=True))
    assert 2 * layers["a"] < layers["b"], "of what the other group leaves"


def test_an_owner_goes_on_however_many_macs_are_preferred_to_it() -> None:
    macs = on_lan([replace(mac(0), node_id=node_id(i), name=f"mac {i}") for i in range(13)])
    [found] = place(seen(macs, [wanted("x", nodes=2)], {"x#0": [node_id(12)]})).assignments
    assert found.owner == node_id(12)


def test_a_group_that_is_given_up_waits_for_another_version_or_a_new_agent() -> None:
    macs = [replace(m, boot_id=f"boot {m.name}") for m in lan(64, 64)]
    given = {"x#0": GivenUp("it failed 5 times", 3, frozenset({"boot a", "boot b"}))}

    def why(macs: Sequence[MemberMachine], version: int) -> str:
        rows = [wanted("x", version=version)]
        return place(seen(macs, rows, {"x#0": ids("a")}, given_up=given)).assignments[0].why

    assert why(macs, 3) == "it failed 5 times"
    assert why(macs[:1], 3) == "it failed 5 times", "a Mac that left helps nothing"
    assert why(macs, 4) == why([macs[0], replace(macs[1], boot_id="new")], 3) == ""


def test_the_least_recently_used_gives_way_but_never_a_pinned_one() -> None:
    macs = lan(33)
    running = {"p#0": ids("a"), "new#0": ids("a"), "old#0": ids("a")}
    others = [wanted("new", keep_s=60, unused_s=1), wanted("old", keep_s=60, unused_s=99)]
    decision = place(seen(macs, [wanted("p"), wanted("m", MIDDLE, keep_s=60), *others], running))
    assert decision.gives_way == ("old",)
    assert {group: letters(nodes) for group, nodes in places(decision).items()} == {
        "p#0": "a", "m#0": "a", "new#0": "a"
    }  # fmt: skip
    refused = place(seen(macs, [wanted("p"), wanted("l", LARGE, keep_s=60), *others], running))
    assert (refused.gives_way, refused.assignments[1].owner) == ((), "")
    pinned = [wanted("l", LARGE), wanted("p")]
    assert place(seen(macs, pinned, {"p#0": ids("a")})).gives_way == ()


def test_a_busy_one_gives_way_to_a_pinned_one_only() -> None:
    reports = [GroupReport("x#0", ids("a"), open_requests=1)]
    for pinned in (True, False):
        new = wanted("l", LARGE, keep_s=FOREVER if pinned else 60)
        decision = place(seen(lan(36), [new, wanted("x", keep_s=60)], reports=reports))
        assert decision.gives_way == (("x",) if pinned else ())
    late = wanted("l", LARGE, nodes=2, keep_s=60)
    reports = [GroupReport("x#0", ids("a")), GroupReport("x#1", ids("b"), open_requests=1)]
    busy = seen(lan(20, 20), [late, wanted("x", keep_s=60, replicas=2)], reports=reports)
    assert place(busy).gives_way == ()
    earlier = seen(
        lan(36), [wanted("x", keep_s=60), replace(late, options=PlacementOptions())], reports=reports[:1]
    )
    assert place(earlier).gives_way == ()


def test_a_replica_gives_way_to_the_first_group_of_another() -> None:
    running = {"x#0": ids("a"), "x#1": ids("b")}
    decision = place(seen(lan(24, 24), [wanted("x", MIDDLE, replicas=2), wanted("y", MIDDLE)], running))
    assert [(each.group, letters(each.ranks)) for each in decision.assignments] == [
        ("x#0", "a"), ("x#1", ""), ("y#0", "b")
    ]  # fmt: skip
    assert decision.gives_way == ()
    running, macs = {f"x#{i}": ids(each) for i, each in enumerate("abc")}, lan(24, 24, 24)
    for model, found in ((MIDDLE, {"x#1": "b", "y#0": "c"}), (LARGE, {"x#1": "", "y#0": "bc"})):
        rows = [wanted("x", MIDDLE, replicas=3), wanted("y", model)]
        assert where(seen(macs, rows, running)) == {"x#0": "a", "x#2": "", **found}


def test_groups_on_one_mac_share_out_what_is_left_for_kv_caches() -> None:
    x, y = place(seen(lan(64), [wanted("x", MIDDLE), wanted("y")])).assignments
    need = [rank_memory(lan(64)[0], model, 1, 8192) for model in (MIDDLE, SMALL)]
    fixed = sum(each.needed - each.kv for each in need)
    assert 64 * GIB - 4 * 2**20 <= fixed + (x.kv_mib + y.kv_mib << 20) <= 64 * GIB
    shrunk = [changed(m, free_bytes=GIB) for m in lan(64)]
    found = place(seen(shrunk, [wanted("x", MIDDLE), wanted("y")], {"x#0": ids("a"), "y#0": ids("a")}))
    assert [each.kv_mib for each in found.assignments] == [each.kv >> 20 for each in need], "at least these"
    rows = [wanted("x", layered(), nodes=2), wanted("y", on=ids("a"))]
    cut = ready("x#0", "ab", RING_ETHERNET, split=(20, 12))
    x, y = place(seen(lan(64, 64), rows, reports=[cut, ready("y#0", "a")])).assignments
    need = [rank_memory(lan(64)[0], layered().stage(*each), 1, 8192) for each in stages(cut.split)]
    left = 64 * GIB - need[0].needed - rank_memory(lan(64)[0], SMALL, 1, 8192).needed
    assert x.kv_mib == max(each.kv for each in need) + left // 2 >> 20, "the fuller Mac's"


def test_agents_on_one_machine_share_one_account() -> None:
    macs = [changed(mac(i, memory=24), interfaces=(LOOP,)) for i in range(2)]
    found = place(seen(macs, [wanted("x", MIDDLE), wanted("y", MIDDLE)])).assignments
    assert [bool(each.owner) for each in found] == [True, False]
    x, y = place(seen(macs, [wanted("x", nodes=1), wanted("y", nodes=1)])).assignments
    assert {x.owner, y.owner} == {node_id(0), node_id(1)}
    assert x.kv_mib == y.kv_mib > 0
    held = [
        replace(changed(m, free_bytes=8 * GIB), held_bytes=(1 - i) * 16 * GIB) for i, m in enumerate(macs)
    ]
    assert where(seen(held, [wanted("x", MIDDLE), wanted("y")], {"x#0": ids("a")})) == {
        "x#0": "a",
        "y#0": "b",
    }


def test_two_groups_do_not_use_the_same_rdma_devices() -> None:
    macs = cabled(lan(24, 24), all_pairs(2))
    rows = [wanted("x", LARGE), wanted("y", nodes=2)]
    assert [bool(each.owner) for each in place(seen(macs, rows, {"x#0": ids("ab")})).assignments] == [
        True, True
    ]  # fmt: skip
    cables_only = [replace(each, options=replace(each.options, backend="jaccl")) for each in rows]
    assert [bool(each.owner) for each in place(seen(macs, cables_only, {"x#0": ids("ab")})).assignments] == [
        True, False
    ]  # fmt: skip


def test_a_model_of_which_only_the_size_is_known_gets_one_mac() -> None:
    found = where(seen(lan(64, 64), [wanted("x", None, weight_bytes=20 * GIB)]))
    assert found == {"x#0": "a"}
    unknown = place(seen(lan(64, 64), [wanted("x", None)])).assignments[0]
    assert unknown.why == "the size of its model is known on 0 of 2 Macs"
    held = [GroupReport("x#0", ids("a"), held_bytes={node_id(0): 60 * GIB})]
    assert where(seen(lan(64), [wanted("x", None), wanted("y", MIDDLE)], reports=held))["y#0"] == ""
    rows = [wanted("x", None, nodes=2), wanted("y", MIDDLE)]
    for bytes_held, found in (({node_id(0): 60 * GIB, node_id(1): GIB}, ""), ({}, "a")):
        view = seen(lan(64, 64), rows, reports=[GroupReport("x#0", ids("ab"), held_bytes=bytes_held)])
        assert where(view)["y#0"] == found


def many(macs: int, deployments: int) -> Cluster:
    """Unlike Macs in one network and on a ring of cables, and models of every size with replicas."""
    sizes, chips = (64, 24, 128, 512), ("Apple M3 Ultra", "Apple M4", "Apple M4 Max")
    members = [
        replace(mac(0, memory=sizes[i % 4], chip=chips[i % 3]), node_id=node_id(i), name=f"mac {i}")
        for i in range(macs)
    ]
    models = (SMALL, MIDDLE, LARGE, shape(num_hidden_layers=160), shape(num_hidden_layers=400))
    wishes = [
        wanted(f"m{i}", models[i % 5], replicas=(1, 2, 0, 3)[i % 4], keep_s=FOREVER if i < 8 else 300)
        for i in range(deployments)
    ]
    return Cluster(cabled(on_lan(members), [(i, (i + 1) % macs) for i in range(macs)]), wishes, {})


def seconds(view: PlaceView) -> float:
    """Processor time of one decision, the best of three."""
    found = []
    for _ in range(3):
        begun = time.process_time()
        place(view)
        found.append(time.process_time() - begun)
    return min(found)


def test_a_decision_for_64_macs_and_32_deployments_takes_little_time() -> None:
    cluster = many(64, 32)
    assert seconds(cluster.view()) < 1.0, "nothing runs yet"
    cluster.step()
    assert seconds(cluster.view()) < 1.0, "all run"
    cluster.lost = frozenset(node_id(i) for i in range(0, 64, 10))
    cluster.running = {g: r for g, r in cluster.running.items() if not cluster.lost & set(r.ranks)}
    assert seconds(cluster.view()) < 1.0, "Macs are lost"


@given(st.lists(st.integers(40, 64), min_size=3, max_size=3), st.sets(st.sampled_from(ids("ab"))))
@settings(max_examples=30, deadline=None)
def test_neither_free_memory_nor_flapping_chooses_the_order_of_equal_macs(
    free: list[int], flapping: set[str]
) -> None:
    macs = on_lan([mac(i, free=each) for i, each in enumerate(free)])
    assert where(seen(macs, [wanted("one", nodes=1), wanted("two", nodes=2)])) == {
        "one#0": "a",
        "two#0": "bc",
    }
    assert where(seen(macs[:2], [wanted("two", nodes=2)], flapping=flapping)) == {"two#0": "ab"}


def test_equal_macs_with_caches_of_a_model_come_first_and_in_their_order() -> None:
    rows = [wanted("two", nodes=2)]
    name = rows[0].planned.name
    cached = [(), (f"1 {name}",), (f"0 {name}", "1 other")]
    macs = [changed(member, caches=each) for member, each in zip(lan(64, 64, 64), cached, strict=True)]
    assert where(seen(macs, rows)) == {"two#0": "cb"}
    macs = [changed(member, caches=("0", "x " + name, "² " + name)) for member in lan(64, 64, 64)]
    assert where(seen(macs, rows)) == {"two#0": "ab"}

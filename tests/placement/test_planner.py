"""Plans as stories, and every small world against trying everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, permutations, product
from math import inf
from typing import Any

import pytest

from benchmarks.published_models import published
from mlxtp.errors import ConfigError
from mlxtp.placement.cost_model import (
    ALONE,
    CHAT,
    JACCL_MESH,
    JACCL_RING,
    RING_ETHERNET,
    RING_LOOPBACK,
    RING_THUNDERBOLT,
    WORKLOADS,
    RankHardware,
    Workload,
    speed,
)
from mlxtp.placement.planner import Placement, PlacementOptions, plan
from mlxtp.placement.tables import chip
from mlxtp.placement.topology import MemberMachine
from mlxtp.wire.cluster_messages import Interface

from .made_up_macs import GIB, add, all_pairs, cabled, changed, ethernet, linux, mac, node_id, on_lan
from .made_up_models import shape

A, B, C, D = (node_id(i) for i in range(4))
FAST = PlacementOptions(fast_fences=True)
BY_TWO = shape()
BY_THREE = shape(num_attention_heads=24, num_key_value_heads=6, intermediate_size=14592)
LARGE = shape(hidden_size=8192, num_attention_heads=64, intermediate_size=28672, num_hidden_layers=60)
"""About 107 GB, too much for one Mac of 64."""
NO_PIPELINE = "pipeline of 2: the family 'llama' cannot be cut into 2 stages: a test says so"


def names(made: Placement) -> str:
    return "".join(made.chosen.names) if made.chosen else ""


def refusal(made: Placement, kind: str, nodes: int) -> str:
    found = [a for a in made.alternatives if (a.kind, a.nodes, a.verdict) == (kind, nodes, "refused")]
    assert len(found) == 1, [(a.kind, a.nodes, a.reason) for a in made.alternatives]
    return found[0].reason


def desk(size: int, **changes: Any) -> list[MemberMachine]:
    """So many equal Macs with cables between all pairs and Ethernet."""
    return on_lan(cabled([mac(i, **changes) for i in range(size)], all_pairs(size)))


def test_four_macs_in_a_circle_make_a_jaccl_ring() -> None:
    around = on_lan(cabled([mac(i) for i in range(4)], [(0, 2), (2, 1), (1, 3), (3, 0)]))
    made = plan(around, LARGE, A, replace(FAST, nodes=4))
    assert (made.chosen.kind, made.chosen.jaccl_ring, names(made)) == (JACCL_RING, True, "acbd")
    assert made.chosen.rdma == (
        (None, "rdma_en2", None, "rdma_en3"),
        ("rdma_en2", None, "rdma_en3", None),
        (None, "rdma_en2", None, "rdma_en3"),
        ("rdma_en3", None, "rdma_en2", None),
    )
    assert refusal(made, JACCL_MESH, 4) == (
        "2 of 6 links by cables with RDMA are missing: a – b (no cable), c – d (no cable)"
    )


def test_repeatable_sums_want_a_jaccl_ring_of_three_and_a_mesh_of_two_will_do() -> None:
    for nodes, kind in ((2, JACCL_MESH), (3, JACCL_RING)):
        made = plan(desk(3), BY_THREE, A, replace(FAST, nodes=nodes, repeatable=True))
        assert made.chosen.kind == kind
    assert "not repeatable" in refusal(made, JACCL_MESH, 3)
    assert plan(desk(3), BY_THREE, A, replace(FAST, nodes=3)).chosen.kind == JACCL_MESH


def test_without_rdma_the_ring_runs_over_the_same_cables_and_says_why() -> None:
    members = [changed(m, rdma="disabled") for m in desk(2)]
    made = plan(members, LARGE, A)
    assert (made.chosen.kind, made.chosen.backend) == (RING_THUNDERBOLT, "ring")
    assert made.chosen.ring_addresses == ("10.0.0.1", "10.0.0.2")
    assert made.notes == (
        "the ring over Thunderbolt, not JACCL: 1 of 1 links by cables with RDMA are missing: "
        "a – b (a: RDMA over Thunderbolt is off)",
    )


def test_a_circle_may_cross_from_one_network_to_another() -> None:
    members = cabled([mac(i, rdma="disabled") for i in range(4)], [(0, 1), (2, 3)])
    bridged = [add(m, [ethernet(f"10.{8 + (i in (1, 2))}.0.{i + 1}")]) for i, m in enumerate(members)]
    made = plan(bridged, LARGE, A, PlacementOptions(nodes=4))
    assert (made.chosen.kind, names(made)) == (RING_ETHERNET, "abcd")
    assert made.chosen.ring_addresses == ("10.8.0.1", "10.0.0.2", "10.9.0.3", "10.0.1.2")
    devices = {node_id(i): {node_id(j): f"x{j}" for j in range(4) if j != i} for i in range(4)}
    both = plan(bridged, LARGE, A, PlacementOptions(nodes=4, rdma=devices))
    assert both.chosen.backend == "jaccl"
    assert made.chosen.ring_addresses in [one.ring_addresses for one in both.alternatives], "beside RDMA, too"


def test_several_nodes_of_one_machine_share_its_memory() -> None:
    loop = Interface("lo", "127.0.0.1", 8, "loopback", 0, True)
    same = [add(linux(i, memory=24), [loop]) for i in range(2)]
    made = plan(same, shape(), A, PlacementOptions(nodes=2))
    assert (made.chosen.kind, made.chosen.ring_addresses) == (RING_LOOPBACK, ("127.0.0.1", "127.0.0.1"))
    assert [rank.available for rank in made.chosen.memory] == [12 * GIB] * 2
    small = [add(linux(i, memory=12), [loop]) for i in range(2)]
    assert "rank 0 (a) has 6.4 GB for" in plan(small, shape(), A, PlacementOptions(nodes=2)).reason


def test_the_slowest_member_of_a_group_counts() -> None:
    """The first circle one finds from a leads over the fast b and ends at the slow f."""
    chips = ("M3 Ultra", "M3 Ultra", "M5 Max", "M4 Max", "M4 Pro", "M4")
    cables = [(0, 1), (1, 5), (5, 0), (0, 2), (2, 4), (4, 0), (0, 3)]
    members = cabled([mac(i, chip=f"Apple {name}") for i, name in enumerate(chips)], cables)
    assert names(plan(members, BY_THREE, A, PlacementOptions(nodes=3))) == "ace"


def test_all_takes_as_many_as_can_work_together_and_at_most_eight() -> None:
    assert len(plan(desk(5), shape(), A, PlacementOptions(nodes="all")).ranks) == 4
    lan, wide = on_lan([mac(i) for i in range(10)]), shape(num_key_value_heads=32)
    assert len(plan(lan, wide, A, PlacementOptions(nodes="all")).ranks) == 8


def test_a_group_slower_than_one_mac_is_refused_until_it_is_asked_for() -> None:
    tiny = shape(hidden_size=256, intermediate_size=512, num_hidden_layers=32, head_dim=8)
    made = plan(desk(2), tiny, A)
    assert made.ranks == (A,)
    why = refusal(made, JACCL_MESH, 2)
    assert why == "slower than a alone per chat request; asking for 2 nodes accepts it"
    for nodes in (2, "all"):
        assert plan(desk(2), tiny, A, PlacementOptions(nodes=nodes)).ranks == (A, B)


def test_a_model_that_does_not_divide_by_three_needs_two() -> None:
    made = plan(desk(3), shape(), A, PlacementOptions(nodes=3))
    assert made.chosen is None
    assert made.reason == (
        "tensor parallel of 3: 3 Macs cannot share this model, 2 can: 32 attention heads do not divide by 3; "
        "8 KV heads do not divide by 3; intermediate size 14336 does not divide by 3"
    )


def test_a_rank_without_room_is_named_with_both_numbers() -> None:
    members = on_lan([mac(0), mac(1, memory=8)])
    made = plan(members, shape(), A, PlacementOptions(nodes=2))
    assert made.reason == f"tensor parallel of 2: rank 1 (b) has 8.6 GB for 9.7 GB; {NO_PIPELINE}"


def test_too_few_nodes_are_counted() -> None:
    assert plan(desk(2), shape(), A, PlacementOptions(nodes=4)).reason.endswith("needs 4 nodes, 2 are here")
    assert plan(desk(1), shape(), A, PlacementOptions(nodes=2)).reason.endswith("needs 2 nodes, 1 is here")
    assert plan([], shape()).reason == "0 nodes here can serve this model"


def test_an_explicit_backend_is_never_replaced() -> None:
    without = [changed(m, rdma="disabled") for m in desk(2)]
    made = plan(without, LARGE, A, PlacementOptions(backend="jaccl"))
    assert made.chosen is None
    ring = plan(desk(2), LARGE, A, PlacementOptions(backend="ring"))
    assert "the backend ring was requested" in refusal(ring, JACCL_MESH, 2)


def test_a_device_that_is_to_serve_two_is_refused() -> None:
    by_hand = {A: {B: "rdma_en5", C: "rdma_en5"}, B: {A: "x", C: "y"}, C: {A: "x", B: "y"}}
    members = [mac(i) for i in range(3)]
    made = plan(members, BY_THREE, A, PlacementOptions(nodes=3, rdma=by_hand))
    assert made.chosen is None
    assert refusal(made, JACCL_MESH, 3) == "rdma_en5 of a would have to serve 2 peers; a device serves 1"
    by_hand[A][C] = "rdma_en6"
    assert plan(members, BY_THREE, A, PlacementOptions(nodes=3, rdma=by_hand)).chosen.backend == "jaccl"


def test_a_node_that_cannot_serve_the_model_is_left_out_and_named_once() -> None:
    members = desk(2)
    members[1] = replace(members[1], lack="its disk is full")
    left_out = "b is left out: its disk is full"
    made = plan(members, shape(), A, FAST)
    assert (made.ranks, made.notes) == ((A,), (left_out,))
    made = plan(members, shape(), A, PlacementOptions(nodes=2))
    assert (made.chosen, made.notes) == (None, ())
    assert made.reason == f"{left_out}; tensor parallel of 2: needs 2 nodes, 1 of the 2 here can"


def test_a_pair_that_computes_less_but_reads_faster_is_found_behind_the_fastest_mac() -> None:
    chips = ("M5 Max", "M5", "M1 Max", "M1 Max")
    pairs = cabled([mac(i, chip=f"Apple {chip}") for i, chip in enumerate(chips)], [(0, 1), (2, 3)])
    essay = Workload("essay", 100, 0, 2000)
    assert plan(pairs, shape(), "", PlacementOptions(nodes=2, workload=essay)).ranks == (C, D)


@pytest.mark.parametrize(("workload", "chosen"), [(CHAT, "ab"), (Workload("reader", 20_000, 0, 10), "ac")])
def test_prompts_want_arithmetic_and_answers_want_memory(workload: Workload, chosen: str) -> None:
    """A M4 Max reads memory faster than a M5 Pro and computes prompts slower."""
    chips = ("Apple M5 Max", "Apple M4 Max", "Apple M5 Pro")
    members = cabled([mac(i, chip=chip, memory=40) for i, chip in enumerate(chips)], all_pairs(3))
    for order in (members, members[::-1]):
        made = plan(order, shape(), A, replace(FAST, nodes=2, workload=workload))
        assert names(made) == chosen


def test_many_at_once_share_the_reading_of_weights() -> None:
    assert str(WORKLOADS["batch"]) == "1,000 tokens in, 250 out, 16 at once"
    assert str(WORKLOADS["agent"]) == "30,000 tokens in (27,000 cached), 300 out"
    model, macs = shape(), [RankHardware("a", chip("Apple M3 Ultra"))]
    one = speed(model, macs, ALONE)
    for at_once in (2, 8):
        many = replace(CHAT, at_once=at_once)
        assert one.answer_s(CHAT) < one.answer_s(many) < at_once * one.answer_s(CHAT)
        assert at_once / one.request_seconds(many) > 1 / one.request_seconds(CHAT)
    experts = published("qwen3-235b-a22b-4bit")
    few, most = (speed(experts, macs, ALONE).answer_s(replace(CHAT, at_once=n)) for n in (1, 500))
    assert most / few > experts.weight_bytes / experts.token_bytes  # all experts are met, by some row


def test_a_coordinator_that_fits_nowhere_hands_over() -> None:
    members = desk(3)
    members[0] = changed(members[0], memory_bytes=4 * GIB, gpu_bytes=4 * GIB)
    made = plan(members, shape(), A, FAST)
    assert set(made.ranks) == {B, C}
    assert made.notes[0].startswith("a can be in no group: alone: rank 0 (a) has 4.3 GB for")


def test_a_slow_coordinator_stays() -> None:
    members = [mac(0, chip="Apple M4"), mac(1)]
    small = shape(quantization={"group_size": 64, "bits": 4})
    stays = plan(members, small, A)
    assert stays.ranks == (A,)
    assert stays.notes[0].startswith("without a: b alone, ")
    assert plan(members, small, A, PlacementOptions(nodes=1)).notes == ()


def test_without_a_coordinator_the_fastest_leads() -> None:
    members = on_lan([mac(0, chip="Apple M4 Pro"), mac(1), mac(2, memory=128)])
    made = plan(members, shape())
    assert made.ranks == (C,)


def test_the_context_takes_room() -> None:
    short, long = (plan(desk(1), shape(), A, PlacementOptions(max_context=n)) for n in (1024, 131072))
    assert short.chosen.memory[0].kv == 1024 * 131072
    assert long.chosen.memory[0].kv == 131072 * 131072
    assert plan(desk(1), shape(max_position_embeddings=2048), A).context == 2048
    assert plan(desk(1, memory=24), shape(), A, PlacementOptions(max_context=131072)).chosen is None


def test_an_unknown_chip_is_said_to_be_assumed() -> None:
    made = plan([linux(0, "10.0.0.1", memory=64)], shape(), A)
    assert made.notes == (
        "a chip without a name is not in the table of chips: a memory bandwidth of 20 GB/s is assumed",
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"backend": "mpi"}, "backend is 'mpi'; it can be auto, jaccl, ring"),
        ({"nodes": "some"}, "nodes is 'some'"),
        ({"nodes": 0}, "nodes is 0"),
        ({"nodes": 9}, "a number up to 8"),
        ({"max_context": -1}, "max_context is -1"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PlacementOptions(**wrong)


def test_sixty_four_members_make_one_plan() -> None:
    crowd = [replace(mac(0), node_id=node_id(i), name=f"mac{i}") for i in range(64)]
    joined = [add(m, [ethernet(f"10.3.0.{i + 1}")]) for i, m in enumerate(crowd)]
    made = plan(joined, LARGE, node_id(40), PlacementOptions(nodes=8))
    assert made.ranks[0] == node_id(40)
    assert len(made.ranks) == 8


CHIPS = ("Apple M5 Max", "Apple M4 Max", "Apple M5 Pro", "Apple M3 Ultra")
ROOMS = (8, 64)
"""GiB: enough for a third of the model, and for all of it."""
MODELS = {"by two and four": BY_TWO, "by two and three": BY_THREE, "by none": shape(num_key_value_heads=1)}


def worlds(size: int) -> Iterator[tuple[frozenset[tuple[int, int]], tuple[int, ...]]]:
    """All cablings of so many Macs, with all memories."""
    pairs = all_pairs(size)
    for count in range(len(pairs) + 1):
        for cables in combinations(pairs, count):
            for rooms in product(ROOMS, repeat=size):
                yield frozenset(cables), rooms


@cache
def seconds(model: str, kind: str, chips: tuple[str, ...]) -> float:
    """A chat request's time; the order of the chips does not matter."""
    ranks = [RankHardware(str(i), chip(name)) for i, name in enumerate(chips)]
    mbps = {RING_ETHERNET: 10_000, RING_THUNDERBOLT: 80_000}.get(kind, 0)
    found = speed(MODELS[model], ranks, kind, fast_fences=True, mbps=mbps)
    return found.request_seconds(CHAT)


def needed(model: str, size: int) -> float:
    """Bytes of a rank's weights, of its caches of 8,192 tokens, and of its headroom."""
    whole = MODELS[model]
    norms = whole.whole_bytes
    weights = (whole.weight_bytes - norms) / size + norms
    return 1.07 * weights + 8192 * whole.kv_token_bytes / size + GIB / 2


def every_way(
    model: str, cables: frozenset[tuple[int, int]], rooms: Sequence[int], lan: bool
) -> Iterator[tuple[float, int]]:
    """Seconds a request and number of nodes of every group that has node 0 as rank 0."""
    for size in range(1, len(rooms) + 1):
        if MODELS[model].obstacles(size):
            continue
        places = [i for i, room in enumerate(rooms) if room * GIB >= needed(model, size)]
        for group in permutations(places, size):
            if group[0] != 0:
                continue
            chips = tuple(sorted(CHIPS[i] for i in group))
            if size == 1:
                yield seconds(model, ALONE, chips), 1
                continue
            around = [tuple(sorted((group[i - 1], group[i]))) for i in range(size)]
            if all(tuple(sorted(pair)) in cables for pair in combinations(group, 2)):
                yield seconds(model, JACCL_MESH, chips), size
            if all(pair in cables for pair in around):
                yield seconds(model, JACCL_RING, chips) if size > 2 else inf, size
                yield seconds(model, RING_THUNDERBOLT, chips), size
            if lan:
                yield seconds(model, RING_ETHERNET, chips), size


@pytest.mark.parametrize("lan", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_way_in_a_small_world_is_faster(size: int, model: str, lan: bool) -> None:
    for cables, rooms in worlds(size):
        check_world(model, cables, rooms, lan)


@pytest.mark.parametrize("model", ["by two and four", "by two and three"])
def test_no_way_among_four_macs_is_faster(model: str) -> None:
    for i, (cables, rooms) in enumerate(worlds(4)):
        if i % 5 in (0, 2):
            check_world(model, cables, rooms, lan=bool(i % 2))


def check_world(model: str, cables: frozenset[tuple[int, int]], rooms: Sequence[int], lan: bool) -> None:
    members = cabled([mac(i, chip=CHIPS[i], memory=room) for i, room in enumerate(rooms)], sorted(cables))
    made = plan(on_lan(members) if lan else members, MODELS[model], A, FAST)
    ways = list(every_way(model, cables, rooms, lan))
    world = f"{model}, {sorted(cables)}, {rooms}, {lan}: {made.reason}"
    if not ways:
        # Nothing can be done with a; others may do without it.
        assert A not in made.ranks, world
        return
    assert made.chosen is not None, world
    assert made.chosen.request_seconds(CHAT) == pytest.approx(min(ways)[0]), world
    most = plan(on_lan(members) if lan else members, MODELS[model], A, replace(FAST, nodes="all"))
    assert len(most.ranks) == max(size for _, size in ways), world


def test_the_chosen_way_comes_first_and_refused_ones_last_even_if_faster() -> None:
    alone, *others = plan(desk(2), shape(), A, PlacementOptions(nodes=1, fast_fences=True)).alternatives
    assert (alone.verdict, {one.verdict for one in others}) == ("chosen", {"refused"})
    assert alone.speed is not None
    assert any(one.speed and one.speed.ttft_s < alone.speed.ttft_s for one in others)

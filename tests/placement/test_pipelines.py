"""Pipelines: which layers each Mac has, how fast they are, and when they are chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published_models import published
from mlxtp.placement import cost_model
from mlxtp.placement import pipelines as pipelines_of
from mlxtp.placement.candidates import Candidate
from mlxtp.placement.cost_model import (
    AGENT,
    BATCH,
    CHAT,
    FABRICS,
    FAST_FENCE_S,
    FENCE_S,
    JACCL_MESH,
    RING_ETHERNET,
    Collective,
    RankHardware,
    StageCosts,
    Workload,
    hardware_of,
    rank_memory,
    speed,
    stage_costs,
    stages,
)
from mlxtp.placement.formation import FailedGroup, links_of
from mlxtp.placement.model_shape import ModelShape, PartShape, StageRules, shape_of
from mlxtp.placement.pipelines import StageCutter, counted_shares
from mlxtp.placement.planner import Placement, PlacementOptions, plan
from mlxtp.placement.tables import chip
from mlxtp.placement.topology import MemberMachine

from .made_up_macs import add, all_pairs, cabled, ethernet, mac, node_id, on_lan
from .made_up_models import layered, shape

A, B, C = (node_id(i) for i in range(3))
CONTEXT = 8192
SMALL = layered(num_hidden_layers=7)
MODELS = (
    SMALL,
    layered(tie_word_embeddings=True),
    published("gpt-oss-120b"),
    published("deepseek-v3.1-4bit"),
)
CHIPS = ("Apple M3 Ultra", "Apple M4 Max", "Apple M4 Pro", "Apple M5", "")


def needed(model: ModelShape, member: MemberMachine, begin: int, end: int) -> bool:
    return rank_memory(member, model.stage(begin, end), 1, CONTEXT).fits


def slowest_s(
    model: ModelShape,
    ranks: Sequence[MemberMachine],
    layers: Sequence[tuple[int, int]],
    work: Workload,
    size: int,
) -> float:
    """Seconds of the slowest of these stages, of so many, for a workload; infinite where one has no room."""
    found = []
    for rank, (begin, end) in zip(ranks, layers, strict=True):
        if not needed(model, rank, begin, end):
            return math.inf
        found.append(stage_costs(model.stage(begin, end), hardware_of(rank)).request_s(work, size))
    return max(found)


def split_s(ranks: Sequence[MemberMachine], split: Sequence[int], work: Workload) -> float:
    return slowest_s(SMALL, ranks, stages(split), work, len(split))


def splits(layers: int, ranks: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), ranks - 1):
        borders = (0, *cuts, layers)
        yield tuple(b - a for a, b in pairwise(borders))


def test_rank_0_has_the_last_layers() -> None:
    assert stages((40, 24, 16)) == [(40, 80), (16, 40), (0, 16)]


@pytest.mark.parametrize("model", MODELS)
def test_stages_together_are_the_model(model: ModelShape) -> None:
    parts = [model.stage(*each) for each in stages((1, model.layers - 4, 3))]
    assert sum(part.layers for part in parts) == model.layers
    for name in PartShape.__slots__:
        extra = model.ends[0].weight_bytes if name == "weight_bytes" and is_tied(model) else 0
        assert sum(getattr(part, name) for part in parts) == getattr(model, name) + extra, name
    assert model.stage(0, model.layers) == model


def is_tied(model: ModelShape) -> bool:
    """Whether first and last stage both have the embedding."""
    ends = sum(end.weight_bytes for end in model.ends)
    return ends + model.before[-1].weight_bytes > model.weight_bytes


def test_layers_weigh_what_the_configuration_gives_them() -> None:
    deepseek = published("deepseek-v3.1-4bit")
    dense, sparse = deepseek.stage(2, 3), deepseek.stage(3, 4)
    assert sparse.weight_bytes > 10 * dense.weight_bytes
    assert dense.token_bytes > sparse.token_bytes * 0.5
    hybrid = published("qwen3.6-27b-4bit")
    assert [hybrid.stage(at, at + 1).kv_token_bytes > 0 for at in range(8)] == [False, False, False, True] * 2
    windows = published("gpt-oss-120b")
    assert [windows.stage(at, at + 1).kv_window_bytes > 0 for at in range(4)] == [True, False] * 2
    assert windows.stage(0, 1).rank_kv(1, 10_000) == windows.stage(0, 1).rank_kv(1, 192), "its slots"
    assert windows.stage(1, 2).rank_kv(1, 10_000) > 50 * windows.stage(1, 2).rank_kv(1, 192)
    tied = layered(tie_word_embeddings=True)
    table, norm = 128256 * 4096 * 2, 4096 * 2
    assert [end.weight_bytes for end in tied.ends] == [table, table + norm]


macs = st.lists(
    st.tuples(st.sampled_from(CHIPS), st.sampled_from((1, 2, 3, 4, 6, 16, 512))), min_size=2, max_size=4
)


RULES = (
    *(StageRules(frozenset(apart)) for apart in ((1, 3, 5), (1, 2, 4, 5))),
    StageRules(frozenset(), (1, 3, 6)),
)


@given(macs, st.sampled_from((*[SMALL.rules] * 3, *RULES)), st.sampled_from((CHAT, AGENT, BATCH)))
@settings(max_examples=300, deadline=None)
def test_no_split_that_the_rules_of_a_model_allow_has_a_faster_slowest_stage(
    desk: list[tuple[str, int]], rules: StageRules, work: Workload
) -> None:
    """Tried with all splits of a model of seven layers, one of which takes 0.4 GB."""
    model = replace(SMALL, rules=rules)
    ranks = [mac(i, chip=name, memory=memory) for i, (name, memory) in enumerate(desk)]
    found = StageCutter(model, CONTEXT, work).split(ranks)
    allowed = [split for split in splits(7, len(ranks)) if not model.uncuttable(len(split), split)]
    times_s = {split: split_s(ranks, split, work) for split in allowed}
    best_s = min(times_s.values(), default=math.inf)
    assert bool(found) == (best_s < math.inf)
    assert not found or times_s[found] <= best_s * (1.001 if rules is SMALL.rules else 1.25)


def test_ranks_are_told_what_plans_count_on() -> None:
    model = layered(num_hidden_layers=3)
    whole, per_layer = counted_shares(model, 1, ())[0], model.kv_token_bytes // 3
    assert (whole.weight_bytes, whole.kv_token_bytes) == (model.weight_bytes, 3 * per_layer)
    for half in counted_shares(model, 2, ()):
        assert half.weight_bytes == model.rank_weights(2)
        assert half.kv_token_bytes == whole.kv_token_bytes // 2
    last, first = counted_shares(model, 2, (2, 1))
    assert (last.kv_token_bytes, first.kv_token_bytes) == (2 * per_layer, per_layer)
    assert last.weight_bytes + first.weight_bytes == model.weight_bytes
    windows = published("gpt-oss-120b")
    of_windows = windows.kv_window_bytes
    assert counted_shares(windows, 1, ())[0].kv_token_bytes == windows.kv_token_bytes - of_windows > 0
    headed = published("deepseek-v3.1-4bit", mtp=True)
    own, of_all = headed.mtp_kv_bytes, headed.kv_token_bytes
    assert [share.kv_token_bytes for share in counted_shares(headed, 2, ())] == [of_all + own] * 2
    assert [share.kv_token_bytes // own for share in counted_shares(headed, 2, (31, 30))] == [32, 30]
    quantized = shape_of(model.model, kv_bits=8)
    assert counted_shares(quantized, 1, ()) == counted_shares(model, 1, ()), "ranks compare before that"


def test_a_split_that_its_model_does_not_allow_is_refused_with_its_layers() -> None:
    pairs = replace(SMALL, name="pairs", rules=StageRules(frozenset((1, 3, 5))))
    assert pairs.uncuttable(2, (3, 4)) == ""
    assert pairs.uncuttable(2, (4, 3)) == (
        "the split 4,3 cannot be: layer 3 reads results of earlier layers, so both must be on one Mac"
    )
    assert pairs.uncuttable(5) == "the layers of pairs depend on each other too much for 5 stages"
    few = replace(SMALL, rules=StageRules(frozenset(), (3, 6)))
    assert few.uncuttable(3, (3, 1, 3)) == (
        "the split 3,1,3 cannot be: layers 0 to 2 have no cache that counts positions, "
        "of which each Mac needs one"
    )
    assert few.uncuttable(3)
    assert not few.uncuttable(2)


@given(macs, st.sampled_from(MODELS), st.sampled_from((CHAT, BATCH)))
@settings(max_examples=200, deadline=None)
def test_all_stages_fit_and_no_layer_is_better_with_a_neighbour(
    desk: list[tuple[str, int]], model: ModelShape, work: Workload
) -> None:
    ranks = [mac(i, chip=name, memory=memory * 32) for i, (name, memory) in enumerate(desk)]
    split = StageCutter(model, CONTEXT, work).split(ranks)
    if not split:
        return
    assert (len(split), sum(split), min(split) > 0) == (len(ranks), model.layers, True)
    for rank, (begin, end) in zip(ranks, stages(split), strict=True):
        assert needed(model, rank, begin, end)
    for i in range(len(split) - 1):
        for step in (1, -1):
            moved = list(split)
            moved[i] += step
            moved[i + 1] -= step
            if min(moved):
                now, then = ((stages(each)[i : i + 2]) for each in (split, moved))
                pair = ranks[i : i + 2]
                was_s, would_s = (slowest_s(model, pair, layers, work, len(ranks)) for layers in (now, then))
                assert would_s >= was_s


def test_stages_on_one_machine_share_its_memory() -> None:
    ranks, large = [mac(i, memory=64) for i in range(2)], published("llama-3.3-70b-8bit")
    apart, beside = (StageCutter(large, CONTEXT, CHAT, shared=shared) for shared in (False, True))
    assert sum(beside.room(ranks)) < sum(apart.room(ranks))
    here, there = (StageCutter(SMALL, CONTEXT, CHAT, shared=shared).cut(ranks) for shared in (True, False))
    assert [2 * rank.available for rank in here.memory] == [rank.available for rank in there.memory]


def test_the_next_plan_of_a_model_measures_none_of_its_stages_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, measured = layered(vocab_size=101_120), []
    needs = cost_model.rank_needs
    monkeypatch.setattr(pipelines_of, "rank_needs", lambda *args: measured.append(args) or needs(*args))
    made = [plan(desk(64, 64), model, options=PlacementOptions(parallel="pipeline"))]
    first = len(measured)
    made.append(plan(desk(64, 64), model, options=PlacementOptions(parallel="pipeline")))
    assert first > 0
    assert len(measured) == first
    assert made[0] == made[1]
    smaller = plan(desk(64, 8), model, options=PlacementOptions(parallel="pipeline"))
    assert smaller.chosen.split != made[0].chosen.split


def in_stages(*split: int, metal: bool = True) -> tuple[ModelShape, list[RankHardware], list[StageCosts]]:
    """A model that so many Macs share, and what each stage costs."""
    model = layered()
    ranks = [RankHardware("abc"[i], chip("Apple M3 Ultra"), metal=metal) for i in range(len(split))]
    cut = zip(stages(split), ranks, strict=True)
    return model, ranks, [stage_costs(model.stage(*layers), rank) for layers, rank in cut]


def test_a_token_goes_through_all_stages_and_once_around() -> None:
    model, ranks, costs = in_stages(16, 16)
    two = speed(model, ranks, JACCL_MESH, costs=costs)
    alone = speed(model, ranks[:1], JACCL_MESH)
    hop_s = FENCE_S + FABRICS[JACCL_MESH].step_s
    expected = 1 / alone.tokens_per_second + 2 * hop_s + 4096 * 2 / 8e9
    assert 1 / two.tokens_per_second == pytest.approx(expected, rel=1e-3)
    assert two.fences_s == pytest.approx(2 * FENCE_S)
    fast = speed(model, ranks, JACCL_MESH, costs=costs, fast_fences=True)
    assert fast.fences_s == pytest.approx(2 * FAST_FENCE_S)


def test_chunks_of_a_prompt_and_lanes_of_rows_keep_all_stages_busy() -> None:
    model, ranks, costs = in_stages(16, 16)
    two, alone = speed(model, ranks, JACCL_MESH, costs=costs), speed(model, ranks[:1], JACCL_MESH)
    one_chunk, many = (Workload("prompt", n, 0, 1) for n in (512, 20 * 2048))
    assert two.prompt_s(one_chunk) > alone.prompt_s(one_chunk)
    assert two.prompt_s(many) == pytest.approx(alone.prompt_s(many) * 81 / 160, rel=0.07)
    single, eight = (Workload("answers", 1000, 0, 100, n) for n in (1, 8))
    assert two.answer_s(single) > alone.answer_s(single)
    assert two.answer_s(eight) < 1.2 * two.answer_s(single), "two lanes of four rows each"


def test_a_slow_link_bounds_the_chunks() -> None:
    model, ranks, costs = in_stages(16, 16)
    prompt = Workload("prompt", 20 * 2048, 0, 1)
    slow = speed(model, ranks, RING_ETHERNET, costs=costs, mbps=10)
    assert slow.prompt_s(prompt) > 20 * 2048 * 4096 * 2 * 8 / 10e6


def test_a_transfer_is_one_step_of_what_was_measured_for_sums() -> None:
    model, ranks, costs = in_stages(16, 8, 8, metal=False)
    group = Collective(RING_ETHERNET, 4e-3, frozenset("abc"), bandwidth=1e8)
    found = speed(model, ranks, RING_ETHERNET, costs=costs, measured=[group])
    assert found.measured
    assert found.latency_s == pytest.approx(3 * 1e-3)
    assert found.wire_s == pytest.approx(2 * 4096 * 2 / 1e8)


LARGE = published("llama-3.3-70b-bf16")
EXPERTS = published("qwen3-235b-a22b-8bit")


def desk(*memories: int, mbps: int = 10_000, chips: Sequence[str] = ()) -> list[MemberMachine]:
    """Macs of so many GiB on Ethernet."""
    kinds = chips or ["Apple M3 Ultra"] * len(memories)
    return [
        add(mac(i, memory=memory, chip=kind), [ethernet(f"192.168.7.{i + 1}", mbps=mbps)])
        for i, (memory, kind) in enumerate(zip(memories, kinds, strict=True))
    ]


def pipelines(made: Placement) -> list[Candidate]:
    return [one for one in made.alternatives if one.is_pipeline]


def test_two_equal_macs_with_cables_share_each_layer_of_a_large_dense_model() -> None:
    members = on_lan(cabled([mac(i, memory=256) for i in range(2)], all_pairs(2)))
    made = plan(members, LARGE, A, PlacementOptions(fast_fences=True))
    assert (made.chosen.kind, made.chosen.split) == (JACCL_MESH, ())
    other = pipelines(made)[0]
    assert other.split == (39, 41)
    assert other.request_seconds(CHAT) > made.chosen.request_seconds(CHAT)


def test_unlike_memories_make_a_pipeline_where_equal_shares_do_not_fit() -> None:
    made = plan(desk(192, 96, chips=("Apple M3 Ultra", "Apple M4 Max")), EXPERTS, A)
    assert made.chosen.split[0] > made.chosen.split[1]
    assert made.reason.startswith(f"pipeline of 2, ring over Ethernet (layers: a {made.chosen.split[0]}, b ")
    assert ". Not tensor parallel of 2: rank 1 (b) has 103.1 GB for 135.0 GB" in made.reason


def test_three_macs_serve_what_no_two_hold_and_three_cannot_divide() -> None:
    made = plan(desk(64, 64, 48, chips=("Apple M4 Max", "Apple M4 Pro", "Apple M4 Pro")), LARGE, A)
    assert (made.chosen.nodes, sum(made.chosen.split), made.ranks[0]) == (3, 80, A)
    assert "64 attention heads do not divide by 3" in made.reason
    assert all(rank.fits for rank in made.chosen.memory)


def test_a_slow_link_is_for_pipelines() -> None:
    """Sums of two a layer want a fast link; three transfers a token do not."""
    fast, slow = (
        plan(desk(96, 96, mbps=mbps), LARGE, A, PlacementOptions(fast_fences=True))
        for mbps in (100_000, 1000)
    )
    assert fast.chosen.split == ()
    assert slow.chosen.split == (39, 41)


def test_what_was_asked_for_overrides_one_mac_and_the_sooner_way() -> None:
    members, small = desk(96, 96), layered()
    essay = PlacementOptions(workload=Workload("essay", 100, 0, 2000))
    assert plan(members, small, A, essay).ranks == (A,)
    for parallel, split in (("tensor", ()), ("pipeline", (15, 17))):
        made = plan(members, small, A, replace(essay, parallel=parallel))
        assert (made.chosen.nodes, made.chosen.split) == (2, split)
        assert plan(members[:1], small, A, PlacementOptions(parallel=parallel)).ranks == (A,), "no other is"
    assert plan(members, shape(), A, PlacementOptions(parallel="pipeline")).ranks == (A,)
    uneven = plan(members, small, A, PlacementOptions(split=(3, 29)))
    assert uneven.chosen.split == (3, 29)
    assert uneven.chosen.memory[0].weights < uneven.chosen.memory[1].weights


PAIRS = replace(layered(), rules=StageRules(frozenset(range(1, 32, 2))))


@pytest.mark.parametrize(
    ("model", "split", "says"),
    [
        (layered(), (40, 24), "the split 40,24 has 64 layers, and model has 32"),
        (layered(), (16, 8, 8), "the split 16,8,8 needs 3 nodes, 2 are here"),
        (layered(), (16, 8, 9), "the split 16,8,9 has 33 layers, and model has 32"),
        (PAIRS, (15, 17), "the split 15,17 cannot be: layer 17 reads results of earlier layers"),
        (layered(), (4, 28), "rank 1 (b) has 8.6 GB for 15.7 GB of 28 layers"),
        (shape(), (16, 16), "the family 'llama' cannot be cut into 2 stages: a test says so"),
        (layered(num_hidden_layers=1), (), "1 layers are fewer than 2 Macs"),
        (layered(num_hidden_layers=200), (), "these Macs have room for 147 of 200 layers: a 134, b 13"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_its_numbers(
    model: ModelShape, split: tuple[int, ...], says: str
) -> None:
    wish = PlacementOptions(split=split) if split else PlacementOptions(nodes=2, parallel="pipeline")
    made = plan(desk(64, 8), model, A, wish)
    assert made.chosen is None
    assert says in made.reason


def test_a_pipeline_that_failed_to_form_makes_way_for_the_next() -> None:
    members = on_lan(cabled([mac(i, memory=96) for i in range(3)], all_pairs(3)))
    first = plan(members, EXPERTS, A, PlacementOptions(parallel="pipeline"))
    failed = FailedGroup(first.chosen.kind, links_of(first.chosen.ranks, first.chosen.rdma), "1 cable is out")
    then = plan(members, EXPERTS, A, PlacementOptions(parallel="pipeline", failed=(failed,)))
    assert (then.chosen.kind, then.chosen.nodes) != (first.chosen.kind, 2)
    assert then.chosen.split == first.chosen.split

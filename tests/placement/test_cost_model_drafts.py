"""The speed with drafts of an MTP head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published_models import published
from mlxtp.engine.mtp_head import PROPOSES
from mlxtp.model_config import MTP_PLACES
from mlxtp.placement.cost_model import (
    ALONE,
    DRAFTS,
    FENCE_S,
    JACCL_MESH,
    KERNEL_S,
    PROMPT,
    WIDER,
    RankHardware,
    drafted,
    speed,
    stage_costs,
    stages,
)
from mlxtp.placement.model_shape import ModelShape, shape_of
from mlxtp.placement.tables import ACCEPTED, ACCEPTED_LATER, ACCEPTED_UNKNOWN, chip

from .made_up_models import llama

DENSE = shape_of(replace(llama(), has_head=True, drafts=True))
DEEPSEEK = published("deepseek-v3.1-4bit")


def macs(count: int) -> list[RankHardware]:
    return [RankHardware(str(i), chip("Apple M3 Ultra")) for i in range(count)]


def step_s(shape: ModelShape, size: int, count: int, accepted: float = 0.5, **options: bool) -> float:
    """Seconds of a step with drafts, by its tokens and their number a second."""
    found = speed(shape, macs(size), JACCL_MESH if size > 1 else ALONE, **options)
    tokens = 1 + accepted * sum(ACCEPTED_LATER**at for at in range(count))
    return tokens / drafted(found, shape, macs(size), count, accepted).tokens_per_second


def test_the_engine_proposes_as_many_and_knows_the_families_of_the_table() -> None:
    assert DRAFTS == PROPOSES
    unknown = {"llama", "qwen3_next"}  # no published head, and no published figure
    assert set(ACCEPTED) >= set(MTP_PLACES) - unknown


def test_a_dense_model_reads_its_weights_once_and_the_head_for_each_draft() -> None:
    shape = DENSE
    head, reading = shape.mtp_head, macs(1)[0].chip.reading
    own = shape.before[-1] - shape.before[-2]
    assert head.weight_bytes == pytest.approx(own.weight_bytes + 2 * 2 * shape.hidden**2, rel=1e-4)
    once_s = (shape.token_bytes + shape.rank_kv(1, PROMPT)) / reading * (1 + 2 * WIDER)
    draft_s = (head.token_bytes + shape.output_bytes + head.kv_token_bytes * PROMPT) / reading
    kernels_s = (shape.kernels + 2 * head.kernels) * KERNEL_S
    assert step_s(shape, 1, 2) == pytest.approx(once_s + draft_s * (2 + 2 * WIDER) + kernels_s)


def test_more_experts_are_met_by_more_tokens() -> None:
    """Of 256 experts each of three tokens meets 8 others, but for those that two of them share."""
    costs = stage_costs(DEEPSEEK, macs(1)[0])
    met = 1 - (1 - 8 / 256) ** 3
    reading_s = (costs.step_s(1, PROMPT, 3) - costs.kernels_s) / (1 + 2 * WIDER)
    assert reading_s - costs.reading_s == pytest.approx(costs.others_s * (met - 8 / 256) / (1 - 8 / 256))


def test_a_step_has_as_many_collectives_as_without_drafts_and_one_for_each() -> None:
    slow, fast = (step_s(DEEPSEEK, 2, 3, fast_fences=fences) for fences in (False, True))
    assert slow - fast == pytest.approx((DEEPSEEK.collectives + 3) * (FENCE_S - 10e-6))


def test_the_best_number_of_drafts_counts_with_what_is_published() -> None:
    found = speed(DEEPSEEK, macs(2), JACCL_MESH)
    each = [
        drafted(found, DEEPSEEK, macs(2), count, ACCEPTED["deepseek_v3"]).tokens_per_second
        for count in (1, 2, 3)
    ]
    assert (found.drafts.tokens_per_second, found.drafts.count) == (max(each), each.index(max(each)) + 1)
    assert (found.drafts.accepted, found.drafts.published) == (0.85, True)
    assert found.drafts.tokens_per_second > found.tokens_per_second


def test_drafts_that_are_rarely_right_cost_more_than_they_bring() -> None:
    found = speed(DEEPSEEK, macs(1), ALONE)
    assert drafted(found, DEEPSEEK, macs(1), 3, 0.1).tokens_per_second < found.tokens_per_second


def test_a_family_of_which_nothing_is_published_has_a_marked_assumption_and_one_without_use_nothing() -> None:
    found = speed(DENSE, macs(1), ALONE).drafts
    assert (found.accepted, found.published) == (ACCEPTED_UNKNOWN, False)
    assert speed(shape_of(llama()), macs(1), ALONE).drafts is None


def test_a_head_in_the_files_is_no_expert_and_no_part_of_a_prompt() -> None:
    without, having = (
        stage_costs(published("deepseek-v3.1-4bit", mtp=mtp), macs(1)[0]) for mtp in (False, True)
    )
    assert having.others_s == pytest.approx(without.others_s, rel=1e-4)
    assert having.chunk_s == pytest.approx(without.chunk_s, rel=1e-4)


def test_in_a_pipeline_the_rank_that_chooses_drafts_alone() -> None:
    cut = zip(stages((30, 31)), macs(2), strict=True)
    costs = [stage_costs(DEEPSEEK.stage(*layers), rank) for layers, rank in cut]
    found = speed(DEEPSEEK, macs(2), JACCL_MESH, costs=costs)
    plain = replace(found, fences_s=0.0, latency_s=0.0)
    assert found.drafts is not None
    assert drafted(found, DEEPSEEK, macs(2), 1, 0.85) == drafted(plain, DEEPSEEK, macs(2), 1, 0.85)
    slower = [macs(1)[0], RankHardware("x", chip("Apple M1"))]
    assert drafted(found, DEEPSEEK, slower, 1, 0.85) == drafted(found, DEEPSEEK, macs(2), 1, 0.85)

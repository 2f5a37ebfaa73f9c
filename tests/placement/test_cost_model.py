"""The speed model, term by term."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.published_models import published
from mlxtp.placement.cost_model import (
    AGENT,
    ALONE,
    FABRICS,
    FAST_FENCE_S,
    FENCE_S,
    JACCL_MESH,
    JACCL_RING,
    KERNEL_S,
    LONG_PROMPT,
    PROMPT,
    RING_ETHERNET,
    RING_THUNDERBOLT,
    Collective,
    RankHardware,
    speed,
)
from mlxtp.placement.model_shape import ModelShape
from mlxtp.placement.tables import chip

from .made_up_models import shape

ULTRA, MAX = chip("Apple M3 Ultra"), chip("Apple M4 Max")
MODEL = shape()


def ranks(count: int, *chips: str) -> list[RankHardware]:
    return [
        RankHardware("abcdefgh"[i], chip(name)) for i, name in enumerate(chips or ["Apple M3 Ultra"] * count)
    ]


def kv(size: int, model: ModelShape = MODEL) -> int:
    return model.rank_kv(size, PROMPT)


def test_one_mac_reads_its_weights_and_starts_its_kernels() -> None:
    alone = speed(MODEL, ranks(1), ALONE)
    expected = (MODEL.token_bytes + kv(1)) / (819e9 * 0.8) + MODEL.kernels * KERNEL_S
    assert 1 / alone.tokens_per_second == pytest.approx(expected)
    assert (alone.fences_s, alone.latency_s, alone.wire_s) == (0, 0, 0)


def test_what_is_cached_of_a_prompt_is_not_computed() -> None:
    alone = speed(MODEL, ranks(1), ALONE)
    assert alone.prompt_s(AGENT) == alone.prompts_s(AGENT.prompt - AGENT.cached, 1, AGENT.cached)


def test_attention_to_earlier_tokens_takes_its_share_of_a_long_prompt() -> None:
    """By arithmetic: layers x heads x (keys + values) x earlier tokens, to a product for each weight."""
    llama = published("llama-3.3-70b-4bit")
    of_weights = speed(llama, ranks(1), ALONE).stages[0].arithmetic_s
    for tokens, cached, share in ((30_000, 0, 0.283), (3_000, 27_000, 0.538), (1_000, 0, 0.009)):
        seconds = speed(llama, ranks(1), ALONE).prompts_s(tokens, 1, cached)
        assert seconds / (tokens * of_weights) - 1 == pytest.approx(share, abs=0.002)
    windows = published("gpt-oss-120b")
    [stage] = speed(windows, ranks(1), ALONE).stages
    assert (windows.attended, windows.attended_window) == (36 * 64 * 128, 18 * 64 * 128)
    later, sooner = (stage.prompt_s(2000, 2000, cached) for cached in (20_000, 10_000))
    assert later - sooner == pytest.approx(2000 * 10_000 * stage.attended_s / 2), "half have windows"
    two = speed(llama, ranks(2), JACCL_MESH).stages[0]
    assert two.attended_s == pytest.approx(speed(llama, ranks(1), ALONE).stages[0].attended_s / 2)


def test_two_macs_read_half_and_wait_for_each_other() -> None:
    two = speed(MODEL, ranks(2), JACCL_MESH)
    assert two.reading_s == pytest.approx((MODEL.rank_token_bytes(2) + kv(2)) / (819e9 * 0.8))
    assert two.kernels_s == speed(MODEL, ranks(1), ALONE).kernels_s
    assert two.fences_s == pytest.approx(MODEL.collectives * FENCE_S)
    assert two.latency_s == pytest.approx(MODEL.collectives * 25e-6)
    assert two.wire_s == pytest.approx(MODEL.collectives * 4096 * 2 / 8e9)
    parts = two.reading_s + two.kernels_s + two.fences_s + two.latency_s + two.wire_s
    assert 1 / two.tokens_per_second == pytest.approx(parts)


def test_the_slowest_mac_counts() -> None:
    mixed = speed(MODEL, ranks(2, "Apple M3 Ultra", "Apple M4 Pro"), JACCL_MESH)
    assert mixed == speed(MODEL, ranks(2, "Apple M4 Pro", "Apple M4 Pro"), JACCL_MESH)


def test_fast_fences_are_fast_and_a_cpu_has_none() -> None:
    fast = speed(MODEL, ranks(2), JACCL_MESH, fast_fences=True)
    assert fast.fences_s == pytest.approx(MODEL.collectives * FAST_FENCE_S)
    cpus = [RankHardware(name, ULTRA, metal=False) for name in "ab"]
    assert speed(MODEL, cpus, RING_ETHERNET).fences_s == 0


def test_a_circle_takes_longer_the_larger_it_is_and_a_mesh_does_not() -> None:
    assert FABRICS[JACCL_MESH].latency_s(8) == FABRICS[JACCL_MESH].latency_s(2)
    assert FABRICS[JACCL_RING].latency_s(2) == FABRICS[JACCL_MESH].latency_s(2)
    assert FABRICS[JACCL_RING].latency_s(5) == pytest.approx(4 * FABRICS[JACCL_RING].latency_s(2))


def test_a_slow_link_makes_the_prompt_slow() -> None:
    fast = speed(MODEL, ranks(2), RING_ETHERNET, mbps=10_000)
    slow = speed(MODEL, ranks(2), RING_ETHERNET, mbps=1000)
    assert slow.wire_s == pytest.approx(10 * fast.wire_s)
    assert slow.ttft_s > fast.ttft_s + 3


def test_a_prompt_is_arithmetic_on_every_mac() -> None:
    alone, two = speed(MODEL, ranks(1), ALONE), speed(MODEL, ranks(2), JACCL_MESH)
    assert alone.ttft_s == pytest.approx(
        2 * MODEL.token_weights * LONG_PROMPT / (ULTRA.flops * 0.75) + 1 / alone.tokens_per_second
    )
    assert two.ttft_s < alone.ttft_s


def latency(measured: Sequence[Collective], count: int, kind: str) -> float:
    found = speed(MODEL, ranks(count), kind, measured=measured)
    return found.latency_s / MODEL.collectives


def pair(a: str, b: str, seconds: float, kind: str = JACCL_MESH) -> Collective:
    return Collective(kind, seconds, frozenset((a, b)))


def test_a_measurement_of_the_group_itself_counts_most() -> None:
    group = Collective(JACCL_MESH, 70e-6, frozenset("abc"))
    known = (group, pair("a", "b", 1.0), pair("b", "c", 1.0), pair("a", "c", 1.0))
    assert latency(known, 3, JACCL_MESH) == pytest.approx(70e-6)
    assert speed(MODEL, ranks(3), JACCL_MESH, measured=known).measured


def test_then_the_slowest_of_its_pairs() -> None:
    times = (("a", "b", 30e-6), ("b", "c", 50e-6), ("a", "c", 40e-6))
    assert latency([pair(*each) for each in times], 3, JACCL_MESH) == pytest.approx(50e-6)
    assert latency([pair(*each, JACCL_RING) for each in times], 3, JACCL_RING) == pytest.approx(2 * 50e-6)


def test_a_circle_asks_for_neighbours_only() -> None:
    neighbours = ("ab", "bc", "cd", "da")
    around = [pair(*each, 30e-6, kind) for each in neighbours for kind in (JACCL_RING, JACCL_MESH)]
    assert latency(around, 4, JACCL_RING) == pytest.approx(3 * 30e-6)
    assert latency(around, 4, JACCL_MESH) == pytest.approx(25e-6)


def test_a_fence_that_was_measured_along_is_not_counted_again() -> None:
    group = Collective(JACCL_MESH, 195e-6, frozenset("ab"), fenced=True)
    two = speed(MODEL, ranks(2), JACCL_MESH, measured=[group])
    assert two.fences_s + two.latency_s == pytest.approx(MODEL.collectives * 195e-6)
    assert two.fences_s == pytest.approx(MODEL.collectives * FENCE_S)
    quick = Collective(JACCL_MESH, 95e-6, frozenset("ab"), fenced=True)  # a fence is faster than assumed
    found = speed(MODEL, ranks(2), JACCL_MESH, measured=[quick])
    assert (found.fences_s, found.latency_s) == (pytest.approx(MODEL.collectives * 95e-6), 0)


def test_a_circle_has_more_steps_but_one_fence() -> None:
    pairs = [
        Collective(JACCL_RING, FENCE_S + 30e-6, frozenset(pair), fenced=True)
        for pair in ("ab", "bc", "cd", "da")
    ]
    around = speed(MODEL, ranks(4), JACCL_RING, measured=pairs)
    assert around.latency_s == pytest.approx(MODEL.collectives * 3 * 30e-6)
    assert around.fences_s == pytest.approx(MODEL.collectives * FENCE_S)


def test_one_fabric_says_nothing_of_another_of_the_same_backend() -> None:
    slow = [Collective(RING_ETHERNET, 1.0, frozenset("ab"))]
    assert latency(slow, 2, RING_ETHERNET) == pytest.approx(1.0)
    for other in (RING_THUNDERBOLT, JACCL_MESH):
        assert not speed(MODEL, ranks(2), other, measured=slow).measured


def test_a_bandwidth_that_was_measured_counts_over_the_links() -> None:
    known = [Collective(RING_ETHERNET, 1e-4, frozenset("ab"), bandwidth=2e8)]
    two = speed(MODEL, ranks(2), RING_ETHERNET, measured=known, mbps=10_000)
    assert two.wire_s == pytest.approx(MODEL.collectives * 4096 * 2 / 2e8)
    unknown = [Collective(RING_ETHERNET, 1e-4, frozenset("ab"))]
    two = speed(MODEL, ranks(2), RING_ETHERNET, measured=unknown, mbps=800)
    assert two.wire_s == pytest.approx(MODEL.collectives * 4096 * 2 / 1e8)

"""Memory that a rank may take, and that it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxtp.placement.cost_model import HEADROOM_BYTES, RankMemory, fits_beside, rank_memory, usable_bytes

from .made_up_macs import GIB, changed, mac, shape


def test_at_most_what_is_free_and_at_most_what_the_gpu_may_wire() -> None:
    assert usable_bytes(mac(0, memory=64, free=50, gpu_bytes=48 * GIB)) == 48 * GIB
    assert usable_bytes(mac(0, memory=64, free=40, gpu_bytes=48 * GIB)) == 40 * GIB
    assert usable_bytes(mac(0, memory=64, gpu_bytes=48 * GIB)) == 48 * GIB


def test_what_our_own_rank_holds_will_be_free() -> None:
    busy = replace(mac(0, memory=64, free=10), held_bytes=30 * GIB)
    assert usable_bytes(busy) == 40 * GIB


@pytest.mark.parametrize(("memory", "share"), [(16, 2 / 3), (36, 3 / 4), (48, 3 / 4), (512, 3 / 4)])
def test_an_unknown_limit_is_macos_own(memory: int, share: float) -> None:
    assert usable_bytes(mac(0, memory=memory, gpu_bytes=0)) == pytest.approx(memory * GIB * share, rel=1e-9)


def test_elsewhere_there_is_no_such_limit() -> None:
    assert usable_bytes(mac(0, memory=16, gpu_bytes=0, system="linux")) == 16 * GIB


def test_a_machine_that_says_nothing_has_nothing() -> None:
    assert usable_bytes(changed(mac(0, gpu_bytes=0), memory_bytes=0)) == 0


def test_a_rank_needs_weights_caches_and_headroom() -> None:
    model = shape()
    rank = rank_memory(mac(0), model, 2, 1000)
    assert rank.weights == model.weight_bytes // 2
    assert rank.kv == 1000 * 131072 // 2
    assert rank.headroom == HEADROOM_BYTES + int(0.07 * rank.weights)
    assert rank.needed == rank.weights + rank.kv + rank.headroom
    assert rank.fits
    assert rank_memory(mac(0), model, 2, 1000, sharing=4).available == 16 * GIB
    assert not rank_memory(mac(0, memory=8), model, 2, 1000).fits


def test_ranks_fit_beside_others_only_in_what_these_leave() -> None:
    weights, held = 20 * GIB, 25 * GIB
    member = replace(mac(0, memory=64, free=20, gpu_bytes=48 * GIB), held_bytes=held)
    needs = [RankMemory(member.node_id, "a", weights, 0, 0, usable_bytes(member), 64 * GIB)]
    assert usable_bytes(member) == 45 * GIB
    assert fits_beside(needs, {})
    assert fits_beside(needs, {member.node_id: held})
    assert not fits_beside(needs, {member.node_id: held + 1})
    assert fits_beside(needs, {"another": held + 1})

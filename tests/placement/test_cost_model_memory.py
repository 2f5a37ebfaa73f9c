"""Memory that a rank may take, and that it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp import free_memory
from mlxtp.placement.cost_model import HEADROOM_BYTES, default_gpu_bytes, rank_memory, usable_bytes
from mlxtp.placement.planner import PlacementOptions, plan

from .made_up_macs import GIB, changed, mac
from .made_up_models import shape
from .recorded_macs import ULTRA, machine, recorded


def test_at_most_what_is_free_and_at_most_what_the_gpu_may_wire() -> None:
    assert usable_bytes(mac(0, memory=64, free=50, gpu_bytes=48 * GIB)) == 48 * GIB
    assert usable_bytes(mac(0, memory=64, free=40, gpu_bytes=48 * GIB)) == 40 * GIB
    assert usable_bytes(mac(0, memory=64, gpu_bytes=48 * GIB)) == 48 * GIB


def test_what_our_own_rank_holds_will_be_free() -> None:
    busy = replace(mac(0, memory=64, free=10), held_bytes=30 * GIB)
    assert usable_bytes(busy) == 40 * GIB


@pytest.mark.parametrize(
    ("memory", "mib"),
    [
        (16, 10_922), (35, 23_893), (36, 27 * 1024), (48, 38_338), (56, 45_711), (64, 53_084), (128, 110_080),
        (256, 212_992), (512, 475_136),
    ],
)  # fmt: skip
def test_an_unknown_limit_is_what_metal_reports_of_such_a_mac(memory: int, mib: int) -> None:
    assert usable_bytes(mac(0, memory=memory, gpu_bytes=0)) >> 20 == mib


@given(st.integers(0, 1024 * GIB), st.integers(0, 1024 * GIB))
def test_more_memory_never_has_a_lower_limit_nor_one_beyond_it(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert 0 <= default_gpu_bytes(low) <= default_gpu_bytes(high) <= high


def test_what_is_stranded_until_a_restart_is_taken_and_named() -> None:
    half = changed(mac(0, memory=512, gpu_bytes=464 * GIB), stranded_bytes=96 * GIB)
    assert usable_bytes(half) == 368 * GIB
    assert usable_bytes(changed(half, free_bytes=200 * GIB)) == 200 * GIB, "free memory has it out already"
    large = shape(hidden_size=32768, intermediate_size=131072)
    reason = plan([half], large, "", PlacementOptions()).reason
    assert reason.endswith("; 103.1 GB there may be stranded until that Mac restarts"), reason


def test_elsewhere_there_is_no_such_limit() -> None:
    assert usable_bytes(mac(0, memory=16, gpu_bytes=0, system="linux")) == 16 * GIB


def test_a_machine_that_says_nothing_has_nothing() -> None:
    assert usable_bytes(changed(mac(0, gpu_bytes=0), memory_bytes=0)) == 0


def test_a_rank_needs_weights_caches_and_headroom() -> None:
    model = shape()
    rank = rank_memory(mac(0), model, 2, 1000)
    assert rank.weights == model.rank_weights(2)
    assert rank.kv == 1000 * 131072 // 2
    assert rank.headroom == HEADROOM_BYTES + int(0.07 * rank.weights)
    assert rank.needed == rank.weights + rank.kv + rank.headroom
    assert rank.fits
    assert rank_memory(mac(0), model, 2, 1000, sharing=4).available == 16 * GIB
    assert not rank_memory(mac(0, memory=8), model, 2, 1000).fits


def test_a_mac_counts_its_free_memory_by_vm_stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "vm_stat"
    monkeypatch.setattr(free_memory, "_VM_STAT", str(program))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=7))
    assert free_memory.free_bytes("darwin") == 7, "it cannot run"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{recorded(ULTRA)['vm_stat']}\nEND\n")
    program.chmod(0o700)
    assert free_memory.free_bytes("darwin") == machine(ULTRA).free_bytes

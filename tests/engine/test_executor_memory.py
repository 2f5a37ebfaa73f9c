"""Memory that a rank gives back, keeps for reuse, and finds for its KV caches; Metal is pretended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxtp.engine import executor
from mlxtp.engine.executor import POOL_BYTES, RankExecutor, kv_room_bytes, ranks_here
from mlxtp.engine.group import CollectiveCounter
from mlxtp.engine.logit_shaping import RequestShaping
from mlxtp.engine.telemetry import RankTelemetry
from mlxtp.errors import ModelError
from mlxtp.wire.messages import Bootstrap, Error, LoadShard, Unload

GIB = 1 << 30


def bootstrap(*hosts: str, rank: int = 0) -> Bootstrap:
    return Bootstrap(rank, max(len(hosts), 1), "ring", hosts, "", bytes(32), 5.0, 5.0, 1)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What becomes of MLX's pool; there is Metal."""
    notes: list[object] = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_cache_limit", notes.append)
    monkeypatch.setattr(mx, "clear_cache", lambda: notes.append("cleared"))
    return notes


@pytest.fixture
def rank(tmp_path: Path) -> RankExecutor:
    how: Any = {"shaping": RequestShaping(), "exchange": None, "post": print}
    return RankExecutor(bootstrap(), 1, tmp_path, RankTelemetry(), CollectiveCounter(), **how)


# --- what is given back ----------------------------------------------------------------------------------


def test_an_unloaded_model_leaves_nothing_in_the_pool(
    rank: RankExecutor, done: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.execute(Unload())
    assert done == ["cleared"]
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)  # it would wait for messages of other ranks
    rank.execute(Unload())
    rank.give_back()
    assert done == ["cleared"]


def test_a_load_that_fails_leaves_nothing_in_memory(
    rank: RankExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are in frames of the error until that is gone."""

    def fail(*_: object) -> None:
        weights = mx.zeros((4 << 20,), dtype=mx.uint8)
        mx.eval(weights)
        raise ModelError("no such layer")

    mx.clear_cache()
    before = mx.get_active_memory()
    monkeypatch.setattr(executor, "load", fail)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_cache_limit", lambda _: None)
    assert isinstance(rank.execute(LoadShard("/model", 64, ())), Error)
    assert (mx.get_active_memory() - before, mx.get_cache_memory()) == (0, 0)


def test_the_pool_is_bounded_on_metal_alone(
    rank: RankExecutor, done: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ModelError("no such model")

    monkeypatch.setattr(executor, "load", fail)
    rank.execute(LoadShard("/model", 64, ()))
    assert done == [POOL_BYTES, "cleared"]
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    rank.execute(LoadShard("/model", 64, ()))
    assert done == [POOL_BYTES, "cleared"]


def test_a_heartbeat_counts_what_is_kept_for_reuse(
    rank: RankExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "get_active_memory", lambda: 7)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 5)
    pong = rank.status.pong()
    assert (pong.stats.memory_bytes, pong.stats.pool_bytes) == (12, 5)


# --- room for KV caches ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "ranks", "expected"),
    [
        (400, 1, 72),  # what Metal recommends, without what this rank has
        (60, 1, 45),  # other programs have the rest
        (60, 2, 22.5),
        (0, 1, 0),
    ],
)
def test_room_on_metal_is_what_the_gpu_may_have_and_what_the_machine_has_left(
    monkeypatch: pytest.MonkeyPatch, free: int, ranks: int, expected: float
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 116 * GIB})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 20 * GIB)
    monkeypatch.setattr(executor, "free_bytes", lambda: free * GIB)
    assert kv_room_bytes(ranks) == expected * GIB


@pytest.mark.parametrize(
    ("hosts", "here"),
    [
        ((), 1),
        (("127.0.0.1:5", "127.0.0.1:6", "127.0.0.1:7"), 3),
        (("10.0.0.1:5", "10.0.0.2:5"), 1),
        (("10.0.0.1:5", "10.0.0.2:5", "10.0.0.1:6"), 2),
        (("", "", ""), 1),  # JACCL has no addresses, and one rank on each Mac
    ],
)
def test_ranks_share_memory_with_those_of_their_own_machine(hosts: tuple[str, ...], here: int) -> None:
    assert ranks_here(bootstrap(*hosts)) == here

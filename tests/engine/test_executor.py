"""Loading on one rank, and its memory, with a pretended group and a pretended GPU."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxtp.engine import executor
from mlxtp.engine.executor import POOL_BYTES, RankExecutor, check_share, kv_room_bytes, ranks_here
from mlxtp.engine.group import CollectiveCounter, LoneGroup
from mlxtp.engine.loader import load
from mlxtp.engine.logit_shaping import RequestShaping
from mlxtp.engine.telemetry import RankTelemetry
from mlxtp.errors import Code, ModelError
from mlxtp.wire.codecs import Message
from mlxtp.wire.messages import Bootstrap, CountedShare, Error, Init, Loaded, LoadShard, Unload

from ..agents.test_one_machine import free_port
from ..live_cluster import WAIT_S
from ..wire.forwards import of_prompt
from .small_models import write_model

pytestmark = pytest.mark.fault


@pytest.mark.parametrize(("ranks", "metal", "expected"), [(2, True, [2]), (2, False, []), (1, True, [1])])
def test_on_metal_a_rank_runs_its_first_forwards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, metal: bool, expected: list[Any]
) -> None:
    """Before the rank answers that it has the model."""
    ran: list[int] = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(executor, "form", lambda *_, **__: SimpleNamespace(rank=0, size=ranks))
    monkeypatch.setattr(
        executor, "load", lambda path, _, progress, *how: load(path, LoneGroup(), progress, *how)
    )
    monkeypatch.setattr(executor, "run_alone", lambda _, size, forwards: ran.append(size))
    monkeypatch.setattr(executor, "kv_room_bytes", lambda _: 1 << 20)
    rank = a_rank(tmp_path, ranks=ranks)
    rank.execute(Init())
    folder = write_model(tmp_path / "model")
    assert isinstance(rank.execute(LoadShard(str(folder), 64, ())), Loaded)
    assert ran == expected


def test_a_forward_that_mlx_blocks_at_queueing_counts_as_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Metal, where ten command buffers are on their way at most."""
    rank = a_rank(tmp_path)
    assert isinstance(rank.execute(LoadShard(str(write_model(tmp_path / "model")), 64, ())), Loaded)
    blocked, queue = threading.Event(), mx.async_eval

    def queue_late(*arrays: Any) -> None:
        blocked.wait(0.2)
        queue(*arrays)

    monkeypatch.setattr(mx, "async_eval", queue_late)
    result = rank.settle(rank.launch(1, of_prompt(1, 0, 4, (7, 8, 9, 10))))
    assert result.step_us >= result.wait_us >= 0.2e6


COUNTED = CountedShare(427_264, 512)
"""Share of one rank of the model that `write_model` makes."""
GIB = 1 << 30
MOST_BYTES = 5 * GIB + (64 << 20)
"""For weights of which a plan counts 4 GiB."""


def bootstrap(*hosts: str, rank: int = 0, ranks: int = 1) -> Bootstrap:
    return Bootstrap(rank, ranks, "ring", hosts, "", bytes(32), 5.0, 5.0, 1)


def a_rank(folder: Path, **fields: Any) -> RankExecutor:
    how: Any = {"shaping": RequestShaping(), "exchange": None, "post": print}
    return RankExecutor(bootstrap(**fields), 1, folder, RankTelemetry(), CollectiveCounter(), **how)


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_refuses_a_share_that_takes_more_memory_than_its_plan_counted_on(
    tmp_path: Path, number: int
) -> None:
    rank, folder = a_rank(tmp_path, rank=number), str(write_model(tmp_path / "model"))

    def loaded(mine: CountedShare, other: CountedShare) -> Message:
        counted = (mine, other) if number == 0 else (other, mine)
        return rank.execute(LoadShard(folder, 64, (), counted=counted))

    refused = loaded(replace(COUNTED, kv_token_bytes=255), COUNTED)
    assert isinstance(refused, Error)
    assert refused.code is Code.MODEL_INVALID
    said = "model: a rank has 512 bytes of KV caches for a token, where its plan counted on 255. If files"
    assert refused.detail.startswith(said)
    assert rank.loaded is None
    reply = loaded(COUNTED, CountedShare(0, 0))
    assert isinstance(reply, Loaded)
    assert (reply.weight_bytes, reply.kv_token_bytes) == (COUNTED.weight_bytes, COUNTED.kv_token_bytes)
    assert isinstance(rank.execute(LoadShard(folder, 64, ())), Loaded), "nothing was planned"


@pytest.mark.parametrize(
    ("weight_bytes", "kv_token_bytes", "says"),
    [
        (1 << 30, 10, ""),
        (5 << 30, 2000, ""),
        (MOST_BYTES, 0, ""),
        (MOST_BYTES + 1, 0, "5435817985 bytes of weights, where its plan counted on 4294967296. If files"),
        (0, 2001, "2001 bytes of KV caches for a token, where its plan counted on 1000. If files"),
    ],
)
def test_a_share_may_take_less_than_counted_or_a_little_more(
    weight_bytes: int, kv_token_bytes: int, says: str
) -> None:
    share: Any = SimpleNamespace(name="m", weight_bytes=weight_bytes, kv_token_bytes=kv_token_bytes)
    with pytest.raises(ModelError, match=f"m: a rank has {says}") if says else nullcontext():
        check_share(share, CountedShare(4 << 30, 1000))


WAITS = """
import os, sys
from pathlib import Path
import mlx.core as mx
from mlxtp.engine.executor import RankExecutor
from mlxtp.engine.group import CollectiveCounter
from mlxtp.engine.logit_shaping import RequestShaping
from mlxtp.engine.telemetry import RankTelemetry
from mlxtp.wire.messages import Bootstrap, Init

at, *hosts = sys.argv[1:]
bootstrap = Bootstrap(int(at), 2, "ring", tuple(hosts), "", bytes(32), 60.0, 5.0, 1)
others = dict(shaping=RequestShaping(), exchange=None, post=print)
rank = RankExecutor(bootstrap, 1, Path.cwd(), RankTelemetry(), CollectiveCounter(), **others)
rank.execute(Init())
if at == "1":
    sys.stdin.read()
never = rank._group.receive_row(4, mx.float32, 1, 4)
mx.eval(mx.ones(1000))  # whose memory MLX keeps
rank.give_back()
os._exit(7)
"""


@pytest.mark.group
@pytest.mark.chaos
def test_a_rank_gives_its_memory_back_although_a_message_never_comes(tmp_path: Path) -> None:
    """The stage that was to send it stands still."""
    hosts = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    how: Any = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}}
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen([*command, "1", *hosts], stdin=subprocess.PIPE, **how) as other:
        try:
            assert subprocess.run([*command, "0", *hosts], timeout=WAIT_S, check=False, **how).returncode == 7
        finally:
            other.kill()


@pytest.mark.slow
@pytest.mark.parametrize("compared", [False, pytest.param(True, marks=pytest.mark.chaos)])
def test_after_forwards_alone_a_joint_one_compiles_no_kernel(tmp_path: Path, compared: bool) -> None:
    """Neither a prompt nor its traced steps. MLX's CPU backend compiles fused kernels as Metal does."""
    folder = write_model(tmp_path / "model")

    def compiled(alone: int) -> dict[str, int]:
        kept = tmp_path / f"kernels-{alone}"
        kept.mkdir()
        command = [sys.executable, "-m", "tests.engine.kernels_member", str(folder), str(alone)]
        environment = os.environ | {"TMPDIR": str(kept)}
        root = Path(__file__).parents[2]
        output = subprocess.run(command, cwd=root, env=environment, capture_output=True, check=True).stdout
        counts: dict[str, int] = json.loads(output)
        return counts

    found = compiled(alone=1)
    assert found["joint"] == 0
    assert found["alone"] > 0
    if compared:
        assert compiled(alone=0)["joint"] == found["alone"]


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
    return a_rank(tmp_path)


def test_a_load_that_fails_leaves_nothing_in_memory(
    rank: RankExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are in frames of the error until that is gone."""

    def fail(*_: object) -> None:
        weights = mx.zeros((4 << 20,), dtype=mx.uint8)
        mx.eval(weights)
        raise ModelError("no such layer")

    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    monkeypatch.setattr(executor, "load", fail)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_cache_limit", lambda _: None)
    assert isinstance(rank.execute(LoadShard("/model", 64, ())), Error)
    assert (mx.get_active_memory() - before, mx.get_cache_memory()) == (0, 0)


def test_the_pool_is_bounded_and_cleared_on_metal_alone(
    rank: RankExecutor, done: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ModelError("no such model")

    monkeypatch.setattr(executor, "load", fail)
    rank.execute(LoadShard("/model", 64, ()))
    rank.execute(Unload())
    assert done == [POOL_BYTES, "cleared", "cleared"]
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)  # it would wait for messages of other ranks
    rank.execute(LoadShard("/model", 64, ()))
    rank.execute(Unload())
    rank.give_back()
    assert len(done) == 3


def test_a_heartbeat_counts_what_is_kept_for_reuse(
    rank: RankExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "get_active_memory", lambda: 7)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 5)
    pong = rank.status.pong()
    assert (pong.stats.memory_bytes, pong.stats.pool_bytes) == (12, 5)


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

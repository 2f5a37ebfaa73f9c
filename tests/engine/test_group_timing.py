"""Timing the collectives of a real group: what comes out, who waits, and that the group is as before."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from typer.testing import CliRunner

from mlxtp.cli.main import app
from mlxtp.engine import group as group_module
from mlxtp.engine.decode_loop import _combined
from mlxtp.engine.group import RingGroup
from mlxtp.errors import Code, UserError
from mlxtp.groups.health import ServingState
from mlxtp.placement.measurements import SIZES
from mlxtp.wire.cluster_messages import FabricResult
from mlxtp.wire.messages import CollectivesTimed, Loaded, Message

from ..live_cluster import Cluster, until
from ..reference import endless_prompt
from .tables import refused

pytestmark = [pytest.mark.group, pytest.mark.fault]

ANSWER = "FALCON-MERCURY-7749"
QUESTION = f"Repeat exactly: {ANSWER}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("timing"), ranks=2) as cluster:
        yield cluster


class Steps:
    """A clock that goes on by what it is told, at each second look at it."""

    def __init__(self, *seconds: float) -> None:
        self._looks = iter([look for each in seconds for look in (0.0, each)])

    def perf_counter(self) -> float:
        return next(self._looks)


class Counting(RingGroup):
    """A group of two as seen from one of them; what it would send comes back doubled."""

    def __init__(self) -> None:
        self.size, self.rank = 2, 0
        self.summed: list[mx.array] = []
        self.gathered: list[mx.array] = []

    def total(self, array: mx.array) -> mx.array:
        self.summed.append(array)
        return array + array

    def gather(self, array: mx.array) -> mx.array:
        self.gathered.append(array)
        return mx.stack([array, array])


def test_each_collective_is_timed_for_itself_and_a_chain_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[None] = []

    def timed(kind: Any, size: int, rounds: int, *seconds: float) -> tuple[float, Counting, int]:
        monkeypatch.setattr(group_module, "time", Steps(*seconds))
        group, before = Counting(), len(progress)
        return group.timed(kind, size, rounds, lambda: progress.append(None)), group, len(progress) - before

    took, group, steps = timed("sum", 1024, 3, 9.0, 1.0, 2.0)
    assert (took, len(group.summed), len(group.gathered), steps) == (2.0, 4, 0, 3)  # one before, to meet
    assert {array.nbytes for array in group.summed} == {1024}
    took, group, steps = timed("gather", 256, 2, 1.0, 2.0)
    assert (took, len(group.summed), len(group.gathered), steps) == (1.5, 1, 2, 2)
    took, group, steps = timed("chain", 1024, 4, 8.0, 1.0, 2.0)
    assert (took, len(group.summed), steps) == (0.5, 1 + 3 * 4, 3)
    assert all(mx.all(array == 1).item() for array in group.summed)  # however long the chain


def test_the_slowest_rank_counts() -> None:
    replies: dict[int, Message] = {0: CollectivesTimed(0.125, False), 1: CollectivesTimed(0.5, True)}
    assert _combined(replies) == _combined(dict(reversed(replies.items()))) == CollectivesTimed(0.5, True)


def test_the_rank_on_which_a_row_is_worth_most_tokens_counts() -> None:
    """Five tokens on rank 1, two on rank 0; room for 100 and for 90 tokens."""
    one = Loaded(512, 512, 0, (), kv_token_bytes=4, kv_bytes=400, kv_row_bytes=8)
    two = replace(one, kv_token_bytes=2, kv_bytes=181, kv_row_bytes=10)
    assert _combined({0: one, 1: two}) == replace(one, kv_bytes=360, kv_row_bytes=20)
    assert _combined({0: two, 1: one}) == replace(two, kv_token_bytes=4, kv_bytes=360, kv_row_bytes=20)
    states = replace(one, kv_token_bytes=1, kv_row_bytes=60)
    assert _combined({0: states, 1: states}) == states


def measure(cluster: Cluster) -> FabricResult:
    return cluster.call(cluster.agent.parts.fabric_bench.measure())


def is_measuring(cluster: Cluster) -> bool:
    ranks = cluster.supervisor.status.ranks
    return ranks is not None and any(pong.phase == "measuring" for pong in ranks.watch.pongs.values())


def test_collectives_of_all_sizes_and_the_group_serves_on(cluster: Cluster) -> None:
    before = cluster.idle()
    result = CliRunner().invoke(app, ["bench", "--fabric", "--json", "--home", str(cluster.home)])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["kind"], told["backend"], told["names"]) == (
        "ring within one machine",
        "ring",
        ["rank 0", "rank 1"],
    )
    assert told["metal"] is False
    sizes = told["sizes"]
    assert 256 in sizes  # 128 numbers of two bytes: a row of the embedded model
    assert {*SIZES[:5], 256} <= set(sizes)
    assert sizes == sorted(sizes)
    times = [*told["sums_s"], *told["gathers_s"], told["collective_s"]]
    assert len(times) == 2 * len(sizes) + 1
    assert min(times) > 0
    assert told["sums_s"][-1] > told["sums_s"][0]
    assert cluster.content(QUESTION) == ANSWER  # the ranks' counts of collectives are compared at each step
    after = cluster.idle()
    assert len(set(after.collectives)) == 1
    assert (after - before).collectives[0] > len(times)
    assert cluster.epoch == 1


def test_a_request_meanwhile_must_come_again_and_no_agent_measures_twice(cluster: Cluster) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(measure, cluster)
        until(lambda: is_measuring(cluster), "the ranks measure")
        refused: httpx.Response = cluster.post(QUESTION)
        with pytest.raises(UserError, match="loading or being measured right now"):
            measure(cluster)
        assert running.result().collective_s > 0
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert "the fabric is being measured" in refused.text
    assert cluster.content(QUESTION) == ANSWER
    assert cluster.epoch == 1


def test_nothing_is_measured_while_a_request_waits(cluster: Cluster) -> None:
    request = cluster.start(endless_prompt(), 2000)
    request.take(1)
    with refused(UserError, Code.NOT_READY, "1 request is open"):
        measure(cluster)
    request.close()
    assert measure(cluster).sizes  # what was on its way to the one that left comes across, and harms no one


@pytest.mark.chaos
def test_a_rank_that_dies_meanwhile_ends_the_measurement_and_the_group_comes_back(cluster: Cluster) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(measure, cluster)
        until(lambda: is_measuring(cluster), "the ranks measure")
        os.kill(cluster.pids()[1], signal.SIGKILL)
        with pytest.raises(UserError, match="the group ended while it was measured: "):
            running.result()
    until(lambda: cluster.epoch == 2, "the next epoch")
    cluster.wait_state(ServingState.READY)
    assert cluster.content(QUESTION) == ANSWER
    assert measure(cluster).collective_s > 0


def test_one_rank_alone_has_nothing_to_measure(tmp_path: Path) -> None:
    with Cluster(tmp_path, ranks=1) as alone:
        with pytest.raises(UserError, match="one rank serves alone"):
            measure(alone)
        alone.unload()
        with pytest.raises(UserError, match="no group to measure; it is idle"):
            measure(alone)

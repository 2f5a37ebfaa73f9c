"""Time in which each stage of a pipeline computes, and in which it waits for the others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from mlxtp.api.backend import Sampling as Chosen
from mlxtp.engine.pipeline import StageTimes
from mlxtp.wire.messages import Forward, Generate

from ..live_cluster import Cluster, until
from ..wire.forwards import of_prompt, of_prompts
from .small_models import write_model

pytestmark = pytest.mark.fault

STEP = Forward((1,), (5,))


def chunk(uid: int, offset: int, tokens: int, total: int) -> Forward:
    return of_prompt(uid, offset, total, (7,) * tokens)


def test_a_stage_waits_for_hidden_states_and_between_steps() -> None:
    times = StageTimes()
    times.began(chunk(1, 0, 4, 4), 100.0, idle=True)
    times.ended(2.0, 102.0)
    assert (times.busy_s, times.waiting_s) == (2.0, 0.0), "nobody waits for the first prompt"
    times.began(STEP, 103.0, idle=True)
    with times.blocked():
        time.sleep(0.02)
    times.ended(1.0, 104.0)
    assert times.waiting_s == pytest.approx(1.02, abs=0.01)
    assert times.busy_s == pytest.approx(2.98, abs=0.01)
    assert times.busy_s + times.waiting_s == pytest.approx(4.0), "every second is one of the two"


def test_time_before_a_frame_and_before_its_tokens_counts_once() -> None:
    times = StageTimes()
    times.began(chunk(1, 0, 4, 4), 100.0, idle=True)
    times.submitted()
    times.ended(2.0, 102.0)
    times.began(STEP, 103.0, idle=True)
    times.tokens_came(103.5)
    times.submitted()
    times.ended(1.0, 104.0)
    assert (times.busy_s, times.waiting_s) == (2.5, 1.5)


def test_only_the_next_tokens_of_a_prompt_were_waited_for() -> None:
    times = StageTimes()
    times.began(chunk(1, 0, 4, 12), 1.0, idle=True)
    times.ended(1.0, 2.0)
    times.began(chunk(1, 4, 4, 12), 2.5, idle=True)
    times.began(chunk(1, 8, 4, 12), 2.6, idle=False)
    times.ended(1.0, 3.5)
    times.ended(1.0, 4.5)
    assert times.waiting_s == 0.5
    times.began(chunk(2, 0, 4, 12), 50.0, idle=True)
    times.ended(1.0, 51.0)
    times.began(chunk(3, 4, 4, 12), 60.0, idle=True)
    times.ended(1.0, 61.0)
    times.began(of_prompts((4, 5), (3, 1), (0, 0), (7, 8, 9, 6)), 70.0, idle=True)
    times.ended(1.0, 71.0)
    times.began(chunk(3, 8, 4, 12), 80.0, idle=True)
    assert times.waiting_s == 0.5, "other requests came when they came"


LAYERS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 2048}
    return write_model(tmp_path_factory.mktemp("models") / "deep", num_hidden_layers=LAYERS, **sizes)


def idle(cluster: Cluster, forwards: int = 0) -> list[dict[str, Any]]:
    """The ranks' heartbeats, once all of them are idle after so many forwards or more."""

    def settled() -> list[dict[str, Any]] | None:
        ranks: list[dict[str, Any]] = cluster.health()["ranks"]
        done = {(each["phase"], each["forwards"]) for each in ranks}
        return ranks if len(ranks) == 3 and len(done) == 1 and min(done) >= ("idle", forwards) else None

    return until(settled, "three idle ranks")


@pytest.mark.group
@pytest.mark.parametrize("slow", [1, *(pytest.param(rank, marks=pytest.mark.chaos) for rank in (0, 2))])
@pytest.mark.chaos
def test_the_others_wait_for_the_stage_with_most_layers(model: Path, tmp_path: Path, slow: int) -> None:
    split = ",".join(str(LAYERS - 2 if rank == slow else 1) for rank in range(3))
    with Cluster(
        tmp_path, ranks=3, model=model, parallel="pipeline", split=split, prefill_chunk=64
    ) as cluster:
        assert_the_others_wait(cluster, slow)


def assert_the_others_wait(three: Cluster, slow: int) -> None:
    step = Generate(0, (6, 7, 8), 80, Chosen(9.0))
    three.ask_all([step])  # compiles kernels
    before = idle(three, 1)
    for work, wanted in {
        "steps": [step],
        "rows": [Generate(0, (6, 7, 8, row), 80, Chosen(9.0)) for row in range(6)],
        "chunks": [Generate(0, tuple(range(6, 326)), 1)],
    }.items():
        began = time.monotonic()
        three.ask_all(wanted)
        took_s = time.monotonic() - began
        after = idle(three, before[0]["forwards"] + 1)
        busy, waiting = (
            [(new[name] - old[name]) / 1e6 for old, new in zip(before, after, strict=True)]
            for name in ("stage_busy_us", "stage_waiting_us")
        )
        before = after
        print(f"{work}: {took_s:.2f} s, busy {busy}, waiting {waiting}")
        share = [mine / (mine + others) for mine, others in zip(busy, waiting, strict=True)]
        assert busy[slow] == max(busy)
        if work == "chunks":  # They take long enough for other work of this machine to change little.
            assert share[slow] > 0.75
            assert all(busy[rank] < 0.6 * busy[slow] for rank in {0, 1, 2} - {slow})
        else:  # The first stage is done with chunks before the others, and waits for none of them then.
            assert share[slow] == max(share)
        assert all(mine + others < 1.1 * took_s + 0.1 for mine, others in zip(busy, waiting, strict=True))

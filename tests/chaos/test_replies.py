"""Rank 0's forward fails after its frame went out; rank 1's replies come late, twice, garbled or not at all.

A reply belongs to its frame: none is ever taken for the answer to a later one.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from mlxtp.errors import Code

from ..live_cluster import SLOWNESS, until
from .answers import LONG
from .harness import (
    ACK_S,
    FAULT_LIMITS,
    NOTICED_S,
    STALL_S,
    FaultyCluster,
    assert_recovered,
    assert_sound,
    before,
    kill,
)
from .orders import Order
from .test_deaths import STAGES

LAST_ACK = 4 + 29
"""Of LONG with 30 tokens: four chunks of prefill and 29 steps."""

chaos = pytest.mark.chaos


def fail_once(
    cluster: FaultyCluster,
    case: str,
    fault: str,
    rank: int,
    codes: set[Code],
    within_s: float,
    max_tokens: int = 30,
    likely: str = "",
    **how: object,
) -> None:
    """Under one request of `max_tokens` tokens the epoch ends with one of `codes`; only the client is told
    that took too much memory.
    """
    expected = cluster.right(LONG, max_tokens)
    was = before(cluster)
    cluster.order(fault, rank, **how)
    answer = cluster.read(LONG, max_tokens=max_tokens)
    assert_recovered(
        cluster,
        was,
        codes,
        detected_within_s=within_s,
        case=case,
        answers=((answer, expected),),
        told=frozenset(codes & {Code.OUT_OF_MEMORY}),
        likely=likely,
    )


@pytest.mark.parametrize(
    ("on", "at"), [("Forward of prompts", 1), ("Forward", 20)], ids=["in prefill", "in decode"]
)
def test_rank_0_raises_after_the_frame_went_out(cluster: FaultyCluster, on: str, at: int) -> None:
    """Rank 1 has run that step or waits in it; no one asks it for the reply any more."""
    codes, likely = {Code.FORWARD_FAILED}, "failed forward"
    case = f"rank 0 raises at {on}"
    fail_once(cluster, case, "raise_in_forward", 0, codes, NOTICED_S, on=on, at=at, likely=likely)


def test_rank_0_has_no_memory_for_a_forward(cluster: FaultyCluster) -> None:
    fail_once(
        cluster,
        "no memory",
        "raise_in_forward",
        0,
        {Code.OUT_OF_MEMORY},
        NOTICED_S,
        on="Forward",
        at=20,
        how="memory",
        likely="out of memory",
    )


@chaos
def test_rank_1_raises(cluster: FaultyCluster) -> None:
    codes = {Code.FORWARD_FAILED}
    fail_once(cluster, "rank 1 raises", "raise_in_forward", 1, codes, NOTICED_S, on="Forward", at=20)


def test_the_last_ack_comes_too_late(cluster: FaultyCluster) -> None:
    late_s = 3 * ACK_S
    fail_once(
        cluster, "late Ack", "late", 1, {Code.ACK_MISSING}, ACK_S, on="Ack", at=LAST_ACK, seconds=late_s
    )


def test_a_late_ack_within_its_limit_is_a_pause(cluster: FaultyCluster) -> None:
    was = before(cluster)
    cluster.order("late", 1, on="Ack", at=20, seconds=0.8)
    answer = cluster.read(LONG)
    assert (answer.text, answer.error) == (cluster.right(LONG), None)
    assert cluster.epoch == was.epoch
    assert_sound(cluster, was)


def test_the_last_ack_never_comes(cluster: FaultyCluster) -> None:
    fail_once(
        cluster,
        "no last Ack",
        "wrong_frame",
        1,
        {Code.ACK_MISSING},
        ACK_S,
        on="Ack",
        how="missing",
        at=LAST_ACK,
    )


def test_an_ack_never_comes(cluster: FaultyCluster) -> None:
    """The next one is for another step than the one rank 0 waits for."""
    codes = {Code.OUT_OF_ORDER}
    fail_once(cluster, "no Ack", "wrong_frame", 1, codes, NOTICED_S, on="Ack", how="missing", at=20)


def test_an_ack_comes_twice(cluster: FaultyCluster) -> None:
    codes = {Code.OUT_OF_ORDER}
    fail_once(cluster, "Ack twice", "wrong_frame", 1, codes, NOTICED_S, on="Ack", how="twice", at=20)


def test_an_ack_is_garbage(cluster: FaultyCluster) -> None:
    codes = {Code.FRAME_MALFORMED}
    fail_once(cluster, "Ack garbage", "wrong_frame", 1, codes, NOTICED_S, on="Ack", how="garbage", at=20)


@chaos
def test_rank_1_stands_still_in_a_step_with_a_beating_heart(cluster: FaultyCluster) -> None:
    """Liveness is not progress: the stall detector, not silence, and not before its limit."""
    was = before(cluster)
    cluster.order("hold", 1, on="decode", at=20, seconds=60 * SLOWNESS)
    answer = cluster.read(LONG)
    end = assert_recovered(
        cluster,
        was,
        {Code.RANK_STALLED},
        detected_within_s=STALL_S,
        case="stuck in a step",
        answers=((answer, cluster.right(LONG)),),
    )
    assert "rank 0 is behind" not in end.error.detail


def test_idling_is_not_part_of_the_first_step(cluster: FaultyCluster) -> None:
    """The stall clock of a request starts with its first forward, however long it idled before."""
    was = before(cluster)
    stall_s = 4 * SLOWNESS
    cluster.tighten(prefill_stall_s=stall_s)
    time.sleep(stall_s + 0.5)
    cluster.order("hold", 1, on="prefill", seconds=stall_s / 2)
    answer = cluster.read(LONG)
    assert (answer.text, answer.error) == (cluster.right(LONG), None)
    assert cluster.epoch == was.epoch


@pytest.mark.parametrize(
    ("on", "how", "codes"),
    [
        pytest.param("SanityDone", "garbage", {Code.FRAME_MALFORMED}),
        pytest.param("InitDone", "twice", {Code.OUT_OF_ORDER}, marks=chaos),
        pytest.param("SanityDone", "missing", {Code.LINK_TIMEOUT}, marks=chaos),
        pytest.param("Loaded", "twice", {Code.OUT_OF_ORDER}, marks=chaos),
        pytest.param("Loaded", "unknown type", {Code.UNKNOWN_TYPE}, marks=chaos),
    ],
)
def test_a_reply_on_the_way_up(cluster: FaultyCluster, on: str, how: str, codes: set[Code]) -> None:
    """The group that comes up after this one's death gets it; the one after that serves."""
    was = before(cluster)
    cluster.order("wrong_frame", 1, epoch=was.epoch + 1, on=on, how=how)
    kill(was.pids[1])
    within_s = cluster.settings.limits.form_s + NOTICED_S
    assert_recovered(cluster, was, codes, epochs=2, detected_within_s=within_s, case=f"{on} {how}")


@chaos
def test_a_reply_to_load_that_never_comes(tmp_path: Path) -> None:
    limits = dataclasses.replace(FAULT_LIMITS, load_stall_s=3.0 * SLOWNESS)
    orders = [Order("wrong_frame", 1, epoch=1, on="Loaded", how="missing")]
    with FaultyCluster(tmp_path, limits=limits, orders=orders, wait=False) as cluster:
        until(lambda: cluster.book.notes("fault"), "loaded, and not said")
        end = cluster.wait_end(1, limits.load_stall_s + 3 * SLOWNESS)
        assert end.error is not None
        assert end.error.code in (Code.LINK_TIMEOUT, Code.RANK_STALLED)


@chaos
@pytest.mark.parametrize(
    ("cluster", "rank", "words"),
    [
        ("auto", 1, "rank 1: tiny: reading its share of the model (0.00 GB) failed: "),
        (STAGES, 1, "rank 1: tiny: reading layers 1 to 2 of 4 (0.00 GB) failed: "),
        (STAGES, 0, "rank 0: tiny: reading layers 3 to 3 of 4 (0.00 GB) failed: "),
    ],
    indirect=["cluster"],
)
def test_no_memory_for_a_load(cluster: FaultyCluster, rank: int, words: str) -> None:
    """A request waits for that epoch. It is not to blame."""
    expected = cluster.right(LONG)
    was = before(cluster)
    cluster.order("find_no_memory", rank, epoch=was.epoch + 1, on="load")
    with cluster.asking(LONG) as client:
        cluster.wait_asked(1, since=was)
        kill(was.pids[1])
        answer = client()
    end = assert_recovered(
        cluster,
        was,
        {Code.OUT_OF_MEMORY},
        epochs=2,
        detected_within_s=NOTICED_S,
        case=f"no memory for a load on rank {rank} of {len(was.pids)}",
        answers=((answer, expected),),
        likely="out of memory",
    )
    assert end.error is not None
    assert end.error.detail.startswith(words)

"""Rank 0's forward fails after its frame went out; rank 1's replies come late, twice or not at all.

A reply belongs to its frame: none is ever taken for the answer to a later one.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from mlxtp.errors import Code

from ..live_cluster import SLOWNESS, until
from .answers import LONG
from .harness import (
    ACK_S,
    FAULT_LIMITS,
    NOTICED_S,
    STALL_S,
    Fault,
    FaultyCluster,
    assert_noticed,
    assert_recovered,
    assert_sound,
    before,
    faults,
    kill,
)
from .orders import Order
from .test_deaths import STAGES

LAST_ACK = 4 + 29
"""Of LONG with 30 tokens: four chunks of prefill and 29 steps."""

chaos = pytest.mark.chaos


def raises(case: str, rank: int, on: str, code: Code, likely: str, how: str = "", **row: Any) -> Fault:
    """The frame has gone out: rank 1 has run that step or waits in it; no one asks it for the reply."""
    order = Order("raise_in_forward", rank, on=on, at=1 if "prompts" in on else 20, how=how)
    return Fault(case, order, {code}, max_tokens=30, likely=likely, **row)


LATE = Order("late", 1, on="Ack", at=LAST_ACK, seconds=3 * ACK_S)
MISSING = Order("wrong_frame", 1, on="Ack", how="missing", at=20)


@faults(
    raises("rank 0 raises", 0, "Forward of prompts", Code.FORWARD_FAILED, "failed forward"),
    raises("no memory", 0, "Forward", Code.OUT_OF_MEMORY, "out of memory", "memory", always=True),
    raises("rank 1 raises", 1, "Forward", Code.FORWARD_FAILED, ""),
    Fault("the last Ack comes too late", LATE, {Code.ACK_MISSING}, ACK_S, 30),
    # The next one is for another step than the one rank 0 waits for.
    Fault("no Ack", MISSING, {Code.OUT_OF_ORDER}, max_tokens=30),
)
def test_what_fails_after_its_frame_went_out_ends_the_epoch(cluster: FaultyCluster, fault: Fault) -> None:
    assert_noticed(cluster, fault)


@chaos
def test_a_late_ack_within_its_limit_is_a_pause(cluster: FaultyCluster) -> None:
    was = before(cluster)
    cluster.order("late", 1, on="Ack", at=20, seconds=0.8)
    answer = cluster.read(LONG)
    assert (answer.text, answer.error) == (cluster.right(LONG), None)
    assert cluster.epoch == was.epoch
    assert_sound(cluster, was)


@chaos
@pytest.mark.parametrize(("place", "at"), [("decode", 20), ("prefill", 2)])
def test_rank_1_stands_still_in_a_step_with_a_beating_heart(
    cluster: FaultyCluster, place: str, at: int
) -> None:
    """Liveness is not progress: the stall detector, not silence, and not before its limit."""
    was = before(cluster)
    cluster.tighten(prefill_stall_s=FAULT_LIMITS.decode_stall_s)
    cluster.order("hold", 1, on=place, at=at, seconds=60 * SLOWNESS)
    answers = ((cluster.read(LONG), cluster.right(LONG)),)
    case = f"stuck in {place}"
    end = assert_recovered(cluster, was, {Code.RANK_STALLED}, case, answers=answers, within_s=STALL_S)
    assert "rank 0 is behind" not in end.error.detail
    assert cluster.postmortem(was.epoch).cause.kind == "stuck"


@chaos
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


@chaos
@pytest.mark.parametrize(
    ("on", "how", "codes"),
    [
        ("InitDone", "twice", {Code.OUT_OF_ORDER}),
        ("SanityDone", "missing", {Code.LINK_TIMEOUT}),
        ("Loaded", "twice", {Code.OUT_OF_ORDER}),
    ],
)
def test_a_reply_on_the_way_up(cluster: FaultyCluster, on: str, how: str, codes: set[Code]) -> None:
    """The group that comes up after this one's death gets it; the one after that serves."""
    was = before(cluster)
    cluster.order("wrong_frame", 1, epoch=was.epoch + 1, on=on, how=how)
    kill(was.pids[1])
    within_s = cluster.settings.limits.form_s + NOTICED_S
    assert_recovered(cluster, was, codes, f"{on} {how}", epochs=2, within_s=within_s)


@chaos
def test_a_reply_to_load_that_never_comes(tmp_path: Path) -> None:
    limits = dataclasses.replace(FAULT_LIMITS, load_stall_s=3.0 * SLOWNESS)
    orders = [Order("wrong_frame", 1, epoch=1, on="Loaded", how="missing")]
    with FaultyCluster(tmp_path, limits=limits, orders=orders, wait=False) as cluster:
        until(lambda: cluster.book.notes("fault"), "loaded, and not said")
        end = cluster.wait_end(1, limits.load_stall_s + 3 * SLOWNESS)
        assert end.error.code in (Code.LINK_TIMEOUT, Code.RANK_STALLED)


@chaos
@pytest.mark.parametrize(
    ("cluster", "rank", "words"),
    [
        ("auto", 1, "reading its share of the model (0.00 GB) failed: "),
        (STAGES, 1, "reading layers 1 to 2 of 4 (0.00 GB) failed: "),
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
        answers = ((client(), expected),)
    case = f"no memory for a load on rank {rank} of {len(was.pids)}"
    how = {"epochs": 2, "answers": answers, "likely": "out of memory"}
    end = assert_recovered(cluster, was, {Code.OUT_OF_MEMORY}, case, **how)
    assert end.error.detail.startswith(f"rank {rank}: tiny: {words}")

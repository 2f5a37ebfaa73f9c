"""Frames that break the rules between rank 0 and rank 1: refused with their code, and nothing is skipped."""

from __future__ import annotations

import pytest

from mlxtp.errors import Code

from .answers import LONG
from .harness import (
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

chaos = pytest.mark.chaos


def refused(how: str, rank: int, *codes: Code, always: bool = False) -> Fault:
    """`rank` sends something else than, or besides, the 20th frame or Ack of an answer."""
    order = Order("wrong_frame", rank, on=("Forward", "Ack")[rank], how=how, at=20)
    noticed = {"within_s": STALL_S} if Code.RANK_STALLED in codes else {"likely": "protocol"}
    return Fault(f"{how} from rank {rank}", order, {*codes}, always=always, **noticed)  # type: ignore[arg-type]


@faults(
    refused("seq ahead", 0, Code.WRONG_SEQ, always=True),
    refused("unknown uid", 0, Code.WRONG_UID),
    refused("truncated", 0, Code.FRAME_MALFORMED),
    # Noticed by the number of the next frame, or, when rank 0 cannot send one before this step is done, by
    # no rank's progress.
    refused("other epoch", 0, Code.WRONG_SEQ, Code.ACK_MISSING, Code.RANK_STALLED),
    refused("hello again", 0, Code.OUT_OF_ORDER),
    refused("oversize", 0, Code.FRAME_OVERSIZE),
    refused("delta", 1, Code.OUT_OF_ORDER),
    refused("seq again", 1, Code.WRONG_SEQ),
)
def test_a_frame_that_breaks_the_rules_is_refused(cluster: FaultyCluster, fault: Fault) -> None:
    assert_noticed(cluster, fault)


@chaos
@pytest.mark.parametrize(("rank", "on"), [(0, "Forward"), (1, "Ack")])
def test_a_frame_of_another_epoch_is_dropped_and_counted(cluster: FaultyCluster, rank: int, on: str) -> None:
    """Nothing else comes of it: the request is answered in the same epoch."""
    was = before(cluster)
    cluster.book.give(
        Order("wrong_frame", rank, was.epoch, on=on, how="other epoch as well", at=20, times=3),
        Order("record", 1 - rank, was.epoch),
    )
    answer = cluster.read(LONG)
    assert (answer.text, answer.error) == (cluster.right(LONG), None)
    counts = [frame["dropped"] for frame in cluster.book.notes("frame")]
    assert max(counts) - min(counts) == 3
    assert cluster.epoch == was.epoch
    assert_sound(cluster, was)


@chaos
def test_a_prompt_before_the_model_is_loaded(cluster: FaultyCluster) -> None:
    """Refused by rank 1 while the next group comes up; the one after it serves."""
    was = before(cluster)
    cluster.order("wrong_frame", 0, epoch=was.epoch + 1, on="LoadShard", how="prompt first")
    kill(was.pids[1])
    end = assert_recovered(cluster, was, {Code.OUT_OF_ORDER}, "a prompt before load", epochs=2)
    assert "Forward in state" in end.error.detail

"""Faults that other loops of this kind had, put in on purpose: each must turn a check red.

None may let a wrong, doubled or missing token reach a client; each ends the epoch with its code, and the next
one completes the answer.
"""

from __future__ import annotations

from typing import Any

import pytest

from mlxtp.errors import Code, GroupError
from mlxtp.groups.health import ServingState

from .answers import LONG
from .harness import (
    ACK_S,
    RESTART_S,
    STALL_S,
    Fault,
    FaultyCluster,
    assert_noticed,
    assert_recovered,
    assert_sound,
    assert_whole,
    before,
    faults,
    kill,
)
from .orders import Order

chaos = pytest.mark.chaos

DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 5}
"""Every rank draws alike: the agreement is `verify`."""
BIASED: dict[str, Any] = {"logit_bias": {"511": -1.0}}
"""Only rank 0 knows of a bias: the agreement is `broadcast`."""

# A forward that runs on one rank only waits in its collectives. With run-ahead the next step may set it
# free, with wrong numbers, and the counts tell; when none comes, or when the host waits for the device before
# it can send one, no rank makes progress and the agent tells.
ALONE = {Code.OUT_OF_ORDER, Code.DESYNC, Code.RANK_STALLED, Code.ACK_MISSING}
DESYNC = {Code.DESYNC}


def alone(fault: str, at: int, *, always: bool = False) -> Fault:
    """One step of 29 is another on rank 1 alone."""
    return Fault(f"{fault} at {at} of 29", Order(fault, 1, at=at), ALONE, STALL_S, 30, always=always)


@faults(
    # One token, one voice: a rank above 0 cannot emit, through its protocol or past it.
    *(
        Fault(
            f"emission at rank 1, {how}",
            Order("speak", 1, at=20, how=how),
            {Code.OUT_OF_ORDER},
            likely="protocol",
        )
        for how in ("rudely", "politely")
    ),
    # N tokens take N forwards: the extra one is in no count.
    Fault("one step too many", Order("extra_step", 0), DESYNC, max_tokens=30),
    # Sent to rank 1 and not run on rank 0: rank 1 waits in a forward of its own, or finds one too many.
    Fault("one step frame too many", Order("extra_frame", 0), {*DESYNC, Code.ACK_MISSING}, ACK_S, 30),
    Fault("a step after the stop", Order("extra_frame", 0, how="late"), {Code.WRONG_UID}, max_tokens=30),
    *(alone("skip_step", at, always=at == 25) for at in (25, 29)),
    alone("run_twice", 25),
    alone("swallow_exception", 29),
    # In the frame, or in its batch: two answers are on their way.
    *(
        Fault(
            f"another order of rows, {how}",
            Order("misread_step", 1, at=5, on="several rows", how=how),
            DESYNC,
            clients=2,
        )
        for how in ("rows", "order")
    ),
    # Attention over too little on one rank is in the sums of all: they would agree on a wrong token.
    Fault("another position", Order("misread_step", 1, at=20, how="positions"), DESYNC),
    # Its hidden states are in the sums of all, so both ranks would agree on an answer to another prompt.
    Fault("another token of a prompt", Order("misread_prompt", 1), DESYNC, always=True),
    Fault("wrong count in a stop", Order("lie", 0, on="SessionStop", how="forwards"), DESYNC, max_tokens=30),
    Fault("another draw under verify", Order("draw_another_token", 1, at=10), DESYNC, fields=DRAWN),
)
def test_what_one_rank_does_otherwise_ends_the_epoch(cluster: FaultyCluster, fault: Fault) -> None:
    assert_noticed(cluster, fault)


@chaos
def test_rank_1_takes_another_token(cluster: FaultyCluster) -> None:
    """Its digest of the step differs."""
    epoch = cluster.epoch
    order = Order("take_another_token", 1, at=20)
    assert_noticed(cluster, Fault("another token", order, DESYNC, likely="desync"))
    found = cluster.postmortem(epoch)
    assert (found.difference.what, set(found.difference.values)) == ("digest", {0, 1})
    steps = [step.seq for step in found.ranks[1].steps if step.finished_us]
    assert found.difference.seq in steps[-8:], (
        "the rank stops within a few steps: those in flight come to their end"
    )


@chaos
def test_what_rank_1_chooses_from_gathered_logits_changes_nothing(cluster: FaultyCluster) -> None:
    """Rank 0's choice travels inside the graph, and that of rank 1 reaches no client."""
    expected = cluster.right(LONG, **BIASED)
    was = before(cluster)
    cluster.order("draw_another_token", 1, at=5, times=0)
    answer = cluster.read(LONG, **BIASED)
    assert all(n["before"] != n["after"] for n in cluster.wait_note("drawn", count=50))
    assert_whole(answer, expected)
    assert cluster.epoch == was.epoch
    assert_sound(cluster, was)


@chaos
@pytest.mark.parametrize(("on", "fields"), [("winners", {}), ("gather", BIASED)])
def test_a_bit_flipped_before_ranks_exchange_logits_reaches_all(
    cluster: FaultyCluster, on: str, fields: dict[str, Any]
) -> None:
    """There is nothing to compare a rank's share with: all ranks agree on what came of it.

    It takes the golden proof to notice a rank that does this more than once.
    """
    expected = cluster.right(LONG, **fields)
    was = before(cluster)
    cluster.order("flip_logit_bit", 1, on=on, at=20)
    answer = cluster.read(LONG, **fields)
    (flipped,) = cluster.wait_note("flipped")
    assert flipped["before"] != flipped["after"]
    assert (answer.done, answer.error) == (True, None)
    assert answer.text != expected
    assert cluster.epoch == was.epoch
    assert_sound(cluster, was)


def test_a_rank_with_a_changed_weight_serves_no_client(cluster: FaultyCluster) -> None:
    """The group forms, proves its collectives and loads; its answer to the golden prompt is another one."""
    was = before(cluster)
    cluster.order("change_weight", 1, epoch=was.epoch + 1)
    kill(was.pids[1])
    end = assert_recovered(
        cluster, was, {Code.PROOF_FAILED}, "a changed weight", epochs=2, within_s=RESTART_S
    )
    assert "golden proof failed" in end.error.detail
    assert not [m for m in cluster.moments if m.epoch == was.epoch + 1 and m.state is ServingState.READY]


@chaos
def test_a_model_that_comes_later_with_a_changed_weight_ends_the_epoch(cluster: FaultyCluster) -> None:
    was = before(cluster)
    cluster.order("change_weight", 1)
    with pytest.raises(GroupError, match="golden proof failed") as failed:
        cluster.load("tiny")
    assert failed.value.code is Code.PROOF_FAILED
    cluster.wait_ready()
    assert cluster.epoch == was.epoch + 1
    (end,) = cluster.ends(was.epoch)
    assert end.error is failed.value
    assert_sound(cluster, was)

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
    NOTICED_S,
    RESTART_S,
    STALL_S,
    FaultyCluster,
    assert_recovered,
    assert_sound,
    assert_whole,
    before,
    kill,
)

chaos = pytest.mark.chaos

"""For what is noticed within a step or two."""


def run(
    cluster: FaultyCluster,
    case: str,
    fault: str,
    rank: int,
    *codes: Code,
    within_s: float = NOTICED_S,
    max_tokens: int = 400,
    likely: str = "",
    **how: Any,
) -> None:
    """One long answer, during or after which `fault` is noticed."""
    expected = cluster.right(LONG, max_tokens)
    was = before(cluster)
    cluster.order(fault, rank, **how)
    answer = cluster.read(LONG, max_tokens=max_tokens)
    assert_recovered(
        cluster,
        was,
        set(codes),
        detected_within_s=within_s,
        case=case,
        answers=((answer, expected),),
        likely=likely,
    )


@pytest.mark.parametrize("how", ["rudely", pytest.param("politely", marks=chaos)])
def test_rank_1_has_a_voice(cluster: FaultyCluster, how: str) -> None:
    """One token, one voice: a rank above 0 cannot emit; through its protocol or past it."""
    run(
        cluster,
        f"emission at rank 1, {how}",
        "speak",
        1,
        Code.OUT_OF_ORDER,
        likely="protocol",
        at=20,
        how=how,
    )


@pytest.mark.parametrize("max_tokens", [400, 30], ids=["at its end token", "at its limit"])
def test_one_step_too_many_on_all_ranks(cluster: FaultyCluster, max_tokens: int) -> None:
    """N tokens take N forwards: the extra one is in no count."""
    run(cluster, f"one step too many of {max_tokens}", "extra_step", 0, Code.DESYNC, max_tokens=max_tokens)


def test_one_step_frame_too_many(cluster: FaultyCluster) -> None:
    """Sent to rank 1 and not run on rank 0: rank 1 waits in a forward of its own, or finds one too many."""
    run(
        cluster,
        "one step frame too many",
        "extra_frame",
        0,
        Code.DESYNC,
        Code.ACK_MISSING,
        max_tokens=30,
        within_s=ACK_S,
    )


def test_a_step_frame_after_the_stop(cluster: FaultyCluster) -> None:
    run(cluster, "a step after the stop", "extra_frame", 0, Code.WRONG_UID, max_tokens=30, how="late")


# A forward that runs on one rank only waits in its collectives. With run-ahead the next step may set it
# free, with wrong numbers, and the counts tell; when none comes, or when the host waits for the device before
# it can send one, no rank makes progress and the agent tells.
ALONE = (Code.OUT_OF_ORDER, Code.DESYNC, Code.RANK_STALLED, Code.ACK_MISSING)


FIRST = pytest.param(1, id="first", marks=chaos)
MIDDLE = pytest.param(25, id="middle")
LAST = pytest.param(29, id="last", marks=chaos)


@pytest.mark.parametrize("at", [FIRST, MIDDLE, LAST])
def test_rank_1_skips_a_step(cluster: FaultyCluster, at: int) -> None:
    run(cluster, f"step {at} of 29 skipped", "skip_step", 1, *ALONE, max_tokens=30, at=at, within_s=STALL_S)


@pytest.mark.parametrize("at", [MIDDLE, LAST])
def test_rank_1_runs_a_step_twice(cluster: FaultyCluster, at: int) -> None:
    run(cluster, f"step {at} of 29 run twice", "run_twice", 1, *ALONE, max_tokens=30, at=at, within_s=STALL_S)


@pytest.mark.parametrize("at", [MIDDLE, LAST])
def test_rank_1_swallows_an_exception(cluster: FaultyCluster, at: int) -> None:
    case = f"exception swallowed in step {at} of 29"
    run(cluster, case, "swallow_exception", 1, *ALONE, max_tokens=30, at=at, within_s=STALL_S)


def test_rank_1_takes_another_token(cluster: FaultyCluster) -> None:
    """Its digest of the step differs."""
    epoch = cluster.epoch
    run(cluster, "another token", "take_another_token", 1, Code.DESYNC, at=20, likely="desync")
    found = cluster.postmortem(epoch)
    assert found.difference is not None
    assert (found.difference.what, set(found.difference.values)) == ("digest", {0, 1})
    steps = [step.seq for step in found.ranks[1].steps if step.finished_us]
    assert found.difference.seq in steps[-8:], (
        "the rank stops within a few steps: those in flight come to their end"
    )


@pytest.mark.parametrize("field", ["forwards", "collectives"])
def test_rank_1_reports_a_wrong_number(cluster: FaultyCluster, field: str) -> None:
    run(cluster, f"wrong {field}", "lie", 1, Code.DESYNC, at=20, how=field)


@pytest.mark.parametrize("how", ["rows", "order"])
def test_rank_1_has_its_rows_in_another_order(cluster: FaultyCluster, how: str) -> None:
    """In the frame, or in its batch: two answers are on their way."""
    expected = cluster.right(LONG)
    was = before(cluster)
    cluster.order("misread_step", 1, on="several rows", at=5, how=how)
    with cluster.asking(LONG) as first, cluster.asking(LONG) as second:
        answers = ((first(), expected), (second(), expected))
    case = f"another order of rows, {how}"
    assert_recovered(cluster, was, {Code.DESYNC}, detected_within_s=NOTICED_S, case=case, answers=answers)


def test_rank_1_has_another_position(cluster: FaultyCluster) -> None:
    """Attention over too little on one rank is in the sums of all: they would agree on a wrong token."""
    run(cluster, "another position", "misread_step", 1, Code.DESYNC, at=20, how="positions")


def test_rank_1_reads_another_token_of_a_prompt(cluster: FaultyCluster) -> None:
    """Its hidden states are in the sums of all, so both ranks would agree on an answer to another prompt."""
    run(cluster, "another token of a prompt", "misread_prompt", 1, Code.DESYNC)


def test_a_stop_with_another_number_of_forwards(cluster: FaultyCluster) -> None:
    run(
        cluster,
        "wrong count in a stop",
        "lie",
        0,
        Code.DESYNC,
        max_tokens=30,
        on="SessionStop",
        how="forwards",
    )


# --- whose token counts -------------------------------------------------------------------------------

DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 5}
"""Every rank draws alike: the agreement is `verify`."""
BIASED: dict[str, Any] = {"logit_bias": {"511": -1.0}}
"""Only rank 0 knows of a bias: the agreement is `broadcast`."""


def test_rank_1_draws_another_token_than_rank_0(cluster: FaultyCluster) -> None:
    expected = cluster.right(LONG, **DRAWN)
    was = before(cluster)
    cluster.order("draw_another_token", 1, at=10)
    answer = cluster.read(LONG, **DRAWN)
    assert_recovered(
        cluster,
        was,
        {Code.DESYNC},
        detected_within_s=NOTICED_S,
        case="another draw under verify",
        answers=((answer, expected),),
    )


def assert_nothing_comes_of_it(cluster: FaultyCluster, note: str, fault: str, **how: Any) -> None:
    expected = cluster.right(LONG, **BIASED)
    was = before(cluster)
    cluster.order(fault, 1, at=5, times=0, **how)
    answer = cluster.read(LONG, **BIASED)
    notes = cluster.wait_note(note, count=50)
    assert all(n["before"] != n["after"] for n in notes)
    assert_whole(answer, expected)
    assert cluster.epoch == was.epoch
    assert_sound(cluster, was)


def test_another_draw_of_rank_1_changes_no_token(cluster: FaultyCluster) -> None:
    """Rank 0's choice travels inside the graph."""
    assert_nothing_comes_of_it(cluster, "drawn", "draw_another_token")


def test_a_bit_flipped_in_the_logits_that_rank_1_gathered_changes_nothing(cluster: FaultyCluster) -> None:
    """The argmax of rank 1 is another, and reaches no client."""
    assert_nothing_comes_of_it(cluster, "flipped", "flip_logit_bit", on="choose")


@pytest.mark.parametrize(("on", "fields"), [("winners", {}), pytest.param("gather", BIASED, marks=chaos)])
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


# --- the golden proof ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=chaos)])
def test_a_rank_with_a_changed_weight_serves_no_client(cluster: FaultyCluster, rank: int) -> None:
    """The group forms, proves its collectives and loads; its answer to the golden prompt is another one."""
    was = before(cluster)
    cluster.order("change_weight", rank, epoch=was.epoch + 1)
    kill(was.pids[1])
    end = assert_recovered(
        cluster, was, {Code.PROOF_FAILED}, detected_within_s=RESTART_S, epochs=2, case="a changed weight"
    )
    assert end.error is not None
    assert "golden proof failed" in end.error.detail
    assert not [m for m in cluster.moments if m.epoch == was.epoch + 1 and m.state is ServingState.READY]


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

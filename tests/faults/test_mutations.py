"""Faults that other loops of this kind had, put in on purpose: each must turn a check red.

None may let a wrong, doubled or missing token reach a client; each ends the epoch with its code.
"""

from __future__ import annotations

from typing import Any

import pytest

from mlxtp.errors import Code

from ..cluster import SLOWNESS
from .harness import (
    ACK_S,
    LONG,
    STALL_S,
    FaultyCluster,
    assert_honest,
    assert_recovered,
    assert_sound,
    before,
)

chaos = pytest.mark.chaos

AT_ONCE_S = 1.0 * SLOWNESS
"""For what is noticed within a step or two."""


def run(
    cluster: FaultyCluster,
    case: str,
    fault: str,
    rank: int,
    *codes: Code,
    within_s: float = AT_ONCE_S,
    max_tokens: int = 400,
    **how: Any,
) -> None:
    """One long answer, during or after which `fault` is noticed."""
    expected = cluster.right(LONG, max_tokens)
    was = before(cluster)
    cluster.order(fault, rank, **how)
    answer = cluster.ask(LONG, max_tokens=max_tokens)
    assert_recovered(
        cluster, was, set(codes), detected_within_s=within_s, case=case, answers=((answer, expected),)
    )
    assert answer.code in (None, *codes)


@pytest.mark.parametrize("how", ["rudely", pytest.param("politely", marks=chaos)])
def test_rank_1_has_a_voice(cluster: FaultyCluster, how: str) -> None:
    """One token, one voice: a rank above 0 cannot emit; through its protocol or past it."""
    run(cluster, f"emission at rank 1, {how}", "speak", 1, Code.OUT_OF_ORDER, at=20, how=how)


@pytest.mark.parametrize("max_tokens", [400, 30], ids=["at its end token", "at its limit"])
def test_one_step_too_many_on_all_ranks(cluster: FaultyCluster, max_tokens: int) -> None:
    """N tokens take N forwards: the extra one is in nobody's count."""
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
    run(cluster, "another token", "take_another_token", 1, Code.DESYNC, at=20)


@pytest.mark.parametrize("field", ["forwards", "collectives", pytest.param("digest", marks=chaos)])
def test_rank_1_reports_a_wrong_number(cluster: FaultyCluster, field: str) -> None:
    run(cluster, f"wrong {field}", "lie", 1, Code.DESYNC, at=20, how=field)


def test_a_flipped_logit_bit_changes_nothing(cluster: FaultyCluster) -> None:
    """The argmax of rank 1 is another, and is nobody's token: rank 0's travels inside the graph."""
    was = before(cluster)
    cluster.order("flip_logit_bit", 1, at=5, times=0)
    answer = cluster.ask(LONG)
    flipped = cluster.wait_note("flipped", count=50)
    assert all(note["before"] != note["after"] for note in flipped)
    assert_honest(answer, cluster.right(LONG))
    assert answer.error is None
    assert cluster.epoch == was.epoch
    assert_sound(cluster, was)

"""Causes to which the records of an epoch point. `tests/chaos` brings about the cheap ones, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxtp.diagnostics.causes import (
    Case,
    Cause,
    Difference,
    EpochRecord,
    RankRecord,
    RecordedStep,
    likely_cause,
)
from mlxtp.errors import Code

S = 1_000_000
FINISHED = RecordedStep(6, started_us=8 * S, queued_us=8 * S, finished_us=9 * S)
QUEUED = RecordedStep(7, started_us=9 * S, queued_us=9 * S)
BEGUN = RecordedStep(7, started_us=9 * S)

WAITING = RankRecord(0, by_agent=True, phase="decode", ended_us=20 * S, steps=(FINISHED, QUEUED))
HEALTHY = RankRecord(1, by_agent=True, phase="decode", ended_us=20 * S, steps=(FINISHED,))
GONE_TOO = RankRecord(0, status=95, exit_code=Code.RANK_LOST, code=Code.RANK_LOST, detail="lost rank 1")


def said(rank: RankRecord, code: Code, detail: str = "it said so") -> RankRecord:
    """A rank that gave a reason and ended by itself."""
    return replace(rank, by_agent=False, code=code, exit_code=code, detail=detail, status=99)


def died(signal: int | None = None, status: int | None = None, **fields: object) -> RankRecord:
    return replace(HEALTHY, by_agent=False, signal=signal, status=status, **fields)  # type: ignore[arg-type]


def agent(code: Code = Code.RANK_LOST, detail: str = "its agent said so") -> EpochRecord:
    return EpochRecord("mac", 0.0, code, detail, machine_bytes=100)


def cause(*ranks: RankRecord, by: EpochRecord | None = None, **known: object) -> Cause:
    return likely_cause(Case(ranks, by, **known))  # type: ignore[arg-type]


def test_a_rank_killed_from_outside() -> None:
    found = cause(GONE_TOO, died(9, steps=(FINISHED, QUEUED)), by=agent())
    assert (found.kind, found.rank) == ("killed from outside", 1)
    assert "in step 7" in found.words
    assert "memory" in found.words


@pytest.mark.parametrize("rank", [died(15), died(status=143)], ids=["before it could hear", "heard"])
def test_a_rank_told_to_end_from_outside(rank: RankRecord) -> None:
    found = cause(GONE_TOO, rank, by=agent())
    assert (found.kind, found.rank) == ("killed from outside", 1)
    assert "signal 15" in found.words


def test_a_rank_killed_while_it_held_most_of_the_memory() -> None:
    found = cause(GONE_TOO, died(9, peak_memory_bytes=80), by=agent())
    assert (found.kind, found.rank) == ("out of memory", 1)
    assert "80%" in found.words
    assert cause(GONE_TOO, died(9, peak_memory_bytes=60), by=agent()).kind == "killed from outside"


def test_a_rank_that_found_no_memory() -> None:
    leader = said(WAITING, Code.OUT_OF_MEMORY)
    found = cause(leader, replace(HEALTHY, code=Code.OUT_OF_MEMORY, detail="rank 0: no memory"))
    assert (found.kind, found.rank) == ("out of memory", 0)


@pytest.mark.parametrize(("number", "name"), [(11, "SIGSEGV"), (6, "SIGABRT"), (7, "SIGBUS"), (10, "SIGBUS")])
def test_a_rank_that_crashed(number: int, name: str) -> None:
    crash = (
        'Fatal Python error\n\nStack (most recent call first):\n  File "kv.py", line 4 in view\n  File "x"'
    )
    found = cause(GONE_TOO, died(number, crash=crash), by=agent())
    assert (found.kind, found.rank) == ("crash", 1)
    assert name in found.words
    assert found.words.endswith('at File "kv.py", line 4 in view')


def test_a_rank_whose_alarm_rang_while_the_group_formed() -> None:
    found = cause(died(14), by=agent(Code.FORM_FAILED))
    assert (found.kind, found.rank) == ("forming", 1)


def test_a_rank_that_exited_without_a_word() -> None:
    found = cause(GONE_TOO, died(status=7), by=agent())
    assert (found.kind, found.rank) == ("exited", 1)
    assert "status 7" in found.words


def test_ranks_that_disagree() -> None:
    difference = Difference(7, "digest", {0: "aa", 1: "bb"})
    ranks = said(WAITING, Code.DESYNC, "step 7: rank 1 reports"), said(HEALTHY, Code.DESYNC, "rank 0: step 7")
    found = cause(*ranks, by=agent(Code.DESYNC), difference=difference)
    assert (found.kind, found.rank) == ("desync", 1)
    assert found.words == "ranks differ from step 7 on, in digest (rank 0: aa, rank 1: bb)"


def test_the_odd_one_of_three() -> None:
    difference = Difference(7, "collectives", {0: "8", 1: "9", 2: "9"})
    assert cause(said(WAITING, Code.DESYNC), difference=difference).rank == 0


def test_ranks_that_disagree_in_something_that_is_not_recorded() -> None:
    found = cause(said(WAITING, Code.DESYNC, "sequence 3: 4 forwards"), HEALTHY)
    assert (found.kind, found.words) == ("desync", "ranks disagree: sequence 3: 4 forwards")


def test_an_unnoticed_difference() -> None:
    found = cause(GONE_TOO, HEALTHY, by=agent(), difference=Difference(7, "fed", {0: "a", 1: "b"}))
    assert found.kind == "desync"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.WRONG_SEQ, "protocol"),
        (Code.OUT_OF_ORDER, "protocol"),
        (Code.FRAME_MALFORMED, "protocol"),
        (Code.CONFIG, "configuration"),
        (Code.MODEL_NOT_DIVISIBLE, "configuration"),
        (Code.MISMATCH, "configuration"),
        (Code.FORM_FAILED, "forming"),
        (Code.PROOF_FAILED, "forming"),
        (Code.FORWARD_FAILED, "failed forward"),
        (Code.INTERNAL, "internal"),
    ],
)
def test_a_rank_that_gave_its_reason(code: Code, kind: str) -> None:
    """The other one only passes it on."""
    ranks = replace(GONE_TOO, code=code, detail="rank 1: the reason"), said(HEALTHY, code, "the reason")
    for by in (agent(code, "the reason"), agent(), None):
        found = cause(*ranks, by=by)
        assert (found.kind, found.rank) == (kind, 1)
        assert code in found.words or kind == "internal"
        assert "the reason" in found.words


STALLED = agent(Code.RANK_STALLED, "no progress")


def test_a_rank_that_never_began_the_step_another_waits_in() -> None:
    found = cause(WAITING, HEALTHY, by=STALLED)
    assert (found.kind, found.rank) == ("stuck", 1)
    assert "rank 0 waited in the forward of step 7 for 11.0 s for rank 1, which is behind" in found.words


def test_a_rank_that_has_not_looked_at_the_step_before_either() -> None:
    """The step is queued on both; its device may have done it long ago."""
    ahead = replace(WAITING, steps=(FINISHED, QUEUED, replace(QUEUED, seq=8)))
    found = cause(ahead, replace(HEALTHY, steps=(FINISHED, QUEUED)), by=STALLED)
    assert (found.kind, found.rank) == ("stuck", 1)
    assert "step 8" in found.words


def test_a_rank_that_cannot_queue_a_step_because_another_does_not_come() -> None:
    """If too much is queued already, building the next graph waits for the device."""
    blocked = replace(WAITING, steps=(FINISHED, QUEUED, replace(BEGUN, seq=8)))
    found = cause(blocked, replace(HEALTHY, steps=(FINISHED, QUEUED)), by=STALLED)
    assert (found.kind, found.rank) == ("stuck", 1)


def test_a_rank_that_was_still_building_its_graph() -> None:
    found = cause(WAITING, replace(HEALTHY, steps=(FINISHED, BEGUN)), by=STALLED)
    assert found.rank == 1


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_rank_that_finished_the_step_another_stands_in_is_not_blamed(ahead: int) -> None:
    done = replace(QUEUED, finished_us=9 * S)
    steps = [(FINISHED, done) if rank == ahead else (FINISHED, QUEUED) for rank in range(2)]
    found = cause(replace(WAITING, steps=steps[0]), replace(HEALTHY, steps=steps[1]), by=STALLED)
    assert (found.kind, found.rank) == ("stuck", 1 - ahead)


def test_a_rank_that_gave_its_reason_with_its_own_number_in_front() -> None:
    """The other one passes it on as it came."""
    detail = "rank 1: jaccl did not form: it said so"
    ranks = replace(GONE_TOO, code=Code.FORM_FAILED, detail=detail), said(HEALTHY, Code.FORM_FAILED, detail)
    assert cause(*ranks, by=agent(Code.FORM_FAILED, f"mini: {detail}")).rank == 1


def test_all_ranks_in_the_same_forward() -> None:
    found = cause(WAITING, replace(HEALTHY, steps=(FINISHED, QUEUED)), by=STALLED)
    assert (found.kind, found.rank) == ("stuck", None)
    assert "all ranks stood in the forward of step 7 for 11.0 s" in found.words


def test_stuck_in_no_forward() -> None:
    loading = RankRecord(1, by_agent=True, phase="loading", phase_since_us=2 * S, ended_us=70 * S)
    found = cause(RankRecord(0, by_agent=True, phase="idle", phase_since_us=60 * S, ended_us=70 * S), loading,
                  by=STALLED)  # fmt: skip
    assert (found.kind, found.rank) == ("stuck", 1)
    assert "rank 1 stood in loading for 68.0 s" in found.words


def test_stuck_before_anything_was_recorded() -> None:
    found = cause(RankRecord(0, recorded=False), by=agent(Code.LINK_TIMEOUT, "did not say hello"))
    assert (found.kind, found.words) == ("stuck", "did not say hello")


LOST_AT_RING = said(
    WAITING, Code.FORWARD_FAILED, "rank 2: RuntimeError: [ring] connection to a peer was lost"
)


@pytest.mark.parametrize("other", [GONE_TOO, LOST_AT_RING], ids=["lost its link", "lost the ring"])
def test_a_rank_that_hears_nothing(other: RankRecord) -> None:
    """Others notice the end of a rank that its agent kills at last."""
    silent = replace(HEALTHY, by_agent=True, deaf=True, signal=9, pong_age_s=5.25)
    found = cause(other, silent, by=agent())
    assert (found.kind, found.rank) == ("wedged", 1)
    assert "5.2 s, SIGTERM included" in found.words


def test_a_rank_that_woke_up_at_sigterm() -> None:
    found = cause(WAITING, replace(HEALTHY, pong_age_s=5.25), by=agent())
    assert (found.kind, found.rank) == ("wedged", 1)
    assert "SIGTERM" not in found.words


def test_a_rank_that_was_killed_in_the_midst_of_a_forward_is_not_wedged() -> None:
    """Its heart beat: only its main thread could not hear SIGTERM, for want of the other rank."""
    waiting = replace(WAITING, deaf=True, signal=9, pong_age_s=2.2)
    assert cause(waiting, replace(HEALTHY, deaf=True, signal=9, pong_age_s=5.0), by=agent()).rank == 1


def test_ranks_that_lost_each_other() -> None:
    found = cause(GONE_TOO, replace(GONE_TOO, rank=1), by=agent(Code.LINK_LOST, "no route"))
    assert (found.kind, found.rank) == ("peer lost", None)
    assert "no route" in found.words


def test_a_rank_elsewhere_of_which_nothing_is_here() -> None:
    found = cause(GONE_TOO, by=agent(), elsewhere={1: "mini"})
    assert (found.kind, found.rank) == ("peer lost", 1)


def test_nothing_at_all() -> None:
    assert cause().kind == "peer lost"

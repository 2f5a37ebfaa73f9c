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


CRASH = 'Fatal Python error\n\nStack (most recent call first):\n  File "kv.py", line 4 in view\n  File "x"'
SILENT = replace(HEALTHY, by_agent=True, deaf=True, signal=9, pong_age_s=5.25)
LOST_AT_RING = said(
    WAITING, Code.FORWARD_FAILED, "rank 2: RuntimeError: [ring] connection to a peer was lost"
)
UNHEARD = replace(WAITING, deaf=True, signal=9, pong_age_s=2.2)


@pytest.mark.parametrize(
    ("other", "ended", "kind", "words"),
    [
        (GONE_TOO, died(9, steps=(FINISHED, QUEUED)), "killed from outside", "in step 7"),
        (GONE_TOO, died(9), "killed from outside", "memory"),
        (GONE_TOO, died(15), "killed from outside", "signal 15"),
        (GONE_TOO, died(status=143), "killed from outside", "signal 15"),
        (GONE_TOO, died(9, peak_memory_bytes=80), "out of memory", "80%"),
        (GONE_TOO, died(9, peak_memory_bytes=60), "killed from outside", ""),
        *(
            (GONE_TOO, died(number, crash=CRASH), "crash", words)
            for number, words in ((11, "SIGSEGV"), (6, "SIGABRT"), (7, "SIGBUS"), (10, "SIGBUS"))
        ),
        (GONE_TOO, died(11, crash=CRASH), "crash", 'at File "kv.py", line 4 in view'),
        (GONE_TOO, died(status=7), "exited", "status 7"),
        # Others notice the end of a rank that its agent kills at last.
        (GONE_TOO, SILENT, "wedged", "5.2 s, SIGTERM included"),
        (LOST_AT_RING, SILENT, "wedged", "5.2 s, SIGTERM included"),
        (WAITING, replace(HEALTHY, pong_age_s=5.25), "wedged", "5.2 s"),
        # Its heart beat: only its main thread could not hear SIGTERM, for want of the other rank.
        (UNHEARD, replace(SILENT, by_agent=False), "wedged", ""),
    ],
)
def test_what_is_left_of_a_rank_tells_how_it_ended(
    other: RankRecord, ended: RankRecord, kind: str, words: str
) -> None:
    found = cause(other, ended, by=agent())
    assert (found.kind, found.rank) == (kind, 1)
    assert words in found.words
    assert "SIGTERM" not in found.words or "SIGTERM" in words or not words


@pytest.mark.parametrize(
    ("ranks", "difference", "rank", "words"),
    [
        (
            (said(WAITING, Code.DESYNC, "step 7: rank 1"), said(HEALTHY, Code.DESYNC, "rank 0: step 7")),
            Difference(7, "digest", {0: "aa", 1: "bb"}),
            1,
            "ranks differ from step 7 on, in digest (rank 0: aa, rank 1: bb)",
        ),
        ((said(WAITING, Code.DESYNC),), Difference(7, "collectives", {0: "8", 1: "9", 2: "9"}), 0, ""),
        ((said(WAITING, Code.DESYNC, "3: 4 forwards"), HEALTHY), None, None, "ranks disagree: 3: 4 forwards"),
        ((GONE_TOO, HEALTHY), Difference(7, "fed", {0: "a", 1: "b"}), 1, ""),  # nobody noticed it
    ],
)
def test_ranks_that_disagree(
    ranks: tuple[RankRecord, ...], difference: Difference | None, rank: int | None, words: str
) -> None:
    found = cause(*ranks, by=agent() if GONE_TOO in ranks else None, difference=difference)
    assert (found.kind, found.rank) == ("desync", rank)
    assert words in found.words


STALLED = agent(Code.RANK_STALLED, "no progress")
AHEAD = replace(WAITING, steps=(FINISHED, QUEUED, replace(QUEUED, seq=8)))
BLOCKED = replace(WAITING, steps=(FINISHED, QUEUED, replace(BEGUN, seq=8)))
BESIDE = replace(HEALTHY, steps=(FINISHED, QUEUED))
DONE = replace(QUEUED, finished_us=9 * S)
IDLE, LOADING = (
    RankRecord(rank, by_agent=True, phase=phase, phase_since_us=since_s * S, ended_us=70 * S)
    for rank, phase, since_s in ((0, "idle", 60), (1, "loading", 2))
)


@pytest.mark.parametrize(
    ("first", "second", "rank", "words"),
    [
        (WAITING, HEALTHY, 1, "waited in the forward of step 7 for 11.0 s for rank 1, which is behind"),
        # The step is queued on both; its device may have done it long ago.
        (AHEAD, BESIDE, 1, "step 8"),
        # If too much is queued already, building the next graph waits for the device.
        (BLOCKED, BESIDE, 1, ""),
        (WAITING, replace(HEALTHY, steps=(FINISHED, BEGUN)), 1, ""),
        (replace(WAITING, steps=(FINISHED, DONE)), BESIDE, 1, ""),
        (WAITING, replace(HEALTHY, steps=(FINISHED, DONE)), 0, ""),
        (WAITING, BESIDE, None, "all ranks stood in the forward of step 7 for 11.0 s"),
        (IDLE, LOADING, 1, "rank 1 stood in loading for 68.0 s"),
    ],
)
def test_ranks_that_stood_still(first: RankRecord, second: RankRecord, rank: int | None, words: str) -> None:
    found = cause(first, second, by=STALLED)
    assert (found.kind, found.rank) == ("stuck", rank)
    assert words in found.words


def test_ends_of_which_little_is_known() -> None:
    lost = cause(GONE_TOO, replace(GONE_TOO, rank=1), by=agent(Code.LINK_LOST, "no route"))
    assert (lost.kind, lost.rank, "no route" in lost.words) == ("peer lost", None, True)
    assert cause().kind == "peer lost"
    elsewhere = cause(GONE_TOO, by=agent(), elsewhere={1: "mini"})
    assert (elsewhere.kind, elsewhere.rank) == ("peer lost", 1)
    alarm = cause(died(14), by=agent(Code.FORM_FAILED))
    assert (alarm.kind, alarm.rank) == ("forming", 1)
    unrecorded = cause(RankRecord(0, recorded=False), by=agent(Code.LINK_TIMEOUT, "did not say hello"))
    assert (unrecorded.kind, unrecorded.words) == ("stuck", "did not say hello")


def test_a_rank_that_found_no_memory() -> None:
    leader = said(WAITING, Code.OUT_OF_MEMORY)
    found = cause(leader, replace(HEALTHY, code=Code.OUT_OF_MEMORY, detail="rank 0: no memory"))
    assert (found.kind, found.rank) == ("out of memory", 0)


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


def test_a_rank_that_gave_its_reason_with_its_own_number_in_front() -> None:
    """The other one passes it on as it came."""
    detail = "rank 1: jaccl did not form: it said so"
    ranks = replace(GONE_TOO, code=Code.FORM_FAILED, detail=detail), said(HEALTHY, Code.FORM_FAILED, detail)
    assert cause(*ranks, by=agent(Code.FORM_FAILED, f"mini: {detail}")).rank == 1

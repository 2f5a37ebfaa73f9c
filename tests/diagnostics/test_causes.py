"""Causes to which the records of an epoch point. `tests/chaos` brings about the cheap ones, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
STALLED = agent(Code.RANK_STALLED, "no progress")
AHEAD = replace(WAITING, steps=(FINISHED, QUEUED, replace(QUEUED, seq=8)))
BLOCKED = replace(WAITING, steps=(FINISHED, QUEUED, replace(BEGUN, seq=8)))
BESIDE = replace(HEALTHY, steps=(FINISHED, QUEUED))
DONE = replace(QUEUED, finished_us=9 * S)
SILENT = replace(HEALTHY, by_agent=True, deaf=True, signal=9, pong_age_s=5.25)
LOST_AT_RING = said(
    WAITING, Code.FORWARD_FAILED, "rank 2: RuntimeError: [ring] connection to a peer was lost"
)
DIGEST = {"difference": Difference(7, "digest", {0: "aa", 1: "bb"})}


def in_phase(rank: int, phase: str, since_s: int) -> RankRecord:
    return RankRecord(rank, by_agent=True, phase=phase, phase_since_us=since_s * S, ended_us=70 * S)


@pytest.mark.parametrize(
    ("ranks", "known", "kind", "rank", "words"),
    [
        # A rank that ended by itself: what was left of it decides.
        ((GONE_TOO, died(9, steps=(FINISHED, QUEUED))), {}, "killed from outside", 1, "in step 7"),
        ((GONE_TOO, died(9)), {}, "killed from outside", 1, "memory"),
        ((GONE_TOO, died(15)), {}, "killed from outside", 1, "signal 15"),
        ((GONE_TOO, died(status=143)), {}, "killed from outside", 1, "signal 15"),
        ((GONE_TOO, died(9, peak_memory_bytes=80)), {}, "out of memory", 1, "80%"),
        ((GONE_TOO, died(9, peak_memory_bytes=60)), {}, "killed from outside", 1, ""),
        *(
            ((GONE_TOO, died(number, crash=CRASH)), {}, "crash", 1, name)
            for number, name in ((11, "SIGSEGV"), (6, "SIGABRT"), (7, "SIGBUS"), (10, "SIGBUS"))
        ),
        ((GONE_TOO, died(11, crash=CRASH)), {}, "crash", 1, 'at File "kv.py", line 4 in view'),
        ((died(14),), {"by": agent(Code.FORM_FAILED)}, "forming", 1, ""),
        ((GONE_TOO, died(status=7)), {}, "exited", 1, "status 7"),
        # Ranks that differ.
        (
            (said(WAITING, Code.DESYNC, "step 7: rank 1"), said(HEALTHY, Code.DESYNC, "rank 0: step 7")),
            DIGEST | {"by": agent(Code.DESYNC)},
            "desync",
            1,
            "ranks differ from step 7 on, in digest (rank 0: aa, rank 1: bb)",
        ),
        (
            (said(WAITING, Code.DESYNC),),  # the odd one of three
            {"by": None, "difference": Difference(7, "collectives", {0: "8", 1: "9", 2: "9"})},
            "desync",
            0,
            "",
        ),
        (
            (said(WAITING, Code.DESYNC, "sequence 3: 4 forwards"), HEALTHY),
            {"by": None},
            "desync",
            None,
            "ranks disagree: sequence 3: 4 forwards",
        ),
        ((GONE_TOO, HEALTHY), DIGEST, "desync", 1, ""),  # nobody noticed it
        # Ranks that stood still.
        (
            (WAITING, HEALTHY),
            {"by": STALLED},
            "stuck",
            1,
            "rank 0 waited in the forward of step 7 for 11.0 s for rank 1, which is behind",
        ),
        # The step is queued on both; its device may have done it long ago.
        ((AHEAD, BESIDE), {"by": STALLED}, "stuck", 1, "step 8"),
        # If too much is queued already, building the next graph waits for the device.
        ((BLOCKED, BESIDE), {"by": STALLED}, "stuck", 1, ""),
        ((WAITING, replace(HEALTHY, steps=(FINISHED, BEGUN))), {"by": STALLED}, "stuck", 1, ""),
        ((replace(WAITING, steps=(FINISHED, DONE)), BESIDE), {"by": STALLED}, "stuck", 1, ""),
        ((WAITING, replace(HEALTHY, steps=(FINISHED, DONE))), {"by": STALLED}, "stuck", 0, ""),
        (
            (WAITING, BESIDE),
            {"by": STALLED},
            "stuck",
            None,
            "all ranks stood in the forward of step 7 for 11.0 s",
        ),
        (
            (in_phase(0, "idle", 60), in_phase(1, "loading", 2)),
            {"by": STALLED},
            "stuck",
            1,
            "rank 1 stood in loading for 68.0 s",
        ),
        (
            (RankRecord(0, recorded=False),),
            {"by": agent(Code.LINK_TIMEOUT, "did not say hello")},
            "stuck",
            None,
            "did not say hello",
        ),
        # Ranks that heard nothing: others notice the end of one that its agent kills at last.
        ((GONE_TOO, SILENT), {}, "wedged", 1, "5.2 s, SIGTERM included"),
        ((LOST_AT_RING, SILENT), {}, "wedged", 1, "5.2 s, SIGTERM included"),
        ((WAITING, replace(HEALTHY, pong_age_s=5.25)), {}, "wedged", 1, "5.2 s"),
        # Its heart beat: only its main thread could not hear SIGTERM, for want of the other rank.
        ((replace(WAITING, deaf=True, signal=9, pong_age_s=2.2), SILENT), {}, "wedged", 1, ""),
        (
            (GONE_TOO, replace(GONE_TOO, rank=1)),
            {"by": agent(detail="no route")},
            "peer lost",
            None,
            "no route",
        ),
        ((GONE_TOO,), {"elsewhere": {1: "mini"}}, "peer lost", 1, ""),
        ((), {"by": None}, "peer lost", None, ""),
    ],
)
def test_the_cause_of_an_end(
    ranks: tuple[RankRecord, ...], known: dict[str, Any], kind: str, rank: int | None, words: str
) -> None:
    found = cause(*ranks, **{"by": agent()} | known)
    assert (found.kind, found.rank) == (kind, rank)
    assert words in found.words
    assert "SIGTERM" not in found.words or "SIGTERM" in words or not words


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

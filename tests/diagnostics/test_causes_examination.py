"""Records of ranks side by side: the first difference, and who is behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxtp.diagnostics.causes import (
    Difference,
    EpochRecord,
    RankRecord,
    RecordedStep,
    behind,
    examine,
    first_difference,
)
from mlxtp.errors import Code


def steps(*seqs: int, **fields: object) -> tuple[RecordedStep, ...]:
    """Finished ones, alike on every rank."""
    return tuple(
        replace(
            RecordedStep(seq, "step", 1, seq, seq, seq + 1, seq, 9 * seq, f"d{seq}", f"f{seq}"),
            **fields,  # type: ignore[arg-type]
        )
        for seq in seqs
    )


def rank(number: int, *its: RecordedStep, **fields: object) -> RankRecord:
    return RankRecord(number, steps=its, **fields)  # type: ignore[arg-type]


HALF = RecordedStep(5, "step", 1, 5, 5, 0, 5, 45)


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ((4, 5, 7), (4, 5, 7), None),
        ((4, 5, 6), (4, 6), Difference(5, "presence", {0: "there", 1: "missing"})),
        ((4, 9), (4, 9), None),  # frames that are no forwards have numbers too
        ((4, 5, 6), (4,), None),  # one runs ahead
        ((1, 2, 3, 4), (3, 4), None),  # one has forgotten the rest
        ((4,), (), None),
    ],
)
def test_a_step_that_one_rank_left_out_is_a_difference(
    ours: tuple[int, ...], theirs: tuple[int, ...], found: Difference | None
) -> None:
    assert first_difference([rank(0, *steps(*ours)), rank(1, *steps(*theirs))]) == found
    assert first_difference([rank(0, *steps(4, 5)), rank(1, *steps(4), HALF)]) is None, "it has no digest yet"


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "prompt"), ("rows", 2), ("forwards", 9), ("collectives", 9), ("fed", "x"), ("digest", "x")],
)
def test_the_first_step_that_differs(field: str, value: str | int) -> None:
    ours, theirs = steps(4, 5, 6, 7), [*steps(4), *steps(5, 6, 7, **{field: value})]
    found = first_difference([rank(0, *ours), rank(1, *theirs)])
    assert found == Difference(5, field, {0: str(getattr(ours[1], field)), 1: str(value)})


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (steps(6), None),
        ((), 1),
        ((RecordedStep(6, started_us=6),), 1),
        ((RecordedStep(6, "step", 1, 6, 6, 0, 6, 54),), 1),
        (steps(6, 7), 0),
        (steps(6, collectives=53), 1),
    ],
    ids=["equal", "not begun", "begun", "queued", "ahead", "fewer collectives"],
)
def test_who_is_behind(last: tuple[RecordedStep, ...], expected: int | None) -> None:
    assert behind([rank(0, *steps(5, 6)), rank(1, *steps(5), *last)]) == expected
    assert behind([rank(0, *steps(5)), RankRecord(1, recorded=False)]) is None


HOST = EpochRecord("studio", 20.0, Code.RANK_LOST, "rank 1 is gone", ("studio", "mini"))
HOSTED = EpochRecord("mini", 21.0, Code.RANK_LOST, "its host knows why")


def test_files_of_two_macs() -> None:
    found = examine(7, "", [rank(1, *steps(4), signal=9), rank(0, *steps(4))], [HOSTED, HOST])
    assert (found.epoch, found.ended, found.reason) == (7, 21.0, "rank 1 is gone")
    assert [each.rank for each in found.ranks] == [0, 1]
    assert (found.cause.kind, found.cause.rank) == ("killed from outside", 1)
    assert found.elsewhere == {}
    host = rank(0, *steps(4), status=95, exit_code=Code.RANK_LOST)
    hosted = rank(1, *steps(4), by_agent=True, status=143)
    for alone, record, elsewhere in ((host, HOST, {1: "mini"}), (hosted, HOSTED, {0: ""})):
        found = examine(7, "", [alone], [record])
        assert found.elsewhere == elsewhere
        assert (found.cause.kind, found.cause.rank) == ("peer lost", *elsewhere)


def test_of_two_files_of_a_rank_the_one_that_remembers_more_counts() -> None:
    for order in (1, -1):
        files = [rank(0, *steps(4, 5)), rank(0, recorded=False)][::order]
        assert len(examine(7, "", files, []).ranks[0].steps) == 2

"""Requests that are asked again after a group has failed, and those that are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.errors import Code
from mlxtp.gateway.request import PROVEN_TOKENS, SUSPECT, ended, strikes_after


@dataclass
class Asked:
    """A request as the policy sees it: strikes, tokens of its present group, tokens of prompt and answer."""

    strikes: int
    came: int
    length: int
    running: bool = True


NEW = Asked(0, 0, 10)
ONCE = Asked(1, 3, 10)
SUSPECTED = Asked(2, 0, 10)
WAITS = Asked(2, 0, 10, running=False)
AT_WORK = Asked(1, PROVEN_TOKENS, 500)


@pytest.mark.parametrize(
    ("requests", "strikes"),
    [
        ([NEW, NEW, NEW], [1, 1, 1]),
        ([ONCE], [None]),
        ([ONCE, NEW], [None, 1]),
        ([ONCE, ONCE], [2, 2]),
        ([SUSPECTED, WAITS, WAITS], [None, 2, 2]),
        ([SUSPECTED, WAITS, NEW], [None, 2, 1]),
        ([SUSPECTED, ONCE], [None, 2]),
        ([AT_WORK, NEW], [0, 1]),
        ([AT_WORK], [0]),
        ([Asked(2, PROVEN_TOKENS, 10), WAITS], [0, 2]),
        ([], []),
    ],
)
def test_after_a_failure(requests: list[Any], strikes: list[int | None]) -> None:
    assert strikes_after(requests, Code.RANK_LOST) == strikes


def test_where_a_fabric_may_be_to_blame_a_suspect_gets_one_more_group() -> None:
    assert strikes_after([ONCE, NEW, AT_WORK], Code.RANK_LOST, spare=True) == [2, 1, 0]
    assert strikes_after([SUSPECTED], Code.RANK_LOST) == [None], "and no third one"


@pytest.mark.parametrize("code", [Code.REPLANNED, Code.LINK_LOST, Code.NOT_READY, Code.SHUTTING_DOWN])
def test_what_is_no_requests_doing_counts_against_none(code: Code) -> None:
    assert strikes_after([ONCE, SUSPECTED, NEW], code) == [1, 2, 0]


@pytest.mark.parametrize(
    ("requests", "strikes"),
    [
        ([Asked(0, 50, 900), Asked(0, 0, 40), Asked(0, 0, 70), NEW], [0, 0, None, 0]),
        ([Asked(0, 50, 900), Asked(1, 9, 901)], [0, None]),
        ([Asked(2, 0, 9999, running=False), Asked(0, 1, 5)], [2, None]),
        ([], []),
    ],
)
def test_when_memory_runs_out_the_longest_of_those_that_begin_is_ended(
    requests: list[Any], strikes: list[int | None]
) -> None:
    assert strikes_after(requests, Code.OUT_OF_MEMORY) == strikes


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(0, 7))
def test_one_that_kills_is_found_and_no_other_is_ended(others: list[bool], at: int) -> None:
    """Each round the killer is among those that run, and the group fails at once."""
    killer = at % (len(others) + 1)
    strikes: list[int | None] = [0] * (len(others) + 1)
    for _ in range(SUSPECT + len(strikes)):
        running = _round(strikes, killer)
        records = [
            Asked(count if count is not None else 0, 0, 10, running=i in running)
            for i, count in enumerate(strikes)
        ]
        alive = [i for i, count in enumerate(strikes) if count is not None]
        after = strikes_after([records[i] for i in alive], Code.RANK_LOST)
        for i, count in zip(alive, after, strict=True):
            strikes[i] = count
        if strikes[killer] is None:
            break
    assert strikes[killer] is None
    assert all(count is not None for i, count in enumerate(strikes) if i != killer)


def _round(strikes: list[int | None], killer: int) -> set[int]:
    """Return the requests beside the killer: no suspect beside another; those before it are harmless."""
    plain = {i for i, count in enumerate(strikes) if count is not None and count < SUSPECT}
    if killer in plain:
        return plain
    for i, count in enumerate(strikes):
        if count is not None and count >= SUSPECT and i != killer:
            strikes[i] = 0  # it came before the killer, or will after it
    return {killer}


def test_the_error_says_why() -> None:
    assert ended(Code.OUT_OF_MEMORY, "rank 1").code is Code.OUT_OF_MEMORY
    assert ended(Code.RANK_LOST, "rank 1 was ended by signal 9").code is Code.REQUEST_FATAL

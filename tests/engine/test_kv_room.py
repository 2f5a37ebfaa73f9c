"""Room for KV caches: enough, seldom another size, and little of it empty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.engine.kv_cache import SMALLEST, batch_tokens, capacity, slots, view
from mlxtp.wire.messages import MAX_CONTEXT

lengths = st.integers(0, MAX_CONTEXT)


def test_the_first_sizes() -> None:
    sizes = sorted({capacity(length) for length in range(1000)})
    assert sizes == [64, 96, 128, 192, 256, 384, 512, 768, 1024]


@given(lengths)
def test_there_is_room_and_at_most_a_third_of_it_is_empty(length: int) -> None:
    size = capacity(length)
    assert size >= max(length, SMALLEST)
    assert length <= SMALLEST or 3 * (size - length) < size
    assert capacity(size) == size


@given(lengths, lengths)
def test_more_tokens_never_take_less(one: int, other: int) -> None:
    shorter, longer = sorted((one, other))
    assert capacity(shorter) <= capacity(longer)
    assert view(shorter) <= view(longer)


def test_a_sequence_that_grows_is_copied_seldom() -> None:
    assert len({capacity(length) for length in range(100_000)}) < 25


@pytest.mark.parametrize(
    ("rows", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64), (65, 128)]
)
def test_slots(rows: int, expected: int) -> None:
    assert slots(rows) == expected


@given(lengths)
def test_attention_reads_all_tokens_and_little_more(length: int) -> None:
    step = 64 if length <= 512 else 256
    assert length <= view(length) < length + step
    assert view(length) % 64 == 0


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_a_batch_has_the_room_of_its_longest_row_for_all(rows: list[int]) -> None:
    assert batch_tokens(rows) == slots(len(rows)) * capacity(max(rows))
    assert batch_tokens(rows) >= sum(rows)


def test_an_empty_batch_takes_nothing() -> None:
    assert batch_tokens(()) == 0

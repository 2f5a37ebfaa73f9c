"""Room for KV caches: enough, seldom another size, and little of it empty."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.engine.kv_cache import (
    BUCKET_ON_CPU,
    BUCKET_ON_GPU,
    LEAST_SAVED,
    MOST_BUCKETS,
    SKIPS,
    SMALLEST,
    STAYS,
    another_bucket,
    batch_tokens,
    capacity,
    cheapest,
    fitting,
    laned_layouts,
    layouts,
    roomy,
    slots,
    step_tokens,
    view,
)
from mlxtp.wire.messages import MAX_CONTEXT

lengths = st.integers(0, MAX_CONTEXT)


@given(lengths)
def test_there_is_room_and_little_of_it_is_empty(length: int) -> None:
    size = capacity(length)
    assert size >= max(length, SMALLEST)
    assert length <= 2 * SMALLEST or 5 * (size - length) < size
    assert length <= 1024 or 16 * (size - length) < size
    assert capacity(size) == size
    assert size <= roomy(length)
    assert length <= SMALLEST or 3 * (roomy(length) - length) < roomy(length)


@given(lengths, lengths)
def test_more_tokens_never_take_less(one: int, other: int) -> None:
    shorter, longer = sorted((one, other))
    for room in (capacity, roomy, view):
        assert room(shorter) <= room(longer)


@given(st.integers(SMALLEST, MAX_CONTEXT))
def test_the_longest_that_fits_a_room_fits_it(room: int) -> None:
    assert fitting(SMALLEST - 1) == 0
    assert capacity(fitting(room)) <= room < capacity(fitting(room) + 1)


def test_a_sequence_that_grows_is_copied_seldom() -> None:
    assert len({roomy(length) for length in range(100_000)}) < 25
    sizes = sorted({capacity(length) for length in range(1, 100_000)})
    moved = sum(sizes[:-1])  # positions that all copies write
    read = sum(range(100_000))  # those that attention reads meanwhile
    assert moved < 0.01 * read


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


some_lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=9).map(tuple)


def packed(rows: tuple[int, ...]) -> int:
    """The least room of rows in at most MOST_BUCKETS buckets, of all ways to put them there."""
    ways = product(range(MOST_BUCKETS), repeat=len(rows))
    return min(
        sum(
            len(bucket) * capacity(max(bucket))
            for number in range(MOST_BUCKETS)
            if (bucket := [row for row, at in zip(rows, way, strict=True) if at == number])
        )
        for way in ways
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6).map(tuple))
def test_the_smallest_layout_is_the_best_of_all_but_for_what_is_not_worth_a_forward(
    rows: tuple[int, ...],
) -> None:
    least, best = sum(layouts(rows)[-1]), packed(rows)
    assert best <= least
    assert least * (1 - 1 / LEAST_SAVED) ** 2 <= best


@given(some_lengths)
def test_layouts_have_room_for_every_row_in_ever_more_buckets_and_ever_less_room(
    rows: tuple[int, ...],
) -> None:
    found = layouts(rows)
    assert found[0] == (roomy(max(rows)),) * slots(len(rows))
    for number, (grown, rooms) in enumerate(zip(found[::2], found[1::2], strict=True), 1):
        assert len(rooms) == len(rows)
        assert all(room >= capacity(row) for room, row in zip(rooms, rows, strict=True))
        assert len(set(rooms)) == number <= MOST_BUCKETS
        assert set(rooms) <= {capacity(row) for row in rows}
        assert grown[: len(rows)] == tuple(map(roomy, rooms))
        assert all(count == slots(count) for count in Counter(grown).values())
    sizes = [sum(rooms) for rooms in found[1::2]]
    assert sizes == sorted(sizes, reverse=True)


def test_one_long_row_does_not_take_its_room_for_short_ones() -> None:
    rows = (32_768, *[1000] * 15)
    assert layouts(rows)[-1] == (32_768, *[1024] * 15)
    assert layouts((1000, 1020, 1010))[-1] == (1024,) * 3, "rows of like lengths share arrays"
    assert layouts(()) == ((),)


@given(some_lengths)
def test_mlx_lms_own_batches_have_the_room_of_the_longest_row_for_all(rows: tuple[int, ...]) -> None:
    assert batch_tokens(()) == 0
    assert batch_tokens(rows) == slots(len(rows)) * roomy(max(rows)) >= sum(rows)


def chosen(rows: tuple[int, ...], forward: int = 2000, held: int = 0) -> tuple[int, ...]:
    return tuple(room for room, _ in cheapest(laned_layouts(rows, (0,) * len(rows)), rows, forward, held))


def test_a_long_row_stands_apart_when_short_rows_would_read_more_beside_it_than_another_bucket() -> None:
    assert chosen((100_000, *[500] * 7)) == (1 << 17, *[512] * 8)
    assert chosen((6000, *[200] * 7)) == (6144, *[256] * 8)
    assert chosen((6000, *[200] * 7), forward=100_000) == (6144,) * 8
    assert chosen((900, 200)) == (1024,) * 2


@given(st.integers(1, 5000), st.integers(1, 9), st.integers(1, 10_000))
def test_equal_rows_share_one_array_with_room_to_grow(length: int, rows: int, forward: int) -> None:
    assert chosen((length,) * rows, forward) == (roomy(length),) * slots(rows)


@given(some_lengths, st.integers(1, 100_000), st.integers(0, MOST_BUCKETS))
def test_no_layout_is_much_cheaper_and_another_number_of_buckets_saves_a_fourth(
    rows: tuple[int, ...], forward: int, held: int
) -> None:
    ways = laned_layouts(rows, (0,) * len(rows))
    best = cheapest(ways, rows, forward, held)
    for way in ways:
        ours, theirs = (step_tokens(each, rows, forward) for each in (best, way))
        assert ours * (STAYS - 1) <= theirs * STAYS
        if len(set(way)) == held != len(set(best)):
            assert ours * STAYS < theirs * (STAYS - 1)


def test_another_bucket_costs_each_layer_its_attention_again() -> None:
    of_two_macs = {"layers": 80, "token_bytes": 160 << 10}  # a 70B
    alone = another_bucket(**of_two_macs, gpu=True, skips=False)
    assert alone == 80 * BUCKET_ON_GPU // (160 << 10)
    fused = another_bucket(**of_two_macs, gpu=True, skips=True)
    assert fused == SKIPS * alone
    assert len(set(chosen((16_000, *[500] * 7), fused))) == 2
    assert len(set(chosen((3000, *[500] * 7), fused))) == 1
    assert another_bucket(4, 0, gpu=False, skips=False) == 4 * BUCKET_ON_CPU


def test_lanes_with_fewer_layouts_have_room_to_grow_where_others_have_it() -> None:
    *_, grown, tight = laned_layouts((6000, 200, 300), (0, 0, 1))
    assert grown == ((6144, 0), (256, 0), (384, 1))
    assert tight == ((6144, 0), (224, 0), (320, 1))

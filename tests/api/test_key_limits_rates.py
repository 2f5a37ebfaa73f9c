"""Rates of events, by a clock of the test's own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.api.key_limits import TokenBucket


def test_a_full_bucket_lets_a_minutes_worth_through_at_once() -> None:
    bucket = TokenBucket(3, 100.0)
    assert [bucket.take(100.0) for _ in range(3)] == [0.0] * 3
    assert bucket.take(100.0) == pytest.approx(20.0)
    assert bucket.take(105.0) == pytest.approx(15.0)  # asking in vain costs nothing
    assert bucket.take(120.0) == 0.0
    assert bucket.take(120.0) == pytest.approx(20.0)


def test_rest_fills_it_to_the_brim_and_not_beyond() -> None:
    bucket = TokenBucket(2, 0.0)
    assert [bucket.take(0.0), bucket.take(0.0)] == [0.0, 0.0]
    assert [bucket.take(1e6), bucket.take(1e6)] == [0.0, 0.0]
    assert bucket.take(1e6) > 0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(1, 50.0)
    assert bucket.take(50.0) == 0.0
    assert bucket.take(40.0) == pytest.approx(60.0)
    assert bucket.take(50.0) == pytest.approx(60.0)


@given(
    per_minute=st.integers(1, 1_000_000),
    steps=st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=60),
)
def test_no_client_gets_more_than_a_full_bucket_and_what_flows_in(
    per_minute: int, steps: list[float]
) -> None:
    bucket, now, passed = TokenBucket(per_minute, 0.0), 0.0, 0
    for step in steps:
        now += step
        passed += bucket.take(now) == 0.0
    assert passed <= per_minute + now * per_minute / 60 + 1e-6


@given(per_minute=st.integers(1, 1_000_000), at=st.floats(0, 1e9, allow_nan=False))
def test_who_comes_again_when_told_gets_through(per_minute: int, at: float) -> None:
    bucket = TokenBucket(per_minute, at)
    wait_s = 0.0
    for _ in range(per_minute if per_minute < 100 else 0):
        assert bucket.take(at) == 0.0
    if per_minute < 100:
        wait_s = bucket.take(at)
        assert 0 < wait_s <= 60 / per_minute * (1 + 1e-6)
    assert bucket.take(at + math.ceil(wait_s)) == 0.0

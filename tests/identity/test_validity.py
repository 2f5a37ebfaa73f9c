"""Ends of certificates against clocks that are wrong: by a day, by years, one of them or most."""

from __future__ import annotations

import pytest

from mlxtp.identity import validity
from mlxtp.identity.validity import (
    CERTIFICATE_S,
    DAY_S,
    EARLIEST,
    ClusterClock,
    accepts_ended,
    cluster_time,
    day,
    is_due,
)

NOW = EARLIEST + 1000 * DAY_S
YEARS = 10 * 365 * DAY_S


@pytest.mark.parametrize(
    ("own", "others", "found"),
    [
        (NOW, (), NOW),
        (NOW, (NOW + YEARS, NOW + 1), NOW + 1),  # one of three is wrong
        (NOW + YEARS, (NOW, NOW + 1), NOW + 1),
        (NOW + YEARS, (NOW,), NOW),  # of two, the earlier one: nothing ends too early
        (NOW, (NOW + YEARS,), NOW),
        (0.0, (NOW,), NOW),  # 1970 and 2001 have no vote
        (978_307_200.0, (NOW + YEARS, NOW), NOW),
        (0.0, (), EARLIEST),
        (NOW, (0.0, 0.0, 0.0), NOW),
    ],
)
def test_the_cluster_s_time_is_that_of_most_clocks(
    own: float, others: tuple[float, ...], found: float
) -> None:
    assert cluster_time(own, others) == found


def test_a_certificate_is_renewed_in_the_second_half_of_its_time() -> None:
    ends = NOW + CERTIFICATE_S
    assert CERTIFICATE_S == 365 * DAY_S
    assert not is_due(ends, NOW)
    assert not is_due(ends, NOW + 182 * DAY_S)
    assert is_due(ends, NOW + 183 * DAY_S)
    assert is_due(ends, NOW + 400 * DAY_S)


def test_one_that_ends_too_late_is_renewed_at_once() -> None:
    """Made by a Mac whose clock was ahead."""
    assert is_due(253_402_300_799.0, NOW)
    assert is_due(NOW + YEARS + CERTIFICATE_S, NOW)
    assert not is_due(NOW + CERTIFICATE_S, NOW - DAY_S)  # clocks that differ by a day renew nothing


@pytest.mark.parametrize(
    ("listed", "can_renew", "own_ends", "welcome"),
    [
        (True, True, NOW + 1, True),  # off for two years: renewed where the link begins
        (False, True, NOW + 1, False),  # not even where the authority's key is
        (True, False, NOW + 1, False),
        (True, False, NOW, True),  # its own has ended as well, by the same clock
        (False, False, NOW, True),  # it has just joined, knows no list, and its clock is ahead
    ],
)
def test_who_comes_in_although_its_certificate_has_ended(
    *, listed: bool, can_renew: bool, own_ends: float, welcome: bool
) -> None:
    assert accepts_ended(NOW, own_ends, listed=listed, can_renew=can_renew) is welcome


def test_clocks_of_members_count_as_long_as_they_are_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    own = NOW + YEARS
    monkeypatch.setattr(validity, "own_time", lambda: own)
    clock = ClusterClock()
    assert clock.now() == own
    clock.told("a", int(NOW))
    clock.told("b", 0)  # an earlier version tells none
    assert clock.now() == NOW
    own += 5.0
    assert clock.now() == NOW + 5
    clock.unlinked("a")
    assert clock.now() == own


def test_a_day_for_people() -> None:
    assert (day(0.0), day(NOW), day(-1.0), day(1e18)) == (
        "1970-01-01",
        "2029-07-28",
        "1970-01-01",
        "9999-12-31",
    )

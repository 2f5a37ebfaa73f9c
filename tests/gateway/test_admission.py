from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.errors import Code
from mlxtp.gateway.admission import (
    FRESH_S,
    AdmissionLimits,
    FreeMemory,
    OpenLoad,
    SystemMemory,
    client_number,
    load_of,
    look_at_memory,
    refusal,
)

BOUNDS = AdmissionLimits(requests=16, tokens=1600, free_bytes=100 << 20, request_tokens=1)
PLENTY = SystemMemory(1 << 40)
IDLE = OpenLoad(0, 0, 0, 0)


def why(
    load: OpenLoad = IDLE, prompt: int = 1, memory: SystemMemory = PLENTY, elsewhere: str = ""
) -> tuple[int, str]:
    refused = refusal(BOUNDS, load, prompt, memory, elsewhere)
    if refused is None:
        return 0, ""
    assert refused.code is Code.OVERLOADED
    return refused.status, refused.detail


def test_an_idle_gateway_takes_everything_that_fits_a_model() -> None:
    assert why(prompt=1_000_000) == (0, "")


@pytest.mark.parametrize(
    ("fits", "too_much", "prompt", "status", "words"),
    [
        (OpenLoad(15, 15, 3, 3), OpenLoad(16, 16, 3, 3), 1, 503, ("16 requests are open",)),
        (
            OpenLoad(2, 1499, 1, 1), OpenLoad(2, 1500, 1, 1), 101, 503,
            ("2 requests are open", "1500 tokens", "101", "1600"),
        ),
        (OpenLoad(13, 13, 13, 13), OpenLoad(14, 14, 14, 14), 1, 429, ("14 of 16",)),
        (OpenLoad(14, 14, 0, 0), OpenLoad(14, 14, 14, 14), 1, 429, ("14 of 16",)),
        (OpenLoad(2, 1299, 2, 1299), OpenLoad(2, 1300, 2, 1300), 101, 429, ("1400 of 1600",)),
        (OpenLoad(2, 1300, 0, 0), OpenLoad(2, 1300, 2, 1300), 101, 429, ("1400 of 1600",)),
    ],
    ids=["places", "tokens", "places of one client", "of others", "tokens of one client", "of others, too"],
)  # fmt: skip
def test_requests_and_tokens_are_bounded_and_one_client_leaves_room_for_others(
    fits: OpenLoad, too_much: OpenLoad, prompt: int, status: int, words: tuple[str, ...]
) -> None:
    assert why(fits, prompt) == (0, "")
    told, detail = why(too_much, prompt)
    assert told == status
    assert [each for each in words if each not in detail] == []


def test_a_mac_that_only_holds_a_part_is_spared_too() -> None:
    status, detail = why(elsewhere="ben")
    assert status == 503
    assert detail.startswith("ben, which has a part of the model, is short of memory")


def test_where_there_are_few_places_one_client_may_have_them_all() -> None:
    assert refusal(AdmissionLimits(requests=4), OpenLoad(3, 3, 3, 3), 1, PLENTY) is None


def test_little_memory_refuses_before_it_runs_out() -> None:
    assert why(memory=SystemMemory(100 << 20)) == (0, "")
    status, detail = why(memory=SystemMemory((100 << 20) - 1))
    assert status == 503
    assert "99 MiB are free" in detail
    assert "100 MiB" in detail


def test_the_systems_own_alarm_counts_too() -> None:
    status, detail = why(memory=SystemMemory(1 << 40, critical=True))
    assert status == 503
    assert "critical" in detail


def test_many_short_requests_are_bounded_by_what_they_cost_and_not_by_their_number() -> None:
    bounds = AdmissionLimits(tokens=256_000)
    for count, status in ((999, None), (1000, 503)):
        load = load_of(1, [(0, 20)] * count, bounds.request_tokens)
        refused = refusal(bounds, load, 20, PLENTY)
        assert (refused and refused.status) == status
    assert refused is not None
    assert "1000 requests are open, with 256000 tokens" in refused.detail


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1000)), max_size=20), st.integers(0, 3))
def test_a_load_counts_all_clients_and_each_by_itself(open_: list[tuple[int, int]], client: int) -> None:
    own = [tokens for other, tokens in open_ if other == client]
    all_open = [tokens for _, tokens in open_]
    assert load_of(client, open_) == OpenLoad(len(all_open), sum(all_open), len(own), sum(own))


def test_a_clients_number_says_nothing_about_it_elsewhere() -> None:
    numbers = [
        client_number(client, salt)
        for client in ("a", "b", "\ud800" * 300)
        for salt in (b"1" * 16, b"2" * 16)
    ]
    assert len(set(numbers)) == 6
    assert all(0 < number < 2**63 for number in numbers)
    assert numbers[0] == client_number("a", b"1" * 16)
    assert client_number("", b"1" * 16) == 0


def test_a_crowd_asks_for_free_memory_once() -> None:
    looked, now = [], [0.0]

    def look() -> SystemMemory:
        looked.append(now[0])
        return SystemMemory(len(looked))

    memory = FreeMemory(look, lambda: now[0])
    assert [memory().available for _ in range(3)] == [1, 1, 1]
    now[0] = FRESH_S
    assert [memory().available for _ in range(3)] == [2, 2, 2]


def test_this_machine_has_memory() -> None:
    memory = look_at_memory()
    assert memory.available > 0
    assert not memory.critical


@pytest.mark.parametrize(("level", "critical"), [(0, False), (1, False), (2, False), (4, True)])
def test_a_mac_says_when_it_is_critical(level: int, critical: bool) -> None:
    assert look_at_memory(7, "darwin", lambda: level) == SystemMemory(7, critical)
    assert not look_at_memory(7, "linux", lambda: level).critical


def test_only_a_mac_takes_its_agents_last_reading_of_free_memory() -> None:
    assert look_at_memory(7, "linux").available > 7
    assert look_at_memory(0, "darwin", lambda: 1).available > 7

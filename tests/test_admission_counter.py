"""The counter of connections: bounds hold, and a place comes back when its connection ends."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mlxtp.admission_counter import AdmissionCounter

SOURCES = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"])
MOVES = st.lists(st.tuples(st.sampled_from(["enter", "exempt", "leave"]), SOURCES), max_size=60)


@given(st.integers(0, 6), st.integers(0, 4), MOVES)
def test_it_admits_what_both_bounds_allow(most: int, most_of_one: int, moves: list[tuple[str, str]]) -> None:
    counter, model = AdmissionCounter(most, most_of_one), Counter[str]()
    for move, source in moves:
        if move == "leave":
            if model[source]:
                counter.release(source)
                model[source] -= 1
            continue
        refused = counter.admit(source, exempt=move == "exempt")
        crowded = move == "enter" and model[source] >= most_of_one
        full = model.total() >= most
        assert refused == ("too many from one address" if crowded else "too many" if full else "")
        model[source] += not refused
        assert counter.total == model.total() <= most
        assert counter.of(source) == model[source]


def test_a_source_that_is_refused_or_gone_is_forgotten() -> None:
    counter = AdmissionCounter(1, 1)
    counter.admit("one")
    for number in range(1000):
        counter.admit(f"refused {number}")
        counter.of(f"looked at {number}")
    counter.release("one")
    assert vars(counter)["_open"] == {}

"""Learning of the workload from what is requested."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.placement.cost_model import AGENT, BATCH, CHAT, ENOUGH, WORKLOADS, Workload, learnt

some = st.builds(
    Workload, st.just("learnt"), st.integers(0, 50_000), st.just(0), st.integers(0, 5_000), st.integers(1, 64)
)


def test_it_begins_with_what_is_there_until_there_is_enough() -> None:
    assert learnt(ENOUGH - 1, AGENT, CHAT) is CHAT
    assert learnt(ENOUGH, AGENT, CHAT) is AGENT


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({"prompt": 5_900}, False),
        ({"prompt": 6_100}, True),
        ({"prompt": 2_500}, True),
        ({"answer": 300}, False),
        ({"answer": 100}, True),
        ({"cached": 3_000}, True),
        ({"at_once": 2}, True),
    ],
)
def test_only_much_of_a_difference_counts(change: dict[str, int], moves: bool) -> None:
    mean = replace(CHAT, name="learnt", **change)
    assert learnt(ENOUGH, mean, CHAT) is (mean if moves else CHAT)


@given(some, some)
def test_it_settles_at_once(mean: Workload, now: Workload) -> None:
    after = learnt(ENOUGH, mean, now)
    assert after in (mean, now)
    assert learnt(ENOUGH, mean, after) is after


def test_a_workload_has_words() -> None:
    assert [str(each) for each in WORKLOADS.values()] == [
        "4,000 tokens in, 400 out",
        "30,000 tokens in (27,000 cached), 300 out",
        "1,000 tokens in, 250 out, 16 at once",
    ]
    assert list(WORKLOADS) == [CHAT.name, AGENT.name, BATCH.name]

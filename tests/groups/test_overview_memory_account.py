"""The account of each Mac's memory: what is found, with numbers, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxtp.groups.overview import MIB, RankAccount, findings

GIB = 1024 * MIB
A = RankAccount("a#0", "mac", 10 * GIB, 4 * GIB, 12 * GIB, 2 * GIB)
B = RankAccount("b#0", "mac", 2 * GIB, 1 * GIB, 2 * GIB, 0)


def test_an_account_that_is_kept_to_has_no_finding() -> None:
    assert findings([], {}) == {}
    assert findings([A, B], {}) == {}
    assert findings([A, B], {"mac": 17 * GIB, "other": 0}) == {}


def test_budgets_of_all_groups_together_are_compared_with_the_mac() -> None:
    words = "its groups may have 17,408 MiB together, and this Mac has 17,407 MiB for them"
    assert findings([A, B], {"mac": 17 * GIB - MIB}) == {("mac", ""): words}
    assert findings([A, replace(B, node_id="other")], {"mac": 14 * GIB, "other": 3 * GIB}) == {}


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (replace(A, kv_bytes=5 * GIB), "its KV caches have 5,120 MiB, and may have 4,096 MiB"),
        (
            replace(A, memory_bytes=16 * GIB),
            "it has 16,384 MiB, and weights, KV caches and forwards may have 15,616 MiB",
        ),
    ],
)
def test_a_rank_beyond_its_budget_is_named(rank: RankAccount, words: str) -> None:
    assert findings([B, rank], {}) == {("mac", "a#0"): words}


def test_a_rank_without_a_bound_is_not_judged() -> None:
    assert findings([replace(A, kv_budget=0, memory_bytes=90 * GIB, kv_bytes=70 * GIB)], {}) == {}

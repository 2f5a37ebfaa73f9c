"""Drafts of a lookup: found where a plain search finds them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxtp.engine.lookup import CANDIDATES, LONGEST_MATCH, SHORTEST_MATCH, Lookup

GRAM = (1,) * SHORTEST_MATCH
FEW_TOKENS = st.lists(st.integers(0, 2), max_size=60)


def matched_at(tokens: Sequence[int], place: int) -> int:
    """Count the tokens before `place` that are the last ones of `tokens`."""
    length = 0
    while length < min(place, LONGEST_MATCH) and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def search(tokens: Sequence[int]) -> tuple[int, int]:
    """(place, matched) of the longest match among the latest candidates, by looking everywhere."""
    places = [p for p in range(len(tokens) - 1, 0, -1) if matched_at(tokens, p) >= SHORTEST_MATCH]
    best = max(places[:CANDIDATES], key=lambda place: matched_at(tokens, place), default=0)
    return best, matched_at(tokens, best) if best else 0


def continued(tokens: Sequence[int], place: int, limit: int) -> tuple[int, ...]:
    """The tokens from `place` on, as if those foretold had already come."""
    known = list(tokens)
    for _ in range(limit):
        known.append(known[place])
        place += 1
    return tuple(known[len(tokens) :])


@given(FEW_TOKENS, FEW_TOKENS, st.integers(0, 12))
@example([], [1, 2, 3, 4, 5, 6, 1], 4)
@example([1, 2, 9, 9, 1, 2], [], 4)
@example([1, 1, 1, 1, 1], [], 0)
@example([7, 1, 2, 3, 1, 2, 3, 1, 2], [], 8)
@example([1] * (LONGEST_MATCH + 2), [1, 1], 4)
@example([7, *GRAM, 9, *chain(*((*GRAM, 20 + n) for n in range(CANDIDATES - 1))), 7, *GRAM], [], 4)
@settings(max_examples=300)
def test_a_draft_is_what_a_plain_search_finds(prompt: list[int], answer: list[int], limit: int) -> None:
    """At every token: the place that was right is kept, else the longest of the latest matches is taken."""
    lookup = Lookup(prompt)
    tokens = list(prompt)
    place, matched = search(tokens)
    for token in [*answer, None]:
        assert lookup.matched == matched
        assert lookup.draft(limit) == (continued(tokens, place, limit) if place else ())
        if token is None:
            return
        kept = place > 0 and tokens[place] == token
        lookup.append(token)
        tokens.append(token)
        place, matched = (place + 1, min(matched + 1, LONGEST_MATCH)) if kept else search(tokens)


def test_work_per_token_is_bounded_on_the_worst_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 3-gram is everywhere, and every other token breaks the match."""
    compared, match = list[int](), Lookup._match

    def note(lookup: Lookup, place: int) -> int:
        compared.append(place)
        return match(lookup, place)

    monkeypatch.setattr(Lookup, "_match", note)
    rng = random.Random(3)
    lookup = Lookup([0] * 5_000)
    for _ in range(5_000):
        lookup.append(rng.randrange(2))
    assert len(compared) <= 5_001 * CANDIDATES

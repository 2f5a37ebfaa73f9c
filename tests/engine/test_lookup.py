"""Drafts of a lookup: found where a plain search finds them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxtp.engine.lookup import CANDIDATES, LONGEST_MATCH, SHORTEST_MATCH, Lookup

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


@given(FEW_TOKENS, st.integers(1, 8))
@settings(max_examples=100)
def test_a_draft_foretells_the_token_in_flight_and_what_follows_it(prompt: list[int], limit: int) -> None:
    lookup = Lookup(prompt)
    foretold = lookup.draft(limit + 1)
    assert len(foretold) in (0, limit + 1)
    if foretold:
        lookup.append(foretold[0])
        assert lookup.draft(limit) == foretold[1:]


@given(FEW_TOKENS, st.integers(0, 60))
def test_it_does_not_matter_what_was_prompt_and_what_was_answer(tokens: list[int], cut: int) -> None:
    """But for the place that is being followed: with all of it as prompt there is none yet."""
    cut = min(cut, len(tokens))
    grown = Lookup(tokens[:cut])
    for token in tokens[cut:]:
        grown.append(token)
    # Nothing here continues with a 9, so that both search again.
    whole = Lookup([*tokens, 9])
    grown.append(9)
    for token in tokens[-4:]:
        grown.append(token)
        whole.append(token)
        assert (grown.draft(5), grown.matched) == (whole.draft(5), whole.matched)


def test_the_longest_match_wins_over_the_latest() -> None:
    prompt = [1, 2, 3, 4, 5, 60, 0, 9, 3, 4, 5, 70, 0, 8, 3, 4, 5, 80, 0, 2, 3, 4, 5]
    assert Lookup(prompt).draft(1) == (60,)
    assert Lookup(prompt).matched == 4
    assert Lookup([*prompt[:-4], 7, 3, 4, 5]).draft(1) == (80,)


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

"""Drafts: found where a plain search finds them, right on text that repeats, rare on text that does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxtp.engine.lookup import CANDIDATES, LONGEST_MATCH, SHORTEST_MATCH, Lookup
from mlxtp.engine.payoff import (
    AT_FIRST,
    EARNED,
    MOST_DRAFTED,
    WIDER,
    DraftPolicy,
    Shares,
    Source,
    StepKind,
    bucket,
    source_of_match,
)

# --- the lookup, against a plain search ------------------------------------------------------------------

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


# --- a decode loop ---------------------------------------------------------------------------------------

Model = Callable[[Sequence[int]], int]
"""Greedy: the next token of what has been."""


@dataclass
class Run:
    tokens: list[int]
    steps: int = 0
    lost: float = 0.0  # plain steps that a draft cost more than it gave, without those that gave more
    accepted: int = 0


def decode(model: Model, prompt: Sequence[int], count: int, *, use_match: bool = True) -> Run:
    """Decode with drafts that are known one step late: the newest token is still being computed.

    Without `use_match`, they are those of a draft model that knows no better than the lookup.
    """
    lookup, policy = Lookup(prompt), DraftPolicy()
    shares: dict[Source, Shares] = {}
    run = Run([model(prompt)], steps=1)
    while len(run.tokens) < count:
        source: Source = source_of_match(lookup.matched) if use_match else ("draft", 0)
        options = {source: MOST_DRAFTED} if lookup.matched else {}
        planned = max(
            [each[1] for each in policy.plan([(options, shares)], 1, MOST_DRAFTED) if each], default=0
        )
        expected = lookup.draft(planned + 1) if planned else ()
        in_flight = run.tokens[-1]
        lookup.append(in_flight)
        draft = expected[1:] if expected[:1] == (in_flight,) else ()
        if expected and use_match:
            policy.checked(shares, source, 1, bool(draft))
        # One forward: what the model says after each fed token, right as far as the draft is.
        known = [*prompt, *run.tokens]
        accepted = 0
        while accepted < len(draft) and model([*known, *draft[:accepted]]) == draft[accepted]:
            accepted += 1
        fresh = [*draft[:accepted], model([*known, *draft[:accepted]])]
        for token in fresh[:-1]:
            lookup.append(token)
        run.tokens += fresh
        run.steps += 1
        run.accepted += accepted
        run.lost += max(WIDER * len(draft) - accepted, 0)
        if draft:
            policy.checked(shares, source, len(draft), accepted)
        policy.step(StepKind(1, 1 + bucket(len(draft)) if expected else 0), len(fresh))
    del run.tokens[count:]
    return run


def plain(model: Model, prompt: Sequence[int], count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(model([*prompt, *tokens]))
    return tokens


def says(text: Sequence[int], prompt: Sequence[int]) -> Model:
    """A model that answers `prompt` with `text`, over and over."""
    return lambda known: text[(len(known) - len(prompt)) % len(text)]


def markov(seed: int, order: int, vocabulary: int) -> Model:
    """A model that is sure of itself: the next token is a fixed function of the last `order` tokens."""
    return lambda known: random.Random(hash((seed, *known[-order:]))).randrange(vocabulary)


@given(
    st.integers(0, 1000),
    st.integers(1, 4),
    st.integers(2, 6),
    st.lists(st.integers(0, 5), min_size=1, max_size=30),
)
@settings(max_examples=60)
def test_drafts_change_no_token(seed: int, order: int, vocabulary: int, prompt: list[int]) -> None:
    """Greedy output is the same with and without drafts, for any model and any drafts."""
    model = markov(seed, order, vocabulary)
    assert decode(model, prompt, 80).tokens == plain(model, prompt, 80)


def text_of(words: int, seed: int) -> list[int]:
    """Text in which some words are far more common than others, as in any language."""
    rng = random.Random(seed)
    common = [1 / (rank + 3) for rank in range(5_000)]
    return rng.choices(range(5_000), common, k=words)


def test_copied_text_takes_a_tenth_of_the_steps() -> None:
    text = text_of(1_000, 1)
    run = decode(says(text, [*text, 1, 2]), [*text, 1, 2], 1_000)
    assert run.tokens == text
    assert run.steps < 100


def test_text_copied_with_changes_takes_half_of_the_steps() -> None:
    text = text_of(1_000, 1)
    rng = random.Random(2)
    changed = [6_000 if rng.random() < 0.03 else token for token in text]
    run = decode(says(changed, text), text, 1_000)
    assert run.tokens == changed
    assert run.steps < 500


@pytest.mark.parametrize("use_match", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        random.Random(4).choices(range(512), k=3_000),
        random.Random(5).choices(range(2), k=3_000),
        random.Random(6).choices(range(10), k=3_000),
        text_of(3_000, 7),
    ],
    ids=["512 tokens", "2 tokens", "10 tokens", "words"],
)
def test_text_with_nothing_to_copy_is_left_alone(text: list[int], use_match: bool) -> None:
    """Its loss is bounded by the steps and what right drafts have gained."""
    run = decode(says(text, text[:500]), text[:500], 2_500, use_match=use_match)
    assert run.lost <= AT_FIRST + 1 + EARNED * run.steps + run.accepted
    assert run.lost < 0.03 * run.steps + run.accepted

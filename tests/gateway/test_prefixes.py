"""Beginnings of prompts that groups have cached, as a gateway remembers them."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from mlxtp.gateway.routing import BLOCK, MOST_HASHES, PrefixChain, PrefixSummary


def tokens(blocks: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + blocks * BLOCK))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=3 * BLOCK), st.lists(st.integers(0, 700), max_size=6))
def test_a_sequence_that_grows_has_the_hashes_of_the_whole(whole: list[int], cuts: list[int]) -> None:
    chain, at = PrefixChain(), 0
    for cut in [*sorted(cuts), len(whole)]:
        chain.extend(whole[at:cut])
        at = max(at, min(cut, len(whole)))
    assert chain.hashes == PrefixChain(whole).hashes
    assert len(chain.hashes) == len(whole) // BLOCK


def test_a_hash_covers_everything_before_its_block() -> None:
    same, other = PrefixChain(tokens(3)).hashes, PrefixChain((9, *tokens(3)[1:])).hashes
    assert not set(same) & set(other)
    assert PrefixChain(tokens(4)).hashes[:3] == same


def test_the_longest_cached_beginning_is_found() -> None:
    summary = PrefixSummary()
    summary.note(PrefixChain(tokens(4)).hashes)
    shared = PrefixChain((*tokens(2), *tokens(3, 5)))
    assert summary.match(shared.hashes) == 2 * BLOCK
    assert summary.match(PrefixChain(tokens(9)).hashes) == 4 * BLOCK
    assert summary.match(PrefixChain(tokens(2, 7)).hashes) == 0
    assert summary.match([]) == 0


def test_the_ends_of_the_oldest_sequences_give_way_first() -> None:
    summary = PrefixSummary(room=4 * BLOCK + 7)
    old, new = (PrefixChain(tokens(3, first)) for first in (0, 1))
    summary.note(old.hashes)
    summary.note(new.hashes)
    assert summary.match(new.hashes) == 3 * BLOCK
    assert summary.match(old.hashes) == BLOCK
    assert len(summary.hashes) == 4


def test_a_summary_is_bounded_and_another_gateway_can_take_it_over() -> None:
    summary, other = PrefixSummary(), PrefixSummary()
    chain = PrefixChain(tokens(MOST_HASHES + 50))
    summary.note(chain.hashes)
    assert len(summary.hashes) == MOST_HASHES
    other.replace(summary.hashes)
    assert other.match(chain.hashes) == summary.match(chain.hashes) == MOST_HASHES * BLOCK


def test_a_long_prompt_is_matched_in_about_a_millisecond() -> None:
    """The bound is ten times what it takes on the machine where it was written."""
    prompt, best = tuple(range(30_000)), 1.0
    summary = PrefixSummary()
    summary.note(PrefixChain(prompt[:20_000]).hashes)
    for _ in range(5):
        began = time.perf_counter()
        cached = summary.match(PrefixChain(prompt).hashes)
        best = min(best, time.perf_counter() - began)
    assert cached == 20_000 // BLOCK * BLOCK
    assert best < 0.01

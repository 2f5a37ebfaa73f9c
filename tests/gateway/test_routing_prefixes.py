"""Beginnings of prompts that groups have cached, as a gateway remembers them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mlxtp.gateway.routing import MAX_HASHES, PrefixSummary
from mlxtp.wire.messages import BLOCK, PrefixDigests


def tokens(blocks: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + blocks * BLOCK))


def digests(whole: Sequence[int], salt: int = 0) -> list[bytes]:
    return PrefixDigests(whole, salt).blocks()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=3 * BLOCK), st.lists(st.integers(0, 700), max_size=6))
def test_a_sequence_that_grows_has_the_digests_of_the_whole(whole: list[int], cuts: list[int]) -> None:
    grown: list[int] = []
    chain = PrefixDigests(grown)
    for cut in [*sorted(cuts), len(whole)]:
        grown += whole[len(grown) : cut]
        assert chain.blocks() == digests(grown)
    assert len(chain.blocks()) == len(whole) // BLOCK


@given(st.lists(st.integers(0, 700), max_size=6))
def test_digests_are_the_same_in_any_order(ends: list[int]) -> None:
    whole, chain = tokens(3), PrefixDigests(tokens(3))
    assert [chain.up_to(end) for end in ends] == [PrefixDigests(whole).up_to(end) for end in ends]


def test_a_digest_covers_the_salt_and_everything_before_its_end() -> None:
    same, other = digests(tokens(3)), digests((9, *tokens(3)[1:]))
    assert not set(same) & {*other, *digests(tokens(3), salt=1)}
    assert digests(tokens(4))[:3] == same


def test_digests_stay_what_they_are_on_disk() -> None:
    assert PrefixDigests(tokens(4), 7).up_to(700).hex() == "9c2640c2c1df478fd92c91b617cc5d8d"
    assert PrefixDigests(tokens(4)).up_to(700) == PrefixDigests(tokens(4), 0).up_to(700)


def test_the_longest_cached_beginning_is_found() -> None:
    summary = PrefixSummary()
    summary.note(digests(tokens(4)))
    shared = digests((*tokens(2), *tokens(3, 5)))
    assert summary.match(shared) == 2 * BLOCK
    assert summary.match(digests(tokens(9))) == 4 * BLOCK
    assert summary.match(digests(tokens(2, 7))) == 0
    assert summary.match([]) == 0


def test_the_ends_of_the_oldest_sequences_give_way_first() -> None:
    summary = PrefixSummary(room=4 * BLOCK + 7)
    old, new = (digests(tokens(3, first)) for first in (0, 1))
    summary.note(old)
    summary.note(new)
    assert summary.match(new) == 3 * BLOCK
    assert summary.match(old) == BLOCK
    assert len(summary.hashes) == 4


def test_a_summary_is_bounded_and_another_gateway_can_take_it_over() -> None:
    summary, other = PrefixSummary(), PrefixSummary()
    chain = digests(tokens(MAX_HASHES + 50))
    summary.note(chain)
    assert len(summary.hashes) == MAX_HASHES
    other.replace(summary.hashes)
    assert other.match(chain) == summary.match(chain) == MAX_HASHES * BLOCK


def test_a_long_prompt_is_matched_in_about_a_millisecond() -> None:
    """The bound is ten times what it takes on the machine where it was written."""
    prompt, best = tuple(range(30_000)), 1.0
    summary = PrefixSummary()
    summary.note(digests(prompt[:20_000]))
    for _ in range(5):
        began = time.perf_counter()
        cached = summary.match(digests(prompt))
        best = min(best, time.perf_counter() - began)
    assert cached == 20_000 // BLOCK * BLOCK
    assert best < 0.01

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.text.answers import StopFinder

pytestmark = pytest.mark.slow

quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)
letters = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=5)
sizes = st.lists(st.integers(1, 4), max_size=30)


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    parts, at = [], 0
    for size in [*sizes, *[1] * len(text)]:
        parts.append(text[at : at + size])
        at += size
    return parts


def shown(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Search in the whole text: for the stop string that ends first, of several for the longest."""
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(ends)[1]], True) if ends else (text, False)


@quick
@given(letters, stop_lists, sizes)
def test_any_cut_finds_what_a_search_in_the_whole_text_finds(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    finder = StopFinder(stops)
    said = "".join([*map(finder.push, cut(text, sizes)), finder.finish()])
    assert (said, finder.found) == shown(text, stops)
    if finder.found:
        assert finder.match in stops
        assert text.startswith(said + finder.match + finder.rest)


@quick
@given(letters, stop_lists, sizes)
def test_exactly_what_may_become_a_stop_string_is_held_back(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    finder, pushed, said = StopFinder(stops), "", ""
    for part in cut(text, sizes):
        pushed += part
        said += finder.push(part)
        if finder.found:
            break
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))} | {""}
        held = max((b for b in beginnings if pushed.endswith(b)), key=len)
        assert said + held == pushed


def test_many_long_stop_strings_in_a_long_text_take_linear_work() -> None:
    """Each is nearly found at every place: a search from each place would take 3 * 10^9 comparisons."""
    stops = ["a" * 990 + chr(0x100 + i) for i in range(16)]
    finder = StopFinder(stops)
    text = "a" * 200_000
    said = [finder.push(text[i : i + 4]) for i in range(0, len(text), 4)]
    assert "".join(said) + finder.finish() == text
    assert len("".join(said)) == len(text) - 990

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.api.backend import Score
from mlxtp.api.stops import Scored, StopFinder, TextStream

from .conftest import BYTE_LEVEL, KINDS, Loaded, score

quick = settings(max_examples=300, deadline=None, derandomize=True, database=None)
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
    """What a search in the whole text says: the stop string that ends first, of several the longest."""
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(ends)[1]], True) if ends else (text, False)


# --- text -------------------------------------------------------------------------------------------------


@quick
@given(letters, stop_lists, sizes)
def test_any_cut_finds_what_a_search_in_the_whole_text_finds(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    finder = StopFinder(stops)
    said = "".join([*map(finder.push, cut(text, sizes)), finder.finish()])
    assert (said, finder.found) == shown(text, stops)


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


def test_nothing_is_said_after_a_stop_string() -> None:
    finder = StopFinder(["end"])
    assert [finder.push("an en"), finder.push("d of"), finder.push("it"), finder.finish()] == [
        "an ", "", "", "",
    ]  # fmt: skip


def test_many_long_stop_strings_in_a_long_text_take_linear_work() -> None:
    """Each is nearly found at every place: a search from each place would take 3 * 10^9 comparisons."""
    stops = ["a" * 990 + chr(0x100 + i) for i in range(16)]
    finder = StopFinder(stops)
    text = "a" * 200_000
    said = [finder.push(text[i : i + 4]) for i in range(0, len(text), 4)]
    assert "".join(said) + finder.finish() == text
    assert len("".join(said)) == len(text) - 990


# --- tokens -----------------------------------------------------------------------------------------------


class Pieces:
    """A detokenizer for tokens that are indices of `pieces`; '~' is half a character, whole with the next."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces
        self._half = False

    def push(self, tokens: Iterable[int]) -> str:
        text = ""
        for token in tokens:
            piece = self._pieces[token]
            if piece == "~":
                self._half = not self._half
                text += "" if self._half else "é"
            else:
                assert not self._half or not piece
                text += piece
        return text

    def finish(self) -> str:
        return ""


answers = st.lists(st.sampled_from(["a", "b", "ab", "ba", "", "~~"]), max_size=20).map(
    lambda pieces: [part for piece in pieces for part in (piece if piece == "~~" else [piece])]
)


def play(
    pieces: list[str], stops: Sequence[str], steps: Sequence[int], scored: bool = True
) -> tuple[list[tuple[str, list[Scored]]], TextStream]:
    """What each push of a stream says; the tokens are 0, 1, 2 … and token i has score i."""
    stream, at, said = TextStream(Pieces(pieces), stops, scored), 0, []
    for size in [*steps, *[1] * len(pieces)]:
        tokens = tuple(range(at, min(at + size, len(pieces))))
        if tokens and not stream.stopped:
            said.append(stream.push(tokens, tuple(score(token) for token in tokens) if scored else ()))
        at += size
    return [*said, stream.finish()], stream


@quick
@given(answers, stop_lists, sizes)
def test_scores_come_in_order_none_lost_none_twice(
    pieces: list[str], stops: list[str], steps: list[int]
) -> None:
    said, stream = play(pieces, stops, steps)
    scores = [scored for _, part in said for scored in part]
    assert scores == [(token, score(token)) for token in range(stream.used)]
    assert stream.stopped or stream.used == len(pieces)
    plain, counted = play(pieces, stops, steps, scored=False)
    assert [text for text, _ in plain] == [text for text, _ in said]
    assert (counted.used, counted.stopped) == (stream.used, stream.stopped)


@quick
@given(answers, stop_lists, sizes)
def test_a_score_never_comes_before_its_text_nor_later_than_with_it(
    pieces: list[str], stops: list[str], steps: list[int]
) -> None:
    """After every push: a token whose text is out has its score out, one whose text is not has not."""
    said, stream = play(pieces, stops, steps)
    ends: list[int] = []  # for each token the length of the answer that completes its text
    for token in range(len(pieces)):
        made = len(Pieces(pieces).push(range(token + 1)))
        grows = [len(Pieces(pieces).push(range(end + 1))) for end in range(token, len(pieces))]
        before = len(Pieces(pieces).push(range(token)))
        ends.append(made if made > before else next((grown for grown in grows if grown > made), 10**9))
    shown_text, shown_scores = 0, 0
    for text, scores in said[:-1]:
        shown_text += len(text)
        shown_scores += len(scores)
        if not stream.stopped:
            assert shown_scores == sum(end <= shown_text for end in ends)


@quick
@given(answers, stop_lists, sizes)
def test_the_text_is_the_detokenizers_up_to_a_stop_string(
    pieces: list[str], stops: list[str], steps: list[int]
) -> None:
    said, stream = play(pieces, stops, steps)
    whole = Pieces(pieces).push(range(len(pieces)))
    assert ("".join(text for text, _ in said), stream.stopped) == shown(whole, stops)


def test_tokens_count_up_to_the_one_that_completed_the_stop_string() -> None:
    pieces = ["x", "e", "nd", "y", "z"]
    for steps in ([1] * 5, [5], [2, 3]):
        said, stream = play(pieces, ["end"], steps)
        assert "".join(text for text, _ in said) == "x"
        assert stream.used == 3
        assert [token for _, scores in said for token, _ in scores] == [0, 1, 2]


def test_a_score_waits_for_the_other_half_of_its_character() -> None:
    said, _ = play(["a", "~", "~", "b"], (), [])
    assert [(text, [token for token, _ in scores]) for text, scores in said] == [
        ("a", [0]), ("", []), ("é", [1, 2]), ("b", [3]), ("", []),
    ]  # fmt: skip


def test_a_score_waits_while_its_text_is_held_back() -> None:
    said, _ = play(["a", "b", "c", "b"], ["bx"], [])
    assert [(text, [token for token, _ in scores]) for text, scores in said] == [
        ("a", [0]), ("", []), ("bc", [1, 2]), ("", []), ("b", [3]),
    ]  # fmt: skip


def test_scores_that_do_not_match_the_tokens_are_a_bug() -> None:
    with pytest.raises(ValueError, match="0 scores for 2 tokens"):
        TextStream(Pieces(["a", "b"]), (), True).push((0, 1))
    with pytest.raises(ValueError, match="1 scores for 2 tokens"):
        TextStream(Pieces(["a", "b"]), (), True).push((0, 1), (Score(0.0, ()),))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_is_found_in_the_text_of_real_tokens(loaded: dict[str, Loaded], kind: str) -> None:
    text = "hello 😀 wide world, hello 日本語 the end"
    ids = loaded[kind].tokenizer.encode(text, add_special_tokens=False).ids
    for stop in ("日", "world, hel", "😀 w", "d", "hello "):
        stream = TextStream(loaded[kind].text.detokenizer(), [stop], True)
        said = [stream.push((id_,), (score(i),)) for i, id_ in enumerate(ids)]
        assert "".join(part for part, _ in said) == text[: text.index(stop)]
        used = loaded[kind].tokenizer.decode(ids[: stream.used], skip_special_tokens=True)
        assert stop in used
        assert stop not in loaded[kind].tokenizer.decode(ids[: stream.used - 1], skip_special_tokens=True)
        assert [s for _, scores in said for s in scores] == [
            (id_, score(i)) for i, id_ in enumerate(ids[: stream.used])
        ]


def test_the_names_of_an_answers_tokens_make_its_text(loaded: dict[str, Loaded]) -> None:
    text, tokenizer = loaded[BYTE_LEVEL].text, loaded[BYTE_LEVEL].tokenizer
    answer = "hello 😀\U0001f9ff日本語 x"
    ids = tokenizer.encode(answer, add_special_tokens=False).ids
    names = [text.name(id_) for id_ in ids]
    assert b"".join(bytes(bytes_ or ()) for _, bytes_ in names).decode() == answer
    assert "\ufffd" in "".join(name for name, _ in names)
    assert text.name(tokenizer.token_to_id("</s>")) == ("</s>", None)
    assert text.name(10**6) == ("<1000000>", None)


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_a_name(loaded: dict[str, Loaded], kind: str) -> None:
    for token in range(loaded[kind].tokenizer.get_vocab_size() + 5):
        name, bytes_ = loaded[kind].text.name(token)
        assert bytes_ is None or bytes(bytes_).decode(errors="replace") == name
        assert name

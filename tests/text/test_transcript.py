from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.api.backend import TokenScore
from mlxtp.text.answers import ReadingPlan, StopFinder
from mlxtp.text.calls import CallReader
from mlxtp.text.conversation import Tool
from mlxtp.text.markups import JSON_CALLS, Markup
from mlxtp.text.transcript import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    ContentDelta,
    ReasoningDelta,
    Scored,
    Transcript,
)

from ..api.conftest import BYTE_LEVEL, KINDS, Loaded, score
from .test_answers_stops import quick, shown, sizes, stop_lists


def finder_of(stops: Sequence[str]) -> StopFinder | None:
    return StopFinder(stops) if stops else None


def said_in(events: Iterable[AnswerEvent]) -> tuple[str, list[Scored]]:
    """The text and the scores of events that are nothing else."""
    said = [event for event in events if isinstance(event, ContentDelta)]
    return "".join(event.text for event in said), [scored for event in said for scored in event.scores]


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


answers = st.lists(st.sampled_from(["a", "b", "ab", "ba", "", "~~"]), max_size=20).map(
    lambda pieces: [part for piece in pieces for part in (piece if piece == "~~" else [piece])]
)


def play(
    pieces: list[str], stops: Sequence[str], steps: Sequence[int], scored: bool = True
) -> tuple[list[tuple[str, list[Scored]]], Transcript]:
    """Return the result of each push of a stream; the tokens are 0, 1, 2 … and token i has score i."""
    stream, at, said = Transcript(Pieces(pieces), finder_of(stops), scored), 0, []
    for size in [*steps, *[1] * len(pieces)]:
        tokens = tuple(range(at, min(at + size, len(pieces))))
        if tokens and not stream.stopped:
            scores = tuple(score(token) for token in tokens) if scored else ()
            said.append(said_in(stream.push(tokens, scores)))
        at += size
    return [*said, said_in(stream.finish())], stream


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


def test_scores_that_do_not_match_the_tokens_are_a_bug() -> None:
    with pytest.raises(ValueError, match="0 scores for 2 tokens"):
        Transcript(Pieces(["a", "b"]), None, True).push((0, 1))
    with pytest.raises(ValueError, match="1 scores for 2 tokens"):
        Transcript(Pieces(["a", "b"]), None, True).push((0, 1), (TokenScore(0.0, ()),))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_is_found_in_the_text_of_real_tokens(loaded: dict[str, Loaded], kind: str) -> None:
    text = "hello 😀 wide world, hello 日本語 the end"
    ids = loaded[kind].tokenizer.encode(text, add_special_tokens=False).ids
    for stop in ("日", "world, hel", "😀 w", "d", "hello "):
        stream = Transcript(loaded[kind].text.detokenizer(), StopFinder([stop]), True)
        said = [said_in(stream.push((id_,), (score(i),))) for i, id_ in enumerate(ids)]
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


THINKS = Markup(("<think>", "</think>"))
CALL = '{"name": "add", "arguments": {"a": 1}}'


def read(pieces: Sequence[str], plan: ReadingPlan, stops: Sequence[str] = ()) -> list[AnswerEvent]:
    transcript = Transcript(Pieces(pieces), finder_of(stops), plan=plan)
    return [*transcript.push(range(len(pieces))), *transcript.finish()]


def test_a_stop_string_counts_in_what_is_said_only() -> None:
    pieces = ["<think>", "the end?", "</think>", "not ", "the end", "."]
    assert read(pieces, ReadingPlan(THINKS), ["end"]) == [
        ReasoningDelta(0, "the end?"),
        ContentDelta(0, "not the "),
    ]


def test_scores_wait_for_a_marker_and_none_is_lost() -> None:
    pieces = [" <", "think", ">", "b", "</think>", "c"]
    transcript = Transcript(Pieces(pieces), None, True, plan=ReadingPlan(THINKS))
    counts, events = [], []
    for token in range(len(pieces)):
        events += (new := transcript.push((token,), (score(token),)))
        counts.append(len(said_in(new)[1]))
    events += transcript.finish()
    assert counts == [0, 0, 3, 1, 1, 1]
    assert said_in(events) == ("c", [(token, score(token)) for token in range(len(pieces))])


def test_one_call_is_enough_where_one_is_wanted() -> None:
    plan = ReadingPlan(THINKS, calls=CallReader(JSON_CALLS, (Tool("add"),), most=1))
    pieces = [f"<tool_call>{CALL}</tool_call>"] * 2
    transcript = Transcript(Pieces(pieces), plan=plan)
    began, arguments = transcript.push((0, 1))
    assert isinstance(began, CallBegan)
    assert arguments == CallArguments(0, 0, '{"a": 1}')
    assert (transcript.stopped, transcript.stopped_by, transcript.used) == (True, None, 1)


def test_a_stop_string_does_not_reach_across_a_call() -> None:
    plan = ReadingPlan(THINKS, calls=CallReader(JSON_CALLS, (Tool("add"),)))
    said = read(["a", f"<tool_call>{CALL}</tool_call>", "bcdef"], plan, ["ab"])
    assert "".join(event.text for event in said if isinstance(event, ContentDelta)) == "abcdef"


@pytest.mark.parametrize("stop", ["\n\n", "b\n", "b \n"])
def test_a_stop_string_ends_the_answer_with_its_last_blank(stop: str) -> None:
    plan = ReadingPlan(THINKS, calls=CallReader(JSON_CALLS, (Tool("add"),)))
    text = f"a {stop}"
    transcript = Transcript(Pieces(text), StopFinder([stop]), plan=plan)
    events = transcript.push(range(len(text)))
    assert (transcript.stopped_by, transcript.used) == (stop, len(text))
    assert said_in([*events, *transcript.finish()])[0] == "a "


def test_blanks_around_thoughts_stop_nothing() -> None:
    pieces = ["\n\n", "<think>", "\n\nhm", "</think>", "\n\n", "yes", "\n\n", "no"]
    assert read(pieces, ReadingPlan(THINKS), ["\n\n"]) == [ReasoningDelta(0, "hm"), ContentDelta(0, "yes")]

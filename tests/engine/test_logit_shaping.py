"""Rank 0's work on the logits of its rows, in one process: masks, forced tokens, counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from random import Random

import mlx.core as mx
import pytest

from mlxtp.engine.grammar import Grammars
from mlxtp.engine.logit_shaping import LEAST_BIAS, Guided, RequestShaping
from mlxtp.errors import Code, MlxtpError
from mlxtp.wire.messages import Generate, Shaping

from ..reference import TINY, model_of
from .tables import refused

VOCABULARY = 512
EOS = model_of(TINY)[1]
PROMPT = (0, 43, 38)
HELLO_OR = 'start: "hello there " /[A-Z]{2}/ " bye"'
UID, SEQUENCE = 7, 3


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(TINY, VOCABULARY, EOS)
    yield grammars
    grammars.close()


def desk_for(shaping: Shaping, guide: Guided | None = None, **fields: int) -> RequestShaping:
    desk = RequestShaping()
    desk.prepare(VOCABULARY, EOS)
    desk.enter(Generate(UID, PROMPT, 20, shaping=shaping, **fields), guide)  # type: ignore[arg-type]
    desk.assign(SEQUENCE, UID)
    return desk


def logits(rows: int) -> mx.array:
    """Falling with the token, so that the lowest allowed one wins."""
    return mx.broadcast_to(-mx.arange(VOCABULARY, dtype=mx.float32) / 100, (rows, VOCABULARY))


def allowed(shaped: mx.array) -> list[set[int]]:
    """For each column what is not forbidden."""
    finite = (shaped > -mx.inf).tolist()
    return [{token for token, is_finite in enumerate(row) if is_finite} for row in finite]


def guided(grammars: Grammars, kind: str, text: str, left: int = 1000) -> Guided:
    return Guided(grammars.compile(kind, text).matcher(), VOCABULARY, left)


def test_a_step_beyond_an_end_of_forced_tokens_has_logits_of_its_own_width(grammars: Grammars) -> None:
    """It is queued before the forced tokens are known, so that other rows run ahead."""
    guide = guided(grammars, "regex", "abc")
    desk = desk_for(Shaping(grammar_kind="regex"), guide)
    forced = guide.forced(8)
    assert forced
    desk.feeds(SEQUENCE, len(PROMPT) + 1 + len(forced))
    for token in forced:
        guide.accept(token)
    assert guide.finished
    assert desk.shape(SEQUENCE, logits(1)).shape == (1, VOCABULARY)


def test_the_token_after_forced_ones_is_held_to_what_follows_them(grammars: Grammars) -> None:
    guide = guided(grammars, "lark", HELLO_OR)
    desk = desk_for(Shaping(grammar_kind="lark"), guide)
    forced = guide.forced(16)
    assert len(forced) > 2
    desk.feeds(SEQUENCE, 3, forced)
    *before, after = allowed(desk.shape(SEQUENCE, logits(1 + len(forced))))
    assert before == [{token} for token in forced]
    # The guide itself goes on only when the tokens are known.
    assert guide.forced(16) == forced
    for token in forced:
        guide.accept(token)
    assert guide.forced(16) == ()
    desk.feeds(SEQUENCE, 3 + len(forced))
    (expected,) = allowed(desk.shape(SEQUENCE, logits(1)))
    assert after == expected


def test_after_forced_tokens_that_end_the_text_only_the_end_may_come(grammars: Grammars) -> None:
    guide = guided(grammars, "regex", "hello there")
    desk = desk_for(Shaping(grammar_kind="regex"), guide)
    forced = guide.forced(64)
    desk.feeds(SEQUENCE, 3, forced)
    assert allowed(desk.shape(SEQUENCE, logits(1 + len(forced))))[-1] <= EOS


def said(grammars: Grammars, text: str) -> list[int]:
    """The tokens of a text, one for each character."""
    guide = guided(grammars, "lark", f'start: "{text}"')
    return [int(token) for token in guide.forced(99)]


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("abab", "abab"),  # all of them
        ("abc", "ab"),  # the grammar forbids the next one
        ("ab!", "ab"),  # behind it a text is forced, whose tokens are not chosen one by one
        ("ab.", "ab"),  # it ends the answer
        ("ab?", "ab"),  # nothing can come behind it
    ],
)
def test_drafts_end_before_one_after_which_a_choice_would_not_be_that_of_single_steps(
    grammars: Grammars, text: str, fits: str
) -> None:
    lark = 'start: /[ab]*/ ("!hello" | "." | "?" x)\nx: "c" x'
    guide, alone = guided(grammars, "lark", lark), guided(grammars, "lark", lark)
    drafts = guide.allowed(said(grammars, text))
    assert list(drafts) == said(grammars, fits)
    desk = desk_for(Shaping(grammar_kind="lark"), guide)
    desk.feeds(SEQUENCE, 3, drafts)
    columns = allowed(desk.shape(SEQUENCE, logits(2 + len(drafts))))
    assert len(columns.pop()) == VOCABULARY, "padding"
    for column, token in zip(columns, [*drafts, None], strict=True):
        assert column == set(alone.masks[0].nonzero()[0].tolist())
        if token is not None:
            guide.accept(token)  # no draft was accepted before
            alone.accept(token)
            assert alone.forced(16) == ()


@pytest.mark.parametrize(("left", "most"), [(1000, 20), (100, 7), (30, 0)])
def test_near_the_end_of_the_budget_nothing_is_drafted(grammars: Grammars, left: int, most: int) -> None:
    """There a mask may leave out more, which depends on the masks before it."""
    drafts = said(grammars, "a" * 20)
    guide = guided(grammars, "regex", "[a-c]+", left)
    assert min(guide.draftable, 20) == most == len(guide.allowed(drafts))


def test_a_grammar_with_no_way_on_says_so_before_any_forward_needs_its_mask(grammars: Grammars) -> None:
    def go_on() -> None:
        guide = guided(grammars, "lark", 'start: "a" x\nx: x "b"')
        for token in (*guide.forced(1), 43):
            guide.accept(token)
            guide.forced(16)

    with refused(MlxtpError, Code.GRAMMAR_STUCK):
        go_on()


def test_a_row_that_asks_for_nothing_keeps_its_logits() -> None:
    desk = desk_for(Shaping())
    row = logits(2)
    assert desk.shape(SEQUENCE, row) is row
    assert desk.shape(99, row) is row
    assert desk.top(SEQUENCE) == desk.top(99) == -1


def test_who_asked_for_scores_is_known_until_it_leaves() -> None:
    desk = desk_for(Shaping(), logprobs=3)
    assert desk.top(SEQUENCE) == 3
    desk.leave(UID)
    assert desk.top(SEQUENCE) == -1


def test_min_tokens_counts_from_the_prompt_on() -> None:
    desk = desk_for(Shaping(min_tokens=3))
    for at in (3, 4, 5):
        desk.feeds(SEQUENCE, at)
        assert not allowed(desk.shape(SEQUENCE, logits(1)))[0] & EOS
    desk.feeds(SEQUENCE, 4, (8, 9))
    columns = allowed(desk.shape(SEQUENCE, logits(3)))
    assert [bool(column & EOS) for column in columns] == [False, False, True]
    desk.feeds(SEQUENCE, 6)
    assert allowed(desk.shape(SEQUENCE, logits(1)))[0] >= EOS


@pytest.mark.parametrize("chose", [[8, 8, 9, 7], [8, 8, 7, 9], [9, 8, 9, 7]])
def test_penalties_count_drafts_up_to_the_first_wrong_one(chose: list[int]) -> None:
    """At each place as if those before it were right, and for good those that are, with the next token."""
    shaping = Shaping(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7)
    desk, alone = desk_for(shaping), desk_for(shaping)
    drafts, row = (8, 8, 9), logits(4) - 1
    desk.feeds(SEQUENCE, 3, drafts)
    columns = desk.shape(SEQUENCE, row)
    desk.chosen(SEQUENCE, mx.array(chose))
    for at, token in enumerate(chose):
        alone.feeds(SEQUENCE, 3 + at)
        assert mx.allclose(columns[at], alone.shape(SEQUENCE, row[:1])[0]).item()
        alone.chosen(SEQUENCE, mx.array([token]))
        if token != (*drafts, -1)[at]:
            break
    assert mx.allclose(desk.shape(SEQUENCE, row), alone.shape(SEQUENCE, row)).item() is False
    desk.feeds(SEQUENCE, 9)
    alone.feeds(SEQUENCE, 9)
    assert mx.allclose(desk.shape(SEQUENCE, row[:1]), alone.shape(SEQUENCE, row[:1])).item()


def test_a_second_sequence_of_a_request_goes_on_counting() -> None:
    """A sequence that was taken out and starts again under another uid."""
    desk = desk_for(Shaping(presence_penalty=5.0))
    desk.chosen(SEQUENCE, mx.array([9]))
    desk.assign(SEQUENCE + 1, UID)
    row = desk.shape(SEQUENCE + 1, logits(1))
    assert row[0, 9].item() == pytest.approx(logits(1)[0, 9].item() - 5.0)


def test_an_answer_that_ignores_end_tokens_may_have_them_at_once() -> None:
    desk = desk_for(Shaping(min_tokens=5), ignore_eos=True)
    assert allowed(desk.shape(SEQUENCE, logits(1)))[0] >= EOS


def test_stop_tokens_wait_for_min_tokens_as_end_tokens_do() -> None:
    desk = desk_for(Shaping(min_tokens=5), ignore_eos=True, stop_tokens=(8,))
    [columns] = allowed(desk.shape(SEQUENCE, logits(1)))
    assert 8 not in columns
    assert columns >= EOS


def test_only_allowed_tokens_keep_their_logits() -> None:
    row = desk_for(Shaping(allowed_tokens=(8, 9), bias_tokens=(9,), bias_values=(2.0,))).shape(
        SEQUENCE, logits(1)
    )[0]
    plain = logits(1)[0]
    assert [token for token, value in enumerate(row.tolist()) if value > LEAST_BIAS / 2] == [8, 9]
    assert (row[8].item(), row[9].item()) == (plain[8].item(), pytest.approx(plain[9].item() + 2))


def test_an_answer_that_an_earlier_group_began_counts_from_its_beginning() -> None:
    for least, may_end in ((2, True), (3, False)):
        desk = desk_for(Shaping(min_tokens=least), answered=2)  # the last two tokens of PROMPT
        desk.feeds(SEQUENCE, len(PROMPT))
        assert (allowed(desk.shape(SEQUENCE, logits(1)))[0] >= EOS) is may_end


WORDS = ((9,), (1, 2), (1, 1, 3), (2, 1, 2, 4), (3,))


def ended_words(answer: Sequence[int]) -> set[int]:
    """The tokens that would complete a word, in plain code."""
    return {word[-1] for word in WORDS if tuple(answer)[len(answer) - len(word) + 1 :] == word[:-1]}


def lasting(row: mx.array) -> set[int]:
    return {token for token, value in enumerate(row.tolist()) if value > LEAST_BIAS}


@pytest.mark.parametrize("seed", range(12))
def test_a_word_lacks_its_last_token_only_behind_the_others(seed: int) -> None:
    """With drafts, right and wrong, in a sequence that starts again, and of an answer begun elsewhere."""
    random = Random(seed)
    tokens, lengths = tuple(chain(*WORDS)), tuple(map(len, WORDS))
    answered = random.choice((0, 2, 3))
    answer = [1, 2, 1][3 - answered :]
    desk = RequestShaping()
    desk.prepare(VOCABULARY, EOS)
    shaping = Shaping(bad_tokens=tokens, bad_lengths=lengths)
    request = Generate(UID, (1, 1, 2, 1, *answer), 99, shaping=shaping, answered=answered)
    desk.enter(request, None)
    for sequence in range(SEQUENCE, SEQUENCE + 12):
        desk.assign(sequence, UID)
        drafts = tuple(random.choices((1, 2, 3, 4), k=random.randrange(4)))
        desk.feeds(sequence, 4 + len(answer), drafts)
        columns = desk.shape(sequence, logits(2 + len(drafts)))[:-1]  # the last one is padding
        for at, column in enumerate(columns):
            ahead = [*answer, *drafts[:at]]
            assert set(range(VOCABULARY)) - lasting(column) == ended_words(ahead[-9:])
        chose = [random.choice((draft, 1, 2)) for draft in (*drafts, 1)]
        desk.chosen(sequence, mx.array(chose))
        right = next((at for at, (one, two) in enumerate(zip(drafts, chose, strict=False)) if one != two), -1)
        answer += chose[: right + 1] if right >= 0 else chose


def test_a_word_comes_only_where_a_grammar_leaves_nothing_else(grammars: Grammars) -> None:
    (one,), (other,) = said(grammars, "a"), said(grammars, "b")
    for text, expected in (("a", {one}), ("[ab]", {one, other})):
        guide = guided(grammars, "regex", text)
        desk = desk_for(Shaping(grammar_kind="regex", bad_tokens=(one,), bad_lengths=(1,)), guide)
        row = desk.shape(SEQUENCE, logits(1))
        assert allowed(row) == [expected]
        assert mx.argmax(row).item() == (other if len(expected) > 1 else one)
    # beside a list of tokens, any other one is chosen rather than a word
    desk = desk_for(Shaping(allowed_tokens=(0,), bad_tokens=(0,), bad_lengths=(1,)))
    assert mx.argmax(desk.shape(SEQUENCE, logits(1))).item() == 1

"""Rank 0's work on the logits of its rows, in one process: masks, forced tokens, counts."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlxtp.engine.grammar import Grammars
from mlxtp.engine.logit_shaping import Guided, RequestShaping
from mlxtp.errors import Code, MlxtpError
from mlxtp.wire.messages import Generate, Shaping

from ..reference import TINY, model_of

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


# --- grammars ---------------------------------------------------------------------------------------------


def guided(grammars: Grammars, kind: str, text: str, left: int = 1000) -> Guided:
    return Guided(grammars.compile(kind, text).matcher(), VOCABULARY, left)


def test_a_mask_leaves_what_the_grammar_allows(grammars: Grammars) -> None:
    guide = guided(grammars, "regex", "[ab]")
    (first,) = allowed(desk_for(Shaping(grammar_kind="regex"), guide).shape(SEQUENCE, logits(1)))
    assert 0 < len(first) <= 4
    assert not first & EOS


def test_the_token_after_forced_ones_is_held_to_what_follows_them(grammars: Grammars) -> None:
    guide = guided(grammars, "lark", HELLO_OR)
    desk = desk_for(Shaping(grammar_kind="lark"), guide)
    forced = guide.forced(16)
    assert len(forced) > 2
    desk.forced(SEQUENCE, forced)
    after = allowed(desk.shape(SEQUENCE, logits(1 + len(forced))))[-1]
    # The guide itself goes on only when the tokens are known.
    assert guide.forced(16) == forced
    for token in forced:
        guide.accept(token)
    assert guide.forced(16) == ()
    (expected,) = allowed(desk.shape(SEQUENCE, logits(1)))
    assert after == expected


def test_after_forced_tokens_that_end_the_text_only_the_end_may_come(grammars: Grammars) -> None:
    guide = guided(grammars, "regex", "hello there")
    desk = desk_for(Shaping(grammar_kind="regex"), guide)
    forced = guide.forced(64)
    desk.forced(SEQUENCE, forced)
    assert allowed(desk.shape(SEQUENCE, logits(1 + len(forced))))[-1] <= EOS


def test_a_grammar_with_no_way_on_says_so_before_any_forward_needs_its_mask(grammars: Grammars) -> None:
    def go_on() -> None:
        guide = guided(grammars, "lark", 'start: "a" x\nx: x "b"')
        for token in (*guide.forced(1), 43):
            guide.accept(token)
            guide.forced(16)

    with pytest.raises(MlxtpError) as caught:
        go_on()
    assert caught.value.code is Code.GRAMMAR_STUCK


# --- everything else --------------------------------------------------------------------------------------


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


def test_min_tokens_counts_what_was_chosen() -> None:
    desk = desk_for(Shaping(min_tokens=2))
    for _ in range(2):
        assert not allowed(desk.shape(SEQUENCE, logits(1)))[0] & EOS
        desk.chosen(SEQUENCE, mx.array([9]))
    assert allowed(desk.shape(SEQUENCE, logits(1)))[0] >= EOS


def test_min_tokens_counts_forced_tokens_once() -> None:
    desk = desk_for(Shaping(min_tokens=4))
    desk.forced(SEQUENCE, (8, 9))
    columns = allowed(desk.shape(SEQUENCE, logits(3)))
    assert [bool(column & EOS) for column in columns] == [False] * 3
    desk.chosen(SEQUENCE, mx.array([8, 9, 10]))
    assert not allowed(desk.shape(SEQUENCE, logits(1)))[0] & EOS
    desk.chosen(SEQUENCE, mx.array([11]))
    assert allowed(desk.shape(SEQUENCE, logits(1)))[0] >= EOS


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

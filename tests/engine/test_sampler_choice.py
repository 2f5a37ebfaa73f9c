"""Choosing tokens from gathered logits: what rank 0 alone does, and what every rank does alike."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtp.engine.group import LoneGroup
from mlxtp.engine.sampler import Chooser, LogitShaping
from mlxtp.wire.messages import Sampling

VOCABULARY = 32
GREEDY = Sampling()
HOT = Sampling(temperature=3.0, seed=5)


class Follower(LoneGroup):
    """A group whose rank 0 chose token 7 everywhere."""

    def agree(self, tokens: mx.array) -> mx.array:
        return mx.full(tokens.shape, 7, dtype=mx.int32)


class Notes(LogitShaping):
    """Allows one row nothing but token 3, wants the other's scores, and writes down what was chosen."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Any]] = []

    def shape(self, uid: int, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(VOCABULARY) == 3, logits, -mx.inf) if uid == 1 else logits

    def chosen(self, uid: int, tokens: mx.array) -> None:
        self.told.append((uid, tokens.tolist()))

    def top(self, uid: int) -> int:
        return 2 if uid == 2 else -1


@pytest.fixture
def logits() -> mx.array:
    return mx.array(np.random.default_rng(1).normal(0, 3, (2, 3, VOCABULARY)).astype(np.float32))


def choose(chooser: Chooser, logits: mx.array, samplings: tuple[Sampling, ...], **how: Any) -> Any:
    at = mx.array([10, 20], dtype=mx.int32)
    return chooser.choose(logits, (1, 2), (3, 1), samplings, at, **{"broadcast": False, **how})


def test_every_rank_chooses_alike_without_a_desk(logits: mx.array) -> None:
    tokens, scores = choose(Chooser(LoneGroup(), LogitShaping()), logits, (GREEDY, HOT))
    again, _ = choose(Chooser(Follower(), LogitShaping()), logits, (GREEDY, HOT))
    assert tokens.tolist() == again.tolist()
    assert tokens[0].tolist() == mx.argmax(logits[0], axis=-1).tolist()
    assert scores == {}


def test_under_broadcast_rank_0s_choice_counts(logits: mx.array) -> None:
    tokens, _ = choose(Chooser(Follower(), LogitShaping()), logits, (GREEDY, HOT), broadcast=True)
    assert tokens.tolist() == [[7] * 3] * 2


def test_the_desk_shapes_and_hears_what_was_chosen_of_each_rows_width(logits: mx.array) -> None:
    desk = Notes()
    tokens, _ = choose(Chooser(LoneGroup(), desk), logits, (GREEDY, GREEDY), broadcast=True)
    assert tokens[0].tolist() == [3, 3, 3]
    assert tokens[1].tolist() == mx.argmax(logits[1], axis=-1).tolist()
    assert desk.told == [(1, [3, 3, 3]), (2, [tokens[1, 0].item()])]


def test_the_desk_shapes_nothing_where_every_rank_chooses(logits: mx.array) -> None:
    desk = Notes()
    tokens, _ = choose(Chooser(LoneGroup(), desk), logits, (GREEDY, GREEDY))
    assert tokens[0].tolist() == mx.argmax(logits[0], axis=-1).tolist()
    assert desk.told == []


@pytest.mark.parametrize("broadcast", [False, True])
def test_scores_are_for_those_who_asked(logits: mx.array, broadcast: bool) -> None:
    tokens, scores = choose(Chooser(LoneGroup(), Notes()), logits, (GREEDY, HOT), broadcast=broadcast)
    assert set(scores) == {2}
    logprobs, top, _ = scores[2]
    reference = logits[1] - mx.logsumexp(logits[1], axis=-1, keepdims=True)
    expected = mx.take_along_axis(reference, tokens[1][:, None], axis=-1)[:, 0]
    np.testing.assert_allclose(np.array(logprobs), np.array(expected), atol=1e-5)
    assert top.shape == (3, 2)
    assert top[:, 0].tolist() == mx.argmax(logits[1], axis=-1).tolist()


def test_other_rows_have_other_settings(logits: mx.array) -> None:
    """State that is kept from step to step belongs to these rows only."""
    chooser = Chooser(LoneGroup(), LogitShaping())
    first, _ = choose(chooser, logits, (HOT, GREEDY))
    second, _ = choose(chooser, logits, (GREEDY, HOT))
    assert second[0].tolist() == mx.argmax(logits[0], axis=-1).tolist()
    assert first[1].tolist() == mx.argmax(logits[1], axis=-1).tolist()
    assert choose(chooser, logits, (HOT, GREEDY))[0].tolist() == first.tolist()

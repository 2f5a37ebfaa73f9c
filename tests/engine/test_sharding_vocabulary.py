"""The parts of a divided vocabulary, one rank at a time in this process. Real groups: test_families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlxtp.engine.group import LoneGroup
from mlxtp.engine.loader import ModelShare, load, make_cache
from mlxtp.engine.sharding import ShardedEmbedding, ShardedHead, Vocabulary, cut_rows, shard
from mlxtp.errors import Code, ModelError

from .small_models import write_model
from .tables import refused
from .vocabulary_member import bits, hard_rows

pytestmark = pytest.mark.group

HIDDEN = 64


@dataclass(frozen=True)
class Seat:
    """One rank's place in a group whose other ranks are not here."""

    rank: int
    size: int
    handle: None = None

    def total(self, array: mx.array) -> mx.array:
        return array


class Toy(nn.Module):
    """The least that has an embedding, a head, and logits that are bent afterwards."""

    model_type = "toy"

    def __init__(self, size: int, *, tied: bool = False, own_gather: bool = False) -> None:
        super().__init__()
        self.body = {"embed_tokens": nn.Embedding(size, HIDDEN)}
        self.lm_head = None if tied else nn.Linear(HIDDEN, size)
        self.layers: list[Any] = []
        self.sharding_group = "its own" if own_gather else None
        self.seen: list[mx.array] = []

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = self.body["embed_tokens"](tokens)
        logits = self.body["embed_tokens"].as_linear(x) if self.lm_head is None else self.lm_head(x)
        return mx.tanh(logits / 5.0) * 5.0

    def shard(self, handle: object) -> None:
        if self.lm_head is not None:
            assert self.lm_head.weight.shape[0] % 2 == 0


def loaded(folder: Path, **changes: Any) -> ModelShare:
    return load(write_model(folder, **changes), LoneGroup(), lambda: None)


def parts_of(folder: Path, **changes: Any) -> tuple[Vocabulary, Any]:
    whole = loaded(folder, **changes)
    return whole.vocabulary, whole.model


def quantized(bits_: int) -> Callable[[Any], Any]:
    return lambda module: module.to_quantized(group_size=32, bits=bits_)


def as_bf16(module: Any) -> Any:
    module.set_dtype(mx.bfloat16)
    return module


KINDS: dict[str, Callable[[Any], Any]] = {
    "f32": lambda module: module,
    "bf16": as_bf16,
    "4bit": quantized(4),
    "8bit": lambda module: quantized(8)(as_bf16(module)),
}


def pieces(model: Any, ranks: int) -> list[Vocabulary]:
    """Every rank's vocabulary of the same weights; `model` makes them again each time."""
    return [shard(model(), Seat(rank, ranks)) for rank in range(ranks)]


def together(parts: list[mx.array], size: int) -> mx.array:
    return mx.concatenate(parts, axis=-1)[..., :size]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "ranks"), [(512, 2), (509, 2), (509, 4), (5, 4), (509, 1)])
def test_the_parts_of_a_head_are_the_head_bit_for_bit(tied: bool, kind: str, size: int, ranks: int) -> None:
    def model() -> Toy:
        mx.random.seed(7)
        toy = Toy(size, tied=tied)
        toy.body = {"embed_tokens": KINDS[kind](toy.body["embed_tokens"])}
        if not tied:
            toy.lm_head = KINDS[kind](toy.lm_head)
        return toy

    x = mx.random.normal((2, 3, HIDDEN)).astype(mx.float32 if kind in ("f32", "4bit") else mx.bfloat16)
    whole = model()
    expected = whole.body["embed_tokens"].as_linear(x) if tied else whole.lm_head(x)
    heads = [vocabulary.head for vocabulary in pieces(model, ranks)]
    parts = [head.as_linear(x) if tied else head(x) for head in heads]
    assert {part.shape[-1] for part in parts} == {-(-size // ranks)}
    assert mx.array_equal(together(parts, size), expected)
    for head in heads:
        head.ends = mx.array([1, 2])
    last = [head.as_linear(x) if tied else head(x) for head in heads]
    assert last[0].shape[:2] == (2, 1)


@pytest.mark.parametrize("tied", [True, False])
def test_padding_stays_minus_infinity_when_logits_are_bent(tied: bool) -> None:
    tokens = mx.array([[1, 2, 3]])
    for rank, padded in enumerate([0, 0, 0, 3]):
        model = Toy(509, tied=tied)
        vocabulary = shard(model, Seat(rank, 4))
        given = mx.random.normal((1, 3, HIDDEN))
        logits = vocabulary.forward(model, tokens, [], given=given)
        assert logits.shape == (1, 3, 128)
        assert (logits == -mx.inf).sum().item() == 3 * padded
        assert mx.isfinite(logits[..., : 128 - padded]).all().item()


@pytest.mark.parametrize(
    ("tokens", "padded"),
    [(500, [0, 0, 0, 12]), (383, [0, 0, 1, 128]), *((count, [0, 0, 0, 3]) for count in (509, 600, 9))],
)
def test_ids_that_the_tokenizer_lacks_are_padding(tokens: int, padded: list[int]) -> None:
    for rank, count in enumerate(padded):
        model = Toy(509)
        vocabulary = shard(model, Seat(rank, 4))
        vocabulary.limit(tokens)
        logits = vocabulary.forward(model, mx.array([[1]]), [], given=mx.random.normal((1, 1, HIDDEN)))
        assert vocabulary._padded == bool(count), "other ranks' forwards have nothing to mask"
        assert (logits[0, 0] == -mx.inf).tolist() == [False] * (128 - count) + [True] * count


@pytest.mark.parametrize(("size", "real"), [(600, 512), (512, 512), (2000, 2000)])
def test_a_load_learns_from_the_tokenizer_what_is_padding(tmp_path: Path, size: int, real: int) -> None:
    model = loaded(tmp_path / "model", vocab_size=size)
    logits = model.vocabulary.forward(model.model, mx.array([[3]]), make_cache(model.model))
    assert mx.isfinite(logits[0, 0]).tolist() == [True] * real + [False] * (size - real)
    assert model.vocabulary._padded == (size > real)


def test_a_family_that_gathers_its_own_head_no_longer_does() -> None:
    model = Toy(509, own_gather=True)
    shard(model, Seat(0, 2))
    assert model.sharding_group is None
    assert isinstance(model.lm_head, ShardedHead)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "ranks"), [(512, 2), (509, 4), (5, 4)])
def test_every_token_is_embedded_by_one_rank_and_not_changed_by_the_others(
    kind: str, size: int, ranks: int
) -> None:
    def model() -> Toy:
        mx.random.seed(3)
        toy = Toy(size, tied=True)
        toy.body["embed_tokens"].weight[:, 0] = -0.0
        toy.body = {"embed_tokens": KINDS[kind](toy.body["embed_tokens"])}
        return toy

    tokens = mx.arange(size)[None]
    expected = model().body["embed_tokens"](tokens)
    parts = [vocabulary.embedding(tokens) for vocabulary in pieces(model, ranks)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert mx.array_equal(bits(total), bits(expected))
    for vocabulary in pieces(model, min(ranks, size // 2)):
        mine = mx.arange(vocabulary.first, min(vocabulary.first + vocabulary.share, size))
        assert vocabulary.embedding is not None
        local = vocabulary.embedding.local(mine - vocabulary.first)
        assert mx.array_equal(bits(local), bits(expected[0, mine]))


def test_rows_are_cut_and_filled_up_with_zeros() -> None:
    array = mx.arange(10).reshape(5, 2)
    assert cut_rows(array, "", 0, 5) is array
    assert cut_rows(array, "", 1, 2).tolist() == [[2, 3], [4, 5]]
    assert cut_rows(array, "", 4, 3).tolist() == [[8, 9], [0, 0], [0, 0]]
    assert cut_rows(array, "", 6, 2).tolist() == [[0, 0], [0, 0]]


def test_given_embeddings_are_used_once_and_instead_of_the_tokens(tmp_path: Path) -> None:
    vocabulary, model = parts_of(tmp_path / "model")
    assert isinstance(vocabulary.embedding, ShardedEmbedding)
    tokens, others = mx.array([[3, 1, 4]]), mx.array([[9, 9, 9]])
    expected = vocabulary.forward(model, tokens, make_cache(model))
    given = vocabulary.embedding(tokens)
    assert mx.array_equal(vocabulary.forward(model, others, make_cache(model), given=given), expected)
    assert mx.array_equal(vocabulary.forward(model, tokens, make_cache(model)), expected)
    assert not mx.array_equal(vocabulary.forward(model, others, make_cache(model)), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_one_position_of_each_row_alone(tmp_path: Path, tied: bool) -> None:
    vocabulary, model = parts_of(tmp_path / "model", tie_word_embeddings=tied)
    tokens = mx.array([[3, 1, 4], [1, 5, 9]])
    full = vocabulary.forward(model, tokens, make_cache(model))
    ends = vocabulary.forward(model, tokens, make_cache(model), ends=mx.array([1, 2]))
    assert full.shape == (2, 3, 512)
    assert ends.shape == (2, 1, 512)
    assert mx.allclose(ends[0, 0], full[0, 1], atol=1e-5).item()
    assert mx.allclose(ends[1, 0], full[1, 2], atol=1e-5).item()
    assert vocabulary.forward(model, tokens, make_cache(model)).shape == full.shape


def test_a_forward_that_fails_leaves_nothing_set(tmp_path: Path) -> None:
    vocabulary, model = parts_of(tmp_path / "model")
    tokens = mx.array([[3, 1, 4]])
    expected = vocabulary.forward(model, tokens, make_cache(model))
    with pytest.raises(ValueError, match=r"rms_norm|shape|dimension"):
        vocabulary.forward(model, tokens, make_cache(model), given=mx.zeros((1, 3, 7)), ends=mx.array([2]))
    assert mx.array_equal(vocabulary.forward(model, tokens, make_cache(model)), expected)


def test_forwards_can_be_compiled(tmp_path: Path) -> None:
    vocabulary, model = parts_of(tmp_path / "model", tie_word_embeddings=False)

    def step(tokens: mx.array, given: mx.array) -> tuple[mx.array, mx.array]:
        local = vocabulary.forward(
            model, tokens, make_cache(model), given=given, ends=mx.zeros(2, dtype=mx.int32)
        )
        return vocabulary.winners(local[:, -1])

    compiled = mx.compile(step)
    for first in (3, 7):
        tokens = mx.array([[first], [first + 1]])
        given = mx.random.normal((2, 1, HIDDEN))
        for ours, plain in zip(compiled(tokens, given), step(tokens, given), strict=True):
            assert mx.allclose(ours, plain).item()


def test_one_alone_chooses_and_gathers_without_anybody(tmp_path: Path) -> None:
    vocabulary = loaded(tmp_path / "model", vocab_size=509).vocabulary
    rows = hard_rows(509)
    assert vocabulary.gather(rows) is rows
    tokens, embeddings = vocabulary.winners(rows)
    assert tokens.dtype == mx.int32
    assert tokens.tolist() == [1, 0, 508, 507, 0, 253]
    assert vocabulary.embedding is not None
    assert mx.array_equal(embeddings, vocabulary.embedding(tokens))
    mixed, some = vocabulary.winners_and_logits(rows[:, None], [5, 0], 1)
    assert mixed[:, 0].tolist() == tokens.tolist()
    assert mx.array_equal(some[:, 0], rows[mx.array([5, 0])])


class Odd(nn.Module):
    """Two embeddings, and no way to tell which embeds tokens."""

    model_type = "odd"

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Toy(16)
        self.decoder = Toy(16)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self.decoder(tokens)


def test_what_is_built_otherwise_is_refused_by_name_on_several_ranks() -> None:
    with refused(ModelError, Code.MODEL_UNSUPPORTED, r"odd: .*encoder.*decoder.* instead of one"):
        shard(Odd(), Seat(0, 2))


def test_what_is_built_otherwise_runs_alone_as_it_is() -> None:
    model = Odd()
    vocabulary = shard(model, LoneGroup(), size=16)
    tokens = mx.array([[1, 2, 3]])
    assert (vocabulary.size, vocabulary.share, vocabulary.first) == (16, 16, 0)
    last = vocabulary.forward(model, tokens, [], given=mx.zeros((1, 3, 5)), ends=mx.array([2]))
    assert mx.array_equal(last, model(tokens)[:, -1:])
    chosen, embeddings = vocabulary.winners(last[:, -1])
    assert chosen.tolist() == [last.argmax().item()]
    assert embeddings.shape == (1, 0)

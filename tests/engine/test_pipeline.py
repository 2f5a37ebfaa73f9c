"""Stages of a model, one after the other in this process: the same logits as the whole model's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial, reduce
from itertools import accumulate, combinations, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from mlxtp.description import from_text
from mlxtp.engine.batch import CacheKind
from mlxtp.engine.group import LoneGroup
from mlxtp.engine.loader import kv_sizes, make_cache, read_config
from mlxtp.engine.pipeline import (
    Border,
    HiddenStates,
    LateTokens,
    Stage,
    border_rules,
    check_split,
    cut_into_stage,
    trace_layers,
)
from mlxtp.engine.sampler import Chosen
from mlxtp.engine.sharding import EMBEDDINGS, HEADS
from mlxtp.errors import Code, GroupError, ModelError
from mlxtp.placement.model_shape import ModelShape, shape_of
from mlxtp.placement.pipelines import counted_shares
from mlxtp.wire.messages import Forward

from .described_models import described, families_of_pipelines
from .families import FAMILIES, GEMMA4, OTHERS, PIPELINE, WINDOWS, asked_for
from .small_models import remember, write_model
from .tables import refused

pytestmark = pytest.mark.fault

PIPELINE_FAMILIES = families_of_pipelines()
LAYERS = 4
PARTS = (slice(0, 9), slice(9, 20), slice(20, 21), slice(21, 22))  # two chunks and two steps
#: Families of each kind of caches and of layers, or with rules for stages; others are cut in the same ways.
EACH_TIME = frozenset(
    {
        *("llama", "deepseek_v3", "gemma3_text", "gemma4", "gpt_oss", "llama4", "minimax_m3_vl"),
        *("deepseek_v32", "longcat_flash", "minimax", "nemotron_h", "qwen3_5", "hunyuan", "bailing_hybrid"),
        *("bailing_moe_linear", "afm7", "baichuan_m1", "gpt2", "mamba", "recurrent_gemma"),
    }
)
SHARED = {**GEMMA4, "num_hidden_layers": 6, "layer_types": [*WINDOWS, *WINDOWS[:2]]}
#: Models whose stages depend on more than their family.
RULED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{family: (family, {}) for family in PIPELINE_FAMILIES},
    "shared by two": ("gemma4_text", {**SHARED, "num_kv_shared_layers": 2}),
    "shared by three": ("gemma4_text", {**SHARED, "num_kv_shared_layers": 3}),
    "full alone": (
        "gemma4_text",
        {**SHARED, "layer_types": ["full_attention"] * 6, "num_kv_shared_layers": 1},
    ),
    "shared, in a model of images": ("gemma4", {"text_config": {**SHARED, "num_kv_shared_layers": 2}}),
    "threes": ("hunyuan", {"num_hidden_layers": 7, "cla_share_factor": 3}),
    "none shared": ("hunyuan", {"use_cla": False}),
    "a tail": ("bailing_hybrid", {"num_hidden_layers": 7, "layer_group_size": 3}),
    "another tail": ("bailing_moe_linear", {"num_hidden_layers": 5, "layer_group_size": 3}),
}
NAMES = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.chaos if name in PIPELINE_FAMILIES - EACH_TIME else ())
        for name in sorted(RULED)
    ],
)


def some_model(folder: Path, family: str, **changes: Any) -> Path:
    every = (each.get(family, {}) for each in (FAMILIES, PIPELINE, OTHERS))
    config = reduce(operator.or_, map(dict, every), {"num_hidden_layers": LAYERS})
    return remember(write_model(folder, model_type=family, **{**config, **changes}))


@pytest.fixture(scope="module")
def ruled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, tuple[Path, ModelShape]]:
    """The folder of each model of `RULED` that is asked for, and what placement makes of its description."""
    parent = tmp_path_factory.mktemp("ruled")
    folders = {
        name: some_model(parent / name, RULED[name][0], **RULED[name][1])
        for name in asked_for(request, "name")
    }
    texts = described(*(in_float32(read_config(folder)) for folder in folders.values()))
    shapes = (shape_of(from_text(text)) for text in texts)
    return dict(zip(folders, zip(folders.values(), shapes, strict=True), strict=True))


def in_float32(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that names the type of the weights that tests write."""
    text = {"text_config": in_float32(config["text_config"])} if "text_config" in config else {}
    return {**config, **text, "dtype": "float32"}


def logits(
    models: Sequence[Any], stages: Sequence[Stage | None], *, first: int = 3, kv_bits: int = 0
) -> np.ndarray:
    """Logits of the last token of each part, by way of all `models`. `first` is the first token."""
    tokens = mx.array([[first, *((7 * i + 3) % 500 for i in range(1, 22))]])
    caches = [CacheKind(model, kv_bits, stage).new() for model, stage in zip(models, stages, strict=True)]
    found = []
    for part in PARTS:
        states = None
        for model, stage, own in zip(models, stages, caches, strict=True):
            if stage is not None:
                stage.given = states
            states = model(tokens[:, part], cache=own)
        assert states is not None
        found.append(states[:, -1])
    return np.array(mx.stack(found).astype(mx.float32))


class Place:
    """A rank's place in a group, without the group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def pipeline(folder: Path, split: Sequence[int]) -> tuple[list[Any], list[Stage | None]]:
    """The models of the ranks of a pipeline, the first stage first."""
    models, stages = [], []
    for rank in reversed(range(len(split))):
        model, _ = load_model(folder, lazy=True)
        stages.append(cut_into_stage(model, Place(rank, len(split)), split, 0).stage)  # type: ignore[arg-type]
        models.append(model)
    return models, list(stages)


def splits(layers: int) -> Iterator[tuple[int, ...]]:
    for ranks in (2, 3):
        yield from (split for split in product(range(1, layers), repeat=ranks) if sum(split) == layers)


@NAMES
def test_stages_compute_together_what_the_whole_model_does(
    ruled: Mapping[str, tuple[Path, ModelShape]], name: str
) -> None:
    folder, shape = ruled[name]
    whole, _ = load_model(folder)
    count = len(whole.layers)
    expected, other = logits([whole], [None]), logits([whole], [None], first=400)
    heeded = np.isfinite(expected) & (abs(other - expected) > 0.01)
    assert heeded[-1].any(), "the last token must heed the first"
    for split in splits(count):
        stages = pairwise(accumulate(reversed(split), initial=0))
        if any(shape.rules.flaw(*stage) for stage in stages):
            with pytest.raises(ModelError, match=r"give (their rank more layers|one rank both)"):
                pipeline(folder, split)
            continue
        models, cut = pipeline(folder, split)
        for model, counted in zip(reversed(models), counted_shares(shape, len(split), split), strict=True):
            assert kv_sizes(model)[0] == counted.kv_token_bytes
            size = sum(weight.nbytes for _, weight in _weights(model))
            assert size == pytest.approx(counted.weight_bytes, rel=0.02, abs=_beside_layers(model))
        np.testing.assert_allclose(logits(models, cut), expected, atol=1e-4, err_msg=str(split))
        # and a second text, with nothing of the first one
        np.testing.assert_allclose(logits(models, cut, first=400), other, atol=1e-4, err_msg=str(split))


def _beside_layers(model: Any) -> int:
    """Return the bytes of norms and positions. Each stage has them, and of what is counted only the last."""
    inside = {id(weight) for layer in model.layers for _, weight in _weights(layer)}
    ends = {*EMBEDDINGS, *HEADS}
    return sum(
        weight.nbytes
        for name, weight in _weights(model)
        if id(weight) not in inside and not ends & set(name.split("."))
    )


@NAMES
def test_placement_knows_which_stages_can_be(ruled: Mapping[str, tuple[Path, ModelShape]], name: str) -> None:
    folder, shape = ruled[name]
    model, _ = load_model(folder, lazy=True)
    empty = make_cache(model)
    facts = trace_layers(model, empty)

    @cache
    def refused(begin: int, end: int) -> bool:
        stage = Stage.__new__(Stage)
        stage.first, stage.end, stage._empty = begin, end, empty
        stage._own = stage._owned(facts, begin, end)
        try:
            stage._check(facts)
        except ModelError:
            return True
        return False

    total = len(facts)
    for ranks in (2, 3, 4):
        possible = []
        for borders in combinations(range(1, total), ranks - 1):
            stages = list(pairwise((0, *borders, total)))
            flaws = [why for stage in stages if (why := shape.rules.flaw(*stage))]
            assert bool(flaws) == any(refused(*stage) for stage in stages), (stages, flaws)
            possible += [] if flaws else [[*borders, total]]
        latest = [max(ends) for ends in zip(*possible, strict=True)]
        assert shape.rules.latest(total, ranks) == latest


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def __call__(self, x: mx.array, cache: KVCache, more: mx.array | KVCache | float = 0.0) -> mx.array:
        if isinstance(more, KVCache):
            more = more.keys[..., 0, :] if more.offset > 1 else 0.0
        keys = x[:, None]
        cache.update_and_fetch(keys, keys)
        return x + self.proj(x) + more


class MadeUp(nn.Module):
    """Five layers, which `forward` calls one after the other."""

    def __init__(self, forward: Callable[..., mx.array]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = [Block() for _ in range(5)]
        self.lm_head = nn.Linear(8, 16)
        self._forward = forward
        mx.eval(self.parameters())  # else their graphs have all random numbers of this process

    def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:
        return self.lm_head(self._forward(self.layers, self.embed_tokens(tokens), cache))


def _one_by_one(
    layers: list[Block], x: mx.array, cache: list[KVCache], **more: Callable[..., Any]
) -> mx.array:
    """Return hidden states. `more`: what layer N is given beside them (`at_N`), or as them (`before_N`)."""
    kept = [x]
    for at, layer in enumerate(layers):
        x = more.get(f"before_{at}", lambda x, *_: x)(x, kept, cache)
        x = layer(x, cache[at], more.get(f"at_{at}", lambda *_: 0.0)(kept, cache))
        kept.append(x)
    return more.get("end", lambda x, *_: x)(x, kept, cache)


def _in_place(x: mx.array, *_: Any) -> mx.array:
    x += 1.0
    return x


READS_MORE = "each layer reads more of those before it"
WAYS: Mapping[str, tuple[Callable[..., mx.array], list[int]]] = {
    "hidden states alone": (_one_by_one, []),
    "those of the layer before, twice": (partial(_one_by_one, at_2=lambda kept, _: kept[2]), [2]),
    "those of an earlier layer": (partial(_one_by_one, at_3=lambda kept, _: kept[2]), [2, 3]),
    "the embedding": (partial(_one_by_one, at_2=lambda kept, _: kept[0]), [1, 2]),
    "a cache of an earlier layer": (
        partial(_one_by_one, at_3=lambda _, cache: cache[1].keys[:, 0, :1]),
        [2, 3],
    ),
    "older tokens of such a cache": (partial(_one_by_one, at_3=lambda _, cache: cache[1]), [2, 3]),
    "something between two layers": (partial(_one_by_one, before_2=lambda x, *_: x * 2), [2]),
    "something in place between two": (partial(_one_by_one, before_2=_in_place), [2]),
    "an earlier layer's in place of the one before": (
        partial(_one_by_one, before_2=lambda _, kept, __: kept[1]),
        [1, 2],
    ),
    "an earlier layer's at the end": (partial(_one_by_one, end=lambda x, kept, _: x + kept[4]), [4]),
}
"""Name -> a forward, and the layers that must be with the one before."""


@pytest.mark.parametrize("way", WAYS)
def test_a_trace_sees_what_a_layer_reads_beside_the_hidden_states_before_it(way: str) -> None:
    forward, joined = WAYS[way]
    caches = [KVCache() for _ in range(5)]
    facts = trace_layers(MadeUp(forward), caches)
    assert border_rules(facts, caches) == (tuple(joined), ())
    assert not any(layer.counted for layer in facts)


def test_a_trace_sees_results_of_earlier_layers_in_their_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Block.__call__

    def through_attributes(self: Block, x: mx.array, cache: KVCache, more: float = 0) -> mx.array:
        if self is model.layers[1]:
            model.layers[4].left = x * 2  # type: ignore[attr-defined]
        return whole(self, x, cache, more) + getattr(self, "left", 0)

    monkeypatch.setattr(Block, "__call__", through_attributes)
    model = MadeUp(_one_by_one)
    caches = [KVCache() for _ in range(5)]
    assert border_rules(trace_layers(model, caches), caches) == ((2, 3, 4), ())


@pytest.mark.parametrize("position", [lambda *_: 3, lambda *_: mx.arange(8), lambda *_: mx.ones((1, 1, 8))])
def test_numbers_and_arrays_that_are_of_no_layer_may_be_positions(position: Callable[..., Any]) -> None:
    facts = trace_layers(MadeUp(partial(_one_by_one, at_2=position)), [KVCache() for _ in range(5)])
    assert [layer.counted for layer in facts] == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (partial(_one_by_one, end=lambda x, kept, _: x + kept[0]), READS_MORE),
        (lambda layers, *given: _one_by_one(layers[::-1], *given), "layer 3 runs after layer 4"),
        (lambda layers, *given: _one_by_one(layers[:4], *given), "not all of its layers are called"),
        (lambda layers, *given: _one_by_one([*layers[:4], layers[0]], *given), "layer 0 runs twice"),
        (
            partial(_one_by_one, before_3=lambda x, *_: mx.concatenate([x, x], axis=1)),
            "layer 3 returns other hidden states",
        ),
        (
            partial(_one_by_one, at_2=lambda *_: mx.zeros((1,), dtype=mx.complex64)),
            "layer 2 returns other hidden states",
        ),
    ],
)
def test_a_trace_refuses_what_no_stage_can_have(forward: Callable[..., mx.array], why: str) -> None:
    with refused(ModelError, Code.MODEL_UNSUPPORTED, why):
        trace_layers(MadeUp(forward), [KVCache() for _ in range(5)])


def test_layers_that_are_given_positions_need_caches_that_count_them() -> None:
    caches = [SimpleNamespace(update_and_fetch=lambda *_: None) for _ in range(5)]
    assert trace_layers(MadeUp(_one_by_one), caches)
    with pytest.raises(ModelError, match="given positions, which none of its caches counts"):
        trace_layers(MadeUp(partial(_one_by_one, at_2=lambda *_: 3)), caches)


FORMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bf16": ("llama", {"dtype": mx.bfloat16}),
    "dense 4bit untied": ("qwen3", {"quantize": 32, "tie_word_embeddings": False}),
    "experts 4bit": ("qwen3_moe", {"quantize": 32, "dtype": mx.bfloat16}),
    "compressed keys 8bit": ("deepseek_v3", {"quantize": 32, "bits": 8, "dtype": mx.bfloat16}),
}


@pytest.mark.parametrize("form", FORMS)
def test_quantized_and_short_numbers_cross_borders(tmp_path: Path, form: str) -> None:
    family, changes = FORMS[form]
    folder = some_model(tmp_path / "model", family, **changes)
    whole, _ = load_model(folder)
    expected = logits([whole], [None])
    for split in ((1, 3), (2, 1, 1)):
        models, stages = pipeline(folder, split)
        assert {stage.dtype for stage in stages if stage} == {changes.get("dtype", mx.float32)}
        np.testing.assert_array_equal(logits(models, stages), expected)


def test_stages_keep_quantized_keys_and_values(tmp_path: Path) -> None:
    folder = some_model(tmp_path / "model", "llama", head_dim=32)
    whole, _ = load_model(folder)
    expected, plain = logits([whole], [None], kv_bits=8), logits([whole], [None])
    assert abs(expected - plain).max() > 1e-3
    np.testing.assert_array_equal(logits(*pipeline(folder, (1, 2, 1)), kv_bits=8), expected)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("iquestloopcoder", {}, "not all of its layers are called"),
        ("nanbeige", {}, "layer 0 runs twice"),
        ("gptj", {}, "layer 0 is given its input by name"),
        ("gemma4_text", {**GEMMA4, "hidden_size_per_layer_input": 8}, READS_MORE),
        *((family, {}, READS_MORE) for family in ("kimi_k3", "rwkv7", "talkie")),
    ],
)
def test_a_model_with_more_between_its_layers_than_hidden_states_is_refused(
    tmp_path: Path, family: str, changes: Mapping[str, Any], why: str
) -> None:
    folder = some_model(tmp_path / "model", family, **changes)
    with refused(ModelError, Code.MODEL_UNSUPPORTED, f"{family} cannot run as a pipeline: .*{why}"):
        pipeline(folder, (2, 2))


def _weights(model: Any) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return list(tree_flatten(model.parameters()))


@pytest.mark.parametrize("split", [(2, 2, 1), (2, 3), (4,)])
def test_a_wrong_split_is_refused_with_its_numbers(split: tuple[int, ...]) -> None:
    with refused(ModelError, Code.MODEL_NOT_DIVISIBLE, "this model has 4 layers, and the group 2 ranks"):
        check_split(split, 2, 4)


def test_hidden_states_of_another_forward_are_found() -> None:
    HiddenStates().wait(5)
    HiddenStates(None, mx.array([5], dtype=mx.uint32)).wait(5)
    HiddenStates(None, mx.array([1], dtype=mx.uint32)).wait((1 << 32) + 1)
    with refused(GroupError, Code.DESYNC, "forward 4, not 5"):
        HiddenStates(None, mx.array([4], dtype=mx.uint32)).wait(5)


def border_of(*, chooses: bool, ranks: int = 2) -> Border:
    return Border(SimpleNamespace(chooses=chooses, ranks=ranks), None)  # type: ignore[arg-type]


def arrived(forward: int) -> HiddenStates:
    return HiddenStates(None, mx.array([forward], dtype=mx.uint32))


def submit(border: Border, forward: int, given: HiddenStates | None = None) -> None:
    border.submit(forward, given or arrived(forward), mx.ones(1))


def held(border: Border) -> list[int]:
    return [each.forward for each in border._held]


def test_rank_0_holds_a_forward_until_it_needs_it_or_has_sent_as_many_frames_as_other_stages_are() -> None:
    border = border_of(chooses=True, ranks=3)
    for forward in (1, 2):
        border.make_way()
        submit(border, forward)
    assert held(border) == [1, 2]
    border.make_way()
    assert held(border) == [2]
    submit(border, 3)
    border.flush(2)
    assert held(border) == [3]
    submit(border, 4, arrived(1))
    with pytest.raises(GroupError, match="forward 1, not 4"):
        border.flush()


def chosen(forward: int, *rows: int, width: int = 1) -> Chosen:
    return Chosen(mx.zeros((len(rows), width)), rows, (width,) * len(rows), {}, forward)


def test_a_step_gets_its_tokens_once_they_have_come_and_in_order() -> None:
    late = LateTokens()
    late.joined(chosen(1, 7, 8), None)
    late.joined(chosen(2, 9), None)
    first, _ = late.feed(Forward((7, 8), (3, 4)), 1, 3)
    late.chose(chosen(3, 7, 8), None)
    assert late.needs == 1
    given, _ = late.feed(Forward((9,), (5,), (2,), (50, 51)), 2, 4)
    assert late.needs == 0
    assert given.tolist() == [[50, 51]]
    late.chose(chosen(4, 9, width=2), None)
    both, _ = late.feed(Forward((7, 8), (4, 5), (2, 0), (60, 61)), 2, 5)
    assert late.needs == 3
    assert not late.known(3)
    late.supply(1, (70, 80))
    assert first.tolist() == [[70], [80]]
    assert late.known(4)
    assert not late.known(5)
    late.supply(2, (90,))
    late.left(7, [1, 0])
    late.supply(3, (71, 81))
    assert both.tolist() == [[60, 61], [81, 0]]
    assert late.known()
    again, _ = late.feed(Forward((9,), (6,)), 1, 6)
    late.supply(4, (91, 92))
    assert again.tolist() == [[92]]


@pytest.mark.parametrize("tokens", [(1, (70,)), (2, (70, 80)), (1, (70, 80, 90))])
def test_tokens_of_another_forward_are_refused(tokens: tuple[int, tuple[int, ...]]) -> None:
    late = LateTokens()
    late.joined(chosen(1, 7, 8), None)
    with refused(GroupError, Code.DESYNC, f"{len(tokens[1])} tokens of forward {tokens[0]}, but 2"):
        late.supply(*tokens)


def test_a_stage_computes_a_step_when_its_tokens_have_come_and_those_behind_it_then_too() -> None:
    border = border_of(chooses=False)
    border.tokens.joined(chosen(1, 7), None)
    submit(border, 1, HiddenStates())
    border.tokens.feed(Forward((7,), (3,)), 1, 2)
    submit(border, 2, HiddenStates())
    submit(border, 3, HiddenStates())
    assert held(border) == [2, 3]
    border.supply(1, (70,))
    assert not held(border)


def test_rank_0_computes_the_step_of_another_lane_before_it_goes_on() -> None:
    border = border_of(chooses=True)
    for forward, uid in ((1, 7), (2, 8)):
        border.tokens.joined(chosen(forward, uid), None)
    for forward, uid in ((3, 7), (4, 8)):
        border.tokens.feed(Forward((uid,), (3,)), 1, forward)
        submit(border, forward)
        border.tokens.chose(chosen(forward, uid), None)
    border.supply(1, (70,))
    border.supply(2, (80,))
    assert held(border) == [4], "3 is of another lane than 2"
    border.supply(3, (71,))
    assert not held(border)


def test_rank_0_sends_the_next_chunk_of_a_prompt_before_it_waits_for_the_one_on_its_way() -> None:
    border = border_of(chooses=True)
    border.tokens.joined(chosen(1, 7), None)
    border.tokens.feed(Forward((7,), (3,)), 1, 2)
    submit(border, 2)
    submit(border, 3)
    border.supply(1, (70,))
    border.flush(2)
    border.supply(2, ())
    assert held(border) == [3]


def test_rank_0_asks_for_its_own_apart_from_what_all_ranks_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: asked.append(arrays))
    tokens, caches, scores = mx.ones(1), [mx.ones(2)], {1: mx.ones(3)}
    Border(None, LoneGroup()).submit(1, arrived(1), tokens, caches, told=scores)
    assert asked == [(tokens, caches), (scores,)]

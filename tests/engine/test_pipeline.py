"""Stages of a model, one after the other in this process: the same logits as the whole model's."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxtp.description import from_text
from mlxtp.engine.batch import CacheKind
from mlxtp.engine.loader import kv_sizes, make_cache, read_config
from mlxtp.engine.pipeline import (
    PIPELINE_FAMILIES,
    Border,
    HiddenStates,
    LateTokens,
    Stage,
    check_family,
    check_split,
    cut_into_stage,
    trace_layers,
)
from mlxtp.engine.sampler import Chosen
from mlxtp.errors import Code, GroupError, ModelError
from mlxtp.placement.model_shape import shape_of
from mlxtp.wire.messages import Forward

from .described_models import described
from .families import FAMILIES, GEMMA4, PIPELINE, WINDOWS
from .small_models import write_model

LAYERS = 4
PARTS = (slice(0, 9), slice(9, 20), slice(20, 21), slice(21, 22))  # two chunks and two steps
SPLITS = {4: ((1, 3), (2, 1, 1))}
"""Splits that have a border behind each layer, by the number of layers."""
#: Families of each kind of caches and of layers; the others are cut in the same ways.
EACH_TIME = frozenset(
    {
        *("llama", "deepseek_v3", "gemma3_text", "gemma4", "gpt_oss", "llama4", "minimax_m3_vl"),
        *("deepseek_v32", "longcat_flash", "minimax", "nemotron_h", "qwen3_5"),
    }
)
ALL_SPLITS = ("llama", "deepseek_v3", "gemma3_text", "gemma4", "gpt_oss", "llama4", "minimax_m3_vl")
"""Families that are tried in all splits: those with caches of several kinds, and two others."""
REFUSED: Mapping[str, frozenset[tuple[int, ...]]] = {
    # Layers in pairs, of which the second reads keys and values of the first.
    "hunyuan": frozenset({(1, 3), (3, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)}),
    # Linear attention with positions, which only other layers count.
    "bailing_hybrid": frozenset({(3, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)}),
    "bailing_moe_linear": frozenset({(3, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)}),
    # Layers without a cache.
    "nemotron_h": frozenset({(1, 1, 4), (4, 1, 1)}),
}
"""Splits that cannot be, of families that are tried in all splits."""


def some_model(folder: Path, family: str, **changes: Any) -> Path:
    config = {"num_hidden_layers": LAYERS, **FAMILIES.get(family, {}), **PIPELINE.get(family, {})}
    return write_model(folder, model_type=family, **{**config, **changes})


def logits(
    models: Sequence[Any], stages: Sequence[Stage | None], *, first: int = 3, kv_bits: int = 0
) -> np.ndarray:
    """Logits of the last token of each part, by way of all `models`. `first` is the first token."""
    tokens = mx.array([[first, *((7 * i + 3) % 500 for i in range(1, 22))]])
    caches = [CacheKind(model, kv_bits, stage).new() for model, stage in zip(models, stages, strict=True)]
    found = []
    for part in PARTS:
        states = None
        for model, stage, cache in zip(models, stages, caches, strict=True):
            if stage is not None:
                stage.given = states
            states = model(tokens[:, part], cache=cache)
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


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in EACH_TIME else pytest.mark.chaos)
        for family in sorted(PIPELINE_FAMILIES)
    ],
)
def test_stages_compute_together_what_the_whole_model_does(tmp_path: Path, family: str) -> None:
    folder = some_model(tmp_path / "model", family)
    whole, _ = load_model(folder)
    count = len(whole.layers)
    expected, other = logits([whole], [None]), logits([whole], [None], first=400)
    assert abs(other - expected)[-1].max() > 0.01, "the last token must heed the first"
    refused = REFUSED.get(family, frozenset())
    tried = splits(count) if refused or family in ALL_SPLITS else SPLITS[count]
    for split in tried:
        if split in refused:
            with pytest.raises(ModelError, match=r"give (their rank more layers|one rank both)"):
                pipeline(folder, split)
            continue
        models, stages = pipeline(folder, split)
        np.testing.assert_allclose(logits(models, stages), expected, atol=1e-4, err_msg=str(split))
        if split == SPLITS[4][0]:  # and a second text, with nothing of the first one
            np.testing.assert_allclose(logits(models, stages, first=400), other, atol=1e-4)


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
#: Families of which each layer may begin a stage, like others that are always tried.
PLAIN = PIPELINE_FAMILIES - EACH_TIME - REFUSED.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.chaos if name in PLAIN else ()) for name in sorted(RULED)],
)
def test_placement_knows_which_stages_can_be(tmp_path: Path, name: str) -> None:
    family, changes = RULED[name]
    folder = some_model(tmp_path / "model", family, **changes)
    model, _ = load_model(folder, lazy=True)
    rules = shape_of(from_text(described(read_config(folder))[0])).rules
    empty = make_cache(model)
    facts = trace_layers(model, empty)

    @functools.cache
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
            flaws = [why for stage in stages if (why := rules.flaw(*stage))]
            assert bool(flaws) == any(refused(*stage) for stage in stages), (stages, flaws)
            possible += [] if flaws else [[*borders, total]]
        latest = [max(ends) for ends in zip(*possible, strict=True)]
        assert rules.latest(total, ranks) == latest


def test_each_family_of_the_table_is_tried() -> None:
    assert PIPELINE.keys() <= PIPELINE_FAMILIES <= FAMILIES.keys() | PIPELINE.keys()


FORMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bf16": ("llama", {"dtype": mx.bfloat16}),
    "dense 4bit": ("llama", {"quantize": 32, "dtype": mx.bfloat16}),
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


@pytest.mark.parametrize(("split", "fits"), [((4, 2), True), ((3, 3), False), ((1, 5), False)])
def test_a_layer_is_on_the_rank_whose_keys_and_values_it_reads(
    tmp_path: Path, split: tuple[int, ...], fits: bool
) -> None:
    sharing = {**GEMMA4, "num_hidden_layers": 6, "layer_types": [*WINDOWS, *WINDOWS[:2]]}
    folder = some_model(tmp_path / "model", "gemma4_text", **{**sharing, "num_kv_shared_layers": 2})
    if not fits:
        with pytest.raises(ModelError, match=r"layer \d reads results of layer \d; give one rank both"):
            pipeline(folder, split)
        return
    whole, _ = load_model(folder)
    assert len(make_cache(whole)) == 4
    models, stages = pipeline(folder, split)
    assert [len(make_cache(model)) for model in models] == [2, 2]
    np.testing.assert_allclose(logits(models, stages), logits([whole], [None]), atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("iquestloopcoder", {}, "not all of its layers are called"),
        ("gemma4_text", {**GEMMA4, "hidden_size_per_layer_input": 8}, "more of each token than hidden"),
    ],
)
def test_a_model_with_more_between_its_layers_than_hidden_states_is_refused(
    tmp_path: Path, family: str, changes: Mapping[str, Any], why: str
) -> None:
    folder = some_model(tmp_path / "model", family, **changes)
    with pytest.raises(ModelError, match=f"{family} cannot run as a pipeline: .*{why}") as refused:
        pipeline(folder, (2, 2))
    assert refused.value.code is Code.MODEL_UNSUPPORTED


@pytest.mark.parametrize("tied", [True, False])
def test_each_weight_is_on_the_stages_that_need_it(tmp_path: Path, tied: bool) -> None:
    folder = write_model(tmp_path / "model", num_hidden_layers=4, tie_word_embeddings=tied)
    models, stages = pipeline(folder, (1, 1, 2))
    assert [stage.layers for stage in stages if stage] == [(0, 1), (2,), (3,)]
    names = [{name for name, _ in _weights(model)} for model in models]
    embeds = [any("embed_tokens" in name for name in found) for found in names]
    heads = [any("lm_head" in name for name in found) for found in names]
    assert embeds == [True, False, tied]
    assert heads == [False, False, not tied]
    whole, _ = load_model(folder)
    assert kv_sizes(models[0])[0] == kv_sizes(whole)[0] // 2


def _weights(model: Any) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return list(tree_flatten(model.parameters()))


@pytest.mark.parametrize("split", [(2, 2, 1), (2, 3), (4,)])
def test_a_wrong_split_is_refused_with_its_numbers(split: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="this model has 4 layers, and the group 2 ranks") as refused:
        check_split(split, 2, 4)
    assert refused.value.code is Code.MODEL_NOT_DIVISIBLE


def test_a_family_that_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'mamba' cannot run as a pipeline"):
        check_family("mamba")


# --- messages ---------------------------------------------------------------------------------------------


def test_hidden_states_of_another_forward_are_found() -> None:
    HiddenStates().wait(5)
    HiddenStates(None, mx.array([5], dtype=mx.uint32)).wait(5)
    HiddenStates(None, mx.array([1], dtype=mx.uint32)).wait((1 << 32) + 1)
    with pytest.raises(GroupError, match="forward 4, not 5") as found:
        HiddenStates(None, mx.array([4], dtype=mx.uint32)).wait(5)
    assert found.value.code is Code.DESYNC


def test_rank_0_holds_a_forward_until_it_needs_it_or_has_sent_as_many_frames_as_there_are_other_stages() -> (
    None
):
    stage = SimpleNamespace(chooses=True, ranks=3)
    border = Border(stage, None)  # type: ignore[arg-type]
    arrived = [HiddenStates(None, mx.array([forward], dtype=mx.uint32)) for forward in range(1, 5)]

    def held() -> list[int]:
        return [each.forward for each in border._held]

    for forward in (1, 2):
        border.make_way()
        border.submit(forward, arrived[forward - 1], mx.ones(1))
    assert held() == [1, 2]
    border.make_way()
    assert held() == [2]
    border.submit(3, arrived[2], mx.ones(1))
    border.flush(2)
    assert held() == [3]
    border.submit(4, arrived[0], mx.ones(1))
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
    with pytest.raises(GroupError, match=f"{len(tokens[1])} tokens of forward {tokens[0]}, but 2") as refused:
        late.supply(*tokens)
    assert refused.value.code is Code.DESYNC


def test_a_stage_computes_a_step_when_its_tokens_have_come_and_those_behind_it_then_too() -> None:
    border = Border(SimpleNamespace(chooses=False, ranks=2), None)  # type: ignore[arg-type]
    border.tokens.joined(chosen(1, 7), None)
    border.submit(1, HiddenStates(), mx.ones(1))
    border.tokens.feed(Forward((7,), (3,)), 1, 2)
    border.submit(2, HiddenStates(), mx.ones(1))
    border.submit(3, HiddenStates(), mx.ones(1))
    assert [each.forward for each in border._held] == [2, 3]
    border.supply(1, (70,))
    assert not border._held


def test_rank_0_computes_the_step_of_another_lane_before_it_goes_on() -> None:
    border = Border(SimpleNamespace(chooses=True, ranks=2), None)  # type: ignore[arg-type]
    arrived = [HiddenStates(None, mx.array([forward], dtype=mx.uint32)) for forward in range(5)]
    border.tokens.joined(chosen(1, 7), None)
    border.tokens.joined(chosen(2, 8), None)
    for forward, uid in ((3, 7), (4, 8)):
        border.tokens.feed(Forward((uid,), (3,)), 1, forward)
        border.submit(forward, arrived[forward], mx.ones(1))
        border.tokens.chose(chosen(forward, uid), None)
    border.supply(1, (70,))
    border.supply(2, (80,))
    assert [each.forward for each in border._held] == [4], "3 is of another lane than 2"
    border.supply(3, (71,))
    assert not border._held


def test_rank_0_sends_the_next_chunk_of_a_prompt_before_it_waits_for_the_one_on_its_way() -> None:
    border = Border(SimpleNamespace(chooses=True, ranks=2), None)  # type: ignore[arg-type]
    arrived = [HiddenStates(None, mx.array([forward], dtype=mx.uint32)) for forward in range(4)]
    border.tokens.joined(chosen(1, 7), None)
    border.tokens.feed(Forward((7,), (3,)), 1, 2)
    border.submit(2, arrived[2], mx.ones(1))
    border.submit(3, arrived[3], mx.ones(1))
    border.supply(1, (70,))
    border.flush(2)
    border.supply(2, ())
    assert [each.forward for each in border._held] == [3]


def test_without_a_stage_nothing_is_received_and_nothing_is_held() -> None:
    border = Border(None, None)  # type: ignore[arg-type]
    received = border.expect(1, 5)
    assert received.given is received.number is None
    array = mx.ones((3,)) * 2
    border.submit(1, received, array)
    border.flush()
    assert array.tolist() == [2, 2, 2]

"""Every kind of model on two real ranks against mlx-lm alone on the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxtp.description import from_text
from mlxtp.placement.model_shape import shape_of
from mlxtp.placement.pipelines import counted_shares

from .bare_groups import Group, run_group
from .described_models import described
from .families import FAMILIES, NAMED, QWEN3_5, asked_for, named, of
from .mlx_lm_sources import shardable_families
from .small_models import change_weights, write_model
from .vocabulary_member import STEPS, hard_rows, prompts

pytestmark = [pytest.mark.group, pytest.mark.fault]

MEMBER = "tests.engine.vocabulary_member"
NOT_TRIED = {"deepseek_v41", "glm_moe_dsa", "kimi_k3", "minimax_m3_vl", "muse_spark", "prism_hadamard_qwen35"}
"""Families that need Metal, or differ from one that is tried in other things than the vocabulary."""
FORMS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"dtype": mx.bfloat16, "vocab_size": 512},
    "4bit": {"quantize": 32, "bits": 4, "vocab_size": 509, "tie_word_embeddings": False},
    "8bit": {"quantize": 32, "bits": 8, "vocab_size": 511, "dtype": mx.bfloat16},
}
NOT_ON_A_CPU = {(family, "bf16") for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")}
"""MLX's CPU backend gathers plain experts in float32 only; quantized ones stand in for them."""
MODELS: Mapping[str, Mapping[str, Any]] = {
    **{
        family: {"model_type": family, "vocab_size": 509, "tie_word_embeddings": bool(i % 2), **config}
        for i, (family, config) in enumerate(FAMILIES.items())
    },
    **{
        f"{family}-{form}": {"model_type": family, **FAMILIES[family], **changes}
        for family in NAMED
        for form, changes in FORMS.items()
        if (family, form) not in NOT_ON_A_CPU
    },
    # A dense MLP beside layers of experts: two ranks cannot share its groups of 32 weights, or its width.
    "glm4_moe-whole": named("glm4_moe", FAMILIES["glm4_moe"], intermediate_size=96, quantize=32),
    "deepseek_v2-whole": named("deepseek_v2", FAMILIES["deepseek_v2"], intermediate_size=129),
}
"""Folder name -> what `write_model` takes."""
FORMED = {"llama-bf16", "qwen3-bf16", "qwen2-4bit", "qwen3_moe-4bit", "gpt_oss-4bit", "deepseek_v3-8bit"}
"""What every run tries in another form: each family once."""
ALWAYS = {name for name in MODELS if name in FORMED or not name.endswith(tuple(FORMS))}
CASES = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.chaos) for name in MODELS]
WIDE = of(hidden_size=256, intermediate_size=512, num_hidden_layers=6, vocab_size=131071, dtype=mx.bfloat16)
"""Most of it is its vocabulary."""
FOUR: Mapping[str, Mapping[str, Any]] = {
    "four": {"num_key_value_heads": 4, "vocab_size": 509, "head_dim": 32, "quantize": 32},
    "five": {"num_key_value_heads": 4, "vocab_size": 5, "tie_word_embeddings": False},
    "copied": {"model_type": "qwen3_5", "text_config": {**QWEN3_5, "linear_num_key_heads": 4}},
}
"""For four ranks. Of five tokens the last rank has none."""


def steps_of(group: Group, rank: int, model: str, what: str) -> list[Any]:
    return [group.arrays[rank][f"{model}/{what}-{step}"] for step in range(1 + STEPS)]


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Group:
    root, wanted = tmp_path_factory.mktemp("two"), ALWAYS | asked_for(request, "model")
    tried = [name for name in MODELS if name in wanted]
    for name in tried:
        write_model(root / name, seed=list(MODELS).index(name), **MODELS[name])
    weight = mx.zeros((512, 64))
    weight[500, 3] = mx.nan
    change_weights(write_model(root / "nan"), model__embed_tokens__weight=weight)
    change_weights(write_model(root / "lacking"), model__norm__weight=None)
    write_model(root / "wide", **WIDE)
    return run_group(root, 2, ["nan", "lacking", "wide", *tried], MEMBER)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Group:
    root = tmp_path_factory.mktemp("four")
    for name, changes in FOUR.items():
        write_model(root / name, **changes)
    return run_group(root, 4, list(FOUR), MEMBER)


def alone(folder: Path, tokens: list[Any]) -> list[Any]:
    """mlx-lm's own logits [2, L, V] of the forwards that the group made, fed what the group chose."""
    model, _ = load_model(folder)
    cache = make_prompt_cache(model)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    fed = [prompts(size), *(mx.array(chosen)[:, None] for chosen in tokens[:-1])]
    return [np.array(model(x, cache=cache).astype(mx.float32)) for x in fed]


def assert_like_alone(group: Group, model: str) -> None:
    """Logits that rounding alone parts, and choices that are the best or nearly as good.

    Errors are measured in standard deviations of the logits. In float32 they are about 1e-6; bfloat16 leaves
    some hundredths, and what belongs to another token or layer is off by one and more.
    """
    tokens = steps_of(group, 0, model, "tokens")
    rounding = 0.1 if model.endswith(("bf16", "8bit")) else 1e-4
    for step, full in enumerate(alone(group.folder / model, tokens)):
        logits = group.arrays[0][f"{model}/logits-{step}"]
        expected = full[:, -logits.shape[1] :]
        error = (logits - expected) / expected.std()
        assert np.sqrt((error**2).mean()) < rounding
        last = expected[:, -1] / expected.std()
        chosen = np.take_along_axis(last, tokens[step][:, None], axis=-1)[:, 0]
        assert (last.max(axis=-1) - chosen < 4 * rounding).all()


def assert_of_one_mind(group: Group, model: str) -> None:
    """The same bits on all ranks; choices that are the argmax, and embeddings that are the looked-up ones."""
    for rank in range(len(group.facts)):
        for name, array in group.arrays[0].items():
            if name.startswith(f"{model}/"):
                np.testing.assert_array_equal(group.arrays[rank][name], array, name)
        of = partial(steps_of, group, rank, model)
        for logits, tokens, greedy, some in zip(
            of("logits"), of("tokens"), of("greedy"), of("some"), strict=True
        ):
            assert (tokens == logits[:, -1].argmax(axis=-1)).all()
            assert (greedy == logits.argmax(axis=-1)).all()
            assert (some == logits[1:, :2]).all()
        for brought, found in zip(of("embeddings"), of("looked-up"), strict=True):
            assert brought.any()
            assert (brought == found).all()


@pytest.mark.parametrize("model", CASES)
def test_two_ranks_compute_what_one_process_does(two: Group, model: str) -> None:
    assert_like_alone(two, model)
    assert_of_one_mind(two, model)


@pytest.mark.parametrize("model", FOUR)
def test_four_ranks_compute_what_one_process_does(four: Group, model: str) -> None:
    assert_like_alone(four, model)
    assert_of_one_mind(four, model)


def assert_as_counted(group: Group) -> None:
    """No rank has a tenth more weights than plans count on, nor more bytes of a token.

    On four ranks it is most, where two have the same KV head.
    """
    names = [name for name, facts in group.facts[0].items() if "weight_bytes" in facts]
    configs, stored = [], []
    for name in names:
        arrays = mx.load(str(group.folder / name / "model.safetensors")).values()
        types = [str(array.dtype).rpartition(".")[2] for array in arrays if array.dtype != mx.uint32]
        configs.append(json.loads((group.folder / name / "config.json").read_text()) | {"dtype": types[0]})
        stored.append(sum(array.nbytes for array in arrays))
    for name, text, size in zip(names, described(*configs), stored, strict=True):
        counted = counted_shares(shape_of(from_text(text), weight_bytes=size), len(group.facts), ())
        for facts, share in zip(group.facts, counted, strict=True):
            assert facts[name]["weight_bytes"] <= 1.1 * share.weight_bytes, name
            assert facts[name]["kv_token_bytes"] <= share.kv_token_bytes, name


def test_no_rank_takes_more_memory_than_plans_count_on(two: Group, four: Group) -> None:
    assert_as_counted(two)
    assert_as_counted(four)


def test_no_family_that_can_run_here_is_left_out() -> None:
    assert shardable_families() - set(FAMILIES) == NOT_TRIED


def test_the_vocabulary_lies_in_equal_runs_on_the_ranks(two: Group, four: Group) -> None:
    assert [facts["llama"]["vocabulary"] for facts in two.facts] == [[509, 255, 0], [509, 255, 255]]
    assert [facts["five"]["vocabulary"] for facts in four.facts] == [[5, 2, 2 * rank] for rank in range(4)]


@pytest.mark.parametrize("model", ["llama", "qwen3-bf16", "qwen2-4bit", "deepseek_v3-8bit"])
def test_one_collective_embeds_one_chooses_one_gathers_and_one_does_both(two: Group, model: str) -> None:
    """Two for each of the two layers; embeddings that are given save theirs."""
    for facts in two.facts:
        assert facts[model]["collectives"] == [[5, 1, 1, 1], [4, 1, 1, 1]] * 2


@pytest.mark.parametrize(
    ("model", "sums"), [("glm4_moe", 5), ("glm4_moe-whole", 4), ("deepseek_v2", 5), ("deepseek_v2-whole", 4)]
)
def test_an_mlp_that_is_whole_on_each_rank_needs_no_sum(two: Group, model: str, sums: int) -> None:
    for facts in two.facts:
        assert facts[model]["collectives"][0] == [sums, 1, 1, 1]


@pytest.mark.parametrize("model", ["llama", "qwen2-4bit", "llama-bf16"])
def test_what_is_hard_to_choose_from(two: Group, model: str) -> None:
    """NaN is as good as minus infinity, and of equals the smallest token is chosen."""
    arrays = two.arrays[0]
    size = two.facts[0][model]["vocabulary"][0]
    rows = np.array(hard_rows(size))
    np.testing.assert_array_equal(arrays[f"{model}/hard-logits"], rows)
    np.testing.assert_array_equal(arrays[f"{model}/hard-some"][:, 0], rows[1::2])
    expected = [1, 0, size - 1, size - 2, 0, size // 2 - 1]
    assert arrays[f"{model}/hard-tokens"].tolist() == expected
    assert arrays[f"{model}/hard-mixed"][:, 0].tolist() == expected
    assert np.where(np.isnan(rows), -np.inf, rows).argmax(axis=-1).tolist() == expected


def test_equals_on_four_ranks(four: Group) -> None:
    for model, expected in {"four": [1, 0, 508, 507, 0, 253], "five": [1, 0, 4, 3, 0, 1]}.items():
        for how in ("tokens", "mixed"):
            assert four.arrays[3][f"{model}/hard-{how}"].flatten().tolist() == expected


def test_every_rank_holds_its_part_of_all_but_the_norms(two: Group, four: Group) -> None:
    for group, models in ((two, ("llama", "qwen3", "llama-bf16", "qwen2-4bit")), (four, ("four",))):
        for model in models:
            stored = mx.load(str(group.folder / model / "model.safetensors"))
            whole = sum(array.nbytes for name, array in stored.items() if "norm" in name)
            divided = sum(array.nbytes for array in stored.values()) - whole
            for facts in group.facts:
                held = facts[model]["weight_bytes"] - whole
                assert divided <= held * len(group.facts) < 1.02 * divided


def test_loading_takes_little_more_than_what_is_held(two: Group) -> None:
    for facts in two.facts:
        assert facts["wide"]["weight_bytes"] > 36_000_000
        assert facts["wide"]["peak_bytes"] < facts["wide"]["weight_bytes"] + 18_000_000


def test_a_token_takes_its_part_of_the_cache(two: Group, four: Group) -> None:
    """Layers x keys and values x this rank's heads x their size x bytes."""
    assert two.facts[0]["llama"]["kv_token_bytes"] == 2 * 2 * 1 * 16 * 4
    assert two.facts[1]["qwen3-bf16"]["kv_token_bytes"] == 2 * 2 * 1 * 16 * 2
    assert two.facts[0]["qwen3_5"]["kv_token_bytes"] == 1 * 2 * 1 * 16 * 4
    assert two.facts[0]["deepseek_v3"]["kv_token_bytes"] == 2 * (32 + 16) * 4
    assert four.facts[0]["four"]["kv_token_bytes"] == 2 * 2 * 1 * 32 * 4


def test_a_rank_reads_its_own_rows_and_gets_what_it_would_cut_from_the_whole(two: Group, four: Group) -> None:
    for group in (two, four):
        for facts in group.facts:
            loaded = [model for model in facts.values() if "same" in model]
            assert len(loaded) >= len(FOUR)
            assert all(model["same"] for model in loaded)
    for facts in two.facts:
        # Of each of two layers q, k, v, gate and up; and of quantized ones scales and biases as well.
        assert facts["llama"]["own"] == 2 * 5
        assert facts["qwen2-4bit"]["own"] == 2 * 5 * 3
        assert facts["qwen3_moe-4bit"]["own"] > 0


def test_a_load_enters_no_collective_whether_it_works_or_not(two: Group) -> None:
    for facts in two.facts:
        assert all(model.get("counted") == 0 for model in facts.values())


def test_what_is_missing_is_named_by_every_rank_and_what_is_no_number_by_the_one_that_reads_it(
    two: Group,
) -> None:
    for facts in two.facts:
        assert facts["lacking"]["code"] == "model_invalid"
        assert "model.norm.weight" in facts["lacking"]["detail"]
    assert "detail" not in two.facts[0]["nan"]
    said = "nan: 1 tensor holds NaN or infinite numbers: model.embed_tokens.weight"
    assert two.facts[1]["nan"]["detail"] == said

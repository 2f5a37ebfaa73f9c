"""Placement's knowledge of a model, against what a load would check and what files weigh."""

from __future__ import annotations

import contextlib
import re
import tracemalloc
import zlib
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import MODEL_REMAPPING

from benchmarks.published_models import PUBLISHED, described, published
from mlxtp.engine.families import DIVIDE, dimensions_of
from mlxtp.engine.sharding import check_divisible
from mlxtp.errors import Code, ModelError
from mlxtp.model_config import ALSO_CALLED, quantization, text_config, unreadable
from mlxtp.models.descriptions import description_of
from mlxtp.placement.model_shape import (
    MAX_RANKS,
    MAX_TEXT,
    DescribedModel,
    ModelShape,
    shape_of,
    unknown_shape,
    unpacked,
    words_of,
)
from mlxtp.wire.cluster_messages import MAX_SHAPE_BYTES

from ..engine.described_models import description
from ..engine.mlx_lm_sources import shardable_families
from .made_up_models import LLAMA, llama, shape

PUBLISHED_GB = {
    "deepseek-v3.1-4bit": 378,
    "kimi-k2-thinking": 658,
    "glm-5-mxfp8": 767,
    "llama-3.1-8b-bf16": 16.1,
    "llama-3.3-70b-bf16": 141,
    "gpt-oss-120b": 63.4,
}
"""Sizes of the weight files on the Hub, in 10^9 bytes."""

PUBLISHED_WEIGHTS = {
    "qwen3-next-80b-a3b-4bit": (79.67e9, 3.87e9),
    "nemotron-3-super-120b-a12b-4bit": (120.67e9, 12.77e9),
    "gemma-4-31b-4bit": (30.7e9, 30.7e9),
    "gemma-4-26b-a4b-4bit": (25.2e9, 3.8e9),
}
"""Numbers of weights of the language models: all, and those that a token meets, its embedding included."""

sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 320])


configs = st.fixed_dictionaries(
    {
        "model_type": st.sampled_from(["llama", "qwen3_5", "glm4_moe"]),
        **dict.fromkeys(
            ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"), sizes
        ),
        "moe_intermediate_size": st.just(0) | sizes,
    }
)


@given(configs, st.sampled_from([0, 16, 32, 64]), st.integers(1, MAX_RANKS))
@settings(max_examples=300, deadline=None)
def test_what_a_load_would_refuse_is_never_planned(found: dict[str, Any], group: int, ranks: int) -> None:
    config = {**LLAMA, **found, "num_experts": 4 if found["moe_intermediate_size"] else 0}
    if group:
        config["quantization"] = {"group_size": group, "bits": 4}
    try:
        check_divisible(config, ranks)
        refused = False
    except ModelError:
        refused = True
    obstacles = dimensions_of(config).obstacles(ranks)
    assert bool(obstacles) == refused
    assert all(str(ranks) in obstacle for obstacle in obstacles)


def test_obstacles_say_what_does_not_divide() -> None:
    assert shape().obstacles(3) == (
        "32 attention heads do not divide by 3",
        "8 KV heads do not divide by 3",
        "intermediate size 14336 does not divide by 3",
    )
    grouped = shape(intermediate_size=320, quantization={"group_size": 64, "bits": 4})
    assert grouped.obstacles(4) == (
        "intermediate size 320 / 4 = 80 is no multiple of the quantization group 64",
    )


def test_a_family_that_copies_kv_heads_goes_on_more_ranks_than_it_has_of_them() -> None:
    qwen = dimensions_of({**LLAMA, "model_type": "qwen3_5", "num_key_value_heads": 2})
    assert qwen.obstacles(4) == ()
    assert shape(num_key_value_heads=2).obstacles(4) == ("2 KV heads do not divide by 4",)
    three = {**LLAMA, "model_type": "qwen3_5", "num_key_value_heads": 3, "num_attention_heads": 24}
    assert dimensions_of(three).obstacles(4) != ()
    few = shape(num_key_value_heads=2)
    assert few.rank_kv(4, 1000) == few.rank_kv(2, 1000) > 0


def test_a_dense_mlp_that_does_not_divide_is_whole_on_each_rank() -> None:
    """GLM-4.5-Air: two ranks would have 5472 of 10944, which groups of 64 do not divide."""
    air = {**PUBLISHED["glm-4.6-4bit"], "num_hidden_layers": 6, "intermediate_size": 10944}
    two, divided = of(air), of({**air, "intermediate_size": 11008})
    assert two.obstacles(2) == ()
    assert dimensions_of({**air, "model_type": "qwen3_moe"}).obstacles(2) == (
        "intermediate size 10944 / 2 = 5472 is no multiple of the quantization group 64",
    )
    assert 0 < divided.mlp_bytes < 0.2 * divided.weight_bytes
    whole = two.whole_bytes + two.mlp_bytes
    assert two.rank_weights(2) == -(-(two.weight_bytes - whole) // 2) + whole
    assert two.rank_token_bytes(2) > divided.rank_token_bytes(2)
    assert two.rank_weights(3) == -(-(two.weight_bytes - two.whole_bytes) // 3) + two.whole_bytes
    assert (
        shape().rank_weights(3) == -(-(shape().weight_bytes - shape().whole_bytes) // 3) + shape().whole_bytes
    )


def test_families_that_cannot_be_divided_stay_whole() -> None:
    whole = shape_of(description("gemma2-stages"), name="gemma")
    assert whole.obstacles(1) == ()
    why = "no layer of the family 'gemma2' can be divided among 2 ranks: mlx-lm divides none"
    assert whole.obstacles(2) == (why,)
    model = shape_of(description("kimi_k3"), name="model")
    assert not model.cuttable
    assert model.uncuttable(3) == (
        "the family 'kimi_k3' cannot be cut into 3 stages: "
        "each layer reads more of those before it than hidden states"
    )


def test_what_a_published_configuration_leaves_out_is_filled_in_as_mlx_lm_does() -> None:
    """Gemma 3 4B names neither heads nor vocabulary."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    gemma = of({"model_type": "gemma3", "text_config": {**text, "num_hidden_layers": 34}})
    assert (gemma.kv_heads, gemma.model.vocabulary) == (4, 262208)
    assert (gemma.obstacles(2), gemma.obstacles(8)) == ((), ())
    assert gemma.obstacles(3) != ()


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("nemotron_h", {"n_groups": 1}, "1 Mamba groups do not divide by 2"),
        (
            "nemotron_h",
            {"n_groups": 2, "mamba_num_heads": 2, "mamba_head_dim": 32},
            "Mamba output 64 / 2 = 32 is no multiple of the quantization group 64",
        ),
        ("qwen3_next", {"linear_num_key_heads": 3}, "3 linear key heads do not divide by 2"),
        ("llama4", {"intermediate_size_mlp": 33}, "dense intermediate size 33 does not divide by 2"),
        ("gemma4", {"num_global_key_value_heads": 3}, "3 global KV heads do not divide by 2"),
    ],
)
def test_sizes_that_only_some_families_have_count(family: str, fields: dict[str, Any], words: str) -> None:
    config = {**LLAMA, "model_type": family, "quantization": {"group_size": 64, "bits": 4}}
    assert dimensions_of({**config, **fields}).obstacles(2) == (words,)
    assert dimensions_of(config).obstacles(2) == ()


def test_the_table_of_families_is_that_of_the_installed_mlx_lm() -> None:
    assert not shardable_families() & DIVIDE.keys(), "mlx-lm's own way comes first"
    assert MODEL_REMAPPING == ALSO_CALLED


@pytest.mark.parametrize("family", ["gemma3", "gemma3_text", "gemma4", "gemma4_text"])
def test_a_configuration_is_filled_in_as_by_mlx_lm(family: str) -> None:
    modules = (
        import_module(f"mlx_lm.models.{name}") for name in (family, f"{family.partition('_')[0]}_text")
    )
    fields: dict[str, Any] = {"model_type": family, "text_config": {}}
    for module in modules:  # of the whole model, then of its language model
        built = module.ModelArgs.from_dict(fields)
        fields |= vars(built).get("text_config") or {}
    found = text_config({"model_type": family})
    assert found.keys() >= {"vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
    assert found == {name: getattr(built, name) for name in found}


@pytest.mark.parametrize("name", PUBLISHED_GB)
def test_published_models_have_the_size_of_their_files(name: str) -> None:
    known = published(name)
    assert 0 < known.token_bytes <= known.weight_bytes
    assert known.weight_bytes / 1e9 == pytest.approx(PUBLISHED_GB[name], rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED_WEIGHTS)
def test_published_models_have_the_published_number_of_weights(name: str) -> None:
    model, (total, met) = described(name), PUBLISHED_WEIGHTS[name]
    parts = (model.embedding, *model.layers, model.head)
    assert sum(part.numbers for part in parts) == pytest.approx(total, rel=0.002)
    assert published(name).token_weights == pytest.approx(met, abs=0.02 * met + model.embedding.numbers)


def test_a_compressed_cache_is_on_every_rank() -> None:
    assert published("deepseek-v3.1-4bit").rank_kv(4, 1000) == 61 * 576 * 2 * 1000
    assert shape().rank_kv(4, 1000) == 32 * 2 * 8 * 128 * 2 * 1000 / 4


def test_quantizing_the_cache_shrinks_it() -> None:
    assert shape_of(llama(), kv_bits=8).kv_token_bytes / shape().kv_token_bytes == pytest.approx(8.5 / 16)
    windows = description("gpt_oss")
    assert shape_of(windows, kv_bits=8) == shape_of(windows), "these cannot be quantized"


@pytest.mark.parametrize(
    ("quantization", "bits_each"),
    [
        ({"group_size": 64, "bits": 4}, 4.5),
        ({"group_size": 32, "bits": 4}, 5.0),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, 4.25),
        ({"group_size": 32, "bits": 8, "mode": "mxfp8"}, 8.25),
        ({}, 16.0),
    ],
)
def test_a_quantized_weight_weighs_its_bits_and_its_part_of_the_scales(
    quantization: dict[str, Any], bits_each: float
) -> None:
    quantized = of({**FEW, "quantization": quantization})
    assert quantized.weight_bytes / of(FEW).weight_bytes == pytest.approx(bits_each / 16, rel=1e-4)


def test_modules_may_be_quantized_in_their_own_way() -> None:
    four = {"group_size": 64, "bits": 4}
    all_of_it = of({**FEW, "quantization": four}).weight_bytes
    whole = of({**FEW, "quantization": {**four, "lm_head": False}})
    assert whole.weight_bytes - all_of_it == 128256 * 4096 * (16 - 4.5) / 8
    finer = of(
        {**FEW, "quantization": {**four, "model.layers.1.self_attn.q_proj": {"group_size": 64, "bits": 8}}}
    )
    assert finer.weight_bytes - all_of_it == 4096 * 4096 * 4 / 8


def test_the_size_on_disk_is_right_and_reading_follows_it() -> None:
    half = shape_of(llama(), weight_bytes=shape().weight_bytes // 2)
    assert half.weight_bytes == shape().weight_bytes // 2
    assert half.token_bytes == pytest.approx(shape().token_bytes / 2, rel=1e-6)


def test_two_sums_a_layer_and_one_choice() -> None:
    assert shape().collectives == 65
    assert of({**FEW, "model_type": "llama"}).collectives == 5
    nemotron = shape_of(description("nemotron_h-letters"))  # a letter for each layer, with one mixer
    assert nemotron.collectives <= nemotron.layers + 1
    caches = [nemotron.stage(at, at + 1).kv_token_bytes > 0 for at in range(nemotron.layers)]
    assert 0 < sum(caches) < nemotron.layers
    minimax = description("minimax")
    assert shape_of(minimax).collectives == 4 * len(minimax.layers) + 1, "for norms of queries and keys, too"


def test_embeddings_of_single_layers_are_whole_on_each_rank() -> None:
    gemma = shape_of(description("gemma4_text-shared"))
    assert gemma.whole_bytes > 0.1 * gemma.weight_bytes
    assert gemma.rank_weights(2) > gemma.whole_bytes


def test_a_model_of_unknown_sizes_is_whole_on_one_rank() -> None:
    unknown = unknown_shape("m", 9 << 30)
    assert unknown.rank_weights(1) == 9 << 30
    assert unknown.rank_kv(1, 10_000) == 0
    assert unknown.obstacles(2)
    assert unknown.uncuttable(2)


DRAFTS, PROMPTS = "drafts, forced tokens", "several prompts in one forward"


@pytest.mark.parametrize(
    ("name", "words", "off"),
    [
        ("llama", "keys and values", ""),
        ("deepseek_v32", "several keys and values a layer", f"{DRAFTS}, quantized KV"),
        ("gpt_oss", "windows of tokens", "quantized KV"),
        ("qwen3_next", "recurrent states, fed again", "quantized KV"),
        ("jamba-stages", "recurrent states, fed again, prompts apart", f"{PROMPTS}, quantized KV"),
        ("plamo2", "recurrent states, prompts apart", f"{DRAFTS}, {PROMPTS}, quantized KV"),
        ("llama4", "chunks of tokens", f"{DRAFTS}, {PROMPTS}, quantized KV, requests at once"),
    ],
)
def test_words_say_what_caches_leave_out(name: str, words: str, off: str) -> None:
    found = words_of(description(name).caches)
    assert (found.name, found.off, bool(found.why)) == (words, off, bool(off))


CT = {"quant_method": "compressed-tensors"}
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "pack-quantized": ({**CT, "format": "pack-quantized"}, r"compressed-tensors \(pack-quantized\)"),
    "without a format": (CT, "compressed-tensors"),
    "FP8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "by fp8, which"),
    "FP8 by ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, r"modelopt \(FP8\)"),
    "AWQ of 8 bits": ({"quant_method": "awq", "bits": 8}, "awq"),
    "AWQ in another order": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq"),
    "no method": ({"bits": 4, "group_size": 64}, "a method without a name"),
    **{name: ({"quant_method": name}, name) for name in ("bitsandbytes", "gptq", "hqq", "torchao")},
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_quantization_that_mlx_lm_cannot_read_is_named(name: str, nested: bool) -> None:
    told, words = REFUSED[name]
    method = {"quantization_config": told}
    assert re.search(words, unreadable({**LLAMA, "text_config": method} if nested else {**LLAMA, **method}))
    assert not unreadable({**LLAMA, "quantization": {"bits": 4, "group_size": 64}, **method}), "converted"
    awq = {"quant_method": "awq", "bits": 4}
    assert (
        unreadable({**LLAMA, "quantization_config": awq}),
        quantization({"quantization_config": awq})["bits"],
    ) == ("", 4)
    experts = {**PUBLISHED["qwen3-235b-a22b-4bit"], "quantization": None}
    assert "awq" in unreadable({**experts, "quantization_config": awq})


def test_a_mode_that_mlx_does_not_have_is_named() -> None:
    with pytest.raises(ModelError, match="the mode 'turbo'") as refused:
        description_of({**LLAMA, "quantization": {"bits": 4, "group_size": 64, "mode": "turbo"}})
    assert refused.value.code is Code.MODEL_UNSUPPORTED


@pytest.mark.parametrize("nested", [False, True])
def test_what_is_not_converted_counts_whole(nested: bool) -> None:
    """65 GB of files: openai/gpt-oss-120b, whose experts alone are in 4 bits."""
    plain = [f"model.layers.*.{name}" for name in ("self_attn", "mlp.router")]
    told = {"quant_method": "mxfp4", "modules_to_not_convert": [*plain, "model.embed_tokens", "lm_head"]}
    config = {**PUBLISHED["gpt-oss-120b"], "quantization": None}
    method = {"quantization_config": told}
    found = of({**config, "text_config": method} if nested else {**config, **method})
    assert found.weight_bytes == pytest.approx(65.25e9, rel=0.01)
    assert (found.model.bits, found.model.group) == (4, 32)


def test_weights_that_become_larger_are_not_counted_as_on_the_disk() -> None:
    told = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**PUBLISHED["deepseek-v3.1-4bit"], "quantization": None, "quantization_config": told}
    model = description_of(config)
    assert shape_of(model, weight_bytes=688 * 10**9).weight_bytes == pytest.approx(2 * 671e9, rel=0.02)
    packed = replace(model, expands=False)
    assert shape_of(packed, weight_bytes=9**12).weight_bytes == 9**12


FEW: Mapping[str, Any] = {**LLAMA, "num_hidden_layers": 2}


def of(config: Mapping[str, Any]) -> ModelShape:
    return shape_of(description_of(config), name="model")


EIGHT = described("llama-3.1-8b-bf16")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_mac_without_the_files_knows_the_same_shape(name: str) -> None:
    facts = DescribedModel(described(name), 7 << 30, mtp=True)
    packed = facts.packed()
    assert len(packed) <= MAX_SHAPE_BYTES
    assert unpacked(packed) == facts
    assert unpacked(packed).shape("m", 4) == shape_of(
        described(name), name="m", weight_bytes=7 << 30, kv_bits=4, mtp=True
    )


@pytest.mark.parametrize(
    "data",
    [
        b"not compressed",
        *map(zlib.compress, (b"", b"1 1", b"1 1 {}", b"1 1 []", b"x 1 {}", b"1 1 \xff")),
        zlib.compress(b"1 1 " + b"[" * 100_000),
        zlib.compress(b"9" * 5000 + b" 1 {}"),
        DescribedModel(EIGHT, 1, mtp=False).packed()[:-20],
        *(
            DescribedModel(replace(EIGHT, **{field: none}), 1, mtp=False).packed()
            for field, none in (("group", 0), ("collectives", -1), ("kernels", 10**400))
        ),
    ],
    ids=str,
)
def test_what_is_no_shape_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpacked(data)


def test_a_shape_that_unpacks_to_much_takes_little_memory() -> None:
    facts = DescribedModel(EIGHT, 1, mtp=False)
    bomb = zlib.compress(zlib.decompress(facts.packed()) + b" " * (64 * MAX_TEXT))
    assert len(bomb) <= 2 * MAX_SHAPE_BYTES
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            unpacked(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_TEXT
    finally:
        tracemalloc.stop()

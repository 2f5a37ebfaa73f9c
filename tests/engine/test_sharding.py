"""Refusals of what does not divide, before anything is loaded, with the number that does not fit."""

from __future__ import annotations

import ast
import pkgutil
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx_lm.models
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn

from mlxtp.engine import families
from mlxtp.engine.group import LoneGroup
from mlxtp.engine.loader import MLX_LM_RAISES
from mlxtp.engine.sharding import (
    COMPILED_COLLECTIVES,
    check_divisible,
    check_shardable,
    divided_vocabulary,
    is_divided,
)
from mlxtp.errors import Code, ModelError
from mlxtp.model_config import context_length

from .mlx_lm_sources import shardable_families
from .tables import refused

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def refusal(world_size: int, **changes: object) -> str:
    with pytest.raises(ModelError) as refused:
        check_divisible(LLAMA_8B | changes, world_size)
    assert refused.value.code is Code.MODEL_NOT_DIVISIBLE
    return refused.value.detail


def test_one_rank_takes_anything() -> None:
    check_divisible({"num_attention_heads": 7, "num_key_value_heads": 7, "intermediate_size": 13}, 1)
    check_divisible({"num_attention_heads": 8, "intermediate_size": [512, 1024]}, 1)


LLAMA_2 = {
    "quantization": {"group_size": 64, "bits": 4},
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
}
SMALL = {"quantization": {"group_size": 64}, "num_attention_heads": 8, "hidden_size": 512}


@pytest.mark.parametrize(
    ("world_size", "changes", "words"),
    [
        (2, {"num_attention_heads": 33, "num_key_value_heads": 33}, "33 attention heads do not divide by 2"),
        (4, {"num_key_value_heads": 2}, "2 KV heads do not divide by 4"),
        (4, {"num_attention_heads": 34, "num_key_value_heads": None}, "34 KV heads do not divide by 4"),
        (2, {"intermediate_size": 14337}, "intermediate size 14337 does not divide by 2"),
        (2, {"moe_intermediate_size": 769}, "expert intermediate size 769 does not divide by 2"),
        # A quantization group is not cut.
        (8, LLAMA_2, "intermediate size 11008 / 8 = 1376 is no multiple of the quantization group 64"),
        (
            8,
            {"quantization": {"group_size": 1024}},
            "attention output 4096 / 8 = 512 is no multiple of the quantization group 1024",
        ),
        (2, {"quantization_config": {"group_size": 4096}}, "quantization group 4096"),
        # The head dimension need not be the quotient.
        (8, {**SMALL, "head_dim": 32}, "attention output 256 / 8 = 32"),
        (4, {"text_config": LLAMA_8B | {"num_key_value_heads": 3}}, "3 KV heads"),
    ],
)
def test_the_refusal_names_the_number(world_size: int, changes: dict[str, object], words: str) -> None:
    assert words in refusal(world_size, **changes)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [(2, {**LLAMA_8B, "quantization": {"group_size": 64}}), (4, LLAMA_2), (8, {**SMALL, "head_dim": 128})],
)
def test_groups_of_a_quantization_that_are_not_cut(world_size: int, changes: dict[str, object]) -> None:
    """11008 / 4 = 2752 = 43 groups of 64."""
    check_divisible(LLAMA_8B | changes, world_size)


def test_all_that_does_not_fit_is_named_at_once() -> None:
    detail = refusal(3)
    for words in ("32 attention heads", "8 KV heads", "intermediate size 14336"):
        assert words in detail
    assert "among 3 ranks" in detail


def test_the_refusal_says_how_many_ranks_would_do() -> None:
    assert refusal(8, num_key_value_heads=4).endswith("It does among 1, 2, 4.")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": "many"},
        {"num_key_value_heads": 2.5},
        {"intermediate_size": [1]},
        {"text_config": "none"},
    ],
)
def test_a_number_that_is_none_is_named(changes: dict[str, object]) -> None:
    with refused(ModelError, Code.MODEL_INVALID, next(iter(changes))):
        check_divisible(LLAMA_8B | changes, 2)


@given(
    heads=st.integers(1, 128),
    groups=st.integers(1, 16),
    width=st.integers(1, 1 << 16),
    world_size=st.integers(1, 8),
)
def test_accepted_exactly_when_every_share_is_whole(
    heads: int, groups: int, width: int, world_size: int
) -> None:
    config = {
        "num_attention_heads": heads * groups,
        "num_key_value_heads": heads,
        "head_dim": 64,
        "intermediate_size": width,
    }
    whole = world_size == 1 or not any(n % world_size for n in (heads * groups, heads, width))
    try:
        check_divisible(config, world_size)
        accepted = True
    except ModelError:
        accepted = False
    assert accepted == whole


@pytest.mark.parametrize("family", ["no_such_family", "../llama", "llama.attention", ""])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_unknown_family_is_named(family: str, world_size: int) -> None:
    with refused(ModelError, Code.MODEL_UNSUPPORTED, re.escape(repr(family))):
        check_shardable({"model_type": family}, world_size)


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 7}])
def test_a_model_that_does_not_say_what_it_is(config: dict[str, object]) -> None:
    with refused(ModelError, Code.MODEL_INVALID, "names no model_type"):
        check_shardable(config, 1)


def test_a_layer_without_the_known_parts_is_refused_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Module()
    layer.self_attn = nn.Module()
    with pytest.raises(MLX_LM_RAISES, match="Module has none of n_heads, num_heads"):
        families.attention(layer.self_attn, LoneGroup())
    monkeypatch.setattr(families, "attention", lambda _part, _group: None)
    with pytest.raises(MLX_LM_RAISES, match="Module has none of mlp, block_sparse_moe"):
        families.divide_usual(SimpleNamespace(layers=[layer]), LoneGroup())


def test_a_family_that_cannot_be_sharded_runs_on_one_rank_only() -> None:
    unshardable = "mamba2"
    assert not is_divided(unshardable)
    check_shardable({"model_type": unshardable}, 1)
    with refused(ModelError, Code.MODEL_UNSUPPORTED, "'mamba2'"):
        check_shardable({"model_type": unshardable}, 2)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_5_moe", "glm_moe_dsa"])
def test_the_list_of_shardable_families_is_true(family: str) -> None:
    """Some inherit how they are sharded."""
    assert family in shardable_families()
    assert hasattr(import_module(f"mlx_lm.models.{family}").Model, "shard")


def test_a_vocabulary_is_divided_while_the_layers_are_cut_and_then_itself_again() -> None:
    owner = SimpleNamespace(args=SimpleNamespace(vocab_size=509, text=SimpleNamespace(vocab_size=509)))
    with divided_vocabulary(owner, 510):
        assert owner.args.vocab_size == owner.args.text.vocab_size == 510
    assert owner.args.vocab_size == owner.args.text.vocab_size == 509
    with divided_vocabulary(SimpleNamespace(), 510):
        assert owner.args.vocab_size == 509


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"text_config": {"max_position_embeddings": 1024}}, 1024),
        ({}, 4096),
        ({"max_position_embeddings": None}, 4096),
        ({"max_position_embeddings": 0}, 4096),
    ],
)
def test_the_context_is_what_the_configuration_says(config: dict[str, Any], length: int) -> None:
    assert context_length(config) == length


@pytest.mark.slow
def test_modules_with_collectives_in_compiled_functions_are_known() -> None:
    """A function that is decorated or passed to `mx.compile`, whose text enters `mx.distributed`."""
    folder = Path(mlx_lm.models.__path__[0])
    found = set()
    for module in pkgutil.iter_modules([str(folder)]):
        if not (path := folder / f"{module.name}.py").is_file():
            continue
        tree = ast.parse(path.read_text())
        wrapped = {
            ast.unparse(call.args[0])
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "mx.compile" and call.args
        }
        compiled = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and (node.name in wrapped or "mx.compile" in " ".join(map(ast.unparse, node.decorator_list)))
        ]
        if any("mx.distributed" in ast.unparse(function) for function in compiled):
            found.add(f"mlx_lm.models.{module.name}")
    assert found == COMPILED_COLLECTIVES

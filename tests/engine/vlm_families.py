"""Configurations of tiny models of mlx-vlm's families, and what tests of them share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mlxtp.description import CacheCapabilities

from .families import (
    EXPERTS,
    FEW_EXPERTS,
    FOUR,
    INDEXED,
    LATENT,
    LINEAR,
    NARROW,
    PIPELINE,
    QWEN_MOE,
    SHARED_NARROW,
    STEP,
    TEXT,
    TWO,
    WINDOW,
    WINDOWS,
    Config,
    of,
)
from .small_models import CONFIG

NEEDS_VLM = pytest.mark.skipif(
    find_spec("mlx_vlm") is None, reason="needs mlx-vlm: EXTRAS=dev,vision make setup"
)
_TEXT = {name: value for name, value in TEXT.items() if name != "model_type"}
ROPE = {"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4, "partial_rotary_factor": 0.5}

VLM: Mapping[str, Config] = {
    "cohere2_moe": of(
        of(FOUR, FEW_EXPERTS, WINDOW, moe_num_shared_experts=1, sliding_window_pattern=2),
        of(first_k_dense_replace=1, prefix_dense_intermediate_size=128, logit_scale=1.0),
    ),
    "deepseek_v4": of(
        of(FOUR, NARROW, TWO, WINDOW, num_key_value_heads=1, head_dim=32, q_lora_rank=32),
        of(qk_rope_head_dim=16, o_groups=2, o_lora_rank=16, n_routed_experts=4, hc_mult=2),
        of(compress_ratios=[0, 4, 128, 4], index_n_heads=16, index_head_dim=32, index_topk=4),
        num_hash_layers=1,
    ),
    "glm5_next": {
        "text_config": of(
            of(
                _TEXT,
                LATENT,
                EXPERTS,
                INDEXED,
                index_n_heads=16,
                qk_rope_head_dim=0,
                hc_mult=2,
                index_kpool=4,
            ),
            linear_attn_config={"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4},
            layer_types=["linear_attention", "deepseek_sparse_attention"] * 2,
        )
    },
    "hy_v4": of(FOUR, LATENT, EXPERTS, INDEXED, num_key_value_heads=1, hc_mult=2, index_n_heads=16),
    "mimo_v2": {"text_config": of(_TEXT, PIPELINE["mimo_v2_flash"])},
    "qwen4_exp": {
        "text_config": of(
            of(_TEXT, LINEAR, QWEN_MOE, SHARED_NARROW, linear_conv_kernel_dim=4, hc_count=2, hc_lowrank=16),
            of(model_type="qwen4_exp_text", full_attention_interval=2, ple_layer_ids=[]),
            of(indexer_n_heads=16, indexer_head_dim=32, indexer_budget=8, rope_parameters=ROPE),
        )
    },
    "step3p7": {
        "text_config": of(
            of(_TEXT, STEP, layer_types=WINDOWS, moe_layers_enum="1,3"),
            of(use_head_wise_attn_gate=True, use_moe_router_bias=True),
        )
    },
}
"""Families with four layers, by their names."""
#: Families that ranks share layer by layer. All can be cut into stages.
DIVIDED = {"cohere2_moe", "deepseek_v4", "step3p7"}


def vlm_config(family: str) -> dict[str, Any]:
    """Return config.json of a family's tiny model."""
    config: dict[str, Any] = {**CONFIG, "tie_word_embeddings": False, "model_type": family, **VLM[family]}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "vocab_size": config["vocab_size"]}
    return {**config, "dtype": "float32"}


RECORDED = Path(__file__).parent / "recorded_vlm.json"


@cache
def recorded() -> Mapping[str, Mapping[str, Any]]:
    """Return what is recorded of each family's description, for pages that are written without mlx-vlm."""
    found: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())
    return found


def caches_of(family: str) -> CacheCapabilities:
    """Return a family's caches as they are recorded."""
    told: list[str] = recorded()[family]["caches"]
    *flags, _kinds = CacheCapabilities.__slots__
    kinds = tuple(name for name in told if name not in flags)
    return CacheCapabilities(**{name: name in told for name in flags}, kinds=kinds)

"""Configurations as they are published, of models that plans are tested with, and their descriptions.

The quantizations are those of the usual conversions for MLX.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mlxtp.description import Description
from mlxtp.model_config import Config
from mlxtp.models.descriptions import description_of
from mlxtp.placement.model_shape import ModelShape, shape_of

_NORM: Config = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 500000.0}


def _affine(bits: int, **modules: object) -> Config:
    return {"quantization": {"group_size": 64, "bits": bits, **modules}}


_LLAMA_8B: Config = {
    **_NORM,
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
_LLAMA_70B: Config = {
    **_LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_LLAMA_405B: Config = {
    **_LLAMA_8B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
_QWEN25_32B: Config = {
    **_LLAMA_8B,
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "vocab_size": 152064,
}
_MIXTRAL_8X7B: Config = {
    **_LLAMA_8B,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
_QWEN3_235B: Config = {
    **_NORM,
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}
_QWEN_27B: Config = {
    "model_type": "qwen3_5",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_value_heads": 48,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mtp_num_hidden_layers": 1,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
}
_DEEPSEEK_V3: Config = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "n_group": 8,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}
_KIMI_K2: Config = {
    **_DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "n_group": 1,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
}
_ALL_BUT_EXPERTS = (
    *(
        f"self_attn.{name}"
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "embed_q", "unembed_out", "o_proj")
    ),
    *(f"mlp.{owner}{name}_proj" for owner in ("", "shared_experts.") for name in ("gate", "up", "down")),
)
#: Kimi K2 Thinking was trained so that its routed experts have 4 bits; everything else has 16.
_PLAIN_BUT_EXPERTS: Config = {
    "quantization": {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": False,
        **{f"model.layers.{layer}.{name}": False for layer in range(61) for name in _ALL_BUT_EXPERTS},
        "lm_head": False,
    }
}
_LLAMA4_SCOUT: Config = {
    "model_type": "llama4",
    "text_config": {
        **_NORM,
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "rope_scaling": None,
        "use_qk_norm": True,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "vocab_size": 202048,
        "max_position_embeddings": 10485760,
    },
}
_LLAMA4_MAVERICK: Config = {
    **_LLAMA4_SCOUT,
    "text_config": {
        **_LLAMA4_SCOUT["text_config"],
        "num_local_experts": 128,
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1048576,
    },
}
_GLM_46: Config = {
    **_NORM,
    "model_type": "glm4_moe",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "rope_scaling": None,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 151552,
    "max_position_embeddings": 202752,
}
_GLM_5: Config = {
    **_NORM,
    "model_type": "glm_moe_dsa",
    "index_topk": 2048,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "attention_bias": False,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
}
_EIGHT_BITS: Config = {"group_size": 64, "bits": 8, "mode": "affine"}
_GPT_OSS_120B: Config = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "sliding_window": 128,
    "quantization": {
        "group_size": 32,
        "bits": 4,
        "mode": "mxfp4",
        "model.embed_tokens": _EIGHT_BITS,
        **{
            f"model.layers.{layer}.{name}": _EIGHT_BITS
            for layer in range(36)
            for name in (*(f"self_attn.{each}_proj" for each in "qkvo"), "mlp.router")
        },
        "lm_head": _EIGHT_BITS,
    },
}

_QWEN3_NEXT: Config = {
    **_NORM,
    "model_type": "qwen3_next",
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.25,
    "norm_topk_prob": True,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}
_QWEN36_35B: Config = {
    **_QWEN3_NEXT,
    "model_type": "qwen3_5_moe",
    "num_hidden_layers": 40,
    "mtp_num_hidden_layers": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 248320,
}
_QWEN35_397B: Config = {
    **_QWEN3_NEXT,
    "model_type": "qwen3_5_moe",
    "hidden_size": 4096,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "linear_num_value_heads": 64,
    "vocab_size": 248320,
}
_GEMMA4_31B: Config = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
    },
}
_GEMMA4_26B: Config = {
    "model_type": "gemma4",
    "text_config": {
        **_GEMMA4_31B["text_config"],
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}
_NEMOTRON3_SUPER: Config = {
    **_NORM,
    "model_type": "nemotron_h",
    "num_hidden_layers": 88,
    "intermediate_size": 2688,
    "attention_bias": False,
    "mamba_proj_bias": False,
    "conv_kernel": 4,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "mlp_hidden_act": "relu2",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 5.0,
    "norm_topk_prob": True,
    "hidden_size": 4096,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 512,
    "n_shared_experts": 1,
    "num_experts_per_tok": 22,
    "moe_latent_size": 1024,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
}

PUBLISHED: Mapping[str, Config] = {
    "llama-3.1-8b-4bit": {**_LLAMA_8B, **_affine(4)},
    "llama-3.1-8b-8bit": {**_LLAMA_8B, **_affine(8)},
    "llama-3.1-8b-bf16": _LLAMA_8B,
    "llama-3.3-70b-4bit": {**_LLAMA_70B, **_affine(4)},
    "llama-3.3-70b-8bit": {**_LLAMA_70B, **_affine(8)},
    "llama-3.3-70b-bf16": _LLAMA_70B,
    "llama-3.1-405b-4bit": {**_LLAMA_405B, **_affine(4)},
    "qwen2.5-32b-4bit": {**_QWEN25_32B, **_affine(4)},
    "mixtral-8x7b-4bit": {**_MIXTRAL_8X7B, **_affine(4)},
    "qwen3.6-27b-4bit": {**_QWEN_27B, **_affine(4)},
    "qwen3.6-27b-8bit": {**_QWEN_27B, **_affine(8)},
    "qwen3.6-35b-a3b-4bit": {**_QWEN36_35B, **_affine(4)},
    "qwen3.6-35b-a3b-8bit": {**_QWEN36_35B, **_affine(8)},
    "qwen3.5-397b-a17b-4bit": {**_QWEN35_397B, **_affine(4)},
    "qwen3.5-397b-a17b-8bit": {**_QWEN35_397B, **_affine(8)},
    "qwen3-next-80b-a3b-4bit": {**_QWEN3_NEXT, **_affine(4)},
    "qwen3-next-80b-a3b-8bit": {**_QWEN3_NEXT, **_affine(8)},
    "gemma-4-26b-a4b-4bit": {**_GEMMA4_26B, **_affine(4)},
    "gemma-4-26b-a4b-8bit": {**_GEMMA4_26B, **_affine(8)},
    "gemma-4-31b-4bit": {**_GEMMA4_31B, **_affine(4)},
    "gemma-4-31b-8bit": {**_GEMMA4_31B, **_affine(8)},
    "nemotron-3-super-120b-a12b-4bit": {**_NEMOTRON3_SUPER, **_affine(4)},
    "nemotron-3-super-120b-a12b-8bit": {**_NEMOTRON3_SUPER, **_affine(8)},
    "qwen3-235b-a22b-4bit": {**_QWEN3_235B, **_affine(4)},
    "qwen3-235b-a22b-8bit": {**_QWEN3_235B, **_affine(8)},
    "gpt-oss-120b": _GPT_OSS_120B,
    "llama-4-scout-4bit": {**_LLAMA4_SCOUT, **_affine(4)},
    "llama-4-scout-8bit": {**_LLAMA4_SCOUT, **_affine(8)},
    "llama-4-maverick-4bit": {**_LLAMA4_MAVERICK, **_affine(4)},
    "llama-4-maverick-6bit": {**_LLAMA4_MAVERICK, **_affine(6)},
    "glm-4.6-4bit": {**_GLM_46, **_affine(4)},
    "glm-4.6-8bit": {**_GLM_46, **_affine(8)},
    "glm-5-4bit": {**_GLM_5, **_affine(4)},
    "glm-5-mxfp8": {**_GLM_5, "quantization": {"group_size": 32, "bits": 8, "mode": "mxfp8"}},
    "deepseek-v3.1-4bit": {**_DEEPSEEK_V3, **_affine(4)},
    "deepseek-v3.1-8bit": {**_DEEPSEEK_V3, **_affine(8)},
    "kimi-k2-4bit": {**_KIMI_K2, **_affine(4)},
    "kimi-k2-thinking": {**_KIMI_K2, **_PLAIN_BUT_EXPERTS},
}


@cache
def folder_of(name: str) -> Path:
    """Return a folder of that name with its configuration alone, which ends with this process."""
    folder = Path(_folders().name, name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return folder


@cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def described(name: str) -> Description:
    """Return the description of a model in `PUBLISHED`. Takes seconds the first time on a machine."""
    return description_of(PUBLISHED[name])


def published(name: str, *, mtp: bool = False) -> ModelShape:
    """Return its shape; with an MTP head in its files, or without."""
    return shape_of(described(name), name=name, mtp=mtp)

"""Configurations of tiny models, one for each family: as little as still has every kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
"""Attention over compressed keys and values."""

EXPERTS: Mapping[str, Any] = {
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}

QWEN_MOE: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}

QWEN3_5: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
}

DEEPSEEK: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    **LATENT,
    **EXPERTS,
}

LONGCAT: Mapping[str, Any] = {
    **LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 128,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 64,
    "n_routed_experts": 4,
    "zero_expert_num": 1,
    "num_layers": 2,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "ministral3": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "original_max_position_embeddings": 512,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "qwen3_moe": QWEN_MOE,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v2": {
        **LATENT,
        **EXPERTS,
        "topk_method": "greedy",
        "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 0.7},
    },
    "deepseek_v3": {**LATENT, **EXPERTS},
    "deepseek_v32": {**LATENT, **EXPERTS, "index_head_dim": 32, "index_n_heads": 4, "index_topk": 8},
    "glm4_moe": {
        **EXPERTS,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": {**LATENT, **EXPERTS},
    "exaone_moe": {
        **QWEN_MOE,
        "num_shared_experts": 1,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "is_moe_layer": [False, True],
    },
    "minimax": {
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "shared_intermediate_size": 64,
        "rotary_dim": 8,
    },
    "mistral4": {
        **LATENT,
        **EXPERTS,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 512,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "iquestloopcoder": {},
    "step3p5": {
        "num_attention_groups": 2,
        "sliding_window": 8,
        "layer_types": ["full_attention", "full_attention"],
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 64,
        "share_expert_dim": 64,
        "moe_layers_enum": "1",
    },
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": {**LONGCAT, "hidden_size": 72, "ngram_vocab_size_ratio": 2},
    "qwen3_5": {"text_config": QWEN3_5},
    "qwen3_5_moe": {
        "text_config": {**QWEN3_5, **QWEN_MOE, "shared_expert_intermediate_size": 64},
    },
    "kimi_k25": {"text_config": DEEPSEEK},
    "solar_open": {**EXPERTS, "partial_rotary_factor": 0.5},
}


def asked_for(request: pytest.FixtureRequest, parameter: str) -> set[str]:
    """Return the values that tests of this run and file have for a parameter, as a module's fixture needs."""
    items = [
        each for each in request.session.items if each.path == request.path and hasattr(each, "callspec")
    ]
    return {each.callspec.params[parameter] for each in items if parameter in each.callspec.params}


NAMED = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""Families that are tried in all types."""


# --- families for pipelines -------------------------------------------------------------------------------

FOUR = {"num_hidden_layers": 4}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
}
GEMMA4: Mapping[str, Any] = {
    **GEMMA,
    "global_head_dim": 32,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "layer_types": WINDOWS,
}
TEXT: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
GRANITE: Mapping[str, Any] = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_bias": False,
    "mlp_bias": False,
}
BAILING: Mapping[str, Any] = {
    **QWEN_MOE,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LFM: Mapping[str, Any] = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}

PIPELINE: Mapping[str, Mapping[str, Any]] = {
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16.0},
    "gemma3": {"text_config": {**GEMMA, "model_type": "gemma3_text"}},
    "gemma3_text": GEMMA,
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": {
        **GEMMA4,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
        "attention_k_eq_v": True,
    },
    "mistral3": {"text_config": {**TEXT, "model_type": "llama"}},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**QWEN_MOE, "shared_expert_intermediate_size": 64},
    "qwen3_next": {
        **QWEN3_5,
        **QWEN_MOE,
        **FOUR,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 64,
        "partial_rotary_factor": 0.5,
    },
    "qwen3_vl": {"text_config": TEXT},
    "qwen3_vl_moe": {
        "text_config": {**TEXT, **QWEN_MOE, "model_type": "qwen3_moe"},
        "tie_word_embeddings": False,
    },
    "glm": {},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "glm_moe_dsa": {
        **LATENT,
        **EXPERTS,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "index_topk": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "llama4": {
        "text_config": {
            **TEXT,
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rope_scaling": None,
            "use_qk_norm": True,
            "attn_temperature_tuning": 4,
            "floor_scale": 4,
        }
    },
    "llama4_text": {"intermediate_size_mlp": 128, "no_rope_layers": [1, 1, 1, 0], "use_qk_norm": True},
    "exaone4": {
        "rope_scaling": {"rope_type": "default"},
        "sliding_window": 8,
        "sliding_window_pattern": "LG",
    },
    "phi3": {},
    "phimoe": {
        "num_local_experts": 4,
        "rope_scaling": {
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
            "type": "longrope",
        },
        "original_max_position_embeddings": 512,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "layer_types": WINDOWS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"sliding_window": 8, "sliding_window_pattern": 2, "logit_scale": 1.0},
    "granite": GRANITE,
    "granitemoe": {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        **GRANITE,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "position_embedding_type": "nope",
    },
    "seed_oss": {},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5},
    "nemotron_h": {
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "E", "*", "M", "-", "*"],
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "mimo": {},
    "mimo_v2_flash": {
        **EXPERTS,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "v_head_dim": 16,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.5,
    },
    "dots1": EXPERTS,
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_layer_start_index": 1,
        "moe_intermediate_size": 64,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
    },
    "hunyuan": {
        "attention_bias": False,
        "moe_topk": 2,
        "num_experts": 4,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
        "moe_intermediate_size": 64,
    },
    "hunyuan_v1_dense": {},
    "smollm3": {},
    "minimax_m3_vl": {
        "text_config": {
            **TEXT,
            "model_type": "minimax_m3",
            "dense_intermediate_size": 128,
            "shared_intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 2,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 0, 1, 1],
            },
        }
    },
    "kimi_linear": {
        **LATENT,
        **QWEN_MOE,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "model_max_length": 512,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "kimi_vl": {"text_config": {**DEEPSEEK, **FOUR}},
    "deepseek": {**EXPERTS, "num_key_value_heads": 4},
    "bailing_moe": BAILING,
    "afmoe": {
        "layer_types": WINDOWS,
        "sliding_window": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "moe_intermediate_size": 64,
    },
    "apertus": {"mlp_bias": False, "attention_bias": False, "post_norm": False, "qk_norm": True},
    "internlm2": {},
    "internlm3": {},
    "starcoder2": {"norm_epsilon": 1e-5},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "phi": {"num_key_value_heads": 4},
    "lfm2": {
        **LFM,
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {**LFM, **QWEN_MOE, "use_expert_bias": True, "num_dense_layers": 1},
    "Klear": {**QWEN_MOE, "attention_bias": False, "n_shared_experts": 1},
    "minicpm": {
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
        "tie_word_embeddings": False,
    },
    "telechat3": {},
    "youtu_llm": LATENT,
    "laguna": {
        "layer_types": WINDOWS,
        "sliding_window": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "rope_parameters": None,
    },
    "mellum": {
        **QWEN_MOE,
        "sliding_window": 8,
        "layer_types": WINDOWS,
        "rope_parameters": {
            "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    "muse_glimmer": {"sliding_window": 8, "layer_types": WINDOWS},
    "falcon_h1": {
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_k25": {"text_config": {**DEEPSEEK, **FOUR}},
    "longcat_flash": {**LONGCAT, "num_layers": 4},
    "longcat_flash_ngram": {
        **LONGCAT,
        "num_layers": 4,
        "hidden_size": 72,
        "ngram_vocab_size_ratio": 2,
    },
    "qwen3_5": {"text_config": {**QWEN3_5, **FOUR}},
    "qwen3_5_moe": {
        "text_config": {**QWEN3_5, **QWEN_MOE, **FOUR, "shared_expert_intermediate_size": 64},
    },
    "exaone_moe": {
        **QWEN_MOE,
        "num_shared_experts": 1,
        "sliding_window": 8,
        "layer_types": WINDOWS,
        "is_moe_layer": [False, True, True, True],
    },
    "step3p5": {
        "num_attention_groups": 2,
        "sliding_window": 8,
        "layer_types": WINDOWS,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 64,
        "share_expert_dim": 64,
        "moe_layers_enum": "1,3",
    },
    "bailing_hybrid": {
        **BAILING,
        **LATENT,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "routed_scaling_factor": 1.0,
        "moe_shared_expert_intermediate_size": 64,
    },
    "bailing_moe_v3": {
        **BAILING,
        **LATENT,
        "layer_group_size": 2,
        "moe_shared_expert_intermediate_size": 64,
    },
    "bailing_moe_linear": {**BAILING, "layer_group_size": 2, "group_norm_size": 2},
}
"""Families of pipelines, with four layers for three ranks."""


# --- families that mlxtp divides among ranks, where mlx-lm has no `shard` ----------------------------------

OWN: Mapping[str, Mapping[str, Any]] = {
    **{
        family: PIPELINE[family]
        for family in (
            *(
                "cohere2",
                "dots1",
                "ernie4_5_moe",
                "gemma3",
                "gemma3_text",
                "gemma4",
                "gemma4_text",
                "granite",
                "granitemoe",
                "kimi_vl",
            ),
            *("llama4", "mistral3", "mixtral", "olmo2", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
        )
    },
    "exaone4": {**PIPELINE["exaone4"], **FOUR, "layer_types": WINDOWS},
    "llama4_text": {**PIPELINE["llama4_text"], "tie_word_embeddings": False},
    "nemotron_h": {**PIPELINE["nemotron_h"], "n_groups": 2},
    "olmo3": {**PIPELINE["olmo3"], **FOUR},
    "seed_oss": {
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "ernie4_5_moe-biased": {"model_type": "ernie4_5_moe", **OWN["ernie4_5_moe"], "use_bias": True},
    # E2B: layers that read keys of others, wide MLPs there, and embeddings for single layers.
    "gemma4_text-shared": {
        "model_type": "gemma4_text",
        **GEMMA4,
        "num_hidden_layers": 6,
        "layer_types": [*WINDOWS, *WINDOWS[:2]],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 512,
        "num_key_value_heads": 1,
    },
    # 31B: keys as values, and fewer heads of these in layers with all tokens.
    "gemma4_text-few": {
        "model_type": "gemma4_text",
        **GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "mistral3-ministral3": {
        "model_type": "mistral3",
        "text_config": {**TEXT, "model_type": "ministral3", **FAMILIES["ministral3"]},
    },
    "nemotron_h-latent": {
        "model_type": "nemotron_h",
        **OWN["nemotron_h"],
        "moe_latent_size": 32,
        "mlp_bias": True,
        "attention_bias": True,
        "mamba_proj_bias": True,
    },
    "qwen3_next-dense": {"model_type": "qwen3_next", **OWN["qwen3_next"], "mlp_only_layers": [1]},
    "olmo2-copied": {"model_type": "olmo2", "num_key_value_heads": 1},
    "llama4-copied": {
        "model_type": "llama4",
        "text_config": {**OWN["llama4"]["text_config"], "num_key_value_heads": 1},
    },
}
"""Folder name -> what `write_model` takes, for other shapes of the same families."""


# --- families that no ranks share layer by layer ----------------------------------------------------------

OLMO_HYBRID: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "attention_bias": False,
}
RECURRENT_GEMMA: Mapping[str, Any] = {
    **FOUR,
    "head_dim": None,
    "num_key_value_heads": 1,
    "attention_bias": False,
    "conv1d_width": 4,
    "logits_soft_cap": 30.0,
    "attention_window_size": 2048,
}
PLAMO2: Mapping[str, Any] = {
    "head_dim": None,
    "hidden_size_per_head": 32,
    "mamba_num_heads": 4,
    "mamba_d_state": 16,
    "mamba_step": 2,
}
#: GPT-2's names of fields, instead of those that others share.
GPT: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")),
    "head_dim": None,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 512,
    "layer_norm_epsilon": 1e-5,
}
_UNLISTED_LFM = {name: value for name, value in PIPELINE["lfm2"].items() if name != "layer_types"}
_UNTOLD_QWEN = {name: value for name, value in QWEN3_5.items() if name != "full_attention_interval"}
#: Names of sizes that a family does not take from those that others share.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
NO_SIZES: Mapping[str, Any] = dict.fromkeys(_SIZES)
MAMBA: Mapping[str, Any] = {
    **FOUR,
    **dict.fromkeys(("head_dim", "num_attention_heads", "num_key_value_heads")),
    "state_size": 16,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
}
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "afm7": {
        **NO_SIZES,
        "head_dim": None,
        "hidden_dim": 64,
        "num_layers": 6,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "baichuan_m1": {
        **FOUR,
        "tie_word_embeddings": False,
        "head_dim": None,
        "conv_window": 2,
        "sliding_window": 20,
        "sliding_window_layers": [1, 3],
        "num_swa_attention_heads": 2,
        "num_swa_key_value_heads": 2,
        "num_key_value_heads": 1,
    },
    "bailing_moe_v3-rest": {
        "model_type": "bailing_moe_v3",
        **PIPELINE["bailing_moe_v3"],
        "num_hidden_layers": 9,
        "layer_group_size": 4,
    },
    "dbrx": {
        **NO_SIZES,
        "head_dim": None,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v41": {
        **FOUR,
        "num_key_value_heads": None,
        "head_dim": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 3],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 4,
        "hc_mult": 2,
    },
    "exaone": {"num_hidden_layers": None, "num_layers": 4, "layer_norm_epsilon": 1e-5},
    "gear": {
        **FOUR,
        "layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
        "sliding_window": 8,
    },
    "gemma3n": {
        "text_config": {
            **GEMMA,
            "num_hidden_layers": 6,
            "layer_types": [*WINDOWS, *WINDOWS[:2]],
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.0] * 6,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_num_inputs": 2,
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 10000.0,
            "vocab_size_per_layer_input": 512,
        }
    },
    "gpt2": {**GPT, "n_ctx": 512},
    "gpt_bigcode": {**GPT, "n_inner": 128},
    "gpt_neox": {
        "layer_norm_eps": 1e-5,
        "num_key_value_heads": None,
        "rotary_emb_base": 1e4,
        "rotary_pct": 0.5,
    },
    "gptj": {**GPT, "rotary_dim": 8},
    "granitemoehybrid-rare": {
        "model_type": "granitemoehybrid",
        **PIPELINE["granitemoehybrid"],
        **FOUR,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
    },
    "helium": {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    "jamba-listed": {
        "model_type": "jamba",
        **PIPELINE["jamba"],
        **FOUR,
        "layers_block_type": ["mamba", "mamba", "attention", "mamba"],
    },
    "jamba-rare": {
        "model_type": "jamba",
        **PIPELINE["jamba"],
        "num_hidden_layers": 14,
        "attn_layer_period": 14,
        "attn_layer_offset": 7,
    },
    "kimi_k3": {
        "text_config": {
            **PIPELINE["kimi_linear"],
            **FOUR,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
            "attn_res_block_size": 2,
            "linear_attn_config": {
                **PIPELINE["kimi_linear"]["linear_attn_config"],
                "kda_layers": [1, 2, 4],
                "gate_lower_bound": -5.0,
            },
        }
    },
    "lfm2-numbered": {"model_type": "lfm2", **FOUR, **_UNLISTED_LFM, "full_attn_idxs": [1]},
    "minicpm3": {
        **LATENT,
        "dim_model_base": 32,
        "head_dim": None,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 8,
            "short_factor": [1.0] * 8,
            "original_max_position_embeddings": 512,
        },
    },
    "mamba": {**MAMBA, "time_step_rank": 8},
    "mamba2": {
        **MAMBA,
        "head_dim": 32,
        "num_heads": 4,
        "layer_norm_epsilon": 1e-5,
        "n_groups": 1,
        "time_step_limit": [0.0, 10.0],
        "time_step_rank": 8,
    },
    "mimo_v2_flash-wide": {
        "model_type": "mimo_v2_flash",
        **FOUR,
        **PIPELINE["mimo_v2_flash"],
        "sliding_window": 8,
        "swa_num_key_value_heads": 4,
        "head_dim": 24,
        "swa_head_dim": 24,
    },
    "nanbeige": {"num_loops": 2},
    "nanochat": {"head_dim": None, "num_key_value_heads": 4},
    "nemotron_h-letters": {
        "model_type": "nemotron_h",
        **PIPELINE["nemotron_h"],
        "hybrid_override_pattern": "M*-M",
    },
    "nemotron_h-words": {
        "model_type": "nemotron_h",
        **PIPELINE["nemotron_h"],
        "hybrid_override_pattern": None,
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
    },
    "olmo_hybrid": {**FOUR, **OLMO_HYBRID},
    "olmo_hybrid-listed": {
        "model_type": "olmo_hybrid",
        **FOUR,
        **OLMO_HYBRID,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    },
    "openelm": {
        **NO_SIZES,
        "model_dim": 64,
        "num_transformer_layers": 4,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4, 8, 8],
        "num_kv_heads": [1, 1, 2, 2],
        "ffn_multipliers": [1.0, 1.0, 2.0, 2.0],
    },
    "phi3small": {
        "vocab_size": 100352,
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 128,
        "gegelu_limit": 20.0,
        "head_dim": None,
        "layer_norm_epsilon": 1e-5,
    },
    "pixtral": {"text_config": TEXT},
    "plamo": {"n_shared_head": 2, "num_key_value_heads": None, "head_dim": None},
    "plamo2": {**FOUR, **PLAMO2},
    "plamo2-rare": {"model_type": "plamo2", "num_hidden_layers": 8, **PLAMO2, "mamba_step": 4},
    "plamo2-without": {"model_type": "plamo2", **FOUR, **PLAMO2, "mamba_enabled": False},
    "plamo3": {**FOUR, "sliding_window_pattern": 2, "window_size": 8},
    "qwen": {"head_dim": None, "intermediate_size": 256, "kv_channels": 16, "num_key_value_heads": None},
    "qwen2_vl": {"text_config": {**TEXT, "model_type": "qwen2"}},
    "qwen3_5-untold": {"model_type": "qwen3_5", "text_config": {**_UNTOLD_QWEN, **FOUR}},
    "recurrent_gemma": {**RECURRENT_GEMMA, "block_types": ["recurrent", "recurrent", "attention"]},
    "recurrent_gemma-2b": {
        "model_type": "recurrent_gemma",
        **RECURRENT_GEMMA,
        "_block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        **FOUR,
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "spark2_5": {
        **FOUR,
        "layer_types": WINDOWS,
        "sliding_window": 8,
        "rope_parameters": {kind: {"rope_theta": 1e4} for kind in set(WINDOWS)},
    },
    "talkie": {"num_key_value_heads": None},
}
"""Folder name -> what `write_model` takes, as above."""

"""Configurations of tiny models, one for each family: as little as still has every kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
}

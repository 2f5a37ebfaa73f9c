"""Models that can be planned for without their files: the published config.json of each. Pure data.

Only the fields that count are here. The quantizations are those of the usual MLX conversions. Where a
conversion quantizes module by module, one module of each kind is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def _affine(bits: int, **modules: object) -> Config:
    return {"quantization": {"group_size": 64, "bits": bits, **modules}}


_LLAMA_8B: Config = {
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
_QWEN3_235B: Config = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
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
    "n_group": 8,
    "topk_group": 4,
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
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
}
#: Kimi K2 Thinking was trained so that its routed experts have 4 bits; everything else has 16.
_PLAIN_BUT_EXPERTS: Config = {
    "quantization": {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": False,
        "model.layers.0.mlp.up_proj": False,
        "model.layers.1.self_attn.o_proj": False,
        "model.layers.1.self_attn.q_a_proj": False,
        "model.layers.1.mlp.shared_experts.up_proj": False,
        "lm_head": False,
    }
}
_LLAMA4_SCOUT: Config = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
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
    "model_type": "glm4_moe",
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
    "n_group": 1,
    "vocab_size": 151552,
    "max_position_embeddings": 202752,
}
_GLM_5: Config = {
    "model_type": "glm_moe_dsa",
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
    "n_group": 1,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
}
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
    "quantization": {
        "group_size": 32,
        "bits": 4,
        "mode": "mxfp4",
        "model.embed_tokens": {"group_size": 64, "bits": 8, "mode": "affine"},
        "model.layers.0.self_attn.q_proj": {"group_size": 64, "bits": 8, "mode": "affine"},
        "lm_head": {"group_size": 64, "bits": 8, "mode": "affine"},
    },
}

#: Configurations by the names that `mlxtp plan --model` accepts.
KNOWN: Mapping[str, Config] = {
    "llama-3.1-8b-4bit": {**_LLAMA_8B, **_affine(4)},
    "llama-3.1-8b-8bit": {**_LLAMA_8B, **_affine(8)},
    "llama-3.1-8b-bf16": _LLAMA_8B,
    "llama-3.3-70b-4bit": {**_LLAMA_70B, **_affine(4)},
    "llama-3.3-70b-8bit": {**_LLAMA_70B, **_affine(8)},
    "llama-3.3-70b-bf16": _LLAMA_70B,
    "qwen3.6-27b-4bit": {**_QWEN_27B, **_affine(4)},
    "qwen3.6-27b-8bit": {**_QWEN_27B, **_affine(8)},
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

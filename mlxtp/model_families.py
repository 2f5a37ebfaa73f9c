"""Families of models by mlx-lm's names, and the ways in which ranks can share them. Pure."""

from __future__ import annotations

#: Other names of families, by mlx-lm's own table. A test compares the two tables.
ALSO_CALLED = {
    "mistral": "llama", "iquestcoder": "llama", "xverse": "llama", "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3", "minimax_m2": "minimax", "deepseek_v41_text": "deepseek_v41",
    "llava": "mistral3", "phi-msft": "phixtral", "falcon_mamba": "mamba", "qwen2_5_vl": "qwen2_vl",
    "gemma4_unified": "gemma4",
}  # fmt: skip

#: Families that mlx-lm itself can divide among ranks. A test compares this with the installed mlx-lm.
DIVIDED_BY_MLX_LM = frozenset(
    ("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "exaone_moe", "glm4_moe", "glm4_moe_lite",
     "glm_moe_dsa", "gpt_oss", "iquestloopcoder", "kimi_k25", "kimi_k3", "llama", "longcat_flash",
     "longcat_flash_ngram", "minimax", "minimax_m3_vl", "ministral3", "mistral4", "muse_spark",
     "prism_hadamard_qwen35", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "solar_open",
     "step3p5")
)  # fmt: skip
#: Families that `engine/families/` divides. A test compares this with its table.
DIVIDED_HERE = frozenset(
    ("cohere2", "dots1", "ernie4_5_moe", "exaone4", "gemma3", "gemma3_text", "gemma4", "gemma4_text",
     "granite", "granitemoe", "kimi_vl", "llama4", "llama4_text", "mistral3", "mixtral", "nemotron_h",
     "olmo2", "olmo3", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "seed_oss")
)  # fmt: skip
TENSOR_FAMILIES = DIVIDED_BY_MLX_LM | DIVIDED_HERE

#: Families that hand over to another family's `shard`, which copies no KV heads.
_HANDED_OVER = frozenset({"kimi_vl", "mistral3", "qwen3_vl", "qwen3_vl_moe"})
#: Families in which several ranks have the same KV head if there are fewer heads than ranks.
COPIES_KV_HEADS = frozenset({"qwen3_5", "qwen3_5_moe"}) | (DIVIDED_HERE - _HANDED_OVER)
#: Families whose few dense MLPs stay whole on each rank where ranks cannot share them, beside experts.
KEEPS_MLP_WHOLE = frozenset({"deepseek_v2", "glm4_moe"})

#: mlx-lm's modules whose layers a test has cut into stages, with the same text as one rank's.
PIPELINE_FAMILIES = frozenset(
    ("afmoe", "apertus", "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "bailing_moe_v3", "cohere",
     "cohere2", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5", "ernie4_5_moe",
     "exaone4", "exaone_moe", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4",
     "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granite",
     "granitemoe", "granitemoehybrid", "hunyuan", "hunyuan_v1_dense", "internlm2", "internlm3", "jamba",
     "kimi_k25", "kimi_linear", "kimi_vl", "Klear", "laguna", "lfm2", "lfm2_moe", "llama", "llama4",
     "llama4_text", "longcat_flash", "longcat_flash_ngram", "mellum", "mimo", "mimo_v2_flash", "minicpm",
     "minimax", "minimax_m3_vl", "ministral3", "mistral3", "mistral4", "mixtral", "muse_glimmer", "nemotron",
     "nemotron_h", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
     "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3",
     "solar_open", "stablelm", "starcoder2", "step3p5", "telechat3", "youtu_llm")
)  # fmt: skip

_NEXT_N = "model.layers.{}."  # behind the model's own layers, whose number it has
#: Where the tensors of an MTP head begin, by the family. Only the first head of several is used.
MTP_PLACES = {
    "deepseek_v3": _NEXT_N, "glm4_moe": _NEXT_N, "glm4_moe_lite": _NEXT_N, "llama": _NEXT_N,
    "mimo": "model.mtp_layers.0.",
}  # fmt: skip

"""Families of models that can run as a pipeline."""

from __future__ import annotations

#: mlx-lm's modules whose layers a test has cut into stages, with the same text as one rank's.
PIPELINE_FAMILIES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "kimi_k25",
        "llama",
        "longcat_flash",
        "longcat_flash_ngram",
        "minimax",
        "ministral3",
        "mistral4",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
    }
)

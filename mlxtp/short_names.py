"""Short names of models, from Ollama and exo, and the repositories that they stand for. Pure.

A name without a size stands for Ollama's default size. Exact names win: a short name counts only if no folder
and no deployment has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

_OWNER = "mlx-community"
#: By repository of that owner. Names with a colon are Ollama's, the others exo's.
_NAMES: Mapping[str, str] = {
    "Llama-3.2-1B-Instruct-4bit": "llama3.2:1b llama-3.2-1b",
    "Llama-3.2-3B-Instruct-4bit": "llama3.2 llama3.2:3b llama-3.2-3b",
    "Llama-3.2-3B-Instruct-8bit": "llama-3.2-3b-8bit",
    "Meta-Llama-3.1-8B-Instruct-4bit": "llama3.1 llama3.1:8b llama-3.1-8b",
    "Meta-Llama-3.1-8B-Instruct-8bit": "llama-3.1-8b-8bit",
    "Meta-Llama-3.1-8B-Instruct-bf16": "llama-3.1-8b-bf16",
    "Meta-Llama-3.1-70B-Instruct-4bit": "llama3.1:70b llama-3.1-70b",
    "Llama-3.3-70B-Instruct-4bit": "llama3.3 llama3.3:70b llama-3.3-70b",
    "Llama-3.3-70B-Instruct-8bit": "llama-3.3-70b-8bit",
    "Qwen3-0.6B-4bit": "qwen3:0.6b qwen3-0.6b",
    "Qwen3-0.6B-8bit": "qwen3-0.6b-8bit",
    "Qwen3-1.7B-4bit": "qwen3:1.7b",
    "Qwen3-4B-4bit": "qwen3:4b",
    "Qwen3-8B-4bit": "qwen3 qwen3:8b",
    "Qwen3-14B-4bit": "qwen3:14b",
    "Qwen3-32B-4bit": "qwen3:32b",
    "Qwen3-30B-A3B-4bit": "qwen3:30b qwen3-30b",
    "Qwen3-30B-A3B-8bit": "qwen3-30b-8bit",
    "Qwen3-235B-A22B-Instruct-2507-4bit": "qwen3-235b-a22b-4bit",
    "Qwen3-235B-A22B-Instruct-2507-8bit": "qwen3-235b-a22b-8bit",
    "Qwen3-Next-80B-A3B-Instruct-4bit": "qwen3-80b-a3b-4bit",
    "Qwen3-Next-80B-A3B-Instruct-8bit": "qwen3-80b-a3b-8bit",
    "Qwen3-Coder-30B-A3B-Instruct-4bit": "qwen3-coder qwen3-coder:30b",
    "Qwen3-Coder-480B-A35B-Instruct-4bit": "qwen3-coder:480b qwen3-coder-480b-a35b-4bit",
    "Qwen3-Coder-480B-A35B-Instruct-8bit": "qwen3-coder-480b-a35b-8bit",
    "Qwen3.5-9B-4bit": "qwen3.5 qwen3.5:9b",
    "Qwen3.5-27B-4bit": "qwen3.5:27b",
    "Qwen3.5-35B-A3B-4bit": "qwen3.5:35b",
    "Qwen3.6-27B-4bit": "qwen3.6:27b",
    "Qwen2.5-Coder-7B-Instruct-4bit": "qwen2.5-coder qwen2.5-coder:7b qwen-2.5-coder-7b",
    "gpt-oss-20b-MXFP4-Q8": "gpt-oss gpt-oss:20b gpt-oss-20b-mxfp4-q8",
    "gpt-oss-120b-MXFP4-Q8": "gpt-oss:120b gpt-oss-120b-mxfp4-q8",
    "gemma-3-1b-it-4bit": "gemma3:1b",
    "gemma-3-4b-it-4bit": "gemma3 gemma3:4b",
    "gemma-3-12b-it-4bit": "gemma3:12b",
    "gemma-3-27b-it-4bit": "gemma3:27b",
    "gemma-4-e2b-it-4bit": "gemma4:e2b",
    "gemma-4-e4b-it-4bit": "gemma4 gemma4:e4b",
    "gemma-4-26b-a4b-it-4bit": "gemma4:26b",
    "gemma-4-31b-it-4bit": "gemma4:31b",
    "Mistral-7B-Instruct-v0.3-4bit": "mistral mistral:7b",
    "DeepSeek-R1-0528-Qwen3-8B-4bit": "deepseek-r1 deepseek-r1:8b",
    "DeepSeek-V3.1-4bit": "deepseek-v3.1 deepseek-v3.1:671b deepseek-v3.1-4bit",
    "DeepSeek-V3.1-8bit": "deepseek-v3.1-8bit",
    "GLM-4.7-Flash-4bit": "glm-4.7-flash glm-4.7-flash-4bit",
    "Kimi-K2-Thinking": "kimi-k2-thinking",
}
SHORT_NAMES: Mapping[str, str] = {
    name: f"{_OWNER}/{repository}" for repository, names in _NAMES.items() for name in names.split()
}


def stands_for(name: str | None) -> str:
    """Return the OWNER/NAME of a short name, in any case, with or without :latest; "" for other names."""
    return SHORT_NAMES.get((name or "").lower().removesuffix(":latest"), "")


def short_for(name: str) -> str:
    return next((short for short, whole in SHORT_NAMES.items() if whole == name), "")


def near(name: str) -> str:
    """Return up to three short names with a similar spelling, separated by commas, or ""."""
    return ", ".join(get_close_matches(name.lower()[:100], SHORT_NAMES))

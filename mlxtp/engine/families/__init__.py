"""Division of layers among ranks for families without a `shard` in mlx-lm: one small function each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..group import Group
from . import dense, experts, gemma4, handed_over, llama4, nemotron_h, qwen3_next

#: A model and the group of ranks; divides the layers in place. Nothing is evaluated, and no collective runs.
Divide = Callable[[Any, Group], None]

#: By mlx-lm's names of families. Their sizes are checked before, see `model_config.dimensions_of`.
DIVIDE: Mapping[str, Divide] = {
    "cohere2": dense.divide,
    "dots1": experts.divide,
    "ernie4_5_moe": experts.divide,
    "exaone4": dense.divide,
    "gemma3": dense.divide,
    "gemma3_text": dense.divide,
    "gemma4": gemma4.divide,
    "gemma4_text": gemma4.divide,
    "granite": dense.divide,
    "granitemoe": experts.divide,
    "kimi_vl": handed_over.divide_deepseek,
    "llama4": llama4.divide,
    "llama4_text": llama4.divide,
    "mistral3": handed_over.divide,
    "mixtral": experts.divide,
    "nemotron_h": nemotron_h.divide,
    "olmo2": dense.divide,
    "olmo3": dense.divide,
    "qwen3_next": qwen3_next.divide,
    "qwen3_vl": handed_over.divide,
    "qwen3_vl_moe": handed_over.divide,
    "seed_oss": dense.divide,
}


def divide_layers(model: Any, group: Group) -> None:
    """Divide the layers of `model` among the ranks, by mlx-lm's `shard` or the family's function here."""
    family = type(model).__module__.rpartition(".")[2]
    if family in DIVIDE:
        DIVIDE[family](model, group)
    else:
        model.shard(group.handle)

"""Families like Llama: cohere2, exaone4, gemma3, granite, olmo2, olmo3, seed_oss."""

from __future__ import annotations

from typing import Any

from ..group import Group
from .parts import SharedNorm, attention, copy_heads, projections


def divide(model: Any, group: Group) -> None:
    """Divide attentions by heads and MLPs by their width.

    The norms of queries and keys are over one head each, but in olmo2 and olmo3 over all heads.
    """
    for layer in model.layers:
        part = layer.self_attn
        if _over_all_heads(part):
            copy_heads(part.k_norm, part.k_norm.weight.size // part.head_dim, group)
            part.q_norm, part.k_norm = SharedNorm(part.q_norm, group), SharedNorm(part.k_norm, group)
        attention(part, group)
        projections(layer.mlp, group)


def _over_all_heads(part: Any) -> bool:
    return "q_norm" in part and part.q_norm.weight.size == part.q_proj.weight.shape[0]

"""Families whose layers are an attention and experts: dots1, ernie4_5_moe, granitemoe, mixtral."""

from __future__ import annotations

from typing import Any

from ..group import Group
from .parts import attention, experts, projections, summed


def divide(model: Any, group: Group) -> None:
    """Divide attentions by heads, MLPs and each expert by their width. Every rank has the whole routers."""
    for layer in model.layers:
        attention(layer.self_attn, group)
        part = layer.block_sparse_moe if "block_sparse_moe" in layer else layer.mlp
        routed = next((part[name] for name in ("switch_mlp", "experts") if name in part), None)
        if routed is None:
            projections(part, group)
            continue
        experts(routed, group)
        if "shared_experts" in part:
            experts(part.shared_experts, group)
        summed(part, group)

"""Families whose layers are an attention and a mixture of experts: granitemoe, mixtral."""

from __future__ import annotations

from typing import Any

from ..group import Group
from .parts import attention, experts, summed


def divide(model: Any, group: Group) -> None:
    """Divide attentions by heads and each expert by its width. Every rank has the whole router."""
    for layer in model.layers:
        attention(layer.self_attn, group)
        experts(layer.block_sparse_moe.switch_mlp, group)
        summed(layer.block_sparse_moe, group)

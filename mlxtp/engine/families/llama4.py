"""Llama 4."""

from __future__ import annotations

from typing import Any

from ..group import Group
from .parts import attention, experts, projections, summed


def divide(model: Any, group: Group) -> None:
    """Divide attentions by heads, MLPs and each expert by their width. Every rank has the whole routers."""
    for layer in model.layers:
        attention(layer.self_attn, group)
        part = layer.feed_forward
        if "experts" in part:
            experts(part.experts, group)
            experts(part.shared_expert, group)
            summed(part, group)
        else:
            projections(part, group)

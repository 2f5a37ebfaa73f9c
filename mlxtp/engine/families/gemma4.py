"""Gemma 4."""

from __future__ import annotations

from typing import Any

from ..group import Group
from .parts import attention, experts, projections, summed


def divide(model: Any, group: Group) -> None:
    """Divide attentions by heads, MLPs and each expert by their width.

    MLP and experts have norms of their own behind them, so each is added up. Every rank has the whole
    routers, and whole embeddings and projections of the input of single layers (E2B, E4B).
    """
    for layer in model.layers:
        attention(layer.self_attn, group)
        projections(layer.mlp, group)
        if layer.enable_moe:
            experts(layer.experts.switch_glu, group)
            summed(layer.experts, group)

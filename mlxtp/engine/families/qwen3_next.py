"""Qwen3-Next: gated linear attention in most layers, and a mixture of experts with a shared one."""

from __future__ import annotations

from typing import Any

from ..group import Group
from .parts import attention, experts, own_rows, projections, shard_segments


def divide(model: Any, group: Group) -> None:
    """Divide both kinds of attention by heads, MLPs and each expert by their width."""
    for layer in model.layers:
        if layer.is_linear:
            _linear(layer.linear_attn, group)
        else:
            attention(layer.self_attn, group)
        if "switch_mlp" in layer.mlp:
            layer.mlp.sharding_group = group.handle  # it adds up by itself
            experts(layer.mlp.switch_mlp, group)
            experts(layer.mlp.shared_expert, group)
        else:
            projections(layer.mlp, group)


def _linear(part: Any, group: Group) -> None:
    """Divide by key heads. Each has its queries, keys, values and gates in one run of rows.

    The convolution has the queries of all heads first, then all keys, then all values.
    """
    projections(part, group, ("in_proj_qkvz", "in_proj_ba"), "out_proj")
    shard_segments(part.conv1d, 0, (part.key_dim, 2 * part.key_dim), group)
    part.conv1d.groups //= group.size
    for name in ("dt_bias", "A_log"):
        part[name] = own_rows(part[name], group)
    for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"):
        setattr(part, name, getattr(part, name) // group.size)

"""Nemotron-H: each layer is a Mamba mixer, an attention, an MLP or a mixture of experts."""

from __future__ import annotations

from typing import Any

from ..group import Group
from .parts import attention, experts, own_rows, projections, shard_segments, share_bias, summed


def divide(model: Any, group: Group) -> None:
    """Divide Mamba mixers by groups of heads, attentions by heads, MLPs and each expert by their width."""
    for layer in model.layers:
        part = layer.mixer
        if layer.block_type == "M":
            _mamba(part, group)
        elif layer.block_type == "*":
            attention(part, group)
        elif layer.block_type == "-":
            projections(part, group, ("up_proj",))
        else:
            _experts(part, group)


def _mamba(part: Any, group: Group) -> None:
    """Divide by groups: the heads of a group share one B and one C, and are normed together.

    The input projection has gates, inputs, all B, all C and the steps of all heads, one after the other.
    """
    inner, states = part.intermediate_size, part.n_groups * part.ssm_state_size
    convolved = (inner, inner + states)
    ends = (inner, *(inner + end for end in convolved), inner + part.conv_dim)
    shard_segments(part.in_proj, 0, ends, group)
    shard_segments(part.conv1d, 0, convolved, group)
    part.conv1d.groups //= group.size
    for name in ("dt_bias", "A_log", "D"):
        part[name] = own_rows(part[name], group)
    part.norm.weight = own_rows(part.norm.weight, group)
    projections(part, group, (), "out_proj")
    for name in ("num_heads", "intermediate_size", "n_groups", "conv_dim"):
        setattr(part, name, getattr(part, name) // group.size)


def _experts(part: Any, group: Group) -> None:
    """Divide each expert by its width. Projections to and from a smaller size are on every rank whole."""
    experts(part.switch_mlp, group, ("fc1",), "fc2")
    if "fc2_latent_proj" in part:
        share_bias(part.fc2_latent_proj, group)
    if "shared_experts" in part:
        experts(part.shared_experts, group, ("up_proj",))
    summed(part, group)

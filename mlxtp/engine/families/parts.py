"""Parts of layers, each divided among the ranks in mlx-lm's way: a projection into more numbers by its rows,
one back from them by its columns, and one sum of all ranks' results behind it.

Shapes of weights are [out, in], and [experts, out, in] for the experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.utils import tree_map

from ..group import Group

_HEADS = ("n_heads", "num_heads", "num_attention_heads")
_KV_HEADS = ("n_kv_heads", "num_key_value_heads")
_GATED = ("gate_proj", "up_proj")


def attention(part: Any, group: Group) -> None:
    """Divide an attention by heads. If there are fewer KV heads than ranks, several ranks have the same one.

    Projections that a layer lacks, because it reads another one's keys or takes keys as values, are left out.
    """
    heads, kv_heads = (next(name for name in names if hasattr(part, name)) for names in (_HEADS, _KV_HEADS))
    count = getattr(part, kv_heads)
    for name in ("k_proj", "v_proj"):
        if name in part:
            copy_heads(part[name], count, group)
    into = [name for name in ("q_proj", "k_proj", "v_proj") if name in part]
    projections(part, group, into, "o_proj")
    setattr(part, heads, getattr(part, heads) // group.size)
    setattr(part, kv_heads, max(1, count // group.size))


def copy_heads(module: Any, heads: int, group: Group) -> None:
    """Repeat each of a module's `heads` as often as ranks have the same one; its rows are by heads."""
    if group.size <= heads:
        return

    def repeated(weight: mx.array) -> mx.array:
        by_heads = weight.reshape(heads, -1, *weight.shape[1:])
        return mx.repeat(by_heads, group.size // heads, axis=0).reshape(-1, *weight.shape[1:])

    module.update(tree_map(repeated, module.parameters()))


def projections(part: Any, group: Group, into: Sequence[str] = _GATED, back: str = "down_proj") -> None:
    """Divide projections `into` more numbers and one `back`, which sums up; by default those of an MLP."""
    for name in into:
        part[name] = shard_linear(part[name], "all-to-sharded", group=group.handle)
    part[back] = shard_linear(part[back], "sharded-to-all", group=group.handle)


def experts(part: Any, group: Group, into: Sequence[str] = _GATED, back: str = "down_proj") -> None:
    """Divide every expert by its width, in place. Their results have to be added up: see `summed`."""
    for name in into:
        shard_inplace(part[name], "all-to-sharded", group=group.handle)
    shard_inplace(part[back], "sharded-to-all", group=group.handle)
    share_bias(part[back], group)


def share_bias(module: Any, group: Group) -> None:
    """Divide the bias of a module whose results are added up, so that the sum has it once."""
    if "bias" in module:
        module.bias = module.bias / group.size


def summed(part: Any, group: Group) -> None:
    """Make `part` return the sum of all ranks' results."""
    whole = type(part).__call__

    def call(module: Any, *args: Any, **kwargs: Any) -> mx.array:
        return group.total(whole(module, *args, **kwargs))

    change(part, call)


def own_rows(array: mx.array, group: Group) -> mx.array:
    """Return this rank's equal part of the first axis."""
    return mx.contiguous(mx.split(array, group.size)[group.rank])


def shard_segments(module: Any, axis: int, segments: Sequence[int], group: Group) -> None:
    """Divide each segment, along `axis` of all weights, in place. They begin at 0 and at `segments`."""
    shard_inplace(module, lambda _path, _weight: (axis, list(segments)), group=group.handle)


class SharedNorm(nn.Module):  # type: ignore[misc]  # mlx is untyped here
    """RMS norm over numbers of which each rank has an equal part, `weight` for its own. One small sum."""

    def __init__(self, norm: Any, group: Group) -> None:
        super().__init__()
        self.weight = own_rows(norm.weight, group)
        self._eps, self._group = norm.eps, group

    def __call__(self, x: mx.array) -> mx.array:
        """Norm this rank's numbers, [.., share] of any type -> the same shape and type."""
        wide = x.astype(mx.float32)
        squares = self._group.total(wide.square().sum(axis=-1, keepdims=True))
        mean = squares / (x.shape[-1] * self._group.size)
        return (wide * mx.rsqrt(mean + self._eps) * self.weight).astype(x.dtype)


def change(module: Any, call: Callable[..., Any], **methods: Callable[..., Any]) -> None:
    """Make `call` what the module does when it is called, and replace methods of it."""
    kind = type(module)
    module.__class__ = type(
        kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, **methods}
    )

"""KV caches as the items of a block on disk, and back. For the thread that computes with MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from .batch import Caches
from .block_store import Items, Raw, array_of
from .loader import leaves


def block_of(caches: Caches, start: int, end: int, *, truncatable: bool) -> Items:
    def part(value: Any) -> Any:
        if not isinstance(value, mx.array):
            return value
        return mx.contiguous(value[..., start:end, :] if truncatable else value)

    held = [(cache.keys, cache.values) if truncatable else cache.state for cache in leaves(caches)]
    items: Items = tree_flatten(tree_map(part, held))
    mx.async_eval([value for _, value in items if isinstance(value, mx.array)])
    return items


def caches_of(new: Caches, items: Items, length: int, *, truncatable: bool) -> Caches:
    """Fill `new` caches with blocks of `length` tokens. Raises ValueError, or others, for what misfits."""
    values = [(name, array_of(value) if isinstance(value, Raw) else value) for name, value in items]
    for cache, held in zip(leaves(new), tree_unflatten(values), strict=True):
        if truncatable:
            if any(array.shape[-2] != length for _, array in tree_flatten(held)):
                raise ValueError(f"blocks of other than {length} tokens")
            cache.keys, cache.values = held
            cache.offset = length
        else:
            cache.state = held
    return new

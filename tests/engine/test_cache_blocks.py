"""KV caches as items of a block on disk: what comes back is what went, bit by bit."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlxtp.engine.cache_blocks import block_of, caches_of


def filled(cache: KVCache | RotatingKVCache, seed: int) -> KVCache | RotatingKVCache:
    mx.random.seed(seed)
    cache.update_and_fetch(mx.random.normal((1, 2, 8, 4)), mx.random.normal((1, 2, 8, 4)))
    return cache


def test_a_part_of_each_layers_keys_and_values_comes_back_in_its_place() -> None:
    caches = [filled(KVCache(), seed) for seed in range(12)]
    items = block_of(caches, 2, 6, truncatable=True)
    back = caches_of([KVCache() for _ in caches], items, 4, truncatable=True)
    for cache, was in zip(back, caches, strict=True):
        assert cache.offset == 4
        assert mx.array_equal(cache.keys, was.keys[..., 2:6, :])
        assert mx.array_equal(cache.values, was.values[..., 2:6, :])


def test_windows_and_states_come_back_whole() -> None:
    window, state = filled(RotatingKVCache(max_size=16), 3), ArraysCache(2)
    state[0] = mx.random.normal((1, 3))
    items = block_of([window, state], 0, 8, truncatable=False)
    new, other = caches_of([RotatingKVCache(max_size=16), ArraysCache(2)], items, 8, truncatable=False)
    assert new.offset == window.offset
    assert mx.array_equal(new.keys, window.keys)
    assert mx.array_equal(new.values, window.values)
    assert mx.array_equal(other[0], state[0])
    assert other[1] is None

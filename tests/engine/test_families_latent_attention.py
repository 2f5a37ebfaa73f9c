"""Attention over compressed keys and values: several new tokens at the cost of as many single ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from mlx_lm.models.mla import MultiLinear
from mlx_lm.utils import load_model

from mlxtp.engine.families import attend_to_latents, score_bytes
from mlxtp.engine.group import LoneGroup
from mlxtp.engine.loader import load
from mlxtp.engine.steps import LEAST, within

from .families import FAMILIES, OTHERS, OWN, PIPELINE
from .small_models import write_model

#: Modules of mlx-lm with such an attention of their own.
MODULES = sorted(
    path.stem for path in Path(mlx_lm.models.__path__[0]).glob("*.py") if "self.embed_q(" in path.read_text()
)
PROMPT, NEW = list(range(3, 24)), [5, 9, 2]


class Masked(KVCache):  # type: ignore[misc]  # mlx-lm is untyped here
    """A cache with an array as mask, as rows of a batch have."""

    def make_mask(self, count: int, **_: object) -> mx.array:
        return create_causal_mask(count, self.offset)


def caches_of(model: Any) -> list[Any]:
    def masked(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            cache.caches = tuple(masked(each) for each in cache.caches)
        return Masked() if type(cache) is KVCache else cache

    return [masked(cache) for cache in make_prompt_cache(model)]


@pytest.fixture
def decompressed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what was computed into keys of all heads."""
    shapes: list[tuple[int, ...]] = []
    call = MultiLinear.__call__

    def counting(part: Any, x: mx.array, transpose: bool = True) -> mx.array:
        if not transpose:
            shapes.append(x.shape)
        return call(part, x, transpose=transpose)

    monkeypatch.setattr(MultiLinear, "__call__", counting)
    return shapes


@pytest.mark.parametrize("family", MODULES)
def test_several_tokens_give_what_mlx_lm_computes_without_keys_of_all_heads(
    family: str, decompressed: list[tuple[int, ...]], tmp_path: Path
) -> None:
    config = next(each[family] for each in (FAMILIES, PIPELINE, OWN, OTHERS) if family in each)
    folder = write_model(tmp_path / family, model_type=family, **config)
    model, _ = load_model(folder)

    def logits() -> mx.array:
        caches = caches_of(model)
        model(mx.array([PROMPT]), cache=caches)
        decompressed.clear()
        return model(mx.array([NEW]), cache=caches)

    expected = logits()
    assert decompressed, "mlx-lm's own code does not need this any longer"
    attend_to_latents(model)
    found = logits()
    assert not decompressed
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-3, atol=1e-3)


def test_many_tokens_are_computed_as_by_mlx_lm(decompressed: list[tuple[int, ...]], tmp_path: Path) -> None:
    """From a width on, their scores over compressed numbers take more products than the keys."""
    folder = write_model(tmp_path / "wide", model_type="deepseek_v3", **FAMILIES["deepseek_v3"])
    model = load(folder, LoneGroup(), lambda: None).model
    width = model.layers[0].self_attn.latent_width
    assert width == 32 * (16 + 16) // (2 * 32 - (16 + 16))
    for count, keys in ((width, False), (width + 1, True)):
        decompressed.clear()
        model(mx.array([[1] * count]), cache=caches_of(model))
        assert bool(decompressed) is keys


@pytest.mark.parametrize(
    ("family", "changes", "kv_bits", "scores"),
    [
        ("deepseek_v3", {}, 0, 4),
        ("deepseek_v32", {}, 0, 4 + 4),
        ("llama", {"head_dim": 64}, 0, 0),
        ("llama", {"head_dim": 64}, 8, 4),
        ("llama", {"head_dim": 256}, 0, 4),
    ],
)
def test_scores_of_a_layer_are_counted_where_no_kernel_goes_without(
    family: str, changes: dict[str, int], kv_bits: int, scores: int, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / family, model_type=family, **{**FAMILIES.get(family, {}), **changes})
    model, _ = load_model(folder)
    assert score_bytes(model, kv_bits) == 6 * scores


@given(st.integers(1, 1 << 30), st.integers(0, 1 << 20), st.integers(1, 4096))
def test_a_chunk_is_as_large_as_its_scores_allow(scores: int, offset: int, limit: int) -> None:
    found = within(scores, offset, limit)
    assert found <= limit
    assert found * (offset + found) <= scores or found <= LEAST
    assert found == limit or found * (offset + found) * 4 > scores - offset - 4096 or found <= LEAST
    assert found >= min(limit, LEAST)

"""The table of cache kinds, against mlx-lm's families and the caches that they make."""

from __future__ import annotations

from pathlib import Path

import mlx_lm.models
import pytest
from mlx_lm.utils import load_model

from mlxtp.engine.batch import CacheKind
from mlxtp.placement.model_shape import ALONE, CHUNKS, FED_AGAIN, LISTS, PLAIN, STATES, WINDOWS, traits_of

from ..engine.families import FAMILIES, OWN
from ..engine.small_models import write_model

MODELS = Path(next(iter(mlx_lm.models.__path__)))
ALL_FAMILIES = sorted(path.stem for path in MODELS.glob("*.py") if path.stem not in ("cache", "base"))


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_has_the_kind_of_the_caches_that_it_names(family: str) -> None:
    source = (MODELS / f"{family}.py").read_text()
    sliding = traits_of(family, ["sliding_attention"])
    if "ArraysCache(" in source:
        assert sliding in (STATES, FED_AGAIN)
    elif "ChunkedKVCache(" in source:
        assert sliding == CHUNKS
    elif "RotatingKVCache(" in source:
        assert sliding == WINDOWS
    elif "CacheList(" in source:
        assert sliding == LISTS


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_the_engine_finds_the_same_in_a_model(family: str, tmp_path: Path) -> None:
    config = {**FAMILIES, **OWN}[family]
    model, _ = load_model(write_model(tmp_path, model_type=family, **config))
    found, expected = CacheKind(model), traits_of(family, config.get("layer_types"))
    assert (found.cuttable, found.batches) == (expected.cuttable, ALONE not in expected.off)
    assert found.slots == (expected in (PLAIN, FED_AGAIN, WINDOWS)) == ("drafts" not in expected.off)

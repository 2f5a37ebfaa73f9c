"""Stages of a model, one after the other in this process: the same logits as the whole model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxtp.engine.loader import kv_sizes, make_cache
from mlxtp.engine.pipeline import Border, Stage, check_family, check_number, check_split, cut_into_stage
from mlxtp.errors import Code, GroupError, ModelError
from mlxtp.pipeline_families import PIPELINE_FAMILIES

from .families import FAMILIES
from .small_models import write_model

LAYERS = 4
PARTS = (slice(0, 9), slice(9, 20), slice(20, 21), slice(21, 22))  # two chunks and two steps


def some_model(folder: Path, family: str) -> Path:
    return write_model(folder, model_type=family, **{"num_hidden_layers": LAYERS, **FAMILIES[family]})


def logits(models: Sequence[Any], stages: Sequence[Stage | None]) -> np.ndarray:
    """Logits of the last token of each part, by way of all `models`."""
    tokens = mx.array([[(7 * i + 3) % 500 for i in range(22)]])
    caches = [make_cache(model) for model in models]
    found = []
    for part in PARTS:
        states = None
        for model, stage, cache in zip(models, stages, caches, strict=True):
            if stage is not None:
                stage.given = states
            states = model(tokens[:, part], cache=cache)
        assert states is not None
        found.append(states[:, -1])
    return np.array(mx.stack(found).astype(mx.float32))


class Place:
    """A rank's place in a group, without the group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def pipeline(folder: Path, split: Sequence[int]) -> tuple[list[Any], list[Stage | None]]:
    """The models of the ranks of a pipeline, the first stage first."""
    models, stages = [], []
    for rank in reversed(range(len(split))):
        model, _ = load_model(folder)
        stages.append(cut_into_stage(model, Place(rank, len(split)), split, 0).stage)  # type: ignore[arg-type]
        models.append(model)
    return models, list(stages)


def splits(layers: int) -> Iterator[tuple[int, ...]]:
    for ranks in (2, 3):
        yield from (split for split in product(range(1, layers), repeat=ranks) if sum(split) == layers)


@pytest.mark.parametrize("family", sorted(PIPELINE_FAMILIES))
def test_stages_compute_together_what_the_whole_model_does(tmp_path: Path, family: str) -> None:
    folder = some_model(tmp_path / "model", family)
    whole, _ = load_model(folder)
    expected = logits([whole], [None])
    assert expected.std() > 0.1
    for split in splits(len(whole.layers)):
        models, stages = pipeline(folder, split)
        np.testing.assert_allclose(logits(models, stages), expected, atol=1e-4, err_msg=str(split))


@pytest.mark.parametrize("tied", [True, False])
def test_each_weight_is_on_the_stages_that_need_it(tmp_path: Path, tied: bool) -> None:
    folder = write_model(tmp_path / "model", num_hidden_layers=4, tie_word_embeddings=tied)
    models, stages = pipeline(folder, (1, 1, 2))
    assert [stage.layers for stage in stages if stage] == [(0, 1), (2,), (3,)]
    names = [{name for name, _ in _weights(model)} for model in models]
    embeds = [any("embed_tokens" in name for name in found) for found in names]
    heads = [any("lm_head" in name for name in found) for found in names]
    assert embeds == [True, False, tied]
    assert heads == [False, False, not tied]
    whole, _ = load_model(folder)
    assert kv_sizes(models[0])[0] == kv_sizes(whole)[0] // 2


def _weights(model: Any) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return list(tree_flatten(model.parameters()))


@pytest.mark.parametrize("split", [(2, 2, 1), (2, 3), (4,)])
def test_a_wrong_split_is_refused_with_its_numbers(split: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="this model has 4 layers, and the group 2 ranks") as refused:
        check_split(split, 2, 4)
    assert refused.value.code is Code.MODEL_NOT_DIVISIBLE


def test_a_family_that_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'mamba' cannot run as a pipeline"):
        check_family("mamba")


# --- messages ---------------------------------------------------------------------------------------------


def test_hidden_states_of_another_forward_are_found() -> None:
    check_number(None, 5)
    check_number(mx.array([5], dtype=mx.uint32), 5)
    check_number(mx.array([1], dtype=mx.uint32), (1 << 32) + 1)
    with pytest.raises(GroupError, match="forward 4, not 5") as found:
        check_number(mx.array([4], dtype=mx.uint32), 5)
    assert found.value.code is Code.DESYNC


def test_without_a_stage_nothing_is_received_and_nothing_is_held() -> None:
    border = Border(None, None)  # type: ignore[arg-type]
    received = border.expect(1, 5)
    assert received.given is received.number is received.last is None
    array = mx.ones((3,)) * 2
    border.submit(1, received, array)
    border.flush()
    assert array.tolist() == [2, 2, 2]

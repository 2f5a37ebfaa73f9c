"""A model's way onto ranks that are proven."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest

from mlxtp.config import Settings
from mlxtp.errors import Code, ModelError
from mlxtp.groups.loading import ModelLoader, refusal
from mlxtp.groups.process_group import EpochGroup
from mlxtp.models.inspect import ModelSource
from mlxtp.placement.pipelines import counted_shares

from ..placement.made_up_models import layered

COMMIT = "a" * 40


@pytest.mark.parametrize(("ranks", "split"), [(1, ()), (2, ()), (2, (2, 1))])
def test_ranks_are_told_what_their_plan_counted_on(
    tmp_path: Path, ranks: int, split: tuple[int, ...]
) -> None:
    model = layered(num_hidden_layers=3)
    group = EpochGroup(1, ranks, "none", split=split)
    told = MagicMock(load=AsyncMock(side_effect=ModelError("seen", Code.MODEL_INVALID)), group=group)
    loader = ModelLoader(Settings(tmp_path, "", 0, 1, "tiny"), MagicMock())
    source = ModelSource("m", tmp_path, MagicMock(eos=(7,)), shape=model)
    with pytest.raises(ModelError, match="seen"):
        asyncio.run(loader.bring_up(told, source, print))
    told.load.assert_awaited_once_with(str(tmp_path), (7,), "", counted_shares(model, ranks, split))


@pytest.mark.parametrize(
    ("model", "folder", "ranks", "said", "words"),
    [
        (
            "org/m",
            COMMIT,
            2,
            f"rank 0: {COMMIT}: RuntimeError: [load_safetensors] no; rank 1: {COMMIT}: RuntimeError: "
            "[load_safetensors] no",
            "org/m cannot be loaded: RuntimeError: [load_safetensors] no; `mlxtp verify org/m` checks its "
            "files for damage",
        ),
        ("m", "m", 1, "rank 0: m: broken; also", "m cannot be loaded: broken; also"),
        ("m", "m", 2, "rank 0: m: one; rank 1: m: two", "m cannot be loaded: rank 0: one; rank 1: two"),
        ("m", "m", 2, "no rank said it", "m cannot be loaded: no rank said it"),
        ("m", "m", 2, "rank 1: m: broken", "m cannot be loaded: rank 1: broken"),
    ],
)
def test_a_refusal_names_the_model_as_it_was_asked_for_and_is_said_once(
    model: str, folder: str, ranks: int, said: str, words: str
) -> None:
    error = refusal(model, folder, ranks, ModelError(said, Code.MODEL_INVALID))
    assert (error.detail, error.code) == (words, Code.MODEL_INVALID)

"""A model's way onto ranks that are proven."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest

from mlxtp.config import Settings
from mlxtp.errors import Code, ModelError
from mlxtp.groups.loading import ModelLoader
from mlxtp.groups.process_group import EpochGroup
from mlxtp.models.inspect import ModelSource
from mlxtp.placement.pipelines import counted_shares

from ..placement.made_up_models import layered


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

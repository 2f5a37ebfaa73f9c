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


def test_forwards_at_the_end_of_a_load_may_compile_kernels(tmp_path: Path) -> None:
    """Rank 0 times its first ones there. On two cores a compiler took more than a step's time limit."""
    ranks = MagicMock(load=AsyncMock(side_effect=ModelError("seen", Code.MODEL_INVALID)))
    loader = ModelLoader(Settings(tmp_path, "", 0, 1, "tiny"), MagicMock())
    with pytest.raises(ModelError, match="seen"):
        asyncio.run(
            loader.bring_up(ranks, MagicMock(id="m", path=tmp_path, draft_path=None, shape=None), print)
        )
    called = [each[0] for each in ranks.mock_calls if each[0] == "load" or "warming_up()." in each[0]]
    assert called == ["watch.warming_up().__enter__", "load", "watch.warming_up().__exit__"]


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

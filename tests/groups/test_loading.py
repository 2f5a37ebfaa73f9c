"""A model's way onto ranks that are proven."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.config import Settings
from mlxtp.errors import Code, ModelError
from mlxtp.groups.loading import ModelLoader


def test_forwards_at_the_end_of_a_load_may_compile_kernels(tmp_path: Path) -> None:
    """Rank 0 times its first ones there. On two cores a compiler took more than a step's time limit."""
    excused: list[bool] = []

    @contextlib.contextmanager
    def warming_up() -> Iterator[None]:
        excused.append(True)
        yield
        excused.append(False)

    async def load(*_: str) -> None:
        assert excused == [True]
        raise ModelError("seen", Code.MODEL_INVALID)

    ranks: Any = SimpleNamespace(
        load=load, watch=SimpleNamespace(warming_up=warming_up), group=SimpleNamespace(world_size=1)
    )
    model: Any = SimpleNamespace(id="m", path=tmp_path, draft_path=None, text=SimpleNamespace(eos=()))
    loader = ModelLoader(Settings(tmp_path, "", 0, 1, "tiny"), cast(Any, None))
    with pytest.raises(ModelError, match="seen"):
        asyncio.run(loader.bring_up(ranks, model, lambda _: None))

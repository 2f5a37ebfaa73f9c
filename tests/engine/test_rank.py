"""Loading on one rank, with a pretended group and a pretended GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxtp.engine import rank as rank_module
from mlxtp.engine.desk import RequestDesk
from mlxtp.engine.group import CollectiveCounter, LoneGroup
from mlxtp.engine.loader import load
from mlxtp.engine.rank import Rank
from mlxtp.engine.status import Status
from mlxtp.wire.messages import Bootstrap, Init, Loaded, LoadShard

from .small_models import write_model


@pytest.mark.parametrize(
    ("ranks", "metal", "expected"), [(2, True, [(2, (1, 64))]), (2, False, []), (1, True, [])]
)
def test_on_metal_a_rank_of_several_runs_its_first_forwards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, metal: bool, expected: list[Any]
) -> None:
    """Of one token and of a chunk of a prompt, before the rank answers that it has the model."""
    ran: list[tuple[int, tuple[int, ...]]] = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(rank_module, "form", lambda *_, **__: SimpleNamespace(rank=0, size=ranks))
    monkeypatch.setattr(rank_module, "load", lambda path, _, progress: load(path, LoneGroup(), progress))
    monkeypatch.setattr(rank_module, "run_alone", lambda _, size, widths: ran.append((size, widths)))
    bootstrap = Bootstrap(0, ranks, "ring", (), "", bytes(32), 5.0, 5.0, 1)
    nothing: Any = None
    rank = Rank(bootstrap, 1, tmp_path, Status(), CollectiveCounter(), desk=RequestDesk(), exchange=nothing)
    rank.execute(Init())
    folder = write_model(tmp_path / "model")
    assert isinstance(rank.execute(LoadShard(str(folder), 64, (), kv_bytes=1 << 20)), Loaded)
    assert ran == expected

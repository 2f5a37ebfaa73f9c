"""MLX's errors of a Mac: which of them are a lack of memory, and which a GPU that took too long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxtp.engine import loader, worker
from mlxtp.engine.group import LoneGroup
from mlxtp.errors import Code, GroupError, MlxtpError, ModelError
from mlxtp.wire.messages import Error
from mlxtp.wire.session import LinkState

from ..mlx_errors import GPU_TIMEOUT, NEITHER, OUT_OF_MEMORY
from .small_models import write_model

RECORDED: list[tuple[Exception, Code | None]] = [
    (MemoryError(), Code.OUT_OF_MEMORY),
    *((RuntimeError(text), Code.OUT_OF_MEMORY) for text in OUT_OF_MEMORY),
    *((RuntimeError(text), Code.GPU_TIMEOUT) for text in GPU_TIMEOUT),
    *((RuntimeError(text), None) for text in NEITHER),
]


def raiser(error: BaseException) -> Any:
    def err(*_: object, **__: object) -> None:
        raise error

    return err


@pytest.mark.parametrize(("error", "code"), RECORDED, ids=str)
def test_a_rank_ends_with_the_code_of_what_mlx_raised(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: Code | None
) -> None:
    monkeypatch.setattr(worker, "run", raiser(error))
    reported: list[MlxtpError] = []
    process: Any = SimpleNamespace(rank=1, report=lambda reason: [reported.append(reason), 77][1])
    assert worker._run_or_fail(process, None, None) == (77, False)
    [reason] = reported
    assert reason.code is (code or Code.FORWARD_FAILED)
    assert str(error) in reason.detail
    memory = reason.code is Code.OUT_OF_MEMORY
    assert reason.detail.startswith("rank 1 ran out of memory: " if memory else "rank 1: ")


@pytest.mark.parametrize(("error", "code"), RECORDED, ids=str)
@pytest.mark.parametrize(
    "at", ["mlxtp.engine.sharding.shard", "mlxtp.engine.loader._evaluate", "mlx_lm.utils.load_model"]
)
def test_a_lack_of_memory_while_loading_is_no_broken_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, error: Exception, code: Code | None
) -> None:
    monkeypatch.setattr(at, raiser(error))
    with pytest.raises(MlxtpError) as refused:
        loader.load(write_model(tmp_path / "small"), LoneGroup(), lambda: None)
    assert type(refused.value) is (GroupError if code else ModelError)
    assert refused.value.code is (code or Code.MODEL_INVALID)
    assert str(error)[:100] in refused.value.detail
    assert ("MLX held 0." in refused.value.detail) == bool(code), "how much of it was there"


@pytest.mark.parametrize(
    ("told", "passed_on"),
    [("no such luck", "rank 1: no such luck"), ("rank 2 ran out of memory", "rank 2 ran out of memory")],
)
def test_an_error_that_is_passed_on_names_its_rank_once(
    monkeypatch: pytest.MonkeyPatch, told: str, passed_on: str
) -> None:
    def read(_link: Any, _rank: int, deliver: Callable[..., None], *_: Any) -> None:
        deliver(SimpleNamespace(message=Error(Code.FORM_FAILED, told, 0)))

    failed: list[MlxtpError] = []
    monkeypatch.setattr(worker, "read_in_background", read)
    process: Any = worker.RankProcessLinks.__new__(worker.RankProcessLinks)
    process._decode, process.mail, process.abort = [], SimpleNamespace(post=lambda *_: None), failed.append
    link: Any = SimpleNamespace(protocol=SimpleNamespace(state=LinkState.FAILED))
    process.listen_to_rank(link, 1)
    assert [error.detail for error in failed] == [passed_on]

"""Names of models by users: the embedded one, a folder, an id on the Hub (here a local server)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlxtp.config import embedded_model_path
from mlxtp.errors import Code, ModelError
from mlxtp.models.inspect import lasting_name, open_model

pytestmark = pytest.mark.slow


def test_names_that_cannot_be_a_model(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("tinny", "neither a folder nor an id on the Hub"),
        ("tinny", "in each --model-folder"),
        (str(tmp_path / "nowhere"), "neither a folder nor an id on the Hub"),
        (str(file), "is a file; a model is a folder"),
        (str(tmp_path / "empty"), "holds no config.json"),
        ("x" * 5000, "x is no folder: File name too long"),
        ("~nobody-here/model", "~nobody-here/model is no folder: Could not determine home directory"),
    ):
        with pytest.raises(ModelError) as refused:
            asyncio.run(open_model(name))
        assert refused.value.code is Code.MODEL_NOT_FOUND
        assert words in refused.value.detail
        assert len(refused.value.detail) < 400


def test_what_a_model_is_called_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("model", "./model", str(tmp_path / "model")):
        assert lasting_name(name) == str(tmp_path / "model")
    for name in ("tiny", "org/model", "nowhere"):
        assert lasting_name(name) == name
    for name in ("~nobody-here/model", "x" * 300):
        with pytest.raises(ModelError, match="is no folder"):
            lasting_name(name)


def test_a_draft_model_is_looked_for_like_any_other(tmp_path: Path) -> None:
    embedded, folder = (asyncio.run(open_model(name)) for name in ("tiny", str(embedded_model_path())))
    assert (
        (embedded.id, embedded.path) == (folder.id, folder.path) == ("tiny", embedded_model_path().resolve())
    )
    assert embedded.draft_path is None
    source = asyncio.run(open_model("tiny", str(embedded_model_path())))
    assert (source.id, source.draft_path) == ("tiny", embedded_model_path().resolve())
    for name, words in (
        ("tinny", "tinny is neither a folder nor an id on the Hub"),
        (str(tmp_path), f"{tmp_path} holds no config.json"),
    ):
        with pytest.raises(ModelError) as refused:
            asyncio.run(open_model("tiny", name))
        assert refused.value.code is Code.MODEL_NOT_FOUND
        assert words in refused.value.detail

"""Short names of models: the table, and the folders and models that come before it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from mlxtp.api import catalog
from mlxtp.api.backend import DeploymentHealth, ModelInfo
from mlxtp.errors import ModelError
from mlxtp.models.inspect import find_model, full_name
from mlxtp.short_names import _NAMES, SHORT_NAMES, near, short_for, stands_for

LLAMA = "mlx-community/Llama-3.2-3B-Instruct-4bit"


def test_each_short_name_stands_for_one_repository() -> None:
    names = [name for names in _NAMES.values() for name in names.split()]
    assert len(names) == len(SHORT_NAMES) > 60
    assert [name for name in names if not re.fullmatch(r"[a-z0-9.-]+(:[a-z0-9.]+)?", name)] == []
    assert [full for full in SHORT_NAMES.values() if not re.fullmatch(r"mlx-community/[\w.-]+", full)] == []
    bare = {name for name in names if ":" not in name and any(each.startswith(f"{name}:") for each in names)}
    for name in bare:  # a name without a size is one of the names with it
        sized = [SHORT_NAMES[each] for each in names if each.startswith(f"{name}:")]
        assert SHORT_NAMES[name] in sized, name
    assert {stands_for(short_for(full)) == full for full in SHORT_NAMES.values()} == {True}


@pytest.mark.parametrize(
    ("full", "names"),
    [
        (LLAMA, ("llama3.2", "llama3.2:3b", "llama3.2:latest", "llama-3.2-3B")),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", ("gpt-oss-20b-MXFP4-Q8",)),
        ("", ("llama3.2:7b", ":latest", "", None, LLAMA)),
    ],
)
def test_what_a_name_stands_for(full: str, names: tuple[str | None, ...]) -> None:
    assert {stands_for(name) for name in names} == {full}


def test_a_folder_comes_before_the_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert full_name("llama3.2:3b", (str(tmp_path),)) == LLAMA
    (tmp_path / "models" / "llama3.2:3b").mkdir(parents=True)
    (tmp_path / "models" / "llama3.2:3b" / "config.json").write_text("{}")
    assert full_name("llama3.2:3b", (str(tmp_path / "models"),)) == "llama3.2:3b"
    (tmp_path / "llama-3.2-1b").mkdir()
    assert full_name("llama-3.2-1b") == "llama-3.2-1b"
    assert [full_name(each) for each in ("tiny", "org/llama3.2", "")] == ["tiny", "org/llama3.2", ""]


def test_an_unknown_name_is_refused_with_those_that_are_near() -> None:
    assert near("llama3.2:7b").startswith("llama3.2:3b, llama3.2:1b")
    with pytest.raises(ModelError, match=r"nor a known short name; near are llama3\.2:3b, llama3\.2:1b"):
        asyncio.run(find_model("llama3.2:7b"))


def test_a_request_finds_a_model_by_its_short_name_after_exact_ones() -> None:
    llama = ModelInfo(LLAMA, ("default",), Path(), 100, 1, (1,), 50)
    folder = ModelInfo("llama3.2:3b", (), Path(), 100, 1, (1,), 50)
    assert catalog.find_model("llama3.2:3b", [folder, llama]) is folder
    assert catalog.find_model("llama-3.2-3b", [folder, llama]) is llama
    assert catalog.find_model("llama3.2:1b", [folder, llama]) is None
    coming = DeploymentHealth(LLAMA, LLAMA, "loading", True, False)
    unknown = DeploymentHealth("other", "", "loading", True, False)
    assert catalog.find_deployment("llama3.2", [], [unknown, coming]) is coming
    assert catalog.find_deployment("gpt-9", [], [unknown, coming]) is None
    words = catalog.unknown_model("llama3.2:3b", ["tiny"]).detail
    assert words.endswith(f"; it stands for {LLAMA}, which `mlxtp serve {LLAMA}` serves; available: tiny")

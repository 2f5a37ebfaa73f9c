"""Names of models by users: the embedded one, a folder, an id on the Hub (here a local server)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxtp.config import embedded_model_path
from mlxtp.errors import Code, ModelError
from mlxtp.models.inspect import lasting_name, open_model

from ..hub import Model, embedded, running_hub

pytestmark = pytest.mark.slow

REPO = "somebody/tiny-llama"
GATED = "somebody/gated-llama"


@pytest.fixture
def hub() -> Iterator[str]:
    with running_hub() as running:
        running.models = {REPO: Model(embedded()), GATED: Model(embedded(), gated=True)}
        yield running.url


def open_in_new_process(name: str, endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """huggingface_hub reads its endpoint once, at import: each case needs a process of its own."""
    program = (
        "import asyncio, sys\n"
        "from mlxtp.errors import MlxtpError\n"
        "from mlxtp.models.download import download\n"
        "from mlxtp.models.inspect import hub_folder, open_model\n"
        "try:\n"
        "    if hub_folder(sys.argv[1]) is None:\n"
        "        asyncio.run(download(sys.argv[1], lambda held, total: None))\n"
        "    model = asyncio.run(open_model(sys.argv[1]))\n"
        "    print(model.id, sorted(p.name for p in model.path.iterdir()))\n"
        "except MlxtpError as error:\n"
        "    sys.exit(f'{error.code}: {error.detail}')\n"
    )
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "PATH": "/usr/bin:/bin",
        "HOME": str(cache),
    }
    command = [sys.executable, "-c", program, name]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_a_model_comes_from_the_hub_and_is_then_on_this_machine(hub: str, tmp_path: Path) -> None:
    first = open_in_new_process(REPO, hub, tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(REPO)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert name in first.stdout

    offline = open_in_new_process(REPO, "http://127.0.0.1:9", tmp_path)
    assert offline.returncode == 0, offline.stderr
    assert offline.stdout == first.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nobody/nothing", "the Hub knows no such model"),
        (GATED, "it is gated; accept its terms"),
        (REPO, "it is not on this machine and the Hub cannot be reached"),
    ],
)
def test_what_the_hub_refuses_is_said_in_plain_words(hub: str, tmp_path: Path, name: str, words: str) -> None:
    refused = open_in_new_process(name, hub if name != REPO else "http://127.0.0.1:9", tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"model_not_found: cannot get {name}: ")
    assert words in refused.stderr


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

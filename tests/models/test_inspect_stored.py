"""Models on this Mac's disk, and what counts as complete: nothing is downloaded for a request."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from benchmarks.published_models import PUBLISHED
from mlxtp.config import embedded_model_path
from mlxtp.errors import ModelError
from mlxtp.model_config import Config
from mlxtp.models.hub_cache import lacks
from mlxtp.models.inspect import (
    check_servable,
    find_model,
    hub_folder,
    models_here,
    open_model,
    stored_models,
    stored_name,
)

from ..groups.scenes import run

COMMIT = "c0ffee" + 34 * "0"
NAME = "some-body/tiny--llama.v2"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub cache with one model, whose files are links to blobs, as the Hub's own client writes them."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    put(cache, NAME)
    return cache


def put(cache: Path, name: str) -> Path:
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "blobs").mkdir()
    for file in embedded_model_path().iterdir():
        shutil.copy(file, folder / "blobs" / file.name)
        (snapshot / file.name).symlink_to(os.path.relpath(folder / "blobs" / file.name, snapshot))
    return snapshot


def weights_of(folder: Path, *names: str) -> None:
    """An index that names these files of weights."""
    index = {"weight_map": {f"layer.{i}": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_what_the_hub_has_left_here_is_found_and_listed_with_its_context(cache: Path) -> None:
    snapshot = cache / "models--some-body--tiny--llama.v2" / "snapshots" / COMMIT
    assert hub_folder(NAME) == snapshot
    assert stored_name(NAME) == NAME
    config = snapshot / "config.json"
    told = json.loads(config.read_text())
    config.unlink()
    config.write_text(
        json.dumps({"model_type": "mistral", "text_config": told | {"max_position_embeddings": 1234}})
    )
    embedded, ours = stored_models()
    assert embedded.id == "tiny"
    assert embedded.context == told["max_position_embeddings"]
    assert (ours.id, ours.path, ours.context) == (NAME, snapshot, 1234)
    assert ours.created > 1_700_000_000


def test_people_are_told_of_what_is_complete_and_of_what_was_begun(cache: Path) -> None:
    begun = cache / "models--org--begun" / "snapshots" / COMMIT
    begun.mkdir(parents=True)
    (begun / "config.json").write_text("{}")
    for none in ("models--org--broken", "datasets--org--data/snapshots", "models--alone/snapshots"):
        (cache / none).mkdir(parents=True)
    whole = sum(file.stat().st_size for file in embedded_model_path().iterdir())
    assert models_here() == [
        {"name": "tiny", "source": "embedded", "size_bytes": whole, "complete": True},
        {"name": "org/begun", "source": "hub", "size_bytes": 2, "complete": False},
        {"name": NAME, "source": "hub", "size_bytes": whole + len(COMMIT), "complete": True},
    ]
    for there in (shutil.rmtree, Path.touch):  # nothing, then a file
        there(cache)
        assert [model["name"] for model in models_here()] == ["tiny"]
        assert [model.id for model in stored_models()] == ["tiny"]


@pytest.mark.slow
def test_it_is_opened_without_a_word_to_the_hub(cache: Path) -> None:
    async def story() -> None:
        source = await open_model(NAME)
        assert source.id == NAME
        assert source.path == (cache / "models--some-body--tiny--llama.v2" / "snapshots" / COMMIT).resolve()
        with pytest.raises(ModelError, match="nothing is downloaded for a request; `mlxtp serve org/none`"):
            await find_model("org/none")

    run(story())


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_that_lacks_a_file_is_not_there(cache: Path, missing: str) -> None:
    folder = cache / "models--some-body--tiny--llama.v2"
    copy = Path(shutil.copytree(embedded_model_path(), cache.parent / "copy"))
    (copy / missing).unlink()
    if missing == "config.json":
        assert stored_name(str(copy)) is None
    else:
        with pytest.raises(ModelError, match="the folder is incomplete: it lacks "):
            stored_name(str(copy))
    (folder / "blobs" / missing).unlink()  # the link is still there, as after a download that was cut
    assert hub_folder(NAME) is None
    assert stored_name(NAME) is None
    assert [model.id for model in stored_models()] == ["tiny"]
    assert [(model["name"], model["complete"]) for model in models_here()] == [("tiny", True), (NAME, False)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "xlm-roberta"}, "no model family 'xlm-roberta'"),
        ({"model_type": "base.cache"}, "no model family"),
        ({"model_type": None}, "names no model_type"),
        ({"architectures": ["Gemma3TextModel"]}, "it is a Gemma3TextModel, which writes no text"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "which writes no text"),
        ({"text_config": [1]}, "not an object"),
    ],
)
def test_what_its_configuration_tells_no_group_could_serve_is_neither_listed_nor_loaded(
    cache: Path, changes: dict[str, Any], why: str
) -> None:
    config = cache / "models--some-body--tiny--llama.v2" / "snapshots" / COMMIT / "config.json"
    told = json.loads(config.read_text())
    config.unlink()
    config.write_text(json.dumps(told | changes))
    folder = shutil.copytree(config.parent, cache.parent / "folder")
    assert [model.id for model in stored_models()] == ["tiny"]
    for name in (NAME, str(folder)):
        with pytest.raises(ModelError, match=why):
            stored_name(name)


def test_what_is_known_to_work_is_never_taken_for_what_cannot() -> None:
    for written in ([], ["LlamaForCausalLM"], ["QWenLMHeadModel"], ["Llama4ForConditionalGeneration"]):
        for name, config in PUBLISHED.items():
            assert why_not({**config, "architectures": written}) == "", name


def why_not(config: Config) -> str:
    try:
        check_servable(config)
    except ModelError as error:
        return error.detail
    return ""


def test_weights_in_several_files_have_to_be_there_all(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(embedded_model_path(), tmp_path / "model"))
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / one)
    assert lacks(folder)
    shutil.copy(folder / one, folder / two)
    assert not lacks(folder)
    weights_of(folder, one, two)
    assert not lacks(folder)
    weights_of(folder, one, two, "model-00003-of-00003.safetensors")
    assert lacks(folder)
    weights_of(folder, one, two, "extra.safetensors")
    assert lacks(folder) == "some files of its weights"
    shutil.copy(folder / one, folder / "extra.safetensors")
    assert not lacks(folder)
    shutil.copy(folder / one, folder / "model-00001-of-00007.safetensors")
    (folder / "consolidated.safetensors.index.json").write_text('{"weight_map": {"a": "consolidated-1.x"}}')
    assert not lacks(folder), "remains of other versions"
    (folder / two).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n")
    assert "model-00002-of-00002.safetensors is a pointer of Git LFS" in lacks(folder)
    for index in ("[]", "{", "{}", '{"weight_map": 5}', "[" * 100_000, "\xff"):
        (folder / "model.safetensors.index.json").write_text(index, encoding="latin-1")
        assert lacks(folder), index


def test_a_folder_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(embedded_model_path(), tmp_path / "model"))
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for name in (folder, f"{folder}/", tmp_path / "link", tmp_path / "x" / ".." / "model"):
        (tmp_path / "x").mkdir(exist_ok=True)
        assert stored_name(str(name)) == str(folder.resolve())
    (tmp_path / "new\nline").symlink_to(folder)
    others = ("model", "./model", "~/model", f"{folder}/config.json", str(tmp_path), "/")
    for name in (tmp_path / "new\nline", *others):
        assert stored_name(str(name)) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "tiny2",
        "a/b/c",
        "../x",
        "a/..",
        "org/no ne",
        "org/\0",
        "/\0",
        "/" + "a" * 5000,
        "models--a/b",
        "é/b",
    ],
)
def test_other_names_are_nothing(cache: Path, name: str) -> None:
    assert stored_name(name) is None
    (cache / "models--some-body--tiny--llama.v2" / "refs" / "main").write_text("../../../etc")
    assert hub_folder(NAME) is None

"""The wanted models on one machine: found, not there, there later, or another one by the time it is found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.cluster.cluster_state import NO_DEPLOYMENTS, PINNED, YIELDS, DeploymentTable, name_of
from mlxtp.errors import Code, ModelError, ProtocolError
from mlxtp.models import local_model
from mlxtp.models.inspect import ModelSource, in_folders, weight_bytes
from mlxtp.models.local_model import LocalModel, LocalModels
from mlxtp.placement.model_shape import unknown_shape
from mlxtp.text.tokenizer import Text
from mlxtp.wire.cluster_messages import Deployment, ModelStatus

from ..groups.scenes import run, sees, within
from ..played import scenes

PACKED = b"facts of a model"


class Stage:
    """A disk whose folders are found when the test lets them be."""

    def __init__(self, patch: pytest.MonkeyPatch, home: Path) -> None:
        self.downloaded: list[str] = []
        self.home = home
        self.changes: list[ModelStatus] = []
        self.errors: dict[str, Exception] = {}
        self.undescribed: dict[str, str] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.finding = 0
        self.published: tuple[ModelStatus, ...] = ()
        self.opened: list[tuple[str, str]] = []
        self.closed: list[str] = []
        nothing = lambda *_, **__: None  # noqa: E731
        self.desired = SimpleNamespace(on_change=nothing, retry_if=nothing, table=NO_DEPLOYMENTS)
        self.models = self.local_models("draft")
        patch.setattr(local_model, "find_model", self._find)
        patch.setattr(local_model, "open_model", self._open)
        patch.setattr(local_model, "facts_in", self._facts)
        self.print = ""
        patch.setattr(local_model, "fingerprint", lambda path: self.print or f"{path.name:0>64}")

    def local_models(self, draft: str, get: Callable[[str], Awaitable[Path]] | None = None) -> LocalModels:
        nothing = lambda *_, **__: None  # noqa: E731
        node = SimpleNamespace(
            settings=SimpleNamespace(draft_model=draft, model_folders=(), kv_bits=0),
            links=SimpleNamespace(reports=SimpleNamespace(on=nothing, publish=self._publish)),
            desired=self.desired,
            rounds=SimpleNamespace(every=nothing),
            changed=nothing,
        )
        transfers = SimpleNamespace(get=get or self._get, stored=SimpleNamespace(on_files=nothing))
        return LocalModels(cast(Any, node), cast(Any, transfers))

    def _publish(self, _kind: type[ModelStatus], *rows: ModelStatus) -> None:
        self.changes += [each for each in rows if each not in self.published]
        self.published = rows

    @property
    def model(self) -> LocalModel:
        rows = self.desired.table.live()
        return self.models.of(rows[0].model if rows else "")

    async def _find(self, name: str) -> Path:
        self.finding += 1
        try:
            if name in self.gates:
                await self.gates[name].wait()
            if name in self.errors:
                raise self.errors[name]
            return self.home / name
        finally:
            self.finding -= 1

    def _facts(self, path: Path) -> Any:
        if path.name in self.undescribed:
            raise ModelError(self.undescribed[path.name], Code.MODEL_INVALID)
        shape = lambda name, _: unknown_shape(name, 1)  # noqa: E731
        return SimpleNamespace(shape=shape, packed=lambda: PACKED, weight_bytes=weight_bytes(path))

    async def _get(self, name: str) -> Path:
        self.downloaded.append(name)
        return Path(name)

    async def _open(self, name: str, draft: str) -> ModelSource:
        self.opened.append((name, draft))
        await asyncio.sleep(0)
        text = SimpleNamespace(close=lambda: self.closed.append(name))
        return ModelSource(name, self.home / name, cast(Text, text))

    def want(self, name: str, version: int, *, pinned: bool = True) -> None:
        """Have this model wanted alone, by a row of this version; an empty name: none."""
        keep_s = PINNED if pinned else YIELDS
        rows = (Deployment(name_of(name), name, keep_s=keep_s, version=version),) if name else ()
        before, self.desired.table = self.desired.table, DeploymentTable(rows)
        self.models.resolve(before, self.desired.table)

    async def has(self, name: str) -> None:
        await sees(lambda: self.model.source is not None and self.model.source.id == name)
        assert self.model.source.shape is self.model.shape


def play(tmp_path: Path, story: Callable[[Stage], Awaitable[None]]) -> None:
    async def scene() -> None:
        with pytest.MonkeyPatch.context() as patch:
            stage = Stage(patch, tmp_path)
            try:
                await within(story(stage))
            finally:
                await stage.models.close()
            assert stage.finding == 0

    run(scene())


played = scenes(play, "tmp_path")


def found(name: str, fingerprint: str = "", revision: str = "", weight_mib: int = 0) -> ModelStatus:
    """What a Mac tells of a model whose files it has: by its name if no fingerprint is given."""
    return ModelStatus(name, fingerprint or f"{name:0>64}", "", revision, weight_mib, PACKED)


@played()
async def test_a_model_is_there_for_a_rank_before_people_have_it(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "model.safetensors").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(ModelError, match="one is not wanted here"):
        stage.models.folder("one")
    stage.want("one", 3)
    with pytest.raises(ModelError, match="one is still being looked for") as early:
        stage.models.folder("one")
    assert early.value.code is Code.MODEL_NOT_FOUND
    await stage.has("one")
    assert stage.changes == [ModelStatus("one", "", ""), found("one", weight_mib=2)]
    assert stage.models.folder("one") == tmp_path / "one"
    assert stage.opened == [("one", "draft")]
    with pytest.raises(ModelError, match="two is not wanted here"):
        stage.models.folder("two")


def test_weights_that_are_not_read_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "one").mkdir()
    for name in ("model-00001-of-00001", "model"):
        (tmp_path / "one" / f"{name}.safetensors").write_bytes(b"x")
    index = '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    (tmp_path / "one" / "model.safetensors.index.json").write_text(index)

    async def story(stage: Stage) -> None:
        stage.want("one", 3)
        await stage.has("one")
        stage.want("one", 4)
        await asyncio.sleep(0)

    play(tmp_path, story)
    assert caplog.messages == ["one: not in its index, and so not read: model.safetensors"]


@played()
async def test_a_newer_choice_of_the_same_model_finds_it_there(stage: Stage, tmp_path: Path) -> None:
    stage.want("one", 3)
    await stage.has("one")
    stage.want("one", 4, pinned=False)
    assert stage.model.status == stage.changes[-1] == found("one")
    assert stage.models.folder("one") == tmp_path / "one", "an epoch was begun for it"
    assert len(stage.opened) == 1
    stage.want("two", 5)
    await stage.has("two")
    with pytest.raises(ModelError, match="one is not wanted here"):
        stage.models.folder("one")


@played()
async def test_what_is_found_too_late_is_not_taken_for_what_is_wanted_now(stage: Stage) -> None:
    stage.gates = {name: asyncio.Event() for name in ("one", "two")}
    stage.want("one", 1)
    await sees(lambda: stage.finding)
    late = stage.model
    stage.want("two", 2)
    stage.gates["one"].set()
    await sees(lambda: stage.finding == 1)
    assert stage.model.status == ModelStatus("two", "", "")
    stage.gates["two"].set()
    await stage.has("two")
    stage.want("", 3)
    assert (stage.model.source, stage.model.status) == (None, ModelStatus("", "", ""))
    assert found("one") not in stage.changes
    stage.changes.clear()
    stage.models._report(late)
    assert stage.changes == [], "the others would take it for the result of a later search"


@played()
async def test_two_models_are_wanted_at_once_and_each_is_reported_by_name(
    stage: Stage, tmp_path: Path
) -> None:
    coming = asyncio.Event()

    async def get(name: str) -> Path:
        await coming.wait()
        return Path(name)

    stage.models = models = stage.local_models("draft", get)
    stage.errors["missing"] = ModelError("missing is not here", Code.MODEL_NOT_FOUND)
    models.want({"missing": True, "org/large": True})
    await sees(lambda: models.of("missing").problem)
    with pytest.raises(ModelError, match="missing is not here"):
        models.folder("missing")
    with pytest.raises(ModelError, match="org/large is still being looked for"):
        models.folder("org/large")
    both = (ModelStatus("missing", "", "missing is not here"), ModelStatus("org/large", "", ""))
    assert stage.published == both
    coming.set()
    await sees(lambda: models.of("org/large").source)
    assert models.of("missing").problem == "missing is not here"
    models.want({"org/large": False})
    assert models.folder("org/large") == tmp_path / "org/large"
    assert len(stage.opened) == 1, "its result stays while it is wanted"
    with pytest.raises(ModelError, match="missing is not wanted here"):
        models.folder("missing")
    assert stage.closed == []
    models.want({})
    assert stage.published == ()
    await sees(lambda: stage.closed == ["org/large"])


@played()
async def test_a_shape_that_a_member_made_up_costs_its_link(stage: Stage) -> None:
    with pytest.raises(ProtocolError, match="the shape of two") as refused:
        stage.models._check("a", ModelStatus("two", f"{'two':0>64}", "", shape=b"made up"))
    assert refused.value.code is Code.FIELD_INVALID


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ModelError("the Hub knows no such model"), "the Hub knows no such model"),
        (ModelError("one holds no config.json", Code.MODEL_NOT_FOUND), "one holds no config.json"),
        (OSError(5, "the disk is gone"), "one: [Errno 5] the disk is gone"),
        (ValueError("embedded null byte"), "one: ValueError: embedded null byte"),
    ],
)
@played()
async def test_why_it_is_not_there_is_told_until_it_comes(
    stage: Stage, error: Exception, problem: str
) -> None:
    stage.errors["one"] = error
    stage.want("one", 3)
    await sees(lambda: len(stage.changes) > 1)
    assert stage.changes[1:] == [ModelStatus("one", "", problem)]
    with pytest.raises(ModelError) as refused:
        stage.models.folder("one")
    assert refused.value.detail == problem
    stage.gates["one"] = asyncio.Event()
    for _ in range(3):
        stage.models.retry()
    await sees(lambda: stage.finding)
    assert stage.finding == 1, "one search at a time"
    del stage.errors["one"]
    stage.undescribed["one"] = "config.json lacks hidden_size"
    stage.gates["one"].set()
    await sees(lambda: "hidden_size" in stage.model.problem)
    with pytest.raises(ModelError, match="lacks hidden_size"):
        stage.models.folder("one")
    del stage.undescribed["one"]
    stage.want("one", 4)
    assert stage.changes[-1] == ModelStatus("one", "", ""), "the others no longer see the old problem"
    await stage.has("one")
    assert stage.model.status == found("one")
    stage.models.retry()
    assert not stage.finding, "it is there"


def test_a_plain_name_is_a_folder_that_each_mac_has_elsewhere(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder / "house").mkdir(parents=True)
    (tmp_path / "second" / "house" / "config.json").write_text("{}")
    folders = [str(tmp_path / name) for name in ("none", "first", "second")]
    assert in_folders("house", folders) == str(tmp_path / "second" / "house")
    for name in ("tiny", "flat", "org/house", "../second/house"):
        assert in_folders(name, folders) == name


@played()
async def test_what_is_on_the_hub_comes_by_the_member_that_gets_it_for_all(stage: Stage) -> None:
    commit = "a" * 40
    got: list[str] = []

    async def get(name: str) -> Path:
        got.append(name)
        return stage.home / commit

    stage.models = stage.local_models("org/draft", get)
    stage.want("org/one", 1)
    await stage.has("org/one")
    assert got == ["org/one", "org/draft"]
    assert stage.model.status == found("org/one", f"{commit:0>64}", commit)


@played()
async def test_files_that_came_or_were_repaired_are_looked_at_again(stage: Stage) -> None:
    stage.errors["org/two"] = ModelError("the Hub knows no such model")
    stage.want("org/two", 2)
    await sees(lambda: stage.model.problem)
    stage.models._files_arrived("org/other")
    assert stage.model.problem
    before: Any = stage.model._search
    stage.models.retry()
    assert stage.model._search is before, "no member looks again for what is on the Hub"
    del stage.errors["org/two"]
    stage.models._files_arrived("org/two")
    await stage.has("org/two")
    await sees(lambda: stage.model.fingerprint == f"{'two':0>64}")
    opened = len(stage.opened)
    stage.models._files_arrived("org/two")
    await sees(lambda: stage.model._search is not None and stage.model._search.done())
    assert len(stage.opened) == opened, "nothing is different"
    stage.print = "6" * 64
    stage.models._files_arrived("org/two")
    await sees(lambda: stage.changes[-1] == found("org/two", "6" * 64))


@played()
async def test_a_model_is_downloaded_for_a_user_and_not_for_a_request(stage: Stage) -> None:
    stage.want("o/requested", 1, pinned=False)
    await stage.has("o/requested")
    assert stage.downloaded == []
    stage.want("o/served", 2)
    await stage.has("o/served")
    assert stage.downloaded == ["o/served"]

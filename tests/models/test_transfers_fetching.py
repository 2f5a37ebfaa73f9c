"""A model on its way into the cache: from the Hub, from a lender, through breaks, lies and full disks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, scan_cache_dir

from mlxtp.errors import Code, LinkError, ModelError, ProtocolError, RemoteProtocolError
from mlxtp.models import hub_cache, hub_client, peer_copy
from mlxtp.models import manifest as manifests
from mlxtp.models.download import Fetch
from mlxtp.models.hub_cache import Damaged, Repo, Stopped, commits_here
from mlxtp.models.hub_client import fetch_some, look_up
from mlxtp.models.inspect import find_config
from mlxtp.wire.frames import encode
from mlxtp.wire.peer_messages import FileHeld, FilesWanted, FileWanted
from mlxtp.wire.tls import ALPN_JOIN, ALPN_MODELS, join_context, member_context_client

from ..hub import (
    COMMIT,
    EVIL,
    NEWER,
    TOKEN,
    Hub,
    Model,
    blob_name,
    embedded,
    poison,
    put,
    running_hub,
    with_weights,
)
from ..wire.members import founder, member_of

pytestmark = pytest.mark.slow

NAME = "some-body/llama"
CHUNK = 64 * 1024
EXTRA = 10 * CHUNK + 5
BIG = "model-extra-0.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(hub_client, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr(hub_client, "AGAIN_S", 0.05)
    monkeypatch.setattr(peer_copy, "AGAIN_S", 0.05)
    with running_hub() as running:
        running.models[NAME] = Model(with_weights(EXTRA))
        put(running.url, tmp_path / "cache", monkeypatch)
        yield running


def fetch(cache: Path | None = None, revision: str = "main") -> Fetch:
    return Fetch(Repo(NAME, cache), revision)


def same(folder: Path, files: dict[str, bytes]) -> bool:
    return {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_it_comes_in_the_layout_that_other_programs_read(hub: Hub, tmp_path: Path) -> None:
    model = hub.models[NAME]
    model.files = {**model.files, "original/model.safetensors": b"twice", "README.md": b"#", "a.bin": b"b"}
    model.files = {**model.files, "LICENSE (1).txt": b"odd", "\u8bf4\u660e.txt": b"odd", ".x.json": b"{}"}
    folder = fetch().from_hub()
    assert folder == tmp_path / "cache" / "models--some-body--llama" / "snapshots" / COMMIT
    assert same(folder, with_weights(EXTRA)), "all that serving needs, and nothing else"
    link = folder / BIG
    assert link.is_symlink()
    assert link.readlink().name == blob_name(BIG, link.read_bytes())
    found = scan_cache_dir(tmp_path / "cache")
    assert not found.warnings
    assert [(repo.repo_id, sorted(repo.refs)) for repo in found.repos] == [(NAME, ["main"])]
    asked = len(hub.asked)
    assert fetch().repo.snapshot("main") == folder
    assert len(hub.asked) == asked


def test_only_weights_that_mlx_lm_reads_come(hub: Hub) -> None:
    model = hub.models[NAME]
    model.files = {name: body for name, body in embedded().items() if not name.endswith(".safetensors")}
    model.files["consolidated.safetensors"] = b"w"
    with pytest.raises(ModelError, match=r"no weights in the safetensors format \(model\*\.safetensors\)"):
        look_up(NAME, "main")
    of_index = json.dumps({"weight_map": {"a": BIG}}).encode()
    strays = {f"model-0000{n}-of-00002.safetensors": b"old" for n in (1, 2)}
    files = {name: body for name, body in with_weights(EXTRA).items() if name != "model.safetensors"}
    files["model.safetensors.index.json"] = of_index
    model.files = {**files, **strays, "model.safetensors": b"old", "consolidated.safetensors": b"twice"}
    assert same(fetch().from_hub(), files)


def test_what_a_plan_has_fetched_is_no_model_and_not_in_the_way(hub: Hub) -> None:
    folder = find_config(NAME)
    assert {path.name for path in folder.iterdir()} == {"config.json"}
    assert Repo(NAME).refs.commit("main") == ""
    assert Repo(NAME).snapshot(COMMIT) is None
    assert fetch().from_hub() == folder
    assert same(folder, dict(hub.models[NAME].files))


def changed(config: bytes) -> bytes:
    """Of the same size, and it can be read, too."""
    other = config.replace(b"0", b"1", 1)
    assert json.loads(other) != json.loads(config)
    return other


def test_a_plan_does_not_trust_what_has_another_hash(hub: Hub) -> None:
    model, repo = hub.models[NAME], Repo(NAME)
    model.lies = {"config.json": changed(model.files["config.json"])}
    with pytest.raises(ModelError, match=r"config\.json does not have the hash .*; try again") as refused:
        find_config(NAME)
    assert refused.value.code is Code.MODEL_NOT_FOUND
    assert not [path for path in repo.folder.rglob("*") if path.is_file() and "blobs" in path.parts]
    model.lies = {}
    folder = find_config(NAME)
    assert (folder / "config.json").read_bytes() == model.files["config.json"]


def test_a_small_file_that_others_left_wrong_is_not_published(hub: Hub) -> None:
    model, repo = hub.models[NAME], Repo(NAME)
    config = next(file for file in look_up(NAME, "main").files if file.path == "config.json")
    find_config(NAME)
    repo.blobs.path(config).write_bytes(changed(model.files["config.json"]))
    assert repo.blobs.has(config)
    folder = fetch().from_hub()
    assert same(folder, dict(model.files))


def test_large_files_that_are_here_are_not_read_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch().from_hub()
    hub.models[NAME].commits["main"] = NEWER
    hashed, honest = list[str](), hub_cache.hash_of
    monkeypatch.setattr(
        hub_cache, "hash_of", lambda path, file, on: hashed.append(file.path) or honest(path, file, on)
    )
    monkeypatch.setattr(hub_cache, "SMALL_BYTES", EXTRA - 1)
    fetch().from_hub()
    assert "config.json" in hashed
    assert BIG not in hashed


def until(true: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 20
    while not true() and time.monotonic() < ends_at:
        threading.Event().wait(0.01)
    assert true()


def stop_when(ours: Fetch, true: Callable[[], bool]) -> None:
    """Stop what comes from the Hub as soon as this is true; its end does not wait for the Hub."""

    def get() -> None:
        with pytest.raises(Stopped):
            ours.from_hub()
        stopped.set()

    stopped = threading.Event()
    threading.Thread(target=get, daemon=True).start()
    until(true)
    ours.stop()
    assert stopped.wait(2)


def test_a_break_costs_nothing_that_has_come(hub: Hub) -> None:
    model = hub.models[NAME]
    model.pace = 2e6
    stop_when(fetch(), lambda: model.sent.get(BIG, 0) >= EXTRA // 2)
    assert Repo(NAME).snapshot("main") is None, "what is half there is no model"
    held = (Repo(NAME).begun() or pytest.fail("nothing was kept")).held
    model.pace, model.sent = 0.0, {}
    folder = fetch().from_hub()
    assert same(folder, dict(model.files))
    assert 0 < model.sent[BIG] < EXTRA * 0.7
    assert held > EXTRA * 0.3


def test_two_programs_get_it_once_and_go_on_where_a_connection_broke(hub: Hub) -> None:
    hub.models[NAME].pace, hub.models[NAME].cut = 4e6, {BIG: 6 * CHUNK}
    found: list[Path] = []
    workers = [threading.Thread(target=lambda: found.append(fetch().from_hub())) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert found[0] == found[1]
    assert same(found[0], dict(hub.models[NAME].files))
    assert EXTRA <= hub.models[NAME].sent[BIG] <= EXTRA + CHUNK


def test_what_has_another_hash_never_gets_a_name(hub: Hub) -> None:
    model = hub.models[NAME]
    model.lies = {BIG: bytes(EXTRA)}
    with pytest.raises(ModelError, match=f"{BIG} does not have the hash .* twice"):
        fetch().from_hub()
    repo = Repo(NAME)
    assert repo.snapshot("main") is None
    assert not [path for path in (repo.folder / "blobs").iterdir() if path.stat().st_size == EXTRA]
    model.lies = {}
    assert same(fetch().from_hub(), dict(model.files))


@pytest.mark.parametrize(
    ("size", "why"), [(EXTRA - 1, "it ends early"), (EXTRA + 1, f"more than the {EXTRA} bytes came")]
)
def test_a_file_of_another_size_is_refused(hub: Hub, size: int, why: str) -> None:
    hub.models[NAME].lies = {BIG: bytes(size)}
    with pytest.raises(ModelError, match=f"cannot get {NAME}: {BIG}: {why}"):
        fetch().from_hub()


def test_a_hub_that_starts_over_and_sends_something_else_is_found_out(hub: Hub) -> None:
    model = hub.models[NAME]
    honest = model.files[BIG]
    model.cut = {BIG: 6 * CHUNK}
    model.anew = {BIG: bytes(5 * CHUNK) + honest[5 * CHUNK :]}
    assert same(fetch().from_hub(), dict(model.files))


def test_a_connection_that_always_breaks_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(dict[str, int]):
        def pop(self, path: str, size: int) -> int:  # type: ignore[override]
            return 0 if path == BIG else size

    hub.models[NAME].cut = Breaks()
    with pytest.raises(ModelError, match=f"{BIG}: ") as refused:
        fetch().from_hub()
    assert refused.value.code is Code.MODEL_NOT_FOUND
    tries = [asked for asked in hub.asked if asked.startswith("GET") and asked.endswith(BIG)]
    assert len(tries) == hub_client.TRIES


@pytest.mark.parametrize(
    "answer",
    [
        b"[]",
        b"null",
        b"<html>log in</html>",
        b"[" * 100_000,
        b'{"siblings": [{}]}',
        b'{"sha": 5, "siblings": [%s, %s]}',
        b'{"sha": "%s", "siblings": [%%s, {"rfilename": "model.safetensors", "size": 8, "blobId": 5}]}'
        % (b"a" * 40),
    ],
)
def test_an_answer_of_the_hub_that_makes_no_sense_is_said_to_make_none(hub: Hub, answer: bytes) -> None:
    config = b'{"rfilename": "config.json", "size": 8, "blobId": "%s"}' % (b"0" * 40)
    hub.models[NAME].answer = answer.replace(b"%s", config)
    with pytest.raises(ModelError, match=f"the Hub's answer about {NAME} cannot be understood: .") as refused:
        fetch().from_hub()
    assert refused.value.code is Code.MODEL_NOT_FOUND, "another Mac may ask another Hub"
    assert Repo(NAME).commits() == frozenset()


def test_a_commit_is_no_other_one(hub: Hub) -> None:
    hub.models[NAME].commits = {"main": COMMIT, COMMIT: NEWER}
    with pytest.raises(ModelError, match=f"the Hub answered with another commit, {NEWER}; .") as refused:
        fetch(revision=COMMIT).from_hub()
    assert refused.value.code is Code.MODEL_NOT_FOUND
    assert Repo(NAME).commits() == frozenset()
    hub.models[NAME].commits = {"main": NEWER}  # while the answers for files name COMMIT
    with pytest.raises(ModelError, match=r"cannot be understood: config\.json is of another commit"):
        find_config(NAME)


@pytest.mark.parametrize("error", [TypeError, KeyError, AttributeError, RecursionError])
def test_what_the_hubs_client_does_not_expect_of_a_file_is_said(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    manifest, usual = look_up(NAME, "main"), hub.models[NAME].answer
    hub.models[NAME].answer = b"[{}]"  # a list of files that makes no sense; the client would keep it
    assert (fetch_some(manifest, ("config.json",)) / "config.json").is_file()
    hub.models[NAME].answer = usual

    def surprised(*_: object, **__: object) -> str:
        raise error("a surprise")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", surprised)
    said = f"the Hub's answer about {NAME} cannot be understood: {error.__name__}: .*a surprise"
    with pytest.raises(ModelError, match=said) as refused:
        find_config(NAME)
    assert refused.value.code is Code.MODEL_NOT_FOUND


def test_sizes_that_no_disk_has_are_refused_at_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def claimed(size: int, count: int) -> bytes:
        weights = [
            {"rfilename": f"model-{i}.safetensors", "size": size, "blobId": f"{i:040x}"} for i in range(count)
        ]
        small = [
            {"rfilename": name, "size": 8, "blobId": "f" * 40} for name in ("config.json", "tokenizer.json")
        ]
        return json.dumps({"id": NAME, "sha": COMMIT, "siblings": [*small, *weights]}).encode()

    monkeypatch.setattr("mlxtp.models.download.PartialFile", lambda *_: pytest.fail("pieces are counted"))
    hub.models[NAME].answer = claimed(1 << 43, 4000)
    with pytest.raises(ModelError, match="bytes in all cannot be right"):
        fetch().from_hub()
    monkeypatch.setattr(hub_cache, "free_bytes", lambda _: 1 << 40)
    hub.models[NAME].answer = claimed(1 << 40, 1)
    with pytest.raises(ModelError, match=r"needs 1099\.5 GB more"):
        fetch().from_hub()
    assert Repo(NAME).commits() == frozenset()


@pytest.mark.parametrize("stalls", ["/api/", "/resolve/"])
def test_to_end_does_not_wait_for_a_hub_that_stalls_and_nothing_comes_later(hub: Hub, stalls: str) -> None:
    model, ours = hub.models[NAME], fetch()
    model.stalls = stalls
    stop_when(ours, lambda: any(stalls in each for each in hub.asked))
    model.goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "apart":
            thread.join(10)
    assert not any(any(path.read_bytes()) for path in ours.repo.folder.glob("blobs/*"))


def test_who_may_not_have_it_is_told_what_to_do(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hub.models[NAME]
    model.gated = True
    said = rf"^cannot get {NAME}: it is gated; accept its terms .*`hf auth login`"
    with pytest.raises(ModelError, match=said):
        fetch().from_hub()
    assert commits_here() == [], "nothing of it came"
    model.gated, model.private = False, True
    with pytest.raises(ModelError, match="knows no such model, or it is private"):
        fetch().from_hub()
    hub.models["some-body/open"] = Model(embedded())
    with pytest.raises(ModelError, match="it has no revision 'v9'"):
        Fetch(Repo("some-body/open"), "v9").from_hub()
    (tmp_path / "cache" / "no-token").write_text(TOKEN)  # where `hf auth login` leaves it
    model.gated = True
    assert same(fetch().from_hub(), dict(model.files))
    assert [each.complete for each in commits_here()] == [True]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set") as refused:
        fetch(tmp_path / "other").from_hub()
    assert refused.value.code is Code.MODEL_NOT_FOUND


def test_a_disk_without_room_is_told_before_with_numbers(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(map(len, hub.models[NAME].files.values()))
    monkeypatch.setattr(hub_cache, "free_bytes", lambda _: hub_cache.ROOM_BYTES + size - 1)
    with pytest.raises(ModelError, match=r"needs [\d.]+ MB more, and .*cache has 1\.1 GB free") as refused:
        fetch().from_hub()
    assert refused.value.code is not Code.MODEL_NOT_FOUND, "another Mac's disk does not help this one"
    assert not hub.models[NAME].sent
    monkeypatch.setattr(hub_cache, "free_bytes", lambda _: hub_cache.ROOM_BYTES + size)
    assert fetch().from_hub().is_dir()


def test_a_newer_revision_costs_what_differs_and_removing_one_frees_that(hub: Hub) -> None:
    fetch().from_hub()
    model = hub.models[NAME]
    model.files = {**model.files, "model-extra-1.safetensors": bytes(5 * CHUNK)}
    model.commits["main"], model.sent = NEWER, {}
    fetch().from_hub()
    assert set(model.sent) == {"model-extra-1.safetensors"}
    repo = Repo(NAME)
    assert repo.commits() == {COMMIT, NEWER}
    assert repo.refs.commit("main") == NEWER
    freed = repo.remove(frozenset({NEWER}))
    assert 5 * CHUNK <= freed < 6 * CHUNK
    older = repo.snapshot(COMMIT)
    assert older is not None
    assert same(older, with_weights(EXTRA))
    assert repo.remove(frozenset({COMMIT})) > EXTRA
    assert not repo.folder.exists()


Lent = tuple[Repo, manifests.Manifest]


class Pair:
    """A lender with all of the model, and a cache that has nothing."""

    def __init__(self, tmp_path: Path) -> None:
        fetch().from_hub()
        self.theirs = Repo(NAME)
        self.one = founder(tmp_path)
        self.two = member_of(self.one, tmp_path)
        self.welcome = {self.two.identity.node_id}
        self.cache = tmp_path / "other"
        self.lender = peer_copy.PeerServer("127.0.0.1", self.one.credentials, self._lent, self._may)
        self.asked: list[str] = []

    def _lent(self, name: str) -> tuple[Repo, manifests.Manifest] | None:
        self.asked.append(name)
        manifest = self.theirs.manifest(self.theirs.refs.commit("main"))
        return (self.theirs, manifest) if name == NAME and manifest is not None else None

    def _may(self, identity: object) -> bool:
        return getattr(identity, "node_id", "") in self.welcome

    def connect(self) -> peer_copy.PeerConnection:
        address = f"127.0.0.1:{self.lender.port}"
        return peer_copy.connect([address], self.one.identity.node_id, self.two.credentials)

    def copy(self) -> Path:
        return fetch(self.cache).from_member(NAME, self.connect)


@pytest.fixture
def pair(hub: Hub, tmp_path: Path) -> Iterator[Pair]:
    found = Pair(tmp_path)
    hub.asked.clear()
    yield found
    found.lender.close()


def test_a_copy_is_the_same_and_the_hub_is_asked_for_the_list_of_files_alone(hub: Hub, pair: Pair) -> None:
    folder = pair.copy()
    assert same(folder, with_weights(EXTRA))
    assert folder.is_relative_to(pair.cache)
    assert Repo(NAME, pair.cache).refs.commit("main") == COMMIT
    assert (pair.cache / "models--some-body--llama" / "refs" / "main").read_text() == COMMIT
    assert hub.asked
    assert all("/api/models/" in asked for asked in hub.asked)


def test_a_copy_without_the_hub_is_found_here_by_name_and_moves_nothing_that_other_programs_read(
    hub: Hub, pair: Pair
) -> None:
    ours = Repo(NAME, pair.cache)
    refs = ours.folder / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(NEWER)
    hub.models = {}
    folder = pair.copy()
    assert ours.snapshot("main") == folder
    assert ours.refs.commits() == {"main": COMMIT}
    assert (refs / "main").read_text() == NEWER
    ours.remove(frozenset({COMMIT}))
    assert not ours.folder.exists() or ours.refs.commits() == {"main": NEWER}


def test_the_later_word_of_the_hub_replaces_that_of_a_member(hub: Hub, pair: Pair) -> None:
    had, hub.models = hub.models, {}
    pair.copy()
    hub.models = had
    hub.models[NAME].commits["main"] = NEWER
    folder = fetch(pair.cache).from_hub()
    assert folder.name == NEWER
    assert Repo(NAME, pair.cache).snapshot("main") == folder
    assert (folder.parents[1] / "refs" / "main").read_text() == NEWER


def test_a_member_brings_no_file_that_serving_does_not_need(hub: Hub, pair: Pair) -> None:
    """Other programs run the code and the pickles that they find in the cache."""
    poison(pair.theirs, EVIL)
    for asked in (True, False):
        if not asked:
            hub.models = {}
            shutil.rmtree(pair.cache)
        assert same(pair.copy(), with_weights(EXTRA))


def test_a_member_does_not_change_what_is_here_already(hub: Hub, pair: Pair) -> None:
    folder = fetch(pair.cache, COMMIT).from_hub()
    manifest = pair.theirs.manifest(COMMIT)
    assert manifest is not None
    few = tuple(file for file in manifest.files if not file.path.startswith("tokenizer"))
    kept = pair.theirs.folder / hub_cache.FOLDER / f"{COMMIT}.json"
    kept.write_bytes(manifests.to_bytes(dataclasses.replace(manifest, files=few)))
    hub.models = {}
    assert pair.copy() == folder
    assert Repo(NAME, pair.cache).manifest(COMMIT) == manifest
    assert same(folder, with_weights(EXTRA))


@pytest.mark.parametrize("what", ["another file", "a commit that is none", "no weights"])
def test_a_members_word_does_not_stand_against_the_hubs(hub: Hub, pair: Pair, what: str) -> None:
    manifest = pair.theirs.manifest(COMMIT)
    assert manifest is not None
    if what == "another file":
        pair.theirs.remove(frozenset({COMMIT}))
        hub.models[NAME] = Model(with_weights(EXTRA + 1))
        fetch().from_hub()  # so much for what the lender has
        hub.models[NAME] = Model(with_weights(EXTRA))
    elif what == "a commit that is none":
        hub.models[NAME].commits["main"] = NEWER
    else:
        few = tuple(file for file in manifest.files if not file.path.endswith(".safetensors"))
        kept = pair.theirs.folder / hub_cache.FOLDER / f"{COMMIT}.json"
        kept.write_bytes(manifests.to_bytes(dataclasses.replace(manifest, files=few)))
    with pytest.raises(ProtocolError, match="offers"):
        pair.copy()
    assert not (pair.cache / "models--some-body--llama" / "snapshots").exists()
    assert not (pair.cache / "models--some-body--llama" / "refs").exists()


def test_a_copy_of_a_commit_is_of_no_other_one(pair: Pair) -> None:
    ours = fetch(pair.cache, NEWER)
    with pytest.raises(LinkError, match=f"{COMMIT} of {NAME} was offered for {NEWER}"):
        ours.from_member(NAME, pair.connect)
    assert ours.repo.commits() == frozenset()
    assert same(fetch(pair.cache, COMMIT).from_member(NAME, pair.connect), with_weights(EXTRA))


def big(pair: Pair) -> manifests.ModelFile:
    manifest = pair.theirs.manifest(COMMIT)
    assert manifest is not None
    return next(file for file in manifest.files if file.path == BIG)


def begun_again(pair: Pair) -> hub_cache.PartialFile:
    """Have the lender itself get the large file anew."""
    pair.theirs.blobs.path(big(pair)).unlink()
    part = hub_cache.PartialFile(pair.theirs.blobs, big(pair), lambda: False)
    part.open()
    return part


def test_a_copy_takes_each_file_as_soon_as_the_lender_itself_has_it(pair: Pair) -> None:
    whole = pair.theirs.blobs.path(big(pair))
    body, part = whole.read_bytes(), begun_again(pair)
    ours = fetch(pair.cache)
    done: list[Path] = []
    worker = threading.Thread(target=lambda: done.append(ours.from_member(NAME, pair.connect)))
    worker.start()
    part.write(body[: EXTRA // 2])
    until(lambda: ours.manifest is not None and ours.held_bytes == ours.manifest.size - EXTRA)
    assert ours.repo.snapshot("main") is None
    part.write(body[EXTRA // 2 :])
    part.finish()
    part.close()
    worker.join(20)
    assert same(done[0], with_weights(EXTRA))


def test_a_lender_that_breaks_off_in_a_file_is_asked_for_the_rest_of_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[int] = []
    lend = peer_copy._lend

    def half(
        channel: peer_copy.PeerConnection, lent: Lent, asked: FileWanted, may: Callable[[], bool]
    ) -> None:
        if lent[1].blobs[asked.file].path == BIG:
            wanted.append(asked.at)
            if len(wanted) == 1:
                channel.send(FileHeld(EXTRA))
                channel.send_bytes(lent[0].blobs.path(big(pair)).read_bytes()[: EXTRA // 2])
                raise LinkError("broken")
        lend(channel, lent, asked, may)

    monkeypatch.setattr(peer_copy, "_lend", half)
    with pytest.raises(LinkError, match="cut short"):
        pair.copy()
    assert same(pair.copy(), with_weights(EXTRA))
    assert wanted[0] == 0
    assert 0 < wanted[1] <= EXTRA // 2


def test_damage_on_the_lenders_disk_is_noticed_and_stays_there(pair: Pair) -> None:
    file = big(pair)
    with pair.theirs.blobs.path(file).open("r+b") as blob:
        blob.seek(3 * CHUNK)
        blob.write(b"\0\0\0\0")
    with pytest.raises(Damaged, match=BIG):
        pair.copy()
    repo = Repo(NAME, pair.cache)
    assert repo.snapshot("main") is None
    assert not repo.blobs.has(file)
    assert not repo.blobs.part(file).exists()


def test_a_lender_that_goes_leaves_what_came(hub: Hub, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    files, lend = itertools.count(1), peer_copy._lend

    def dies(*args: object) -> None:
        if next(files) == 3:
            pair.lender.close()
        lend(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(peer_copy, "_lend", dies)
    with pytest.raises(LinkError, match=r"cut short|nothing can be copied"):
        pair.copy()
    repo = Repo(NAME, pair.cache)
    begun = repo.begun()
    assert 0 < begun.held < begun.total
    hub.models[NAME].sent = {}
    assert same(fetch(pair.cache).from_hub(), with_weights(EXTRA)), "and the Hub brings the rest"
    assert sum(hub.models[NAME].sent.values()) < begun.total


def test_only_members_copy_and_only_what_is_lent(pair: Pair, tmp_path: Path) -> None:
    pair.welcome.clear()
    with pytest.raises(LinkError):
        peer_copy.ask(pair.connect(), NAME)
    pair.welcome.add(pair.two.identity.node_id)
    channel = pair.connect()
    for name in ("../../etc/passwd", "some-body/other", f"{NAME}@../..", "/etc/passwd", ""):
        with pytest.raises(LinkError, match="nothing of"):
            peer_copy.ask(channel, name)
    manifest, _ = peer_copy.ask(channel, NAME)
    for place, at in ((len(manifest.blobs), 0), (0, 1 << 40), (2**32 - 1, 2**63 - 1)):
        other = pair.connect()
        peer_copy.ask(other, NAME)
        other.send(FileWanted(place, at))
        with pytest.raises(LinkError):
            other.next()
    early = pair.connect()
    early.send(FileWanted(0, 0))
    with pytest.raises(LinkError):
        early.next()
    long = pair.connect()
    long.send_bytes((8 << 20).to_bytes(4, "big"))
    with pytest.raises(LinkError):
        long.next()
    pair.welcome.clear()  # removed while it is connected
    channel.send(FilesWanted(NAME))
    channel.next()
    with pytest.raises(LinkError):
        peer_copy.ask(channel, NAME)


def test_a_lender_that_gets_another_revision_is_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pair.theirs.manifest(COMMIT)
    told = iter([first])
    less = manifests.Manifest(NAME, NEWER, first.files[:1])
    monkeypatch.setattr(pair, "_lent", lambda _: (pair.theirs, next(told, less)))
    pair.lender._lent = pair._lent
    with pytest.raises(LinkError, match="another revision by now"):
        pair.copy()


def test_one_that_gets_a_large_file_slowly_is_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pair.theirs.blobs.path(big(pair))
    body, part = whole.read_bytes(), begun_again(pair)
    now_s, held = 0.0, peer_copy._held

    def some_more(lent: Lent | None) -> peer_copy.FilesHeld:
        nonlocal now_s
        now_s += 0.9 * peer_copy.STEP_S
        part.write(body[part.held_bytes :][: EXTRA // 5 + 1])
        if part.held_bytes == EXTRA and not pair.theirs.blobs.has(part.file):
            part.finish()
        return held(lent)

    monkeypatch.setattr(peer_copy, "_held", some_more)
    monkeypatch.setattr(peer_copy, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(peer_copy, "CONNECTIONS", 1)
    assert same(pair.copy(), with_weights(EXTRA))
    part.close()
    assert now_s > 3 * peer_copy.STEP_S


def drip(channel: peer_copy.PeerConnection, lent: Lent, wanted: FileWanted, _: object) -> None:
    channel.send(FileHeld(lent[1].blobs[wanted.file].size))
    while True:
        channel.send_bytes(b"\0")
        threading.Event().wait(0.1)


@pytest.mark.parametrize(
    ("limit", "lend", "said"),
    [
        ("STEP_S", None, r"nothing new has come for 0\.5 s"),
        ("STEP_S", drip, r"nothing new has come for 0\.5 s"),
        ("IDLE_S", lambda *_: threading.Event().wait(3), "stood still for 0.5 s"),
    ],
    ids=["it gets nothing new itself", "drips", "falls silent"],
)
def test_a_lender_of_which_nothing_comes_is_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, limit: str, lend: Callable[..., object] | None, said: str
) -> None:
    monkeypatch.setattr(peer_copy, limit, 0.5)
    if lend is None:
        pair.theirs.blobs.path(big(pair)).unlink()
    else:
        monkeypatch.setattr(peer_copy, "_lend", lend)
    with pytest.raises(LinkError, match=said) as late:
        pair.copy()
    assert late.value.code is Code.LINK_TIMEOUT


def test_a_removed_member_no_longer_gets_any_file(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_copy, "STEP_BYTES", CHUNK)
    monkeypatch.setattr(peer_copy, "_BLOCK_BYTES", CHUNK)
    channel = pair.connect()
    manifest, _ = peer_copy.ask(channel, NAME)
    allowed = iter([True, True])
    pair.lender._may_copy = lambda _: next(allowed, False)
    channel.send(FileWanted(manifest.blobs.index(big(pair)), 0))
    assert channel.receive(FileHeld).size == EXTRA
    channel.receive_into(memoryview(bytearray(2 * CHUNK)))
    with pytest.raises(LinkError, match="cut short"):
        channel.receive_into(memoryview(bytearray(2 * CHUNK)))


def test_strangers_who_only_connect_keep_no_member_out(pair: Pair) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(peer_copy.MAX_CONNECTIONS + peer_copy.MAX_STRANGERS):
            crowd.enter_context(socket.create_connection(("127.0.0.1", pair.lender.port), 5))
        assert same(pair.copy(), with_weights(EXTRA))


def test_one_member_leaves_connections_for_others(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = member_of(pair.one, tmp_path)
    pair.welcome.add(third.identity.node_id)
    held = 0
    with contextlib.ExitStack() as crowd:
        for _ in range(peer_copy.MAX_CONNECTIONS):
            channel = pair.connect()
            crowd.callback(channel.close)
            with contextlib.suppress(LinkError):
                peer_copy.ask(channel, NAME)
                held += 1
        assert held == peer_copy.MAX_PER_MEMBER
        address = [f"127.0.0.1:{pair.lender.port}"]
        other = peer_copy.connect(address, pair.one.identity.node_id, third.credentials)
        crowd.callback(other.close)
        assert peer_copy.ask(other, NAME)
        monkeypatch.setattr(peer_copy, "MAX_CONNECTIONS", 1)  # of all members together
        with contextlib.closing(pair.connect()) as late, pytest.raises(LinkError, match="cut short"):
            peer_copy.ask(late, NAME)


def test_strangers_of_one_address_cut_no_handshake_of_another(pair: Pair) -> None:
    port = ("127.0.0.1", pair.lender.port)
    with contextlib.ExitStack() as crowd:
        slow = crowd.enter_context(socket.create_connection(port, 5, source_address=("127.0.0.2", 0)))
        strangers = [
            crowd.enter_context(socket.create_connection(port, 5)) for _ in range(3 * peer_copy.MAX_STRANGERS)
        ]
        # The lender accepts in order, so it has seen all but the last strangers once it cuts this one.
        assert strangers[2 * peer_copy.MAX_STRANGERS - 1].recv(1) == b""
        context = member_context_client(pair.two.credentials, ALPN_MODELS)
        with context.wrap_socket(slow) as tls:
            tls.sendall(encode(FilesWanted(NAME), 0, 0))
            assert tls.recv(1)


def test_a_lender_among_more_than_1024_descriptors_lends(pair: Pair) -> None:
    """A crowd of clients may hold them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while held[-1] <= 1024:
            held.append(os.dup(held[0]))
        pair.lender.close()
        pair.lender = peer_copy.PeerServer("127.0.0.1", pair.one.credentials, pair._lent, pair._may)
        assert same(pair.copy(), with_weights(EXTRA))
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_link_out_of_the_cache_is_not_followed(pair: Pair, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    file = big(pair)
    secret.write_bytes(bytes(file.size))
    pair.theirs.blobs.path(file).unlink()
    pair.theirs.blobs.path(file).symlink_to(secret)
    with pytest.raises(LinkError, match="is not there any more"):
        pair.copy()


def test_strangers_and_joiners_do_not_get_in(pair: Pair, tmp_path: Path) -> None:
    stranger = founder(tmp_path)
    address = ("127.0.0.1", pair.lender.port)
    for context in (
        join_context(),
        member_context_client(pair.two.credentials, ALPN_JOIN),
        member_context_client(stranger.credentials, ALPN_MODELS),
    ):
        context.check_hostname = False
        try:
            with context.wrap_socket(socket.create_connection(address, 5)) as tls:
                tls.sendall(encode(FilesWanted(NAME), 0, 0))
                got = tls.recv(1)
        except OSError:
            got = b""
        assert not got
    with pytest.raises(ProtocolError, match="is another node"):
        peer_copy.connect([f"127.0.0.1:{pair.lender.port}"], "f" * 32, pair.two.credentials)
    assert pair.asked == []


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../../x", "..", "a//b", ".hidden", "a\\b", "a\0b", "x/" * 5 + "x"]
)
def test_a_manifest_with_a_path_that_leads_elsewhere_is_none(path: str) -> None:
    good = manifests.Manifest(NAME, COMMIT, (manifests.ModelFile("config.json", 1, "0" * 40),))
    assert manifests.from_bytes(manifests.to_bytes(good)) == good
    bad = manifests.Manifest(NAME, COMMIT, (manifests.ModelFile(path, 1, "0" * 40),))
    with pytest.raises(ValueError, match="no path inside a snapshot"):
        manifests.from_bytes(manifests.to_bytes(bad))


def test_a_lender_that_lies_about_the_manifest_is_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_copy, "to_bytes", lambda _: b'{"name": "a/b", "revision": "x", "files": []}')
    with pytest.raises(RemoteProtocolError, match="a manifest that makes no sense"):
        pair.copy()
    nothing: dict[str, object] = {}
    monkeypatch.setattr(peer_copy, "to_bytes", manifests.to_bytes)
    monkeypatch.setattr(peer_copy, "take", lambda *_: nothing["a bug"])
    with pytest.raises(KeyError, match="a bug"):  # in one thread ends the copy
        pair.copy()
    assert not (pair.cache / "models--some-body--llama" / "snapshots").exists()

"""One model's folder in the Hub's cache: what is removed, read and locked there, and nothing beside it."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from mlxtp.errors import ModelError
from mlxtp.models.hub_cache import Damaged, PartialFile, Repo, Stopped, commits_here, hash_of
from mlxtp.models.manifest import Manifest, ModelFile, wanted

from ..hub import COMMIT, NEWER, blob_name, embedded

NAME = "some-body/llama"
NOTE = ModelFile("note.json", 4, blob_name("note.json", b"note"))


def put(cache: Path, name: str = NAME, commit: str = COMMIT, *more: ModelFile) -> Manifest:
    """A model that is complete, and `more` files with the content "note"."""
    repo, files = Repo(name, cache), [*more]
    files += [ModelFile(path, len(body), blob_name(path, body)) for path, body in embedded().items()]
    manifest = Manifest(name, commit, wanted(files))
    repo.keep(manifest)
    for path, body in embedded().items():
        (repo.folder / "blobs" / blob_name(path, body)).write_bytes(body)
    for file in more:
        repo.blobs.path(file).write_bytes(b"note")
    repo.publish(manifest, "main", by_hub=True)
    return manifest


def test_of_two_revisions_the_one_that_stays_loses_nothing(tmp_path: Path) -> None:
    put(tmp_path)
    put(tmp_path, NAME, NEWER, NOTE)
    put(tmp_path, "other/name")
    repo, other = Repo(NAME, tmp_path), Repo("other/name", tmp_path)
    assert other.remove(frozenset({COMMIT, ""})) > 0
    assert not other.folder.exists()
    assert other.remove(frozenset({COMMIT, ""})) == 0
    foreign = repo.folder / "blobs" / f"{'1' * 40}.incomplete"
    foreign.write_bytes(b"another program's")
    assert 0 < repo.remove(frozenset({NEWER})) < 1 << 16
    assert repo.snapshot(COMMIT) is not None
    assert repo.commits() == {COMMIT}
    assert repo.refs.commits() == {}
    assert not repo.blobs.path(NOTE).exists()
    assert foreign.exists()


def test_what_was_begun_is_a_commit_that_lacks_something(tmp_path: Path) -> None:
    put(tmp_path)
    repo = Repo(NAME, tmp_path)
    assert repo.begun() is None
    repo.keep(Manifest(NAME, NEWER, (NOTE,)))
    repo.blobs.part(NOTE).write_bytes(b"no")
    begun = repo.begun()
    assert (begun.revision, begun.held, begun.total) == (NEWER, 2, 4)
    found = {each.revision: (each.refs, each.complete) for each in commits_here(tmp_path)}
    assert found == {COMMIT: (("main",), True), NEWER: ((), False)}


def test_a_snapshot_of_another_program_is_listed_with_its_size(tmp_path: Path) -> None:
    folder = Repo(NAME, tmp_path).folder / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for path, body in embedded().items():
        (folder / path).write_bytes(body)
    size = sum(map(len, embedded().values()))
    (here,) = commits_here(tmp_path)
    assert (here.folder, here.manifest, here.held, here.total) == (folder, None, size, size)


def test_a_model_that_another_process_adds_to_is_not_removed(tmp_path: Path) -> None:
    put(tmp_path)
    repo, other = Repo(NAME, tmp_path), Repo(NAME, tmp_path)
    with (
        other.locked(lambda: False),
        pytest.raises(ModelError, match=f"another process is adding to {NAME}; stop it, or wait"),
    ):
        repo.remove(frozenset({COMMIT}))
    with repo.locked(), pytest.raises(Stopped), other.locked(lambda: True):
        pytest.fail("it is held twice")
    assert repo.snapshot(COMMIT) is not None
    assert repo.remove(frozenset({COMMIT})) > 0


def test_who_waited_for_a_model_that_is_removed_locks_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path)
    repo, flock = Repo(NAME, tmp_path), fcntl.flock

    def flock_after_remove(*args: object) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        Repo(NAME, tmp_path).remove(frozenset({COMMIT}))
        flock(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", flock_after_remove)
    with repo.locked(lambda: False), pytest.raises(ModelError, match="another process is adding"):
        Repo(NAME, tmp_path).remove(frozenset({COMMIT}))


def test_a_model_whose_folder_is_elsewhere_is_read_and_removed_there(tmp_path: Path) -> None:
    cache, disk = tmp_path / "cache", tmp_path / "disk"
    manifest = put(disk)
    repo = Repo(NAME, cache)
    cache.mkdir()
    repo.folder.symlink_to(disk / repo.folder.name)
    for file in manifest.files:
        assert hash_of(repo.blobs.readable(file), file, lambda _: None) == file.hash
    secret, file = tmp_path / "secret", manifest.files[0]
    secret.write_bytes(bytes(file.size))
    repo.blobs.path(file).unlink()
    repo.blobs.path(file).symlink_to(secret)
    with pytest.raises(OSError, match="outside the cache"):
        repo.blobs.readable(file)
    assert repo.remove(frozenset({COMMIT})) > 0
    assert secret.exists()
    assert [each.name for folder in (cache, disk) for each in folder.iterdir()] == [".locks"]


def test_a_name_in_other_letters_is_the_model_where_the_disk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path)
    typed, stored = Repo("Some-Body/LLAMA", tmp_path), Repo(NAME, tmp_path)
    snapshot = stored.snapshot("main")
    assert snapshot is not None
    assert typed.as_here().name == typed.name
    assert not typed.has_inside(snapshot)
    samefile = Path.samefile  # of a disk that ignores case
    monkeypatch.setattr(Path, "samefile", lambda a, b: samefile(Path(str(a).lower()), Path(str(b).lower())))
    assert typed.as_here().name == NAME
    assert typed.has_inside(snapshot)
    assert not typed.has_inside(tmp_path)
    assert not Repo("some-body/other", tmp_path).has_inside(snapshot)


def test_bytes_that_come_after_the_end_are_left_out(tmp_path: Path) -> None:
    repo = Repo(NAME, tmp_path)
    repo.keep(Manifest(NAME, COMMIT, (NOTE,)))
    part = PartialFile(repo.blobs, NOTE, lambda: False)
    assert part.open() == 0
    part.write(b"no")
    part.close()
    for late in (part.open, lambda: part.write(b"te"), part.restart, part.finish):
        with pytest.raises(Stopped):
            late()
    assert repo.blobs.part(NOTE).read_bytes() == b"no"
    done = PartialFile(repo.blobs, NOTE, lambda: False)
    assert (done.open(), done.held_bytes) == (2, 2)
    with pytest.raises(OSError, match="more than the 4 bytes"):
        done.write(b"te of it")
    done.write(b"te")
    done.finish()
    done.close()
    assert repo.blobs.path(NOTE).read_bytes() == b"note"
    assert not repo.blobs.part(NOTE).exists()


def test_a_beginning_that_is_longer_than_the_file_or_another_one_is_forgotten(tmp_path: Path) -> None:
    repo = Repo(NAME, tmp_path)
    repo.keep(Manifest(NAME, COMMIT, (NOTE,)))
    repo.blobs.part(NOTE).write_bytes(b"longer")
    part = PartialFile(repo.blobs, NOTE, lambda: False)
    assert part.open() == 0
    part.write(b"other"[:4])
    with pytest.raises(Damaged):
        part.finish()
    part.close()
    assert not repo.blobs.part(NOTE).exists()
    assert not repo.blobs.has(NOTE)


def test_a_crash_while_a_branch_is_written_leaves_nothing_that_is_taken_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path)
    repo = Repo(NAME, tmp_path)

    def crash(*_: object) -> None:
        raise OSError("no power")

    with monkeypatch.context() as crashing:
        crashing.setattr(Path, "replace", crash)
        with pytest.raises(OSError, match="no power"):
            repo.refer(["main"], NEWER, lambda: False, by_hub=True)
    assert [path.name for path in (repo.folder / "refs").iterdir()] == ["main"]
    assert repo.refs.commits() == {"main": COMMIT}
    repo.refer(["main"], NEWER, lambda: False, by_hub=True)
    assert repo.refs.commits() == {"main": NEWER}

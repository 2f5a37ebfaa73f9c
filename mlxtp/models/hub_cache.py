"""Models in the Hub's own cache (HF_HUB_CACHE), so that other programs share them and nothing is there twice.

    models--OWNER--NAME/
        blobs/HASH                    a file's content; its name is its hash
        blobs/HASH.mlxtp-part         what has come of one
        blobs/HASH.mlxtp-have         a byte for each piece of that, 1 if it is here
        snapshots/COMMIT/PATH         links to blobs; appears when all of them are complete
        refs/REVISION                 the commit of a branch or tag, by the Hub's word
    .mlxtp/refs/REVISION          the same by a member's word, for mlxtp alone
        .mlxtp/COMMIT.json            the manifest, once it is known; .mlxtp/lock: whoever adds or removes

Only what has its hash gets a name that anybody reads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from ..errors import Code, ModelError, why_not_written
from ..identity.private_files import sync_folder, to_disk
from .completeness import is_complete
from .manifest import (
    CHUNK_BYTES,
    Manifest,
    ModelFile,
    check,
    from_bytes,
    is_commit,
    split_name,
    to_bytes,
    wanted,
)

FOLDER = ".mlxtp"
_READ_BYTES = 1 << 18
"""What is hashed at a time: little enough to stay in a processor's cache between the two."""
_SAVE_BYTES = 128 << 20
_LOOK_S = 0.5
SMALL_BYTES = 64 << 20
"""Blobs up to this size are hashed before they become part of a model: that takes no time."""
ROOM_BYTES = 1 << 30
"""What is left free on the disk beside a model."""


class Stopped(Exception):
    """Whoever wanted this does not want it any more."""


class Damaged(Exception):
    """What came does not have its hash. `file` is gone again."""

    def __init__(self, file: ModelFile) -> None:
        super().__init__(f"{file.path} does not have the hash {file.hash[:12]}… that it should have")
        self.file = file


def cache_folder() -> Path:
    """Where the Hub's own client keeps models: HF_HUB_CACHE, or `hub` in HF_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def free_bytes(folder: Path) -> int:
    """Room on the disk that has this folder, or will have it. Raises OSError."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


class Repo:
    """One model of the cache, whatever is there of it. Reads and writes the disk: use it in threads."""

    def __init__(self, name: str, cache: Path | None = None) -> None:
        """`name` is OWNER/NAME. Raises ValueError for what is none."""
        if split_name(name) != (name, "main"):
            raise ValueError(f"{name!r:.200} is no OWNER/NAME")
        self.name = name
        self.cache = cache or cache_folder()
        self.folder = self.cache / f"models--{name.replace('/', '--')}"

    # --- what is here

    def commit(self, revision: str) -> str:
        """The commit that a revision was when it was last asked for; empty when that is not known."""
        if is_commit(revision):
            return revision
        latest, commit = 0, ""
        for folder in self._ref_folders:
            with contextlib.suppress(OSError, ValueError):
                path = folder / revision
                written, found = path.stat().st_mtime_ns, path.read_text().strip()
                if is_commit(found) and written > latest:
                    latest, commit = written, found
        return commit

    @property
    def _ref_folders(self) -> tuple[Path, Path]:
        """The Hub's word, which other programs read, and a member's."""
        return self.folder / "refs", self.folder / FOLDER / "refs"

    def snapshot(self, revision: str) -> Path | None:
        """The folder of a revision, if all of it is here."""
        if not (commit := self.commit(revision)):
            return None
        folder = self.folder / "snapshots" / commit
        if (kept := self._kept(commit)) is None:
            return folder if is_complete(folder) else None
        return folder if all(_has_size(folder / file.path, file.size) for file in kept.files) else None

    def manifest(self, commit: str) -> Manifest | None:
        """What was kept of a commit; of one that another program brought whole, what its links say."""
        return (self._kept(commit) or self._linked(commit)) if is_commit(commit) else None

    def _kept(self, commit: str) -> Manifest | None:
        try:
            kept = from_bytes((self.folder / FOLDER / f"{commit}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return kept if (kept.name, kept.revision) == (self.name, commit) else None

    def _linked(self, commit: str) -> Manifest | None:
        """The Hub's client names blobs by their hashes."""
        folder = self.folder / "snapshots" / commit
        try:
            found = [
                ModelFile(path.relative_to(folder).as_posix(), path.stat().st_size, path.readlink().name)
                for path in sorted(folder.rglob("*"))
                if path.is_symlink()
            ]
            manifest = check(Manifest(self.name, commit, wanted(found)))
        except (OSError, ValueError):
            return None
        return manifest if is_complete(folder) else None

    def begun(self) -> Manifest | None:
        """The newest manifest of which something is missing."""
        try:
            kept = sorted((self.folder / FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime)
        except OSError:
            return None
        found = (self.manifest(path.stem) for path in reversed(kept))
        return next((each for each in found if each and self.snapshot(each.revision) is None), None)

    def held_bytes(self, manifest: Manifest) -> int:
        """Bytes of it that are here."""
        return sum(self._held(file) for file in manifest.blobs)

    def _held(self, file: ModelFile) -> int:
        return file.size if self.has(file) else _bytes_of(file, self._ledger(file))

    def has(self, file: ModelFile) -> bool:
        """Whether its blob is complete."""
        return _has_size(self.blob(file), file.size)

    def chunks(self, file: ModelFile) -> bytes:
        """A byte for each of its pieces, 1 for those that are here."""
        return b"\1" * file.chunks if self.has(file) else self._ledger(file)

    def _ledger(self, file: ModelFile) -> bytes:
        try:
            kept = self.ledger(file).read_bytes()
        except OSError:
            kept = b""
        return kept if len(kept) == file.chunks and self.part(file).is_file() else bytes(file.chunks)

    def blob(self, file: ModelFile) -> Path:
        """Where its content is, or will be."""
        return self.folder / "blobs" / file.hash

    def part(self, file: ModelFile) -> Path:
        """Where it is until then."""
        return self.folder / "blobs" / f"{file.hash}.mlxtp-part"

    def ledger(self, file: ModelFile) -> Path:
        """Which pieces of that are here."""
        return self.folder / "blobs" / f"{file.hash}.mlxtp-have"

    def readable(self, file: ModelFile) -> Path:
        """Where its pieces can be read from now on. Raises OSError when that is outside the cache.

        All of a model may lie elsewhere: its folder may be a link, to another disk for example.
        """
        path = self.blob(file) if self.has(file) else self.part(file)
        found = path.resolve(strict=True)
        if not any(found.is_relative_to(each.resolve()) for each in (self.folder, self.cache)):
            raise OSError(errno.EPERM, f"{path} is a link to what lies outside the cache")
        return found

    def as_here(self) -> Repo:
        """The same model, by the name that its folder has on this disk: macOS ignores case."""
        try:
            names = [each.name for each in self.cache.iterdir()]
            if self.folder.name not in names:
                for name in names:
                    if name.casefold() == self.folder.name.casefold() and self._is(self.cache / name):
                        return _repo_of(name, self.cache) or self
        except OSError:
            pass
        return self

    def has_inside(self, path: Path) -> bool:
        """Whether a path, however it is spelled, leads into this model's folder."""
        path = path.resolve()
        return any(self._is(each) for each in (path, *path.parents))

    def _is(self, folder: Path) -> bool:
        try:
            return self.folder.samefile(folder)
        except OSError:
            return False

    def check(self, file: ModelFile, path: Path) -> None:
        """That it stands at `path`, a link to its blob, with its hash.

        Raises Damaged when it is something else, which is gone then, and OSError.
        """
        if hash_of(path, file, lambda _: None) != file.hash:
            path.unlink(missing_ok=True)
            self.blob(file).unlink(missing_ok=True)
            raise Damaged(file)

    def drop_if_wrong(self, file: ModelFile) -> None:
        """A small blob without its hash is gone afterwards: others bring blobs, too, and hash none. Raises
        OSError.
        """
        if file.size <= SMALL_BYTES and self.has(file):
            with contextlib.suppress(Damaged):
                self.check(file, self.blob(file))

    # --- what comes

    @contextlib.contextmanager
    def locked(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Meanwhile no other program of ours changes this model here. Waits for one that does.

        Raises ModelError when nothing can be written here, Stopped when that is no longer wanted.
        """
        while (lock := self._lock()) is None:
            if stopped():
                raise Stopped
            threading.Event().wait(_LOOK_S)
        with lock:
            yield

    def _lock(self) -> IO[bytes] | None:
        """Held until it is closed; None while somebody else has it. Raises ModelError, OSError."""
        path = self.folder / FOLDER / "lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("wb")
        except FileNotFoundError:  # all of the model is just being removed
            return None
        except OSError as error:
            raise ModelError(f"{self.name}: {why_not_written(error, self.cache)}") from None
        with contextlib.ExitStack() as unless_taken:
            unless_taken.callback(lock.close)
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever removes the model removes this file, too: then it locks nothing any more.
                if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    unless_taken.pop_all()
                    return lock
        return None

    def keep(self, manifest: Manifest) -> None:
        """From now on this is to come. Raises OSError."""
        path = self.folder / FOLDER / f"{manifest.revision}.json"
        _write(path, to_bytes(manifest))
        (self.folder / "blobs").mkdir(exist_ok=True)

    def check_room(self, manifest: Manifest) -> None:
        """Raises ModelError, with the numbers, when the disk has no room for the rest of it."""
        missing, free = manifest.size - self.held_bytes(manifest), free_bytes(self.cache)
        if missing + ROOM_BYTES > free:
            raise ModelError(
                f"{self.name} needs {gigabytes(missing)} more, and {self.cache} has {gigabytes(free)} free, "
                f"of which {gigabytes(ROOM_BYTES)} are left alone: make room (`mlxtp list`, `mlxtp remove "
                "MODEL`) or set HF_HUB_CACHE to a folder on another disk",
            )

    def publish(self, manifest: Manifest, revision: str, *, by_hub: bool) -> Path:
        """All its blobs are complete: now it is a model. Returns its folder. Raises OSError.

        `by_hub`: the Hub itself said that `revision` is this commit.
        """
        for file in manifest.files:
            if not self.has(file):
                raise OSError(errno.ENOENT, f"{file.path} is not complete")
        folder = self.folder / "snapshots" / manifest.revision
        draft = self.folder / FOLDER / f"{manifest.revision}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        for file in manifest.files:
            link = draft / file.path
            link.parent.mkdir(parents=True, exist_ok=True)
            up = "../" * (2 + file.path.count("/"))
            link.symlink_to(f"{up}blobs/{file.hash}")
        folder.parent.mkdir(exist_ok=True)
        try:
            draft.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            for file in manifest.files:  # another program has begun it
                (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
                (draft / file.path).replace(folder / file.path)
            shutil.rmtree(draft)
        if not is_commit(revision):
            self._point(revision, manifest.revision, by_hub=by_hub)
        return folder

    def _point(self, ref: str, commit: str, *, by_hub: bool) -> None:
        hubs, members = self._ref_folders
        _write((hubs if by_hub else members) / ref, commit.encode())
        if by_hub:
            (members / ref).unlink(missing_ok=True)

    def refer(self, refs: Iterable[str], commit: str, stopped: Callable[[], bool], *, by_hub: bool) -> None:
        """From now on these branches and tags are that commit, by the Hub's word or a member's.

        Raises ModelError, OSError, and Stopped as `locked` does.
        """
        with self.locked(stopped):
            for ref in refs:
                self._point(ref, commit, by_hub=by_hub)

    # --- what goes

    def remove(self, commits: frozenset[str]) -> int:
        """Remove these commits, and what no other one here uses. Returns how many bytes that freed.

        Nothing outside this model's folder is touched. Raises ModelError while somebody adds to it, OSError.
        """
        if (lock := self._lock()) is None:
            raise ModelError(
                f"somebody is just adding to {self.name}; end that, or wait until it is done", Code.NOT_READY
            )
        with lock:
            before = _disk_bytes(self.folder)
            commits &= self.commits()
            gone = {name for commit in commits for name in self._blobs_of(commit)}
            for _, path in self._ref_files():
                if path.read_text().strip() in commits:
                    path.unlink()
            for commit in commits:
                _remove(self.folder / "snapshots" / commit)
            if not (others := self.commits() - commits):
                self._remove_all()
                return before
            used = {name for commit in others for name in self._blobs_of(commit)}
            for path in (self.folder / "blobs").glob("*"):
                name, _, unfinished = path.name.partition(".mlxtp-")
                if name not in used and (unfinished or name in gone):
                    path.unlink()
            for commit in commits:  # last, so that what was cut short can be done again
                _remove(self.folder / FOLDER / f"{commit}.json")
            return before - _disk_bytes(self.folder)

    def _blobs_of(self, commit: str) -> set[str]:
        """The names of the blobs that a commit's snapshot links to, or its manifest tells."""
        links = (path for path in (self.folder / "snapshots" / commit).rglob("*") if path.is_symlink())
        kept = self._kept(commit)
        return {path.readlink().name for path in links} | {file.hash for file in (kept.files if kept else ())}

    def _remove_all(self) -> None:
        """The lock comes last: who takes it from now on begins with an empty folder."""
        folder = self.folder.resolve()
        for path in folder.iterdir():
            if path.name != FOLDER:
                _remove(path)
        for path in (folder / FOLDER).iterdir():
            if path.name != "lock":
                _remove(path)
        (folder / FOLDER / "lock").unlink()
        with contextlib.suppress(OSError):  # somebody begins anew
            (folder / FOLDER).rmdir()
            folder.rmdir()
            if self.folder.is_symlink():
                self.folder.unlink()

    def refs(self) -> dict[str, str]:
        """The commit of each branch and tag that is known here."""
        found = {path.relative_to(folder).as_posix() for folder, path in self._ref_files()}
        return {name: self.commit(name) for name in sorted(found)}

    def _ref_files(self) -> list[tuple[Path, Path]]:
        return [(each, path) for each in self._ref_folders for path in each.rglob("*") if path.is_file()]

    def commits(self) -> frozenset[str]:
        """Those of which something is here."""
        snapshots, kept = self.folder / "snapshots", self.folder / FOLDER
        found = [path.name for path in snapshots.glob("*")] + [path.stem for path in kept.glob("*.json")]
        return frozenset(filter(is_commit, found))


class PartialFile:
    """A file that comes in pieces, in any order, from any thread. `close` ends what `open` began.

    A piece that is here is not written again, unless all of it is forgotten: then it is hashed anew, too.
    """

    def __init__(self, repo: Repo, file: ModelFile, stopped: Callable[[], bool]) -> None:
        self.file = file
        self._repo = repo
        self._stopped = stopped
        self._here = bytearray(repo.chunks(file))
        self._changed = threading.Condition()
        self._data = self._marks = -1
        self._begun = 0
        """How often it was begun anew."""
        self._named = self._closed = False

    def open(self) -> None:
        """Before anything is written. May be repeated. Raises OSError, and Stopped after `close`."""
        with self._changed:
            if self._data >= 0 or not self._is_open():
                return
            self._data = os.open(self._repo.part(self.file), os.O_RDWR | os.O_CREAT, 0o644)
            self._marks = os.open(self._repo.ledger(self.file), os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(self._data, self.file.size)
            os.ftruncate(self._marks, self.file.chunks)
            os.pwrite(self._marks, bytes(self._here), 0)

    def close(self) -> None:
        """No more is written, whatever a thread that nobody waits for still brings. May be repeated."""
        with self._changed:
            self._closed = True
            for descriptor in (self._data, self._marks):
                if descriptor >= 0:
                    os.close(descriptor)
            self._data = self._marks = -1

    def _is_open(self) -> bool:
        """False when it has its name: what comes after that is left out. Raises Stopped after `close`."""
        if self._closed and not self._named:
            raise Stopped
        return not self._named

    @property
    def missing(self) -> list[int]:
        """Pieces that are not here."""
        return [chunk for chunk, here in enumerate(self._here) if not here]

    @property
    def begins(self) -> int:
        """Bytes from its beginning on without a gap."""
        gap = self._here.find(0)
        return self.file.size if gap < 0 else gap * CHUNK_BYTES

    @property
    def held_bytes(self) -> int:
        """Bytes of all pieces that are here."""
        return _bytes_of(self.file, self._here)

    def write(self, at: int, data: memoryview | bytes) -> None:
        """Raises OSError, and Stopped after `close`."""
        view = memoryview(data)
        with self._changed:
            while view and self._is_open():
                chunk = at // CHUNK_BYTES
                part = view[: (chunk + 1) * CHUNK_BYTES - at]
                count = len(part) if self._here[chunk] else os.pwrite(self._data, part, at)
                view, at = view[count:], at + count

    def wrote(self, chunk: int) -> None:
        """All of a piece was written."""
        with self._changed:
            if self._is_open():
                self._here[chunk] = 1
                os.pwrite(self._marks, b"\1", chunk)
                self._changed.notify_all()

    def discard(self) -> None:
        """Nothing of it is here any more."""
        with self._changed:
            if self._is_open():
                self._begun += 1
                self._here[:] = bytes(len(self._here))
                os.pwrite(self._marks, bytes(self._here), 0)

    def finish(self) -> None:
        """Hash the pieces as they come; then the file gets its name.

        Raises Damaged when it has another hash, Stopped when it is not wanted any more, OSError.
        """
        self.open()
        # A descriptor of its own: `close` may come from another thread at any time.
        with self._repo.part(self.file).open("rb", buffering=0) as data:
            while not self._named:
                begun = self._begun
                digest = self._digest(data.fileno(), begun)
                to_disk(data.fileno())
                self._name(begun, digest)

    def _digest(self, data: int, begun: int) -> str:
        """The hash of all pieces; empty when they were forgotten meanwhile. Raises Stopped, OSError."""
        unsaved = 0
        digest, buffer = self.file.digest(), memoryview(bytearray(min(_READ_BYTES, self.file.size)))
        for chunk in range(self.file.chunks):
            with self._changed:
                while not (self._here[chunk] or self._stopped()):
                    self._changed.wait(_LOOK_S)
                if self._stopped():
                    raise Stopped
                if self._begun != begun:
                    return ""
            at, size = self.file.span(chunk)
            while size:
                count = os.preadv(data, [buffer[:size]], at)
                if not count:
                    raise OSError(errno.EIO, f"{self.file.path} is shorter than it was")
                digest.update(buffer[:count])
                at, size = at + count, size - count
            unsaved += self.file.span(chunk)[1]
            if unsaved >= _SAVE_BYTES:  # while more comes, the disk has nothing else to do
                os.fsync(data)
                unsaved = 0
        return str(digest.hexdigest())

    def _name(self, begun: int, digest: str) -> None:
        """The file gets its name, unless it was begun anew since it was hashed. Raises Damaged, Stopped."""
        with self._changed:
            if self._begun != begun or not self._is_open():
                return
            if digest != self.file.hash:
                self._closed = True  # what comes of it now is left out
                self._repo.part(self.file).unlink()
                self._repo.ledger(self.file).unlink()
                raise Damaged(self.file)
            self._repo.part(self.file).replace(self._repo.blob(self.file))
            self._repo.ledger(self.file).unlink()
            self._named = True


def hash_of(path: Path, file: ModelFile, on_bytes: Callable[[int], None]) -> str:
    """The hash of what is at `path`, of the kind that `file` has. Raises OSError."""
    digest, buffer = file.digest(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            digest.update(buffer[:count])
            on_bytes(count)
    return str(digest.hexdigest())


def gigabytes(size: float) -> str:
    """For people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def hub_name(name: str) -> tuple[Repo, str]:
    """The place of OWNER/NAME[@REVISION] in the cache, and the revision. Raises ModelError."""
    try:
        repo, revision = split_name(name)
    except ValueError as error:
        raise ModelError(str(error), Code.MODEL_NOT_FOUND) from None
    return Repo(repo), revision


def _bytes_of(file: ModelFile, here: bytes | bytearray) -> int:
    """Of the pieces that are here; only the last one is shorter than the others."""
    lacking = file.chunks * CHUNK_BYTES - file.size if here[-1:] == b"\1" else 0
    return here.count(1) * CHUNK_BYTES - lacking


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]


def _disk_bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in _files(folder))


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing; it is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        to_disk(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


_REPO_FOLDER = re.compile(r"models--(.+?)--(.+)")


def repos_here(cache: Path | None = None) -> list[Repo]:
    """Every model of the cache, by name."""
    cache = cache or cache_folder()
    found = (_repo_of(folder.name, cache) for folder in sorted(cache.glob("models--*--*")))
    return [repo for repo in found if repo is not None]


def _repo_of(folder: str, cache: Path) -> Repo | None:
    if match := _REPO_FOLDER.fullmatch(folder):
        with contextlib.suppress(ValueError):
            return Repo(f"{match[1]}/{match[2]}", cache)
    return None

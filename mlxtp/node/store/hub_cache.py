"""Models in the Hub's own cache (HF_HUB_CACHE), so that other programs share them and nothing is there twice.

    models--OWNER--NAME/
        blobs/HASH                    a file's content; its name is its hash
        blobs/HASH.mlxtp-part         what has come of one
        blobs/HASH.mlxtp-have         a byte for each piece of that, 1 if it is here
        snapshots/COMMIT/PATH         links to blobs; appears when all of them are complete
        refs/REVISION                 the commit of a branch or tag
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
from collections.abc import Callable, Iterator
from pathlib import Path

from ...cluster.manifests import (
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
from ...errors import Code, ModelError, why_not_written
from .complete import is_complete

FOLDER = ".mlxtp"
_READ_BYTES = 1 << 18
"""What is hashed at a time: little enough to stay in a processor's cache between the two."""
_SAVE_BYTES = 128 << 20
_LOOK_S = 0.5
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
        try:
            found = (self.folder / "refs" / revision).read_text().strip()
        except (OSError, ValueError):
            return ""
        return found if is_commit(found) else ""

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

    def held(self, manifest: Manifest) -> int:
        """Bytes of it that are here."""
        return sum(self._held(file) for file in manifest.blobs)

    def _held(self, file: ModelFile) -> int:
        if self.has(file):
            return file.size
        return sum(file.span(i)[1] for i, here in enumerate(self._ledger(file)) if here)

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
        """Where its pieces can be read from now on. Raises OSError when that is outside the cache."""
        path = self.blob(file) if self.has(file) else self.part(file)
        found = path.resolve(strict=True)
        if not found.is_relative_to(self.cache.resolve()):
            raise OSError(errno.EPERM, f"{path} is a link to what lies outside the cache")
        return found

    # --- what comes

    @contextlib.contextmanager
    def locked(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Meanwhile no other program of ours changes this model here. Waits for one that does.

        Raises ModelError when nothing can be written here, Stopped when that is no longer wanted.
        """
        try:
            (self.folder / FOLDER).mkdir(parents=True, exist_ok=True)
            lock = (self.folder / FOLDER / "lock").open("w")
        except OSError as error:
            raise ModelError(f"{self.name}: {why_not_written(error, self.cache)}") from None
        with lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if stopped():
                        raise Stopped from None
                    threading.Event().wait(_LOOK_S)
            yield

    def keep(self, manifest: Manifest) -> None:
        """From now on this is to come. Raises OSError."""
        path = self.folder / FOLDER / f"{manifest.revision}.json"
        _write(path, to_bytes(manifest))
        (self.folder / "blobs").mkdir(exist_ok=True)

    def check_room(self, manifest: Manifest) -> None:
        """Raises ModelError, with the numbers, when the disk has no room for the rest of it."""
        missing, free = manifest.size - self.held(manifest), free_bytes(self.cache)
        if missing + ROOM_BYTES > free:
            raise ModelError(
                f"{self.name} needs {gigabytes(missing)} more, and {self.cache} has {gigabytes(free)} free, "
                f"of which {gigabytes(ROOM_BYTES)} are left alone: make room (`mlxtp list`, `mlxtp remove "
                "MODEL`) or set HF_HUB_CACHE to a folder on another disk",
            )

    def publish(self, manifest: Manifest, revision: str) -> Path:
        """All its blobs are complete: now it is a model. Returns its folder. Raises OSError."""
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
            _write(self.folder / "refs" / revision, manifest.revision.encode())
        return folder

    # --- what goes

    def remove(self, commits: frozenset[str]) -> int:
        """Remove these commits, and what no other one uses. Returns how many bytes that freed.

        Raises OSError.
        """
        from huggingface_hub import scan_cache_dir

        before = _disk_bytes(self.folder)
        for commit in commits:
            (self.folder / FOLDER / f"{commit}.json").unlink(missing_ok=True)
        snapshots = {path.name for path in (self.folder / "snapshots").glob("*")}
        if snapshots & commits:  # the Hub's client knows what else its caches share
            scan_cache_dir(self.cache).delete_revisions(*snapshots & commits).execute()
        if not self.commits():
            shutil.rmtree(self.folder, ignore_errors=True)
            return before
        manifests = [manifest for commit in self.commits() if (manifest := self.manifest(commit))]
        used = {file.hash for manifest in manifests for file in manifest.files}
        for path in (self.folder / "blobs").glob("*.mlxtp-*"):
            if path.name.partition(".")[0] not in used:
                path.unlink()
        return before - _disk_bytes(self.folder)

    def refs(self) -> dict[str, str]:
        """The commit of each branch and tag that is known here."""
        folder = self.folder / "refs"
        found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        return {name: self.commit(name) for name in sorted(found)}

    def commits(self) -> frozenset[str]:
        """Those of which something is here."""
        snapshots, kept = self.folder / "snapshots", self.folder / FOLDER
        found = [path.name for path in snapshots.glob("*")] + [path.stem for path in kept.glob("*.json")]
        return frozenset(filter(is_commit, found))


class Part:
    """A file that comes in pieces, in any order, from any thread. `close` ends what `open` began."""

    def __init__(self, repo: Repo, file: ModelFile, stopped: Callable[[], bool]) -> None:
        self.file = file
        self._repo = repo
        self._stopped = stopped
        self._here = bytearray(repo.chunks(file))
        self._changed = threading.Condition()
        self._data = self._marks = -1

    def open(self) -> None:
        """Before anything is written. May be repeated. Raises OSError."""
        with self._changed:
            if self._data >= 0:
                return
            self._data = os.open(self._repo.part(self.file), os.O_RDWR | os.O_CREAT, 0o644)
            self._marks = os.open(self._repo.ledger(self.file), os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(self._data, self.file.size)
            os.ftruncate(self._marks, self.file.chunks)
            os.pwrite(self._marks, bytes(self._here), 0)

    def close(self) -> None:
        """No more is written. May be repeated."""
        for descriptor in (self._data, self._marks):
            if descriptor >= 0:
                os.close(descriptor)
        self._data = self._marks = -1

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
    def held(self) -> int:
        """Bytes of all pieces that are here."""
        return sum(self.file.span(chunk)[1] for chunk, here in enumerate(self._here) if here)

    def write(self, at: int, data: memoryview | bytes) -> None:
        """Raises OSError."""
        view = memoryview(data)
        while view:
            count = os.pwrite(self._data, view, at)
            view, at = view[count:], at + count

    def came(self, chunk: int) -> None:
        """All of a piece was written."""
        with self._changed:
            self._here[chunk] = 1
            os.pwrite(self._marks, b"\1", chunk)
            self._changed.notify_all()

    def forget(self) -> None:
        """Nothing of it is here any more."""
        self._here[:] = bytes(len(self._here))
        os.pwrite(self._marks, bytes(self._here), 0)

    def finish(self) -> None:
        """Hash the pieces as they come; then the file gets its name.

        Raises Damaged when it has another hash, Stopped when it is not wanted any more, OSError.
        """
        self.open()
        unsaved = 0
        digest, buffer = self.file.digest(), memoryview(bytearray(min(_READ_BYTES, self.file.size)))
        for chunk in range(self.file.chunks):
            with self._changed:
                while not self._here[chunk]:
                    if self._stopped():
                        raise Stopped
                    self._changed.wait(_LOOK_S)
            at, size = self.file.span(chunk)
            while size:
                count = os.preadv(self._data, [buffer[:size]], at)
                digest.update(buffer[:count])
                at, size = at + count, size - count
            unsaved += self.file.span(chunk)[1]
            if unsaved >= _SAVE_BYTES:  # while more comes, the disk has nothing else to do
                os.fsync(self._data)
                unsaved = 0
        if digest.hexdigest() != self.file.hash:
            self._repo.part(self.file).unlink()
            self._repo.ledger(self.file).unlink()
            raise Damaged(self.file)
        os.fsync(self._data)
        self._repo.part(self.file).replace(self._repo.blob(self.file))
        self._repo.ledger(self.file).unlink()


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


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]


def _disk_bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in _files(folder))


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    draft.write_bytes(data)
    draft.replace(path)


_REPO_FOLDER = re.compile(r"models--(.+?)--(.+)")


def repos_here(cache: Path | None = None) -> list[Repo]:
    """Every model of the cache, by name."""
    cache = cache or cache_folder()
    found = []
    for folder in sorted(cache.glob("models--*--*")):
        if match := _REPO_FOLDER.fullmatch(folder.name):
            with contextlib.suppress(ValueError):
                found.append(Repo(f"{match[1]}/{match[2]}", cache))
    return found

"""Models in the Hub's own cache (HF_HUB_CACHE), shared with other programs so that nothing is stored twice.

    models--OWNER--NAME/
        blobs/HASH                    a file's content; its name is its hash
        blobs/HASH.mlxtp-part         the beginning of a file's content
        snapshots/COMMIT/PATH         links to blobs; appears when all of them are complete
        refs/REVISION                 the commit of a branch or tag, as reported by the Hub
        .mlxtp/refs/REVISION          the same as reported by a member; only mlxtp reads it
        .mlxtp/COMMIT.json            the manifest, once it is known
    .locks/models--OWNER--NAME/mlxtp.lock   held by a process that adds or removes files

The Hub client's `scan_cache_dir` omits damaged and incomplete models. Its `delete_revisions` deletes only one
of two models with the same commit, and of a linked folder only the link. Functions that change the disk, or
read a file, raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import Code, ModelError, why_not_written
from ..identity.private_files import sync_folder, to_disk, write_whole
from ..model_files import TIKTOKEN_FILE, indexed, is_lfs_pointer, lfs_pointer, weight_files
from .manifest import (
    Manifest,
    ModelFile,
    check,
    from_bytes,
    gigabytes,
    is_commit,
    split_name,
    to_bytes,
    wanted,
)

FOLDER = ".mlxtp"
_READ_BYTES = 1 << 18  #: Bytes read and hashed at a time: few enough to stay in a processor's cache.
_LOOK_S = 0.5
#: Bytes. Blobs up to this size are hashed before they become part of a model: it takes no time.
SMALL_BYTES = 64 << 20
ROOM_BYTES = 1 << 30  #: Bytes that a model must leave free on the disk.
_SHARD = re.compile(r".*-(\d+)-of-(\d+)\.safetensors")


class Stopped(Exception):
    """The caller has stopped this work."""


class Damaged(Exception):
    """A file's content does not match its hash. The file has been deleted."""

    def __init__(self, file: ModelFile) -> None:
        super().__init__(f"{file.path} does not have the hash {file.hash[:12]}… that it should have")


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that has or would have this folder."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def lacks(folder: Path) -> str:
    """Return the configuration, tokenizer and weights that this folder lacks, in words; "" for nothing."""
    try:
        missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
        if (folder / TIKTOKEN_FILE).is_file() and (folder / "tokenizer_config.json").is_file():
            missing = [name for name in missing if name != "tokenizer.json"]  # it is made from these two
        weights = [path for path in weight_files(folder) if path.is_file()]
        absent = [name for name in indexed(folder) if not (folder / name).is_file()]
        pointers = [path for path in weights if is_lfs_pointer(path)]
    except OSError:
        return "files that can be read"
    except ValueError as error:
        return f"files that can be read ({error})"
    shards = [match for path in weights if (match := _SHARD.fullmatch(path.name))]
    if not weights:
        missing.append("weights (model*.safetensors)")
    elif absent or any(int(shard[2]) != len(shards) for shard in shards):
        missing.append("some files of its weights")
    elif pointers:
        missing.append(f"its weights ({lfs_pointer(pointers[0])})")
    return " and ".join(missing)


class Blobs:
    """Contents of a model's files, by hash, complete or not."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder = folder
        self._cache = cache

    def path(self, file: ModelFile) -> Path:
        return self._folder / "blobs" / file.hash

    def part(self, file: ModelFile) -> Path:
        return self._folder / "blobs" / f"{file.hash}.mlxtp-part"

    def has(self, file: ModelFile) -> bool:
        return _size(self.path(file)) == file.size

    def held(self, file: ModelFile) -> int:
        return file.size if self.has(file) else min(max(_size(self.part(file)), 0), file.size)

    def held_bytes(self, manifest: Manifest) -> int:
        return sum(self.held(file) for file in manifest.blobs)

    def readable(self, file: ModelFile) -> Path:
        """Return the path of its content. Raises OSError for a link out of the cache and model's folder."""
        path = self.path(file)
        found = path.resolve(strict=True)
        if not any(found.is_relative_to(each.resolve()) for each in (self._folder, self._cache)):
            raise OSError(errno.EPERM, f"{path} is a link to what lies outside the cache")
        return found

    def check(self, file: ModelFile, path: Path) -> None:
        """Raise Damaged, and delete the file, if the content at `path` does not match its hash."""
        if hash_of(path, file, lambda _: None) != file.hash:
            path.unlink(missing_ok=True)
            self.path(file).unlink(missing_ok=True)
            raise Damaged(file)

    def drop_if_wrong(self, file: ModelFile) -> None:
        """Delete a small file that does not match its hash: other programs do not check what they write."""
        if file.size <= SMALL_BYTES and self.has(file):
            with contextlib.suppress(Damaged):
                self.check(file, self.path(file))

    def check_room(self, manifest: Manifest) -> None:
        missing, free = manifest.size - self.held_bytes(manifest), free_bytes(self._cache)
        if missing + ROOM_BYTES > free:
            raise ModelError(
                f"{manifest.name} needs {gigabytes(missing)} more, and {self._cache} has {gigabytes(free)} "
                f"free, of which {gigabytes(ROOM_BYTES)} are left alone: make room (`mlxtp list`, `mlxtp "
                "remove MODEL`) or set HF_HUB_CACHE to a folder on another disk",
            )


class Refs:
    """Commits of a model's branches and tags: from the Hub, for all programs, and from members."""

    def __init__(self, folder: Path) -> None:
        self._hubs, self._members = folder / "refs", folder / FOLDER / "refs"

    def commit(self, revision: str) -> str:
        """Return the commit of a revision at its last lookup; "" if unknown."""
        if is_commit(revision):
            return revision
        latest, commit = 0, ""
        for folder in (self._hubs, self._members):
            with contextlib.suppress(OSError, ValueError):
                path = folder / revision
                written, found = path.stat().st_mtime_ns, path.read_text().strip()
                if is_commit(found) and written > latest:
                    latest, commit = written, found
        return commit

    def commits(self) -> dict[str, str]:
        found = {path.relative_to(folder).as_posix() for folder, path in self._files()}
        return {name: self.commit(name) for name in sorted(found)}

    def point(self, ref: str, commit: str, *, by_hub: bool) -> None:
        """Point a branch or tag at a commit. The draft lies elsewhere: files in the Hub's folder are refs."""
        _write(self._members / ref, commit.encode())
        if by_hub:
            path = self._hubs / ref
            path.parent.mkdir(parents=True, exist_ok=True)
            (self._members / ref).replace(path)
            sync_folder(path.parent)

    def forget(self, commits: frozenset[str]) -> None:
        for _, path in self._files():
            if path.read_text().strip() in commits:
                path.unlink()

    def _files(self) -> list[tuple[Path, Path]]:
        """Return each ref's folder and path. A name that begins with a dot is a draft, not a ref."""
        found = [(each, path) for each in (self._hubs, self._members) for path in each.rglob("*")]
        return [(each, path) for each, path in found if path.is_file() and not path.name.startswith(".")]


@dataclass(frozen=True, slots=True)
class StoredCommit:
    """State of a commit on this disk: `held` of `total` bytes."""

    name: str
    revision: str
    manifest: Manifest | None = None  #: None if unknown, or if no manifest may have its file names
    folder: Path | None = None  #: None until it is complete
    held: int = 0
    total: int = 0
    refs: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return self.folder is not None


class Repo:
    """One model of the cache, complete or not. Raises ValueError for a name that is not OWNER/NAME."""

    def __init__(self, name: str, cache: Path | None = None) -> None:
        if split_name(name) != (name, "main"):
            raise ValueError(f"{name!r:.200} is no OWNER/NAME")
        self.name = name
        self.cache = cache or cache_folder()
        self.folder = self.cache / f"models--{name.replace('/', '--')}"
        self.blobs = Blobs(self.folder, self.cache)
        self.refs = Refs(self.folder)

    @contextlib.contextmanager
    def locked(self, stopped: Callable[[], bool] | None = None) -> Iterator[None]:
        """Hold the model's lock against other mlxtp processes. Raises ModelError if nothing can be written.

        While it waits it raises Stopped if `stopped` says so. Without `stopped` it raises ModelError instead
        of waiting.
        """
        path = self.cache / ".locks" / self.folder.name / "mlxtp.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("wb")
        except OSError as error:
            raise ModelError(f"{self.name}: {why_not_written(error, self.cache)}") from None
        with lock:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if stopped is None:
                    why = f"another process is adding to {self.name}; stop it, or wait until it is done"
                    raise ModelError(why, Code.NOT_READY)
                if stopped():
                    raise Stopped
                threading.Event().wait(_LOOK_S)
            yield

    # --- what is here

    def stored(self, revision: str) -> StoredCommit:
        """Return how much is here of a commit, or of the commit of a branch or tag."""
        commit = self.refs.commit(revision)
        folder, manifest = self.folder / "snapshots" / commit, self._kept(commit)
        if manifest is not None:
            whole = all(_size(folder / file.path) == file.size for file in manifest.files)
        elif whole := bool(commit) and not lacks(folder):
            manifest = self._linked(folder)
        if manifest is not None:
            total = manifest.size
            held = total if whole else self.blobs.held_bytes(manifest)
        else:
            held = total = folder_bytes(folder, links=True) if whole else 0
        return StoredCommit(self.name, commit, manifest, folder if whole else None, held, total)

    def snapshot(self, revision: str) -> Path | None:
        return self.stored(revision).folder

    def manifest(self, revision: str) -> Manifest | None:
        """Return the kept manifest of a revision, or one made from another program's links."""
        return self.stored(revision).manifest

    def _kept(self, commit: str) -> Manifest | None:
        try:
            kept = from_bytes((self.folder / FOLDER / f"{commit}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return kept if (kept.name, kept.revision) == (self.name, commit) else None

    def _linked(self, folder: Path) -> Manifest | None:
        try:
            found = [
                ModelFile(path.relative_to(folder).as_posix(), path.stat().st_size, path.readlink().name)
                for path in sorted(folder.rglob("*"))
                if path.is_symlink()
            ]
            return check(Manifest(self.name, folder.name, wanted(found)))
        except (OSError, ValueError):
            return None

    def begun(self) -> StoredCommit | None:
        """Return the newest commit that has a kept manifest and is incomplete."""
        try:
            kept = sorted((self.folder / FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime)
        except OSError:
            return None
        found = (self.stored(path.stem) for path in reversed(kept) if is_commit(path.stem))
        return next((each for each in found if each.manifest and not each.complete), None)

    def as_here(self) -> Repo:
        """Return the model under its folder's spelling on this disk, since macOS ignores case."""
        found = (each for each in repos_here(self.cache) if each.name.casefold() == self.name.casefold())
        return next((each for each in found if self._is(each.folder)), self)

    def has_inside(self, path: Path) -> bool:
        """Return True if a path, in any spelling, is inside this model's folder."""
        path = path.resolve()
        return any(self._is(each) for each in (path, *path.parents))

    def _is(self, folder: Path) -> bool:
        try:
            return self.folder.samefile(folder)
        except OSError:
            return False

    # --- downloads

    def keep(self, manifest: Manifest) -> None:
        _write(self.folder / FOLDER / f"{manifest.revision}.json", to_bytes(manifest))
        (self.folder / "blobs").mkdir(exist_ok=True)

    def publish(self, manifest: Manifest, revision: str, *, by_hub: bool) -> Path:
        """Link a snapshot to complete blobs; return it. `by_hub`: the Hub named its commit for `revision`."""
        for file in manifest.files:
            if not self.blobs.has(file):
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
            for file in manifest.files:  # another program made the folder
                (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
                (draft / file.path).replace(folder / file.path)
            shutil.rmtree(draft)
        if not is_commit(revision):
            self.refs.point(revision, manifest.revision, by_hub=by_hub)
        return folder

    def refer(self, refs: Iterable[str], commit: str, stopped: Callable[[], bool], *, by_hub: bool) -> None:
        """Call `Refs.point` for each ref under the lock. It waits and raises as `locked` does."""
        with self.locked(stopped):
            for ref in refs:
                self.refs.point(ref, commit, by_hub=by_hub)

    # --- removal

    def remove(self, commits: frozenset[str]) -> int:
        """Remove commits, and blobs that no other commit here uses; return the bytes freed. See `locked`."""
        with self.locked():
            before = folder_bytes(self.folder)
            commits &= self.commits()
            gone = {name for commit in commits for name in self._blobs_of(commit)}
            self.refs.forget(commits)
            for commit in commits:
                snapshot = self.folder / "snapshots" / commit
                if snapshot.is_dir() and not snapshot.is_symlink():
                    shutil.rmtree(snapshot)
                else:
                    snapshot.unlink(missing_ok=True)
            if not (others := self.commits() - commits):
                if self.folder.exists():
                    shutil.rmtree(self.folder.resolve())
                self.folder.unlink(missing_ok=True)  # a link to a folder elsewhere
                return before
            used = {name for commit in others for name in self._blobs_of(commit)}
            for path in (self.folder / "blobs").glob("*"):
                name, _, unfinished = path.name.partition(".mlxtp-")
                if name not in used and (unfinished or name in gone):
                    path.unlink()
            for commit in commits:  # last, so that an interrupted removal can be repeated
                (self.folder / FOLDER / f"{commit}.json").unlink(missing_ok=True)
            return before - folder_bytes(self.folder)

    def _blobs_of(self, commit: str) -> set[str]:
        links = (path for path in (self.folder / "snapshots" / commit).rglob("*") if path.is_symlink())
        kept = self._kept(commit)
        return {path.readlink().name for path in links} | {file.hash for file in (kept.files if kept else ())}

    def commits(self) -> frozenset[str]:
        """Return the commits that have a snapshot or a kept manifest."""
        snapshots, kept = self.folder / "snapshots", self.folder / FOLDER
        found = [path.name for path in snapshots.glob("*")] + [path.stem for path in kept.glob("*.json")]
        return frozenset(filter(is_commit, found))


class PartialFile:
    """A file that one thread writes in order and hashes on the way. It resumes an earlier beginning."""

    def __init__(self, blobs: Blobs, file: ModelFile, stopped: Callable[[], bool]) -> None:
        self.file = file
        self.held_bytes = blobs.held(file)
        self._blobs = blobs
        self._stopped = stopped
        self._lock = threading.Lock()
        self._data = -1
        self._digest = file.digest()
        self._at = 0  #: Bytes hashed so far.

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock:
            if self._stopped():
                raise Stopped
            yield

    def open(self) -> int:
        """Open the file and hash what it has; return the number of those bytes. Raises Stopped."""
        with self._in_use():
            if self._data < 0:
                self._data = os.open(self._blobs.part(self.file), os.O_RDWR | os.O_CREAT, 0o644)
            if os.fstat(self._data).st_size > self.file.size:
                os.ftruncate(self._data, 0)
        while data := self._next():
            self._digest.update(data)
            self._at += len(data)
        return self._at

    def _next(self) -> bytes:
        with self._in_use():
            return os.pread(self._data, _READ_BYTES, self._at)

    def write(self, data: memoryview | bytes) -> None:
        """Write the next bytes. Raises OSError, also for too many bytes, and Stopped after `close`."""
        view = memoryview(data)
        with self._in_use():
            if self._at + len(view) > self.file.size:
                raise OSError(f"more than the {self.file.size} bytes came that it should have")
            while view:
                count = os.pwrite(self._data, view, self._at)
                self._digest.update(view[:count])
                view, self._at = view[count:], self._at + count
            self.held_bytes = self._at

    def restart(self) -> None:
        with self._in_use():
            os.ftruncate(self._data, 0)
            self._digest, self._at, self.held_bytes = self.file.digest(), 0, 0

    def finish(self) -> None:
        """Rename the complete file to its hash. Raises Damaged, Stopped."""
        with self._in_use():
            part = self._blobs.part(self.file)
            if self._digest.hexdigest() != self.file.hash:
                part.unlink()
                raise Damaged(self.file)
            to_disk(self._data)
            part.replace(self._blobs.path(self.file))

    def close(self) -> None:
        """Prevent all further writes, even by an abandoned thread. May be repeated."""
        with self._lock:
            self._stopped = lambda: True
            if self._data >= 0:
                os.close(self._data)
                self._data = -1


FileQueue = list[PartialFile]


def take(queue: FileQueue, there: Container[str] | None = None) -> PartialFile | None:
    """Take from a queue that threads share: the next file, or the next with a hash in `there`, or None."""
    for part in [each for each in queue if there is None or each.file.hash in there]:
        with contextlib.suppress(ValueError):  # another thread took it
            queue.remove(part)
            return part
    return None


def hash_of(path: Path, file: ModelFile, on_bytes: Callable[[int], None]) -> str:
    digest, buffer = file.digest(), memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            digest.update(buffer[:count])
            on_bytes(count)
    return str(digest.hexdigest())


def hub_name(name: str) -> tuple[Repo, str]:
    """Return the cache's Repo for OWNER/NAME[@REVISION], and the revision. Raises ModelError."""
    try:
        repo, revision = split_name(name)
    except ValueError as error:
        raise ModelError(str(error), Code.MODEL_NOT_FOUND) from None
    return Repo(repo), revision


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def folder_bytes(folder: Path, *, links: bool = False) -> int:
    """Return the bytes of the files below a folder. With `links`, the targets of links count too."""
    files = (path for path in folder.rglob("*") if path.is_file() and (links or not path.is_symlink()))
    try:
        return sum(path.stat().st_size for path in files)
    except OSError:  # it is being deleted
        return 0


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data, 0o666)


def repos_here(cache: Path | None = None) -> list[Repo]:
    cache, found = cache or cache_folder(), []
    for folder in sorted(cache.glob("models--*--*")):
        with contextlib.suppress(ValueError):
            found.append(Repo("/".join(folder.name.split("--", 2)[1:]), cache))
    return found


def commits_here(cache: Path | None = None) -> list[StoredCommit]:
    """Return the commits in this Mac's Hub cache that are complete, or that mlxtp has begun to download."""
    found = []
    for repo in repos_here(cache):
        refs = repo.refs.commits()
        for here in map(repo.stored, sorted(repo.commits())):
            if here.complete or here.held:
                named = tuple(ref for ref, at in refs.items() if at == here.revision)
                found.append(replace(here, refs=named))
    return found

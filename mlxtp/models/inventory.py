"""Models on this Mac's disk that have a name without a path: the embedded one, and those in the Hub's cache.

A request may name the complete ones, because no request downloads. Users see all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..api.backend import StoredModelInfo
from ..config import EMBEDDED_MODEL, embedded_model_path
from ..errors import ModelError
from .completeness import is_complete
from .hub_cache import Repo, repos_here
from .inspect import check_servable, read_config
from .manifest import split_name

MOST = 200  #: Models listed for users, at most: a cache may hold anything.
#: Tokens that the engine assumes for a model whose configuration has no context length.
_DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A model on this disk. `name` is what `mlxtp serve` takes.

    `size_bytes` counts all its files. `complete`: it can be tried without a download. Only loading shows that
    mlx-lm can run it.
    """

    name: str
    source: Literal["embedded", "hub"]
    size_bytes: int
    complete: bool


def hub_folder(name: str) -> Path | None:
    """Return the snapshot of OWNER/NAME[@REVISION] in this Mac's Hub cache if it is complete, else None.
    Reads the disk.
    """
    try:
        repo, revision = split_name(name)
    except ValueError:
        return None
    return Repo(repo).snapshot(revision)


def models_here() -> tuple[OnDisk, ...]:
    """Return the models here now, complete or not: the embedded model first, then by name.

    Reads the names and sizes of every file in the cache: call it in a thread.
    """
    embedded = OnDisk(EMBEDDED_MODEL, "embedded", _size(embedded_model_path()), complete=True)
    sizes = [(repo, _size(repo.folder)) for repo in repos_here()[: MOST - 1]]
    return (
        embedded,
        *(OnDisk(repo.name, "hub", size, repo.snapshot("main") is not None) for repo, size in sizes if size),
    )


def stored_models(folders: Iterable[tuple[str, Path]] = ()) -> tuple[StoredModelInfo, ...]:
    """Return the complete models that can be served: embedded, of the Hub cache, and `folders` with their
    names.

    Leaves out what `check_servable` refuses. Reads the disk: call it in a thread.
    """
    found = [
        (EMBEDDED_MODEL, embedded_model_path()),
        *((repo.name, repo.snapshot("main")) for repo in repos_here()),
        *((name, folder if is_complete(folder) else None) for name, folder in folders),
    ]
    described = (_described(name, folder) for name, folder in found if folder is not None)
    return tuple(stored for stored in described if stored is not None)


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision of a model in the Hub's cache: `held` of `total` bytes are here. `refs` are branches and
    tags that name it.
    """

    name: str
    revision: str
    refs: tuple[str, ...]
    held: int
    total: int
    complete: bool


def revisions_here(only: str = "", cache: Path | None = None) -> list[Revision]:
    """Return the revisions in this Mac's Hub cache, of one OWNER/NAME if `only` is not empty.

    They are complete, or mlxtp has downloaded a part of them. Reads the disk: call it in a thread.
    """
    found = []
    for repo in repos_here(cache):
        if only not in ("", repo.name):
            continue
        refs = repo.refs()
        for commit in sorted(repo.commits()):
            manifest, folder = repo.manifest(commit), repo.snapshot(commit)
            named = tuple(ref for ref, at in refs.items() if at == commit)
            if manifest is not None:
                held = manifest.size if folder is not None else repo.held_bytes(manifest)
                if folder is None and not held:
                    continue
                found.append(Revision(repo.name, commit, named, held, manifest.size, folder is not None))
            elif folder is not None:
                size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                found.append(Revision(repo.name, commit, named, size, size, complete=True))
    return found


def _size(folder: Path) -> int:
    """Return the bytes of the files below a folder. Each file counts once; a snapshot has links to them."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    try:
        return sum(path.stat().st_size for path in files)
    except OSError:  # it is being deleted
        return 0


def _described(name: str, folder: Path) -> StoredModelInfo | None:
    """Return the model's description; None if its configuration shows that it cannot be served."""
    try:
        config = read_config(folder)
        check_servable(config)
        created = int((folder / "config.json").stat().st_mtime)
    except (ModelError, OSError):
        return None
    inner = config.get("text_config")
    length = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    context = length if isinstance(length, int) and length > 0 else _DEFAULT_CONTEXT
    return StoredModelInfo(name, folder, context, created)

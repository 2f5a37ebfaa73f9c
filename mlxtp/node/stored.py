"""Models on this Mac's disk that are complete: what a request may name without anything being downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..api.backend import Stored
from ..cluster.manifests import split_name
from ..config import EMBEDDED_MODEL, embedded_model_path
from .complete import READ_ERRORS, table_of
from .hub_cache import Repo, repos_here

_DEFAULT_CONTEXT = 4096
"""What the engine takes for a model that does not say its own."""


def hub_folder(name: str) -> Path | None:
    """The snapshot of OWNER/NAME[@REVISION] in this Mac's Hub cache, if it is whole. Reads the disk."""
    try:
        repo, revision = split_name(name)
    except ValueError:
        return None
    return Repo(repo).snapshot(revision)


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision of a model in the Hub's cache: `held` of `total` bytes are here. `refs` are branches and
    tags that name it."""

    name: str
    revision: str
    refs: tuple[str, ...]
    held: int
    total: int
    complete: bool


def revisions_here(only: str = "") -> list[Revision]:
    """Those in this Mac's Hub cache that are whole, or were begun by mlxtp; or those of one OWNER/NAME.

    Reads the disk: call it in a thread.
    """
    found = []
    for repo in repos_here():
        if only not in ("", repo.name):
            continue
        refs = repo.refs()
        for commit in sorted(repo.commits()):
            manifest, folder = repo.manifest(commit), repo.snapshot(commit)
            named = tuple(ref for ref, at in refs.items() if at == commit)
            if manifest is not None:
                held = manifest.size if folder is not None else repo.held(manifest)
                found.append(Revision(repo.name, commit, named, held, manifest.size, folder is not None))
            elif folder is not None:
                size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                found.append(Revision(repo.name, commit, named, size, size, complete=True))
    return found


def stored_models() -> tuple[Stored, ...]:
    """The embedded model and those of the Hub cache, by name. Reads the disk: call it in a thread."""
    names = [repo.name for repo in repos_here()]
    found = [(EMBEDDED_MODEL, embedded_model_path()), *((name, hub_folder(name)) for name in names)]
    return tuple(_described(name, folder) for name, folder in found if folder is not None)


def _described(name: str, folder: Path) -> Stored:
    try:
        config = table_of(folder / "config.json")
        created = int((folder / "config.json").stat().st_mtime)
    except READ_ERRORS:
        config, created = {}, 0
    inner = config.get("text_config")
    length = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    context = length if isinstance(length, int) and length > 0 else _DEFAULT_CONTEXT
    return Stored(name, folder, context, created)

"""Models on this Mac's disk that are complete: what a request may name without anything being downloaded."""

from __future__ import annotations

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

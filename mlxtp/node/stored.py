"""Models on this Mac's disk that can be named without a path: the embedded one, and those in the Hub's cache.

A request may name those that are complete, because nothing is downloaded for it; people are told of all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..api.backend import Stored
from ..config import EMBEDDED_MODEL, embedded_model_path
from ..errors import ModelError
from .servable import check_servable, read_config

MOST = 200
"""How many people are told of: a cache may hold anything."""

_PART = re.compile(r"[\w.-]+")
_SHARD = re.compile(r".*-(\d+)-of-(\d+)\.safetensors")
_DEFAULT_CONTEXT = 4096
"""What the engine takes for a model that does not say its own."""
_READ_ERRORS = (OSError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A model here. `name` is what `mlxtp serve` takes.

    `size_bytes` counts all its files. `complete`: it can be tried without a download; whether mlx-lm can run
    it is not known before.
    """

    name: str
    source: Literal["embedded", "hub"]
    size_bytes: int
    complete: bool


def hub_folder(name: str) -> Path | None:
    """The newest snapshot of OWNER/NAME in this Mac's Hub cache, if all of it is there. Reads the disk."""
    from huggingface_hub import constants

    parts = name.split("/")
    if len(parts) != 2 or not all(_PART.fullmatch(part) for part in parts):
        return None
    folder = Path(constants.HF_HUB_CACHE) / f"models--{'--'.join(parts)}"
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except _READ_ERRORS:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if _PART.fullmatch(commit) and is_complete(snapshot) else None


def is_complete(folder: Path) -> bool:
    """Whether configuration, tokenizer and all weights are in this folder. Reads the disk."""
    return not lacks(folder)


def lacks(folder: Path) -> str:
    """What this folder would need to be a complete model, in words; empty for nothing. Reads the disk."""
    try:
        missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
        weights = {path.name for path in folder.glob("model*.safetensors") if path.is_file()}
        indices = list(folder.glob("*.safetensors.index.json"))
        wanted = {name for index in indices for name in _table(index)["weight_map"].values()}
    except (*_READ_ERRORS, LookupError, AttributeError):
        return "files that can be read"
    shards = [match for match in map(_SHARD.fullmatch, weights) if match]
    if not weights:
        missing.append("weights (model*.safetensors)")
    elif not wanted <= weights or any(int(shard[2]) != len(shards) for shard in shards):
        missing.append("some files of its weights")
    return " and ".join(missing)


def models_here() -> tuple[OnDisk, ...]:
    """What is here now, complete or not: the embedded model first, then by name.

    Reads the names and sizes of every file in the cache: call it in a thread.
    """
    embedded = OnDisk(EMBEDDED_MODEL, "embedded", _size(embedded_model_path()), complete=True)
    cached = sorted(_cached())[: MOST - 1]
    return (
        embedded,
        *(OnDisk(name, "hub", _size(folder), hub_folder(name) is not None) for name, folder in cached),
    )


def stored_models(folders: Iterable[tuple[str, Path]] = ()) -> tuple[Stored, ...]:
    """The embedded model, those of the Hub cache by name, and `folders`, each with its name: what is complete
    but for what `check_servable` refuses. Reads the disk: call it in a thread.
    """
    found = [
        (EMBEDDED_MODEL, embedded_model_path()),
        *((name, hub_folder(name)) for name, _ in sorted(_cached())),
        *((name, folder if is_complete(folder) else None) for name, folder in folders),
    ]
    described = (_described(name, folder) for name, folder in found if folder is not None)
    return tuple(stored for stored in described if stored is not None)


def _cached() -> Iterator[tuple[str, Path]]:
    """Names and folders of the models of which something was downloaded."""
    from huggingface_hub import constants

    for folder in Path(constants.HF_HUB_CACHE).glob("models--*--*"):
        if (folder / "snapshots").is_dir():
            yield "/".join(folder.name.split("--", 2)[1:]), folder


def _size(folder: Path) -> int:
    """Bytes of the files below it, each of which counts once: a snapshot has links to them."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    try:
        return sum(path.stat().st_size for path in files)
    except OSError:  # it is being deleted
        return 0


def _described(name: str, folder: Path) -> Stored | None:
    """Nothing, if its configuration tells that it cannot be served."""
    try:
        config = read_config(folder)
        check_servable(config)
        created = int((folder / "config.json").stat().st_mtime)
    except (ModelError, OSError):
        return None
    inner = config.get("text_config")
    length = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    context = length if isinstance(length, int) and length > 0 else _DEFAULT_CONTEXT
    return Stored(name, folder, context, created)


def _table(path: Path) -> dict[str, Any]:
    table = json.loads(path.read_text())
    if not isinstance(table, dict):
        raise ValueError(f"{path} holds no table")
    return table

"""Models on this Mac's disk that are complete: what a request may name without anything being downloaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..api.backend import Stored
from ..config import EMBEDDED_MODEL, embedded_model_path
from ..errors import ModelError
from .servable import check_servable, read_config

_PART = re.compile(r"[\w.-]+")
_SHARD = re.compile(r".*-(\d+)-of-(\d+)\.safetensors")
_DEFAULT_CONTEXT = 4096
"""What the engine takes for a model that does not say its own."""
_READ_ERRORS = (OSError, ValueError, RecursionError)


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
    try:
        if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
            return False
        weights = {path.name for path in folder.glob("model*.safetensors") if path.is_file()}
        indices = list(folder.glob("*.safetensors.index.json"))
        wanted = {name for index in indices for name in _table(index)["weight_map"].values()}
    except (*_READ_ERRORS, LookupError, AttributeError):
        return False
    shards = [match for match in map(_SHARD.fullmatch, weights) if match]
    if any(int(shard[2]) != len(shards) for shard in shards):
        return False
    return bool(weights) and wanted <= weights


def stored_models() -> tuple[Stored, ...]:
    """The embedded model and those of the Hub cache, by name, but for what `check_servable` refuses. Reads
    the disk: call it in a thread."""
    from huggingface_hub import constants

    names = []
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        _, owner, *rest = folder.name.split("--")
        names.append(f"{owner}/{'--'.join(rest)}")
    found = [(EMBEDDED_MODEL, embedded_model_path()), *((name, hub_folder(name)) for name in names)]
    described = (_described(name, folder) for name, folder in found if folder is not None)
    return tuple(stored for stored in described if stored is not None)


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

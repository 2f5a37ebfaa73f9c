"""Models on this disk that people can name without a path: the embedded one, and those in the Hub's cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config import EMBEDDED_MODEL, embedded_model_path

log = logging.getLogger(__name__)

MOST = 200
"""How many are told: a cache may hold anything."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A model here. `name` is what `mlxtp serve` takes.

    `size_bytes` counts all its files. `complete`: there are a configuration and weights in one snapshot, so
    that it can be tried without a download; whether mlx-lm can run it is not known before.
    """

    name: str
    source: Literal["embedded", "hub"]
    size_bytes: int
    complete: bool


def models_here(cache: Path | None = None) -> tuple[OnDisk, ...]:
    """What is here now: the embedded model first, then by name. `cache` is the Hub's own unless given.

    Reads the names and sizes of every file in the cache: call it in a thread.
    """
    return (_embedded(), *sorted(_cached(cache), key=lambda each: each.name)[: MOST - 1])


def _embedded() -> OnDisk:
    files = [path for path in embedded_model_path().iterdir() if path.is_file()]
    return OnDisk(EMBEDDED_MODEL, "embedded", sum(path.stat().st_size for path in files), complete=True)


def _cached(cache: Path | None) -> list[OnDisk]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(cache).repos
    except CacheNotFound:
        return []
    except (OSError, ValueError) as error:
        log.warning("the cache of the Hub cannot be read: %s", error)
        return []
    return [
        OnDisk(
            repo.repo_id,
            "hub",
            repo.size_on_disk,
            any(_is_model({file.file_name for file in each.files}) for each in repo.revisions),
        )
        for repo in repos
        if repo.repo_type == "model"
    ]


def _is_model(files: set[str]) -> bool:
    return "config.json" in files and any(name.endswith(".safetensors") for name in files)

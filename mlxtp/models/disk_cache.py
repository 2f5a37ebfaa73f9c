"""KV caches of earlier prompts on this Mac's disk, as its agent sees them: room, list, removal.

Only rank processes write them. FOLDER/LAYOUT/ has one rank's share of a model: about.json names both, and
each block is a file. A name that begins with "." marks an unfinished block. FOLDER/.used has the bytes of all
blocks; it changes under a lock on FOLDER/.lock. A rank tolerates the removal of a block.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..cluster.cluster_state import name_of
from ..errors import UserError
from ..model_files import table
from ..wire.cluster_messages import MAX_CACHES

MOST_BYTES = 50 * 10**9  #: Default room, unless a tenth of the free disk is less.
_ABOUT, _LOCK, _USED = "about.json", ".lock", ".used"
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")
#: Errors of an about.json: OverflowError for an infinite number.
_UNUSABLE = (OSError, ValueError, TypeError, LookupError, OverflowError)


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """Room for the caches of all this Mac's ranks."""

    folder: str = ""
    bytes: int = 0


def folder_in(home: Path) -> Path:
    return home / "kv-cache"


def room_in(home: Path, setting: int | None) -> DiskRoom:
    """Return the room for `Settings.cache_disk`; None: a tenth of the disk that is free without caches."""
    folder = folder_in(home)
    if setting is None:
        try:
            setting = min(MOST_BYTES, (shutil.disk_usage(home).free + _used(folder)) // 10)
        except OSError:
            setting = 0
    return DiskRoom(str(folder), setting) if setting else DiskRoom()


@dataclass(frozen=True, slots=True)
class Layout:
    """Blocks of one rank's share of a model."""

    model: str
    rank: int
    ranks: int
    kv_bits: int
    blocks: int
    bytes: int
    used_at: float  #: last use, in seconds since 1970


def layouts(folder: Path) -> list[Layout]:
    found = [layout for each in _folders(folder) if (layout := _layout(each)).blocks]
    return sorted(found, key=lambda each: (each.model, each.ranks, each.rank))


def ranks_in(home: Path) -> tuple[str, ...]:
    """Return `Machine.caches` for an agent's home: this Mac's latest rank of each model that ranks shared."""
    found: dict[str, tuple[float, int]] = {}
    for each in _folders(folder_in(home)):
        with suppress(*_UNUSABLE):
            about = table(each / _ABOUT)
            if int(about["ranks"]) > 1:
                name = _name(str(about["model"])).rstrip("/").rpartition("/")[2]
                newest = each.stat().st_mtime, int(about["rank"])
                found[name] = max(found.get(name, newest), newest)
    return tuple(f"{rank} {name}" for name, (_, rank) in sorted(found.items()))[:MAX_CACHES]


def listed(home: Path, setting: int | None) -> dict[str, Any]:
    folder = folder_in(home)
    return {
        "folder": str(folder),
        "room_bytes": room_in(home, setting).bytes,
        "models": by_model(layouts(folder)),
    }


def by_model(found: list[Layout]) -> list[dict[str, Any]]:
    models: dict[str, list[Layout]] = {}
    for each in found:
        models.setdefault(each.model, []).append(each)
    return [
        {
            "model": model,
            "blocks": sum(each.blocks for each in parts),
            "bytes": sum(each.bytes for each in parts),
            "used_at": max(each.used_at for each in parts),
            "layouts": [asdict(each) for each in parts],
        }
        for model, parts in models.items()
    ]


def clear(folder: Path, model: str = "", *, agent_runs: bool) -> list[Layout]:
    """Remove and return the blocks of a model (a folder, or OWNER/NAME), or of all. Raises UserError.

    While an agent runs, unfinished blocks and folders stay, because a rank may be writing there.
    """
    if not folder.is_dir():
        return []
    removed, freed, name = [], 0, name_of(model)
    with os.fdopen(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            for each in _folders(folder):
                layout = _layout(each)
                if not name or name == name_of(layout.model):
                    freed += _remove(each, unfinished=not agent_runs)
                    removed.append(layout)
        finally:  # without an agent count again, because no rank adds to it
            left = _used(folder) - freed if agent_runs else sum(each.bytes for each in layouts(folder))
            used = os.open(folder / _USED, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(used, "w") as account:
                account.write(str(max(0, left)))
    return [each for each in removed if each.blocks]


def _used(folder: Path) -> int:
    try:
        return max(0, int((folder / _USED).read_text()[:20]))
    except (OSError, ValueError):
        return 0


def _folders(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
    return []


def _layout(folder: Path) -> Layout:
    try:
        about = table(folder / _ABOUT)
        model = _name(str(about["model"]))
        numbers = [int(about[name]) for name in ("rank", "ranks", "kv_bits")]
    except _UNUSABLE:
        model, numbers = "", [0, 0, 0]
    rank, ranks, kv_bits = numbers
    blocks = [status for _path, status in _files(folder, unfinished=False)]
    size, used_at = sum(each.st_size for each in blocks), max((each.st_mtime for each in blocks), default=0.0)
    return Layout(model, rank, ranks, kv_bits, len(blocks), size, used_at)


def _name(model: str) -> str:
    match = _SNAPSHOT.search(model)
    return f"{match[1]}/{match[2]}" if match is not None else model


def _files(folder: Path, *, unfinished: bool) -> Iterator[tuple[Path, os.stat_result]]:
    with suppress(OSError), os.scandir(folder) as entries:
        for each in entries:
            if each.name != _ABOUT and (unfinished or not each.name.startswith(".")):
                with suppress(OSError):
                    if each.is_file(follow_symlinks=False):
                        yield Path(each.path), each.stat(follow_symlinks=False)


def _remove(folder: Path, *, unfinished: bool) -> int:
    """Remove the blocks of one layout, with `unfinished` its folder too; return the bytes freed."""
    freed = 0
    for path, status in _files(folder, unfinished=unfinished):
        try:
            path.unlink()
        except FileNotFoundError:
            continue  # a rank has evicted it
        except OSError as error:
            raise UserError(f"{path} cannot be removed: {error.strerror}") from None
        freed += status.st_size
    with suppress(OSError):
        if unfinished and all(each.name == _ABOUT for each in folder.iterdir()):
            (folder / _ABOUT).unlink(missing_ok=True)
            folder.rmdir()
    return freed

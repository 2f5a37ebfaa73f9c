"""From a user's name of a model to a folder on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import EMBEDDED_MODEL, embedded_model_path
from ..errors import Code, ModelError
from ..placement.model_shape import ModelShape, shape_of
from ..text.tokenizer import Text
from ..wire.cluster_messages import MAX_MODEL
from . import hub_client
from .completeness import lacks
from .download import Fetch
from .hub_cache import hub_name
from .inspect import check_servable, read_config, shape_in
from .inventory import hub_folder

_CONFIG_FILES = ("config.json", "*.index.json")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Model to serve: its public name, its folder on this machine, its tokenizer, and its draft model."""

    id: str
    path: Path
    text: Text
    draft_path: Path | None = None


async def open_model(name: str, draft: str = "", *, download: bool = True) -> ModelSource:
    """Open the model `name`: the embedded one, a folder, or an id on the Hugging Face Hub
    (OWNER/NAME[@REVISION]).

    An id that is not here is downloaded. `draft` names a second model that proposes tokens for it. Without
    `download` the model has to be on this machine. Raises ModelError; its message uses the user's name of the
    model.
    """
    return await asyncio.to_thread(_open_model, name, draft, download)


async def find_model(name: str, *, download: bool = True) -> Path:
    """Return only its folder. Raises ModelError as `open_model` does."""
    return await asyncio.to_thread(lambda: _check(_find(name, download)).resolve())


def find_config(name: str) -> Path:
    """Return a folder with its configuration and the index of its weights, not the weights. Raises
    ModelError.
    """
    if not is_hub_id(name):
        return _check(_find(name))
    repo, revision = hub_name(name)
    return repo.snapshot(revision) or hub_client.fetch_some(
        hub_client.look_up(repo.name, revision), _CONFIG_FILES
    )


def stored_name(name: str) -> str | None:
    """Return the desired state's name of a model that is complete on this machine; None for any other.

    That is the embedded model's name, a folder's whole path, or an id on the Hub. Raises ModelError for a
    folder that lacks files, and for a configuration that cannot be served. Reads the disk: call it in a
    thread.
    """
    if len(name) > MAX_MODEL or not name.isprintable():
        return None  # it fits in no message between Macs
    if name == EMBEDDED_MODEL:
        return name
    try:
        local = Path(name).is_absolute()
        folder = _check(_find(name)) if local else hub_folder(name)
    except (ModelError, OSError, ValueError):
        return None
    if folder is None:
        return None
    if local and (missing := lacks(folder)):
        raise ModelError(f"the folder is incomplete: it lacks {missing}", Code.MODEL_NOT_FOUND)
    check_servable(read_config(folder))
    return lasting_name(name) if local else name


def _open_model(name: str, draft: str, download: bool) -> ModelSource:
    path = _check(_find(name, download))
    draft_path = _check(_find(draft)).resolve() if draft else None
    public = name if is_hub_id(name) else path.name
    return ModelSource(public, path.resolve(), Text.load(path), draft_path)


def _check(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json, so it is not a model folder", Code.MODEL_NOT_FOUND)
    if set(str(path)) & set("[]*?"):
        raise ModelError(f"{path}: mlx-lm finds no weights in folders whose path has one of [ ] * ?")
    return path


def _find(name: str, download: bool = True) -> Path:
    if name == EMBEDDED_MODEL:
        return embedded_model_path()
    folder = _as_path(name)
    if _is_folder(folder):
        return folder
    if folder.exists():
        raise ModelError(
            f"{name} is a file; a model is a folder with config.json and weights", Code.MODEL_NOT_FOUND
        )
    if not is_hub_id(name):
        raise ModelError(
            f"{name} is neither a folder nor an id on the Hub (OWNER/NAME); "
            f"{EMBEDDED_MODEL!r} is the embedded model, and other plain names are looked for in each "
            "--model-folder of `mlxtp node` (`model_folders` in config.toml)",
            Code.MODEL_NOT_FOUND,
        )
    if not download:
        if (stored := hub_folder(name)) is None:
            raise ModelError(
                f"{name} is not complete on this Mac, and nothing is downloaded for a request; "
                f"`mlxtp serve {name}` downloads it",
                Code.MODEL_NOT_FOUND,
            )
        return stored
    return _download(name)


def look_ahead(name: str, kv_bits: int, *, elsewhere: bool = False) -> ModelShape | None:
    """Return the shape of a model for placement, before anything of it is loaded or downloaded.

    None for a model that is not here but `elsewhere`, complete on another member's disk. Raises ModelError
    for a model that is neither here nor on the Hub, lacks files, or has no room on this disk. It does so,
    too, for a configuration that no group could run. Waits for disk and network: call it in a thread.
    """
    try:
        if not is_hub_id(name):
            folder: Path | None = _check(_find(name))
        else:
            folder = hub_folder(name)
        if folder is not None:
            if missing := lacks(folder):
                raise ModelError(f"the folder is incomplete: it lacks {missing}", Code.MODEL_NOT_FOUND)
            config = read_config(folder)
            check_servable(config)
            return shape_in(folder, config, name, kv_bits)
        return None if elsewhere else _look_at_hub(name, kv_bits)
    except ModelError as error:
        raise ModelError(
            f"{name} cannot be served, so all stays as it is: {error.detail}", error.code
        ) from None


def _look_at_hub(name: str, kv_bits: int) -> ModelShape:
    repo, revision = hub_name(name)
    manifest = hub_client.look_up(repo.name, revision)
    repo.check_room(manifest)
    config = read_config(hub_client.fetch_some(manifest, ("config.json",)))
    check_servable(config)
    weights = sum(file.size for file in manifest.files if file.path.endswith(".safetensors"))
    return shape_of(config, name=name, weight_bytes=weights, kv_bits=kv_bits)


def in_folders(name: str, folders: Sequence[str]) -> str:
    """Return the path of a model with a plain name on this Mac, or the name itself. Reads the disk."""
    if "/" not in name and name != EMBEDDED_MODEL:
        for folder in folders:
            if (Path(folder) / name / "config.json").is_file():
                return str(Path(folder) / name)
    return name


def lasting_name(name: str) -> str:
    """Return a model's name that holds in any working directory: a folder's whole path."""
    folder = _as_path(name)
    return str(folder.resolve()) if name != EMBEDDED_MODEL and _is_folder(folder) else name


def is_hub_id(name: str) -> bool:
    """Return True if this names a model on the Hub, OWNER/NAME, rather than a folder."""
    owner, _, model = name.partition("@")[0].partition("/")
    return (
        bool(owner and model)
        and "/" not in model
        and not name.startswith((".", "~"))
        and not _is_folder(Path(name))
    )


def _as_path(name: str) -> Path:
    """Return the path. Raises ModelError for what no folder can be called."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, or the home of an unknown user
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{name[:200]} is no folder: {why}", Code.MODEL_NOT_FOUND) from None
    return path


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _download(name: str) -> Path:
    """Return the model's folder here; without one, download all of it from the Hub in this process."""
    repo, revision = hub_name(name)
    return repo.snapshot(revision) or Fetch(repo, revision, revision).from_hub()

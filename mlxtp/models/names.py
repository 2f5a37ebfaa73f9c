"""From a user's name of a model to a folder on this machine. Nothing is downloaded here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import EMBEDDED_MODEL, embedded_model_path
from ..errors import Code, ModelError
from ..text.tokenizer import Text
from .hub_cache import Repo
from .manifest import split_name


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Model to serve: its public name, its folder on this machine, its tokenizer, and its draft model."""

    id: str
    path: Path
    text: Text
    draft_path: Path | None = None


async def open_model(name: str, draft: str = "") -> ModelSource:
    """Open a model on this machine: the embedded one, a folder, or an id on the Hugging Face Hub
    (OWNER/NAME[@REVISION]).

    `draft` names a second model that proposes tokens for it. Raises ModelError; its message uses the user's
    name of the model.
    """
    return await asyncio.to_thread(_open_model, name, draft)


async def find_model(name: str) -> Path:
    """Return only its folder. Raises ModelError as `open_model` does."""
    return (await asyncio.to_thread(folder_of, name)).resolve()


def folder_of(name: str) -> Path:
    """Return the folder of a model on this machine. Raises ModelError. Reads the disk."""
    path = _find(name)
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json, so it is not a model folder", Code.MODEL_NOT_FOUND)
    if set(str(path)) & set("[]*?"):
        raise ModelError(f"{path}: mlx-lm finds no weights in folders whose path has one of [ ] * ?")
    return path


def hub_folder(name: str) -> Path | None:
    """Return the snapshot of OWNER/NAME[@REVISION] in this Mac's Hub cache if it is complete, else None.
    Reads the disk.
    """
    try:
        repo, revision = split_name(name)
    except ValueError:
        return None
    return Repo(repo).snapshot(revision)


def _open_model(name: str, draft: str) -> ModelSource:
    path = folder_of(name)
    draft_path = folder_of(draft).resolve() if draft else None
    public = name if is_hub_id(name) else path.name
    return ModelSource(public, path.resolve(), Text.load(path), draft_path)


def _find(name: str) -> Path:
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
    if (stored := hub_folder(name)) is None:
        raise ModelError(
            f"{name} is not complete on this Mac, and nothing is downloaded for a request; "
            f"`mlxtp serve {name}` downloads it",
            Code.MODEL_NOT_FOUND,
        )
    return stored


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

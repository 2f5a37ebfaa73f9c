"""From a user's name of a model to its folder on this machine, its shape, and reasons not to serve it.

Plain functions read the disk: call them in threads. Only `inspect` and `find_config` contact the Hub. They
raise ModelError if no usable model is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..api.backend import StoredModelInfo
from ..config import EMBEDDED_MODEL, embedded_model_path
from ..description import Description
from ..errors import Code, ModelError
from ..model_config import Config, context_length, unreadable
from ..model_config import family as family_of
from ..model_files import (
    MTP_FILE,
    TEMPLATE_FILES,
    chat_refusal,
    config_in,
    has_mtp_head,
    tokenizer_settings,
    weight_sizes,
)
from ..model_sources import lack
from ..placement.model_shape import DescribedModel, ModelShape, shape_of
from ..short_names import near, stands_for
from ..text.tokenizer import Text
from ..vector_files import ENCODERS, SUITABLE, VECTOR_FILES, VectorModel, headless, vector_model
from ..wire.cluster_messages import MAX_MODEL
from . import hub_client
from .descriptions import description_of
from .hub_cache import folder_bytes, hub_name, lacks, repos_here
from .manifest import Manifest

#: Classes for embeddings and labels. Generators of text are named ForCausalLM, LMHeadModel or the like.
_WRITES_NO_TEXT = re.compile(
    r"(?:(?<!LMHead)Model|For(?:SequenceClassification|TokenClassification|MaskedLM|QuestionAnswering))$"
)
_CONFIG_FILES = ("config.json", "hf_quant_config.json")
#: Fields of tokenizer_config.json; each names a chat template of mlx-lm.
_TEMPLATES = frozenset({"chat_template", "chat_template_type"})
MOST = 200  #: Models listed for users. A cache may hold any number.


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Model to serve."""

    id: str  #: its public name
    path: Path
    text: Text
    draft_path: Path | None = None
    shape: ModelShape | None = None  #: basis of its ranks' plan; None without a plan
    vectors: VectorModel | None = None


async def open_model(name: str, draft: str = "") -> ModelSource:
    path = await asyncio.to_thread(folder_of, name)
    draft_path = await find_model(draft) if draft else None
    public = name if is_hub_id(name) else path.name
    vectors = await asyncio.to_thread(vectors_in, path)
    text = await asyncio.to_thread(Text.load, path)
    return ModelSource(public, path.resolve(), text, draft_path, vectors=vectors)


async def find_model(name: str) -> Path:
    return (await asyncio.to_thread(folder_of, name)).resolve()


def folder_of(name: str) -> Path:
    path = _find(name)
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json, so it is not a model folder", Code.MODEL_NOT_FOUND)
    if set(str(path)) & set("[]*?"):
        raise ModelError(f"{path}: mlx-lm finds no weights in folders whose path has one of [ ] * ?")
    return path


def hub_folder(name: str) -> Path | None:
    """Return the complete snapshot of OWNER/NAME[@REVISION] in this Mac's Hub cache, or None."""
    with contextlib.suppress(ModelError):
        repo, revision = hub_name(name)
        return repo.snapshot(revision)
    return None


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
            f"{name} is neither a folder nor an id on the Hub (OWNER/NAME)"
            + (f", nor a known short name; near are {known}" if (known := near(name)) else "")
            + f"; {EMBEDDED_MODEL!r} is the embedded model, and other plain names are looked for in each "
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
    """Return the path of a plainly named model in the model folders, else the name itself."""
    if "/" not in name and name != EMBEDDED_MODEL:
        for folder in folders:
            if (Path(folder) / name / "config.json").is_file():
                return str(Path(folder) / name)
    return name


def full_name(name: str, folders: Sequence[str] = ()) -> str:
    """Expand a short name such as llama3.2:3b to OWNER/NAME, unless a folder has that name."""
    if not (full := stands_for(name)) or in_folders(name, folders) != name or _is_folder(Path(name)):
        return name
    return full


def named_folders(folders: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in folders:
        with contextlib.suppress(OSError):  # a share may have gone
            for config in sorted(Path(folder).glob("*/config.json")):
                found.setdefault(config.parent.name, config.parent)
    found.pop(EMBEDDED_MODEL, None)
    return found


def lasting_name(name: str) -> str:
    """Return a model's name that holds in any working directory: for a folder its absolute path."""
    folder = _as_path(name)
    return str(folder.resolve()) if name != EMBEDDED_MODEL and _is_folder(folder) else name


def is_hub_id(name: str) -> bool:
    owner, _, model = name.partition("@")[0].partition("/")
    return (
        bool(owner and model)
        and "/" not in model
        and not name.startswith((".", "~"))
        and not _is_folder(Path(name))
    )


def _as_path(name: str) -> Path:
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


@dataclass(frozen=True, slots=True)
class Servable:
    """Model that a group could serve."""

    name: str
    shape: ModelShape
    folder: Path | None  #: None unless complete
    manifest: Manifest | None = None  #: the Hub's, if not complete


def inspect(name: str, kv_bits: int = 0, *, ask_hub: bool = False) -> Servable:
    """Return the facts that placement and a download need, before any of the model is loaded.

    Raises ModelError if the model is neither here nor, with `ask_hub`, on the Hub. It also does if the model
    lacks files, exceeds the free disk, or cannot run on any group.
    """
    if not (ask_hub and is_hub_id(name) and hub_folder(name) is None):
        folder = folder_of(name)
        _check_whole(folder)
        _checked(folder, lambda: folder)
        return Servable(name, facts_in(folder).shape(name, kv_bits), folder)
    repo, revision = hub_name(name)
    manifest = hub_client.look_up(repo.name, revision)
    repo.blobs.check_room(manifest)
    some = hub_client.fetch_some(manifest, (*_CONFIG_FILES, *VECTOR_FILES))
    config = _checked(some, lambda: hub_client.fetch_some(manifest, TEMPLATE_FILES))
    found = described(some, config)
    weights = sum(file.size for file in manifest.files if file.path.endswith(".safetensors"))
    # An MTP head within the model's own files shows once they are here.
    mtp = any(file.path == MTP_FILE for file in manifest.files)
    shape = shape_of(found, name=name, weight_bytes=weights, kv_bits=kv_bits, mtp=mtp)
    return Servable(name, shape, None, manifest)


def _check_whole(folder: Path) -> None:
    if missing := lacks(folder):
        raise ModelError(f"the folder is incomplete: it lacks {missing}", Code.MODEL_NOT_FOUND)


def find_config(name: str) -> Path:
    if not is_hub_id(name):
        return folder_of(name)
    repo, revision = hub_name(name)
    return repo.snapshot(revision) or hub_client.fetch_some(
        hub_client.look_up(repo.name, revision), (*_CONFIG_FILES, "*.index.json")
    )


def stored_name(name: str) -> str | None:
    """Return a deployment's name for a model that is complete on this machine; None for any other.

    Raises ModelError for a folder that lacks files, and for a configuration that cannot be served.
    """
    if len(name) > MAX_MODEL or not name.isprintable():
        return None  # it fits in no message between Macs
    if name == EMBEDDED_MODEL:
        return name
    try:
        local = Path(name).is_absolute()
        folder = folder_of(name) if local else hub_folder(name)
    except (ModelError, OSError, ValueError):
        return None
    if folder is None:
        return None
    if local:
        _check_whole(folder)
    check_servable(read_config(folder), vectors_in(folder))
    return lasting_name(name) if local else name


def read_config(folder: Path) -> Config:
    try:
        return config_in(folder)
    except (OSError, ValueError) as error:  # its disk may be unplugged
        raise ModelError(f"{folder} cannot be read: {error}") from None


def weight_bytes(folder: Path) -> int:
    try:
        return sum(weight_sizes(folder).values())
    except (OSError, ValueError):
        return 0


def facts_in(folder: Path) -> DescribedModel:
    """Describe the model in this folder. Raises ModelError. Blocks as `description_of` does."""
    config = read_config(folder)
    try:
        weights = sum(weight_sizes(folder).values())
        mtp = has_mtp_head(folder, config)
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise ModelError(f"{folder} cannot be read any more: {error}") from None
    return DescribedModel(described(folder, config), weights, mtp)


def vectors_in(folder: Path, config: Config | None = None) -> VectorModel | None:
    """Return how the model in this folder makes vectors; None if it writes text. Raises ModelError."""
    try:
        return vector_model(folder, read_config(folder) if config is None else config)
    except (OSError, ValueError, AttributeError) as error:
        detail = f"{folder}: its files for embeddings cannot be read: {error}"
        raise ModelError(detail, Code.MODEL_INVALID) from None


def described(folder: Path, config: Config) -> Description:
    """Describe the model in this folder. Models for vectors stay on one Mac. Raises ModelError."""
    vectors = vectors_in(folder, config)
    found = description_of({**config, **headless(vectors)})
    why = "one rank computes the vectors of texts" if vectors is not None else ""
    return replace(found, unsharable=why, uncuttable=why) if why else found


def check_servable(config: Config, vectors: VectorModel | None = None) -> None:
    """Raise ModelError if its files show at once that no group could serve a model."""
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ModelError("config.json names no model_type, so the model's family is unknown")
    code = family_of(config)
    if why := lack(family, code):
        if code in ENCODERS:
            why += f", an encoder; serve an embedding model that is a decoder, {SUITABLE}"
        raise ModelError(why, Code.MODEL_UNSUPPORTED)
    if vectors is not None and vectors.flaw:
        raise ModelError(vectors.flaw, Code.MODEL_UNSUPPORTED)
    said = config.get("architectures")
    classes = [each for each in said if isinstance(each, str)] if isinstance(said, list) else []
    # An embedding model is its decoder alone, without a head; labels need a head that mlx-lm lacks.
    bare = vectors is not None and all(each.endswith("Model") for each in classes)
    if classes and not bare and all(map(_WRITES_NO_TEXT.search, classes)):
        raise ModelError(f"it is a {classes[0]}, which writes no text", Code.MODEL_UNSUPPORTED)
    if why := unreadable(config):
        raise ModelError(why, Code.MODEL_UNSUPPORTED)


def _checked(folder: Path, tokenizer: Callable[[], Path]) -> Config:
    """Return the configuration in a folder. Raises ModelError if no group could serve its model.

    `tokenizer` returns the folder with its tokenizer's settings. Only a few families need the call.
    """
    config = read_config(folder)
    check_servable(config, vectors_in(folder, config))
    why = chat_refusal(config, template=False)
    try:
        if why and not _TEMPLATES & tokenizer_settings(tokenizer()).keys():
            raise ModelError(why, Code.MODEL_UNSUPPORTED)
    except (OSError, ValueError) as error:
        raise ModelError(f"its tokenizer_config.json cannot be read: {error}") from None
    return config


def models_here() -> list[dict[str, Any]]:
    """Return the models here as JSON, complete or not: the embedded model first, then by name."""
    found = [(EMBEDDED_MODEL, "embedded", folder_bytes(embedded_model_path()), True)]
    sizes = [(repo, folder_bytes(repo.folder)) for repo in repos_here()[: MOST - 1]]
    found += [(repo.name, "hub", size, repo.snapshot("main") is not None) for repo, size in sizes if size]
    return [dict(zip(("name", "source", "size_bytes", "complete"), each, strict=True)) for each in found]


def stored_models(folders: Iterable[tuple[str, Path]] = ()) -> tuple[StoredModelInfo, ...]:
    """Return the complete models that a request may name, without models that `check_servable` refuses."""
    found = [
        (EMBEDDED_MODEL, embedded_model_path()),
        *((repo.name, repo.snapshot("main")) for repo in repos_here()),
        *((name, None if lacks(folder) else folder) for name, folder in folders),
    ]
    described = (_described(name, folder) for name, folder in found if folder is not None)
    return tuple(filter(None, described))


def _described(name: str, folder: Path) -> StoredModelInfo | None:
    try:
        config = read_config(folder)
        check_servable(config, vectors_in(folder, config))
        created = int((folder / "config.json").stat().st_mtime)
    except (ModelError, OSError):
        return None
    return StoredModelInfo(name, folder, context_length(config), created)

"""From a folder on disk to this rank's share of a model in memory, strictly."""

from __future__ import annotations

import json
import struct
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import Code, ModelError
from .group import Group
from .sharding import Config, check_divisible, check_shardable, context_length, text_config

_BRIEF = 200


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose weights are this rank's share, all of them in memory."""

    model: Any
    name: str
    context: int
    vocabulary: int
    eos: frozenset[int]
    weight_bytes: int
    batches: bool
    """Whether its caches can be merged; when not, sequences run one after the other."""


def load(folder: Path, group: Group, progress: Callable[[], None]) -> LoadedModel:
    """Load this rank's share. Calls `progress` after each layer.

    Nothing is left half-loaded: it returns a whole model or raises ModelError, in the words of whoever chose
    the folder. Peak memory is about the share plus one layer, because each layer is cut and evaluated before
    the next is read.
    """
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    maybe_set_recommended_wired_limit()  # on Metal, keep the weights from being paged out; elsewhere nothing
    config = read_config(folder)
    check_shardable(config, group.size)
    check_divisible(config, group.size)
    model, config = _read_weights(folder)
    try:
        if group.size > 1:
            model.shard(group.handle)
        for layer in model.layers:
            mx.eval(layer.parameters())
            progress()
        mx.eval(model.parameters())
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"{folder.name}: sharding or reading the weights failed: {_brief(error)}", Code.MODEL_INVALID
        ) from error
    mx.clear_cache()
    return LoadedModel(
        model=model,
        name=folder.name,
        context=context_length(config),
        vocabulary=_vocabulary(config, model),
        eos=_eos(config),
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
        batches=all(hasattr(cache, "merge") for cache in make_cache(model)),
    )


def make_cache(model: Any) -> list[Any]:
    """One empty KV cache for each layer, of the kind the model wants."""
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    return caches


def read_config(folder: Path) -> Config:
    """The model's config.json. Raises ModelError when it is missing or is not JSON."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(
            f"{folder} holds no config.json, so it is not a model folder", Code.MODEL_NOT_FOUND
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", Code.MODEL_INVALID) from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object", Code.MODEL_INVALID)
    return config


def _read_weights(folder: Path) -> tuple[Any, Config]:
    """The whole model, lazily: no weight is read before it is evaluated."""
    from mlx_lm.utils import load_model

    _check_shards_present(folder)
    try:
        model, config = load_model(folder, lazy=True, strict=True)
    except FileNotFoundError:
        raise ModelError(f"{folder} holds no model*.safetensors", Code.MODEL_NOT_FOUND) from None
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError, struct.error) as error:
        # mlx-lm raises these for missing and surplus tensors, wrong shapes and broken files.
        detail = f"{folder.name}: {type(error).__name__}: {_brief(error)}"
        raise ModelError(detail, Code.MODEL_INVALID) from error
    return model, config


def _brief(error: Exception) -> str:
    """One line, short enough for every rank's words to fit one frame. MLX lists all tensors it misses."""
    return textwrap.shorten(str(error), _BRIEF, placeholder=" ...")


def _check_shards_present(folder: Path) -> None:
    """The index names every file; one that is missing would otherwise surface as a list of tensors."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        files = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}", Code.MODEL_INVALID) from None
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(files)} weight files: {', '.join(missing[:5])}"
        )


def _vocabulary(config: Config, model: Any) -> int:
    """Some families leave out of config.json what is their default."""
    size = text_config(config).get("vocab_size")
    if isinstance(size, int):
        return size
    for name, array in tree_flatten(model.parameters()):
        if name.endswith("embed_tokens.weight"):
            return int(array.shape[0])
    raise ModelError("config.json names no vocab_size", Code.MODEL_INVALID)


def _eos(config: Config) -> frozenset[int]:
    eos = config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return frozenset(i for i in ids if isinstance(i, int))

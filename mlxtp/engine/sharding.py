"""Checks whether a model divides among a number of ranks. Pure: a configuration in, a refusal out."""

from __future__ import annotations

import contextlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import Code, ModelError

Config = Mapping[str, Any]


def check_divisible(config: Config, world_size: int) -> None:
    """Check that every sharded dimension divides by `world_size`. Raises ModelError (MODEL_NOT_DIVISIBLE).

    mlx-lm's llama does not check this: it floors the head counts, and the forward fails or goes wrong later.
    The error names every dimension that does not divide, and the world sizes that would work.
    """
    problems = _indivisible(config, world_size)
    if problems:
        fitting = [n for n in range(1, 9) if not _indivisible(config, n)]
        raise ModelError(
            f"this model does not divide among {world_size} ranks: {'; '.join(problems)}. "
            f"It does among {', '.join(map(str, fitting))}.",
            Code.MODEL_NOT_DIVISIBLE,
        )


#: Families whose `shard` gives several ranks the same KV head if there are fewer heads than ranks.
_COPIES_KV_HEADS = ("qwen3_5", "qwen3_5_moe")


#: Families whose few dense MLPs stay whole on each rank where ranks cannot share them, beside experts.
_KEEPS_MLP_WHOLE = ("deepseek_v2", "glm4_moe")


def _indivisible(config: Config, world_size: int) -> list[str]:
    if world_size == 1:
        return []
    text = text_config(config)
    heads = _number(text, "num_attention_heads")
    head_dim = _number(text, "head_dim") or _number(text, "hidden_size") // max(heads, 1)
    sizes = {
        "attention heads": heads,
        "KV heads": _number(text, "num_key_value_heads") or heads,
        "intermediate size": _number(text, "intermediate_size"),
        "expert intermediate size": _number(text, "moe_intermediate_size"),
    }
    if config.get("model_type") in _COPIES_KV_HEADS and world_size % sizes["KV heads"] == 0:
        del sizes["KV heads"]
    if config.get("model_type") in _KEEPS_MLP_WHOLE and sizes["expert intermediate size"]:
        del sizes["intermediate size"]  # see `_whole_mlps` in vocabulary.py
    problems = [f"{size} {what} ({size} / {world_size})" for what, size in sizes.items() if size % world_size]
    group = (
        _number(_table(config, "quantization") or _table(config, "quantization_config"), "group_size") or 1
    )
    # The inputs of the row-sharded projections are cut between quantization groups only.
    inputs = {
        "attention output": heads * head_dim,
        "intermediate size": sizes.get("intermediate size", 0),
        "expert intermediate size": sizes["expert intermediate size"],
    }
    problems += [
        f"{what} {size} / {world_size} = {size // world_size}, no multiple of the quantization group {group}"
        for what, size in inputs.items()
        if size % world_size == 0 and (size // world_size) % group
    ]
    return problems


def text_config(config: Config) -> Config:
    """Return the fields of the language model, which some families separate from those of other parts."""
    return {**config, **_table(config, "text_config")}


def _table(config: Config, name: str) -> Config:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {name} is {value!r}, not an object", Code.MODEL_INVALID)
    return value


def _number(config: Config, name: str) -> int:
    """Return a size that must be a whole number, or 0 where it is missing."""
    value = config.get(name) or 0
    if not isinstance(value, int):
        raise ModelError(f"config.json: {name} is {value!r}, not a whole number", Code.MODEL_INVALID)
    return value


def check_shardable(config: Config, world_size: int) -> None:
    """Check that mlx-lm knows the family and can shard it. Raises ModelError (MODEL_UNSUPPORTED)."""
    from mlx_lm.utils import MODEL_REMAPPING

    name = config.get("model_type")
    if not isinstance(name, str):
        raise ModelError(
            "config.json names no model_type, so the model's family is unknown", Code.MODEL_INVALID
        )
    family = MODEL_REMAPPING.get(name, name)
    if not family.isidentifier() or importlib.util.find_spec(f"mlx_lm.models.{family}") is None:
        raise ModelError(f"mlx-lm has no model family {name!r}", Code.MODEL_UNSUPPORTED)
    if world_size > 1 and family not in shardable_families():
        raise ModelError(
            f"mlx-lm cannot shard the family {name!r}; on more than one rank these work: "
            f"{', '.join(sorted(shardable_families()))}",
            Code.MODEL_UNSUPPORTED,
        )


@cache
def shardable_families() -> frozenset[str]:
    """Return families whose `Model` has `shard`, from their sources, because importing all takes seconds."""
    import mlx_lm.models

    folder = Path(mlx_lm.models.__path__[0])
    sources = {
        module.name: path.read_text()
        for module in pkgutil.iter_modules([str(folder)])
        if (path := folder / f"{module.name}.py").is_file()
    }
    found = {family for family, text in sources.items() if "def shard(self" in text}
    return frozenset(found | {family for family, text in sources.items() if _parent(text) in found})


def _parent(text: str) -> str | None:
    """Return the family whose `Model` this one's extends, if any."""
    base = re.search(r"^class Model\(([\w.]+)\)", text, re.MULTILINE)
    if base is None:
        return None
    family, _, name = base[1].rpartition(".")
    imported = re.search(rf"^from \.(\w+) import Model as {name}$", text, re.MULTILINE)
    return imported[1] if imported else family or None


#: Modules with a collective in a compiled function. A test holds this equal to what mlx-lm's sources have.
COMPILED_COLLECTIVES = frozenset({"mlx_lm.models.minimax"})


def compiles_collectives(model: Any) -> bool:
    """Return True for a model with parts from such a module."""
    return any(type(module).__module__ in COMPILED_COLLECTIVES for module in model.modules())


@contextlib.contextmanager
def divided_vocabulary(owner: Any, size: int) -> Iterator[None]:
    """Set the vocabulary of a head's `owner` to `size` tokens, while its layers are cut.

    Families that divide their head themselves refuse a vocabulary that does not divide, even when they do
    not divide this head.
    """
    arguments: Any = getattr(owner, "args", None)
    candidates: tuple[Any, ...] = (arguments, getattr(arguments, "text", None))
    holders = [a for a in candidates if hasattr(a, "vocab_size")]
    sizes = [holder.vocab_size for holder in holders]
    for holder in holders:
        holder.vocab_size = size
    try:
        yield
    finally:
        for holder, true_size in zip(holders, sizes, strict=True):
            holder.vocab_size = true_size


def context_length(config: Config) -> int:
    """Return the tokens that the model was made for, prompt and answer together."""
    length = text_config(config).get("max_position_embeddings")
    return int(length) if isinstance(length, int) and length > 0 else 4096

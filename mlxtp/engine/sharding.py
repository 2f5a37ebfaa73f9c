"""Which models divide among how many ranks. Pure: a configuration in, a refusal out."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import Code, ModelError

Config = Mapping[str, Any]


def check_divisible(config: Config, world_size: int) -> None:
    """Raises ModelError (MODEL_NOT_DIVISIBLE) unless every sharded dimension divides by `world_size`.

    mlx-lm's llama does not check this: it floors the head counts, and the forward fails or goes wrong later.
    Every dimension that does not divide is named in the one error, with the world sizes that would do.
    """
    problems = _indivisible(config, world_size)
    if problems:
        fitting = [n for n in range(1, 9) if not _indivisible(config, n)]
        raise ModelError(
            f"this model does not divide among {world_size} ranks: {'; '.join(problems)}. "
            f"It does among {', '.join(map(str, fitting))}.",
            Code.MODEL_NOT_DIVISIBLE,
        )


def _indivisible(config: Config, world_size: int) -> list[str]:
    if world_size == 1:
        return []
    text: Config = {**config, **config.get("text_config", {})}
    heads = int(text.get("num_attention_heads", 0))
    head_dim = int(text.get("head_dim") or int(text.get("hidden_size", 0)) // max(heads, 1))
    sizes = {
        "attention heads": heads,
        "KV heads": int(text.get("num_key_value_heads") or heads),
        "intermediate size": int(text.get("intermediate_size") or 0),
        "expert intermediate size": int(text.get("moe_intermediate_size") or 0),
    }
    problems = [f"{size} {what} ({size} / {world_size})" for what, size in sizes.items() if size % world_size]
    group = int(
        (config.get("quantization") or config.get("quantization_config") or {}).get("group_size") or 1
    )
    # The inputs of the row-sharded projections are cut between quantization groups only.
    inputs = {
        "attention output": heads * head_dim,
        "intermediate size": sizes["intermediate size"],
        "expert intermediate size": sizes["expert intermediate size"],
    }
    problems += [
        f"{what} {size} / {world_size} = {size // world_size}, no multiple of the quantization group {group}"
        for what, size in inputs.items()
        if size % world_size == 0 and (size // world_size) % group
    ]
    return problems


def check_shardable(config: Config, world_size: int) -> None:
    """Raises ModelError (MODEL_UNSUPPORTED) when mlx-lm does not know the family or cannot shard it."""
    from mlx_lm.utils import MODEL_REMAPPING

    name = config.get("model_type")
    if not isinstance(name, str):
        raise ModelError(
            "config.json names no model_type, so nobody knows which model this is", Code.MODEL_INVALID
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
    """Families whose source defines `shard`; importing all of them to ask would take many seconds."""
    import mlx_lm.models

    return frozenset(
        module.name
        for module in pkgutil.iter_modules(mlx_lm.models.__path__)
        for path in [Path(mlx_lm.models.__path__[0]) / f"{module.name}.py"]
        if path.is_file() and "def shard(self" in path.read_text()
    )


def context_length(config: Config) -> int:
    """Tokens the model was made for, prompt and answer together."""
    text: Config = {**config, **config.get("text_config", {})}
    length = text.get("max_position_embeddings")
    return int(length) if isinstance(length, int) and length > 0 else 4096

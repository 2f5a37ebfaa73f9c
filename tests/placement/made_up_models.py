"""Dense models of any size, described without a process as their modules would show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxtp.description import CacheCapabilities, Description, PartFacts
from mlxtp.engine.families import dimensions_of
from mlxtp.placement.model_shape import ModelShape, shape_of

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
"""About 16 GB in 16 bits; divides by 2, 4 and 8."""

KERNELS, AROUND = 19, 4  # of a layer, and beside all layers


def llama(**changes: Any) -> Description:
    """This Llama with other fields. Quantized ones with one number of bits for all."""
    config = {**LLAMA, **changes}
    told = config.get("quantization") or {}
    hidden, tied, layers = config["hidden_size"], config["tie_word_embeddings"], config["num_hidden_layers"]
    queries = config["num_attention_heads"] * config["head_dim"]
    pairs = config["num_key_value_heads"] * config["head_dim"]
    numbers = hidden * (2 * queries + 2 * pairs + 3 * config["intermediate_size"])
    norms = 2 * 2 * hidden

    def size(numbers: int) -> int:
        return numbers * told["bits"] // 8 + 4 * numbers // told["group_size"] if told else 2 * numbers

    table = config["vocab_size"] * hidden
    dimensions = dimensions_of(config)
    divides = any(not dimensions.obstacles(ranks) for ranks in range(2, 9))
    layer = PartFacts(
        numbers=numbers,
        weight_bytes=size(numbers) + norms,
        whole_bytes=norms if divides else 0,
        token_numbers=numbers,
        token_bytes=size(numbers) + norms,
        token_whole_bytes=norms if divides else 0,
        kv_token_bytes=2 * 2 * pairs,
        kv_heads=config["num_key_value_heads"],
    )
    norm = 2 * hidden
    whole = norm if divides else 0
    return Description(
        family="llama",
        hidden=hidden,
        vocabulary=config["vocab_size"],
        embedding=PartFacts(table, size(table), 0, 0, size(hidden), size(hidden) if divides else 0),
        layers=(layer,) * layers,
        head=PartFacts(
            0 if tied else table, norm + (0 if tied else size(table)), whole, table, size(table) + norm, whole
        ),
        tied=tied,
        experts=0,
        picked=0,
        mlp_bytes=0,
        mlp_width=0,
        bits=told.get("bits", 16),
        group=told.get("group_size", 1),
        number_bytes=2,
        expands=False,
        context=config["max_position_embeddings"],
        has_head=False,
        drafts=False,
        dimensions=dimensions,
        kernels=KERNELS * layers + AROUND + (3 if told else 0),
        collectives=2 * layers if divides else 0,
        caches=CacheCapabilities(*[True] * 6, ("KVCache",)),
    )


def layered(**changes: Any) -> ModelShape:
    """A Llama of 16 GB, which pipelines can cut, or what `changes` to its configuration make of it."""
    return shape_of(llama(**changes), name="model")


def shape(**changes: Any) -> ModelShape:
    """The same that no pipeline can cut."""
    return uncut(layered(**changes))


def uncut(shape: ModelShape) -> ModelShape:
    return replace(shape, model=replace(shape.model, uncuttable="a test says so"))

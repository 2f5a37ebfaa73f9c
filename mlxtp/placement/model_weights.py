"""Weights that a model's configuration implies, by kind. Pure: config.json in, numbers of weights out.

Families name the same things differently; the tables at the top have the names. Small weights that only a few
families have (norms, biases, convolutions) are left out: they are less than 2 % of any model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import Code, ModelError

Config = Mapping[str, Any]

_MOST = 1 << 48  #: Above any size of a model.

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_attention_groups")
_DENSE = (
    "intermediate_size_mlp",
    "dense_intermediate_size",
    "ffn_hidden_size",
    "intermediate_size",
    "n_inner",
)
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_PICKED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "experts_per_token")
_EXPERT = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SHARED = ("shared_expert_intermediate_size", "share_expert_dim")
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts")

#: Families with one shared expert that their configuration does not mention.
_ONE_SHARED = frozenset({"llama4", "llama4_text"})
#: Families whose queries are twice as wide: the other half is a gate.
_GATED_ATTENTION = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
#: Families with two attentions and two dense MLPs a layer.
_TWO_IN_ONE = frozenset({"longcat_flash", "longcat_flash_ngram"})
_TWO_CACHES = _TWO_IN_ONE | {"iquestloopcoder"}
#: Families that compress keys and values but keep them for each head.
_EXPANDED_CACHE = frozenset({"deepseek_v2"})
#: Families whose `shared_intermediate_size` is used; others only carry the field.
_SHARED_AS_EXPERT = frozenset({"minimax_m3_vl", "minimax_m3_vl_text"})


@dataclass(frozen=True, slots=True)
class WeightKind:
    """One kind of weights, over all layers.

    role     its name, by which its quantization is found
    count    weights in the whole model
    active   how many of them one token meets
    divides  whether each rank holds only its share of them
    """

    role: str
    count: int
    active: int
    divides: bool = True


def text_config(config: Config) -> Config:
    """Return the fields of the language model, which some families keep apart from other parts."""
    return {**config, **table(config, "text_config")}


def table(config: Config, name: str) -> Config:
    """Return an object in config.json, empty if it is missing. Raises ModelError if it is something else."""
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {name} is {value!r}, not an object", Code.MODEL_INVALID)
    return value


def number(config: Config, *names: str) -> int:
    """Return the first of these sizes that is there, or 0. Raises ModelError if it is no whole number."""
    for name in names:
        value = config.get(name) or 0
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
            told = f"{value!r:.40}"
            raise ModelError(f"config.json: {name} is {told}, not a whole number", Code.MODEL_INVALID)
        if value:
            return value
    return 0


def required(config: Config, what: str, *names: str) -> int:
    """Return the first of these sizes, as `number`. Raises ModelError if none of them is there."""
    value = number(config, *names)
    if not value:
        raise ModelError(f"config.json names no {what} ({names[0]})", Code.MODEL_INVALID)
    return value


def hidden(config: Config) -> int:
    return required(config, "hidden size", *_HIDDEN)


def layers(config: Config) -> int:
    return required(config, "number of layers", *_LAYERS)


def heads(config: Config) -> int:
    return required(config, "number of attention heads", *_HEADS)


def kv_heads(config: Config) -> int:
    return number(config, *_KV_HEADS) or heads(config)


def head_dim(config: Config) -> int:
    return number(config, "head_dim") or hidden(config) // heads(config)


def is_latent(config: Config) -> bool:
    """Return whether keys and values are computed through a compression that all heads share."""
    return bool(number(config, "kv_lora_rank"))


def keeps_latent(config: Config) -> bool:
    """Return whether the cache keeps the compression itself, which ranks cannot divide among them."""
    return is_latent(config) and config.get("model_type") not in _EXPANDED_CACHE


def cached_numbers(config: Config) -> int:
    """Count the numbers that the KV caches keep of one token, over all layers.

    A cache that keeps a window counts like one that keeps all; one that does not grow counts nothing.
    """
    rope = number(config, "qk_rope_head_dim")
    if keeps_latent(config):
        index = 2 * number(config, "index_head_dim") if number(config, "index_n_heads") else 0
        numbers = number(config, "kv_lora_rank") + rope + index
    elif is_latent(config):
        numbers = kv_heads(config) * (number(config, "qk_nope_head_dim") + rope + _value_dim(config))
    else:
        numbers = 2 * kv_heads(config) * head_dim(config)
    caches = layers(config) - linear_layers(config)
    return caches * numbers * (2 if config.get("model_type") in _TWO_CACHES else 1)


def linear_layers(config: Config) -> int:
    """Count the layers with linear attention, whose cache does not grow with the text."""
    if not number(config, "linear_num_value_heads"):
        return 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "linear_attention" for kind in kinds)
    return layers(config) - layers(config) // (number(config, "full_attention_interval") or 1)


def experts(config: Config) -> tuple[int, int]:
    """Return a layer's routed experts, and how many of them a token meets; (0, 0) for a dense model."""
    count = number(config, *_EXPERTS)
    return (count, min(number(config, *_PICKED) or 1, count)) if count else (0, 0)


def expert_layers(config: Config) -> int:
    """Count the layers with routed experts; the others have a dense MLP."""
    total = layers(config)
    if not experts(config)[0]:
        return 0
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sparse" for kind in kinds)
    for name in ("is_moe_layer", "moe_layer_freq"):
        listed = config.get(name)
        if isinstance(listed, list):
            return sum(bool(item) for item in listed)
    named = config.get("moe_layers_enum")
    if isinstance(named, str) and named:
        return len(named.split(","))
    if every := number(config, "interleave_moe_layer_step"):
        return total // every
    dense_only = config.get("mlp_only_layers")
    without = len(dense_only) if isinstance(dense_only, list) else 0
    return max(total - number(config, "first_k_dense_replace") - without, 0)


def parts(config: Config) -> tuple[WeightKind, ...]:
    """Return the weights of a model. `config` holds the fields of its language model."""
    width, vocabulary = hidden(config), required(config, "vocabulary", "vocab_size")
    tied = bool(config.get("tie_word_embeddings"))
    table_size = vocabulary * width
    ends = [WeightKind("embedding", table_size, table_size if tied else width)]
    if not tied:
        ends.append(WeightKind("head", table_size, table_size))
    return tuple(part for part in (*ends, *_attention(config), *_mlp(config)) if part.count)


def _attention(config: Config) -> list[WeightKind]:
    linear, full = linear_layers(config), layers(config) - linear_layers(config)
    full *= 2 if config.get("model_type") in _TWO_IN_ONE else 1
    divided, whole = _latent(config) if is_latent(config) else (_grouped(config), 0)
    divided = divided * full + _linear(config) * linear
    return [
        WeightKind("attention", divided, divided),
        WeightKind("compression", whole * full, whole * full, divides=False),
    ]


def _grouped(config: Config) -> int:
    """Count the weights of queries, keys, values and output of one layer."""
    queries, pairs = heads(config) * head_dim(config), kv_heads(config) * head_dim(config)
    gate = queries if config.get("model_type") in _GATED_ATTENTION else 0
    return hidden(config) * (queries + gate + 2 * pairs + queries)


def _latent(config: Config) -> tuple[int, int]:
    """Count the same for compressed keys and values: (divided among ranks, whole on each rank)."""
    width, count = hidden(config), heads(config)
    rank, latent = number(config, "q_lora_rank"), number(config, "kv_lora_rank")
    rope, nope = number(config, "qk_rope_head_dim"), number(config, "qk_nope_head_dim")
    values = _value_dim(config)
    divided = count * ((rank or width) * (nope + rope) + latent * (nope + values) + values * width)
    indexer = number(config, "index_n_heads")
    index_dim = number(config, "index_head_dim")
    whole = width * (rank + latent + rope) + indexer * (rank * index_dim + width) + width * index_dim
    return divided, whole


def _value_dim(config: Config) -> int:
    return number(config, "v_head_dim") or head_dim(config)


def _linear(config: Config) -> int:
    """Count the weights of one layer of gated linear attention."""
    values = number(config, "linear_num_value_heads")
    wide = values * number(config, "linear_value_head_dim")
    keys = number(config, "linear_num_key_heads") * number(config, "linear_key_head_dim")
    return hidden(config) * (2 * keys + 3 * wide + 2 * values)


def _mlp(config: Config) -> list[WeightKind]:
    width, sparse = hidden(config), expert_layers(config)
    dense = layers(config) - sparse
    count, picked = experts(config)
    if config.get("model_type") in _TWO_IN_ONE:
        dense = 2 * layers(config)
    dense *= 3 * width * number(config, *_DENSE)
    expert = 3 * width * expert_width(config)
    shared = 3 * width * _shared_width(config) * sparse
    routes = width * count * sparse
    return [
        WeightKind("mlp", dense, dense),
        WeightKind("experts", expert * count * sparse, expert * picked * sparse),
        WeightKind("shared", shared, shared),
        WeightKind("router", routes, routes, divides=False),
    ]


def expert_width(config: Config) -> int:
    """Return the inner width of one routed expert."""
    return number(config, *_EXPERT) or number(config, "intermediate_size")


def _shared_width(config: Config) -> int:
    if width := number(config, *_SHARED):
        return width
    family = config.get("model_type")
    if family in _SHARED_AS_EXPERT:
        return number(config, "shared_intermediate_size")
    return (1 if family in _ONE_SHARED else number(config, *_SHARED_COUNT)) * expert_width(config)

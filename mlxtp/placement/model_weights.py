"""Weights and caches that a model's configuration implies, layer by layer, and where no stage ends. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Code, ModelError
from ..model_config import Config, number, table
from ..wire.messages import MAX_LAYERS

# Families name the same things differently; the tables below have the names. Small weights that only
# a few families have (norms, biases, convolutions) are left out: they are less than 2 % of any model.

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_layers", "num_hidden_layers", "n_layer", "n_layers")
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
_PICKED = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "moe_k",
    "experts_per_token",
)
_EXPERT = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim")
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_DENSE_FIRST = ("first_k_dense_replace", "moe_layer_start_index")

#: Families with one shared expert that their configuration does not mention.
_ONE_SHARED = frozenset({"llama4", "llama4_text"})
#: Families whose embedding is always their head.
_TIED = frozenset({"cohere", "cohere2"})
#: Families whose queries are twice as wide: the other half is a gate.
_GATED_ATTENTION = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
#: Families with two attentions and two dense MLPs a layer.
_TWO_IN_ONE = frozenset({"longcat_flash", "longcat_flash_ngram"})
_TWO_CACHES = _TWO_IN_ONE | {"iquestloopcoder"}
#: Families that compress keys and values but keep them for each head.
_EXPANDED_CACHE = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
#: Kinds of layers, as configurations list them, whose caches do not grow with the text.
_WITHOUT_TOKENS = ("mamba", "linear_attention", "conv", "conv_mixer", "recurrent", "mlp", "moe")
#: Families whose `shared_intermediate_size` is used; others only carry the field.
_SHARED_AS_EXPERT = frozenset({"minimax_m3_vl", "minimax_m3_vl_text"})


@dataclass(frozen=True, slots=True)
class WeightKind:
    """One kind of weights, over all layers.

    role     its name, by which its quantization is found
    count    weights in the whole model
    active   how many of them one token meets
    layers   those that have them, equally many each; () for embedding and head
    divides  whether each rank holds only its share of them
    """

    role: str
    count: int
    active: int
    layers: tuple[int, ...] = ()
    divides: bool = True


def required(config: Config, what: str, *names: str) -> int:
    """Return the first of these sizes, as `number`. Raises ModelError if none of them is there."""
    value = number(config, *names)
    if not value:
        raise ModelError(f"config.json names no {what} ({names[0]})", Code.MODEL_INVALID)
    return value


def hidden(config: Config) -> int:
    return required(config, "hidden size", *_HIDDEN)


def layers(config: Config) -> int:
    total = len(_mixers(config)) or required(config, "number of layers", *_LAYERS)
    if total > MAX_LAYERS:
        raise ModelError(f"config.json names {total} layers, more than {MAX_LAYERS}", Code.MODEL_INVALID)
    return total


def heads(config: Config) -> int:
    return required(config, "number of attention heads", *_HEADS)


def kv_heads(config: Config) -> int:
    return number(config, *_KV_HEADS) or heads(config)


def head_dim(config: Config) -> int:
    return number(config, "head_dim", "hidden_size_per_head") or hidden(config) // heads(config)


def is_latent(config: Config) -> bool:
    """Return whether keys and values are computed through a compression that all heads share."""
    return bool(number(config, "kv_lora_rank"))


def keeps_latent(config: Config) -> bool:
    """Return whether the cache keeps the compression itself, which ranks cannot divide among them."""
    return is_latent(config) and config.get("model_type") not in _EXPANDED_CACHE


def cached_numbers(config: Config, *, states: bool = False) -> tuple[int, ...]:
    """Count the numbers that the KV caches of each layer keep of one token.

    A cache that keeps a window counts as long as that grows; one that does not grow counts nothing.
    `states`: the family has recurrent states, so that fields that list its kinds of layers count.
    """
    total = layers(config)
    if is_gemma4(config):
        layout = [_gemma4_heads(config, layer) for layer in range(total)]
        return tuple(2 * kv * dim if own else 0 for own, kv, dim in layout)
    rope = number(config, "qk_rope_head_dim")
    if keeps_latent(config):
        index = 2 * number(config, "index_head_dim") if number(config, "index_n_heads") else 0
        numbers = number(config, "kv_lora_rank") + rope + index
    elif is_latent(config):
        numbers = kv_heads(config) * (number(config, "qk_nope_head_dim") + rope + _value_dim(config))
    else:
        numbers = kv_heads(config) * (head_dim(config) + _value_dim(config))
    numbers *= 2 if config.get("model_type") in _TWO_CACHES else number(config, "num_loops") or 1
    own = total - number(config, "num_kv_shared_layers")  # the last ones read the keys of others
    kept = [0 if layer >= own else numbers for layer in range(total)]
    if pairs := number(config, "swa_num_key_value_heads", "num_swa_key_value_heads"):
        width = hidden(config) // (number(config, "num_swa_attention_heads") or heads(config))
        width = number(config, "swa_head_dim") or width
        for layer in sliding_layers(config):
            kept[layer] = pairs * (width + (number(config, "swa_v_head_dim") or width))
    sparse = {**config, **table(config, "sparse_attention_config")}
    for layer in _of_kind(sparse, "sparse_attention_freq"):
        kept[layer] += number(sparse, "sparse_index_dim", "index_head_dim")
    for layer in layers_without_tokens(config) if states else ():
        kept[layer] = 0
    return tuple(kept)


def sliding_layers(config: Config) -> tuple[int, ...]:
    """Return the layers whose caches keep a window or a chunk of tokens, as listed or by their pattern."""
    every, listed = config.get("sliding_window_pattern"), config.get("sliding_window_layers")
    total = range(layers(config))
    if isinstance(config.get("layer_types"), list):
        return _of_kind(config, "layer_types", "sliding_attention", "chunked_attention")
    if number(config, "attention_chunk_size"):
        every = 4
    if isinstance(every, str) and every:
        return tuple(layer for layer in total if every[layer % len(every)] == "L")
    if isinstance(every, int) and every > 0:
        return tuple(layer for layer in total if (layer + 1) % every)
    if isinstance(listed, list):
        return tuple(layer for layer in total if layer in listed)
    return _of_kind(config, "hybrid_layer_pattern", 1)


def layers_without_tokens(config: Config) -> tuple[int, ...]:
    """Return the layers whose caches keep no tokens, by the first field that lists or numbers the others."""
    total = layers(config)
    kda: Any = table(config, "linear_attn_config").get("kda_layers")
    full: Any = config.get("full_attn_idxs")
    fields = ("layers_block_type", "layer_types", "block_types", "_block_types")
    kinds = next((kinds for field in fields if isinstance(kinds := config.get(field), list) and kinds), [])
    period, group = number(config, "attn_layer_period"), number(config, "layer_group_size")
    step = number(config, "mamba_step") if config.get("mamba_enabled", True) else 0
    interval = number(config, "full_attention_interval") or 4
    rules: tuple[tuple[object, Callable[[int], bool]], ...] = (
        (isinstance(kda, list), lambda layer: layer + 1 not in kda),
        (isinstance(full, list), lambda layer: layer in full),
        (kinds, lambda layer: kinds[layer % len(kinds)] not in _WITHOUT_TOKENS),
        (period, lambda layer: layer % period == number(config, "attn_layer_offset")),
        (group, lambda layer: (layer + 1) % group == 0 or layer >= total // group * group),
        (step, lambda layer: layer % step == step // 2 if total > step // 2 else layer == total - 1),
        (number(config, "linear_num_value_heads"), lambda layer: (layer + 1) % interval == 0),
    )
    keeps = next((rule for named, rule in rules if named), lambda _layer: True)
    return mixing(config, "M-E") or tuple(layer for layer in range(total) if not keeps(layer))


def linear_layers(config: Config) -> tuple[int, ...]:
    """Return the layers with gated linear attention, which has weights of its own."""
    return layers_without_tokens(config) if number(config, "linear_num_value_heads") else ()


def _of_kind(config: Config, name: str, *kinds: object) -> tuple[int, ...]:
    """Return the layers for which a list of the configuration has one of these; any true value without."""
    listed = config.get(name)
    if not isinstance(listed, list):
        return ()
    first = enumerate(listed[: layers(config)])
    return tuple(layer for layer, kind in first if (kind in kinds if kinds else kind))


def experts_of(config: Config) -> tuple[int, int]:
    """Return a layer's routed experts, and how many of them a token meets; (0, 0) for a dense model."""
    count = number(config, *_EXPERTS)
    return (count, min(number(config, *_PICKED) or 1, count)) if count else (0, 0)


def expert_layers(config: Config) -> tuple[int, ...]:
    """Return the layers with routed experts; the others have a dense MLP."""
    total = layers(config)
    if _mixers(config) or not experts_of(config)[0]:
        return mixing(config, "E")
    if isinstance(config.get("mlp_layer_types"), list):
        return _of_kind(config, "mlp_layer_types", "sparse")
    for name in ("is_moe_layer", "moe_layer_freq"):
        if isinstance(config.get(name), list):
            return _of_kind(config, name)
    named = config.get("moe_layers_enum")
    if isinstance(named, str) and named:
        return tuple(range(total))[-len(named.split(",")) :]  # all such models begin with the dense ones
    if every := number(config, "interleave_moe_layer_step"):
        return tuple(range(every - 1, total, every))
    dense = config.get("mlp_only_layers")
    dense_only = dense if isinstance(dense, list) else ()
    return tuple(i for i in range(number(config, *_DENSE_FIRST), total) if i not in dense_only)


@dataclass(frozen=True, slots=True)
class MixerCounts:
    """Parts of layers, over the whole model. On several ranks, each ends in a sum over them."""

    attention: int
    linear: int
    dense: int
    experts: int

    @property
    def all(self) -> int:
        return self.attention + self.linear + self.dense + self.experts


def mixers_of(config: Config) -> MixerCounts:
    """Count the parts of layers by kind. Most layers have an attention, and an MLP or experts."""
    if kinds := _mixers(config):
        return MixerCounts(*(kinds.count(letter) for letter in "*M-E"))
    total, linear, sparse = layers(config), len(linear_layers(config)), len(expert_layers(config))
    dense = total if is_gemma4(config) else total - sparse
    return MixerCounts(total - linear, linear, dense, sparse)


def parts_of(config: Config) -> tuple[WeightKind, ...]:
    """Return the weights of a model. `config` holds the fields of its language model."""
    width, vocabulary = hidden(config), required(config, "vocabulary", "vocab_size")
    tied = bool(config.get("tie_word_embeddings")) or config.get("model_type") in _TIED
    table_size = vocabulary * width
    ends = [WeightKind("embedding", table_size, table_size if tied else width)]
    if not tied:
        ends.append(WeightKind("head", table_size, table_size))
    return tuple(part for part in (*ends, *_attention(config), *_mlp(config)) if part.count)


def mtp_head(config: Config) -> WeightKind:
    """Return the weights of an MTP head: a layer like the last one, behind a projection of two inputs.

    Each rank has all of it. A token meets it only where it drafts.
    """
    last = layers(config) - 1
    layer = sum(part.count // len(part.layers) for part in parts_of(config) if last in part.layers)
    return WeightKind("mtp", layer + 2 * hidden(config) ** 2, 0, divides=False)


def _attention(config: Config) -> list[WeightKind]:
    if is_gemma4(config):
        return [*_gemma4_attention(config), *_gemma4_inputs(config)]
    if _mixers(config):
        full, mamba = mixing(config, "*"), mixing(config, "M")
        grouped, mixer = _grouped(config) * len(full), _mamba(config) * len(mamba)
        return [WeightKind("attention", grouped, grouped, full), WeightKind("mamba", mixer, mixer, mamba)]
    linear = linear_layers(config)
    full = tuple(layer for layer in range(layers(config)) if layer not in linear)
    count = len(full) * (2 if config.get("model_type") in _TWO_IN_ONE else 1)
    divided, whole = _latent(config) if is_latent(config) else (_grouped(config), 0)
    other = _linear(config) * len(linear)
    return [
        WeightKind("attention", divided * count, divided * count, full),
        WeightKind("attention", other, other, linear),
        WeightKind("compression", whole * count, whole * count, full, divides=False),
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
    plain = tuple(layer for layer in range(layers(config)) if layer not in sparse)
    count, picked = experts_of(config)
    matrices, latent = 3, 0
    if _mixers(config):
        plain, matrices, latent = mixing(config, "-"), 2, number(config, "moe_latent_size")
    dense = len(plain)
    if is_gemma4(config):  # a dense MLP in every layer, wide where keys are another layer's
        plain = tuple(range(layers(config)))
        wide = gemma4_shared(config) if config.get("use_double_wide_mlp", True) else 0
        dense = len(plain) + wide
    if config.get("model_type") in _TWO_IN_ONE:
        dense, plain = 2 * layers(config), tuple(range(layers(config)))
    dense *= matrices * width * number(config, *_DENSE)
    expert = matrices * (latent or width) * expert_width(config) * len(sparse)
    shared = matrices * width * _shared_width(config) * len(sparse)
    routes = (width * count + 2 * width * latent) * len(sparse)
    return [
        WeightKind("mlp", dense, dense, plain),
        WeightKind("experts", expert * count, expert * picked, sparse),
        WeightKind("shared", shared, shared, sparse),
        WeightKind("router", routes, routes, sparse, divides=False),
    ]


def expert_width(config: Config) -> int:
    """Return the inner width of one routed expert."""
    return number(config, *_EXPERT) or number(config, "intermediate_size")


def _shared_width(config: Config) -> int:
    if width := number(config, *_SHARED):
        return width
    name = config.get("model_type")
    if name in _SHARED_AS_EXPERT:
        return number(config, "shared_intermediate_size")
    return (1 if name in _ONE_SHARED else number(config, *_SHARED_COUNT)) * expert_width(config)


# --- families with layers of their own kinds -------------------------------------------------------------

#: Nemotron-H's names of mixers: Mamba, attention, MLP, experts.
_MIXERS = {
    "mamba": "M", "linear_attention": "M", "conv": "M", "attention": "*", "full_attention": "*", "mlp": "-",
    "moe": "E",
}  # fmt: skip


def _mixers(config: Config) -> str:
    """Return a letter for the one mixer of each layer; empty for families that have two in each."""
    if config.get("model_type") != "nemotron_h":
        return ""
    listed = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    names = listed or config.get("layer_types") or ()
    return "".join(_MIXERS.get(name, str(name)) for name in names) if isinstance(names, str | list) else ""


def mixing(config: Config, kinds: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(_mixers(config)) if kind in kinds)


def _mamba(config: Config) -> int:
    """Count the weights of one Mamba mixer: gates, inputs, B, C and steps, and the output."""
    inner = number(config, "mamba_num_heads") * number(config, "mamba_head_dim")
    states = number(config, "n_groups") * number(config, "ssm_state_size")
    return hidden(config) * (3 * inner + 2 * states + number(config, "mamba_num_heads"))


def is_gemma4(config: Config) -> bool:
    return config.get("model_type") in ("gemma4", "gemma4_text")


def gemma4_shared(config: Config) -> int:
    """Return how many layers, the last ones, read the keys of others."""
    shared = config.get("num_kv_shared_layers", 20)
    return min(shared, layers(config)) if isinstance(shared, int) else 0


def _gemma4_heads(config: Config, layer: int) -> tuple[bool, int, int]:
    """Return whether a layer has keys of its own, its KV heads, and their width."""
    sliding = layer in sliding_layers(config)
    few = number(config, "num_global_key_value_heads") if config.get("attention_k_eq_v") else 0
    wide = number(config, "global_head_dim")
    own = layer < layers(config) - gemma4_shared(config)
    return (
        own,
        kv_heads(config) if sliding else few or kv_heads(config),
        (head_dim(config) if sliding else wide or head_dim(config)),
    )


def _gemma4_attention(config: Config) -> Iterator[WeightKind]:
    for layer in range(layers(config)):
        own, pairs, width = _gemma4_heads(config, layer)
        same = bool(config.get("attention_k_eq_v")) and layer not in sliding_layers(config)
        numbers = 2 * heads(config) * width + (pairs * width * (1 if same else 2) if own else 0)
        yield WeightKind("attention", hidden(config) * numbers, hidden(config) * numbers, (layer,))


def _gemma4_inputs(config: Config) -> Iterator[WeightKind]:
    """Yield embeddings and projections of the input of single layers, which every rank has whole."""
    width, total = number(config, "hidden_size_per_layer_input"), layers(config)
    table = number(config, "vocab_size_per_layer_input") * total * width
    yield WeightKind("inputs", table, total * width, divides=False)
    gates = 3 * hidden(config) * width * total
    yield WeightKind("inputs", gates, gates, tuple(range(total)), divides=False)


# --- borders of stages ----------------------------------------------------------------------------------

#: Families whose linear attention is given positions, which only the caches of the other layers count.
_COUNTED = frozenset(("bailing_hybrid", "bailing_moe_linear"))


@dataclass(frozen=True, slots=True)
class StageRules:
    """Rules for stages. `engine/pipeline.py` finds the same in a loaded model, and a test compares the two.

    joined   layers that must be on the rank of the layer before, because they read results of earlier ones
    keepers  layers whose caches count positions, of which each stage needs one; () where any layer will do
    """

    joined: frozenset[int] = frozenset()
    keepers: tuple[int, ...] = ()

    def flaw(self, begin: int, end: int) -> str:
        """Return why no stage can have the layers from `begin` up to `end`; empty if one can."""
        if begin in self.joined:
            return f"layer {begin} reads results of earlier layers, so both must be on one Mac"
        if self.keepers and not any(begin <= layer < end for layer in self.keepers):
            named = f"layers {begin} to {end - 1} have" if end - begin > 1 else f"layer {begin} has"
            return f"{named} no cache that counts positions, of which each Mac needs one"
        return ""

    def border(self, at: int, step: int) -> int:
        """Return `at`, or the next layer by `step` (1 or -1) before which a stage may begin."""
        while at in self.joined:
            at += step
        return at

    def end(self, begin: int, most: int) -> int:
        """Return where a stage from `begin` on ends, at `most` or before; `begin` where none can be."""
        end = self.border(most, -1)
        return begin if end <= begin or self.flaw(begin, end) else end

    def latest(self, total: int, stages: int) -> list[int]:
        """Return where each of so many stages of `total` layers must end; [] where they cannot be so many."""
        ends = [total]
        while len(ends) < stages:
            keepers = (layer for layer in reversed(self.keepers) if layer < ends[0])
            ends.insert(0, self.border(next(keepers, -1) if self.keepers else ends[0] - 1, -1))
        return [] if ends[0] <= 0 or self.flaw(0, ends[0]) else ends


def stage_rules(config: Config) -> StageRules:
    """Return the rules for a model. `config` holds the fields of its language model."""
    total, family = layers(config), config.get("model_type")
    if family == "hunyuan" and config.get("use_cla"):
        group = number(config, "cla_share_factor") or 2
        return StageRules(frozenset(layer for layer in range(total) if layer % group))
    if is_gemma4(config) and number(config, "hidden_size_per_layer_input"):
        return StageRules(frozenset(range(1, total)))  # each layer reads an input of its own
    if is_gemma4(config) and (shared := gemma4_shared(config)):
        return StageRules(
            frozenset(range(_first_read(sliding_layers(config), total - shared, total) + 1, total))
        )
    if mixers := mixing(config, "M*"):
        return StageRules(keepers=mixers)
    if family in _COUNTED:
        without = layers_without_tokens(config)
        return StageRules(keepers=tuple(layer for layer in range(total) if layer not in without))
    return StageRules()


def _first_read(sliding: Sequence[int], own: int, total: int) -> int:
    """Return the first layer whose keys and values are read by others: by those from `own` on.

    Each reads those of the last layer of its kind that has its own.
    """
    kinds = {layer in sliding for layer in range(own, total)}
    return min(max((at for at in range(own) if (at in sliding) == kind), default=0) for kind in kinds)

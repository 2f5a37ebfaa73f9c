"""Shape of a model, with its kind of KV caches, for its placement. Pure: config.json and weights' size in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from ..chunks import ring_slots
from ..errors import Code, ModelError
from ..model_config import (
    KEEPS_MLP_WHOLE,
    MTP_LAYERS,
    PIPELINE_FAMILIES,
    TENSOR_FAMILIES,
    Config,
    Dimensions,
    dimensions_of,
    expands,
    family,
    mtp_place,
    number,
    quantization,
    text_config,
    unreadable,
)
from ..wire.messages import MAX_RANKS as MAX_RANKS
from .model_weights import (
    StageRules,
    WeightKind,
    cached_numbers,
    experts_of,
    head_dim,
    heads,
    hidden,
    is_latent,
    keeps_latent,
    kv_heads,
    layers,
    mixers_of,
    mtp_head,
    parts_of,
    sliding_layers,
    stage_rules,
)

# --- kinds of KV caches, and what the engine leaves out with each ---------------------------------------

#: Families with windows of tokens in every model.
_WINDOWS = frozenset(
    ("afmoe", "cohere2", "exaone4", "exaone_moe", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text",
     "gpt_oss", "iquestloopcoder", "laguna", "mellum", "mimo_v2_flash", "muse_glimmer", "muse_spark", "olmo3",
     "plamo3", "spark2_5")
)  # fmt: skip
#: Families with windows in the layers that their configuration calls sliding.
_WINDOWS_IN_SOME = frozenset(("llama", "ministral3", "mistral3", "step3p5"))
#: Families with recurrent states, some of them beside windows.
_STATES = frozenset(
    ("baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "gear", "kimi_k3", "longcat_flash_ngram", "mamba",
     "mamba2", "plamo2", "recurrent_gemma", "rwkv7")
)  # fmt: skip
#: Families whose states the engine takes back to a token before a step's last one.
_FED_AGAIN = frozenset(
    ("bailing_moe_v3", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe",
     "nemotron_h", "olmo_hybrid", "prism_hadamard_qwen35", "qwen3_5", "qwen3_5_moe", "qwen3_next")
)  # fmt: skip
_LISTS = frozenset(("deepseek_v32", "glm_moe_dsa", "longcat_flash", "minimax_m3_vl"))
_COMPRESSED = frozenset(("deepseek_v41",))
_CHUNKS = frozenset(("llama4",))
_WINDOW_SIZES = ("sliding_window", "sliding_window_size", "window_size", "attention_chunk_size")


@dataclass(frozen=True, slots=True)
class CacheTraits:
    """One kind of KV caches. `off` names what is left out, and `why`; both empty where nothing is.

    `cuttable`: a kept cache serves from any of its tokens on, not only as a whole.
    """

    name: str
    cuttable: bool = True
    off: str = ""
    why: str = ""


_NOT_WIDE = "drafts, forced tokens, several prompts in one forward, quantized KV"
ALONE = "requests at once"  #: Among `off`: no two requests are decoded together.
PLAIN = CacheTraits("keys and values")
LISTS = CacheTraits(
    "keys and values, with an index", off=_NOT_WIDE, why="rows of a batch cannot roll back one by one"
)
_NOT_MANY = "several prompts in one forward, quantized KV"
WINDOWS = CacheTraits(
    "windows of tokens",
    cuttable=False,
    off=_NOT_MANY,
    why="a prompt is computed in mlx-lm's own window, which has one sequence and no quantized numbers",
)
STATES = CacheTraits(
    "recurrent states", cuttable=False, off=_NOT_WIDE, why="mlxtp cannot roll these states back"
)
FED_AGAIN = CacheTraits(
    "recurrent states, fed again",
    cuttable=False,
    off=_NOT_MANY,
    why="a state holds all tokens so far; only those of the last step are fed to it again",
)
COMPRESSED = CacheTraits(
    "compressed groups",
    cuttable=False,
    off=f"{_NOT_WIDE}, {ALONE}",
    why="closed groups cannot be opened, nor caches be joined",
)
CHUNKS = CacheTraits(
    "chunks of tokens",
    cuttable=False,
    off=f"{_NOT_WIDE}, {ALONE}",
    why="what is before a chunk cannot come back, nor can mlx-lm join such caches",
)


def traits_of(family: str, layer_types: object = ()) -> CacheTraits:
    """Return the kind of a family's caches; `layer_types` as in config.json."""
    sliding = isinstance(layer_types, list | tuple) and "sliding_attention" in layer_types
    kinds = (
        (_STATES, STATES),
        (_FED_AGAIN, FED_AGAIN),
        (_WINDOWS, WINDOWS),
        (_LISTS, LISTS),
        (_COMPRESSED, COMPRESSED),
        (_CHUNKS, CHUNKS),
    )
    for families, traits in kinds:
        if family in families:
            return traits
    return WINDOWS if sliding and family in _WINDOWS_IN_SOME else PLAIN


# --- shape ----------------------------------------------------------------------------------------------

_DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
#: Roles of modules, by parts of their paths. The first that fits counts.
_ROLES: Mapping[str, tuple[str, ...]] = {
    "router": (".gate", ".router"),
    "shared": ("shared_expert",),
    "experts": ("switch_mlp", ".experts"),
    "compression": ("q_a_proj", "kv_a_proj", "indexer"),
    "attention": ("attn", "attention"),
    "embedding": ("embed_tokens", "word_embeddings", "wte"),
    "head": ("lm_head",),
    "mlp": ("mlp",),
}

#: GPU kernels that one token starts one after the other, counted in mlx-lm's models.
_KERNELS = {
    "mixer": 2,  # norm, residual sum
    "attention": 10,  # queries, keys, values, two rotations, two cache updates, attention (2), output
    "latent": 20,  # the same through compressions, with scores of the rotated part beside
    "indexer": 8,
    "linear": 16,
    "mlp": 4,  # gate, up, activation, down
    "experts": 16,  # router (8), three gathered products, activation, weighted sum
    "groups": 8,  # a router that scores groups of experts first
    "shared": 5,
    "once": 12,  # embedding, last norm, head, choice of a token
    "draft": 12,  # of an MTP head beside its layer: two norms, their product, and the same as "once"
}
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "glm4_moe", "minimax", "exaone_moe", "step3p5"})
#: Families that sum over the ranks for the norms of queries and keys too.
_NORM_SUMS = frozenset({"minimax", "olmo2", "olmo3"})


@dataclass(frozen=True, slots=True)
class PartShape:
    """Sizes of one layer, or of what a stage has beside its layers. Fields as those of `ModelShape`."""

    weight_bytes: int = 0
    token_bytes: int = 0
    token_weights: int = 0
    kernels: int = 0
    kv_token_bytes: int = 0
    kv_window_bytes: int = 0

    def __add__(self, other: PartShape) -> PartShape:
        return PartShape(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __sub__(self, other: PartShape) -> PartShape:
        return PartShape(*(getattr(self, name) - getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that its placement depends on. Bytes are of weights as they are stored.

    name              its name in sentences
    family            `model_type` of its config.json
    layers, hidden    number of layers, and their width
    heads, kv_heads, head_dim, intermediate, vocabulary, experts, experts_per_token    as in config.json
    bits, group       of its quantization; 16 or 32 bits and group 1 without
    max_context       most tokens that it supports
    weight_bytes      all weights
    whole_bytes       the part of these that each rank of a group holds whole
    token_bytes       weights read for one token: of routed experts only those it meets
    token_whole_bytes the part of these that each rank of a group reads whole
    mlp_bytes         weights of dense MLPs, which some families keep whole where they do not divide
    token_weights     number of weights that a token is multiplied by
    kv_token_bytes    bytes of one more token in the KV caches, over all layers
    kv_window_bytes   the part of these in layers with a window, which have slots for `window` tokens at most
    kv_divides        whether ranks share these; a compressed cache is on every rank
    collectives       sums and gathers over the ranks for one token
    kernels           GPU kernels started one after the other for one token
    shardable         whether its family can be divided at all
    dimensions        sizes that ranks divide
    caches            kind of its KV caches
    mtp_kv_bytes      bytes of one more token in the cache of an MTP head, which each rank has whole; 0 where
                      its files have none
    mtp_head          sizes of the MTP head that its configuration names, in its files or not
    drafts            whether such a head can be used
    output_bytes      weights of the output head, which may be the embedding's
    before            sizes of all layers before each one, and of all
    ends              sizes of what first and last stages have beside layers: the embedding; norm and head
    cuttable          whether its layers can be cut into stages
    rules             for its stages
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int
    experts_per_token: int
    expert_width: int
    bits: int
    group: int
    max_context: int
    weight_bytes: int
    whole_bytes: int
    token_bytes: int
    token_whole_bytes: int
    mlp_bytes: int
    token_weights: int
    kv_token_bytes: int
    kv_divides: bool
    collectives: int
    kernels: int
    shardable: bool
    dimensions: Dimensions = field(default=Dimensions(), repr=False)
    caches: CacheTraits = PLAIN
    kv_window_bytes: int = 0
    window: int = 0
    mtp_kv_bytes: int = 0
    mtp_head: PartShape | None = None
    drafts: bool = False
    output_bytes: int = 0
    before: tuple[PartShape, ...] = field(default=(), repr=False)
    ends: tuple[PartShape, PartShape] = field(default=(PartShape(), PartShape()), repr=False)
    cuttable: bool = False
    rules: StageRules = field(default=StageRules(), repr=False)

    def stage(self, begin: int, end: int) -> ModelShape:
        """Return the shape of a stage: the layers from `begin` up to `end`, and what its place brings."""
        if (begin, end) == (0, self.layers):
            return self
        sizes = self.before[end] - self.before[begin]
        if begin == 0:
            sizes += self.ends[0]
        if end == self.layers:
            sizes += self.ends[1]
        own = self.mtp_kv_bytes if end == self.layers else 0
        fields = {name: getattr(sizes, name) for name in sizes.__slots__}
        return replace(self, layers=end - begin, mtp_kv_bytes=own, **fields)

    def rank_weights(self, ranks: int) -> int:
        """Return the bytes of weights on each of `ranks` ranks."""
        return _shared_out(self.weight_bytes, self.whole_bytes + self._whole_mlps(ranks), ranks)

    def rank_token_bytes(self, ranks: int) -> int:
        """Return the bytes of weights that each rank reads for one token."""
        return _shared_out(self.token_bytes, self.token_whole_bytes + self._whole_mlps(ranks), ranks)

    def _whole_mlps(self, ranks: int) -> int:
        """Return the bytes of the dense MLPs that each of `ranks` ranks has whole."""
        keeps = self.family in KEEPS_MLP_WHOLE and self.expert_width
        divide = self.intermediate % ranks == 0 and self.intermediate // ranks % self.group == 0
        return self.mlp_bytes if keeps and not divide else 0

    def rank_kv(self, ranks: int, tokens: int) -> int:
        """Return the bytes of the KV caches of `tokens` tokens on each rank."""
        beyond = max(tokens - self.window, 0)
        size = self.kv_token_bytes * tokens - self.kv_window_bytes * beyond
        own = -(-size // (min(ranks, self.kv_heads) if self.kv_divides else 1))
        return own + self.mtp_kv_bytes * tokens

    def uncuttable(self, ranks: int, split: Sequence[int] = ()) -> str:
        """Return why it cannot be cut into so many stages, or as `split` has it; empty if it can."""
        if not self.cuttable:
            return f"the family {self.family!r} cannot be cut into {ranks} stages"
        told = ",".join(map(str, split))
        if split and sum(split) != self.layers:
            return f"the split {told} has {sum(split)} layers, and {self.name} has {self.layers}"
        for begin, end in pairwise(accumulate(reversed(split), initial=0)):
            if why := self.rules.flaw(begin, end):
                return f"the split {told} cannot be: {why}"
        if self.layers < ranks:
            return f"{self.layers} layers are fewer than {ranks} Macs"
        many = not split and not self.rules.latest(self.layers, ranks)
        return f"the layers of {self.name} depend on each other too much for {ranks} stages" if many else ""

    def obstacles(self, ranks: int) -> tuple[str, ...]:
        """Return why `ranks` ranks cannot divide it; () if they can."""
        if ranks == 1:
            return ()
        if not self.shardable:
            return (f"no layer of the family {self.family!r} can be divided among {ranks} ranks",)
        return self.dimensions.obstacles(ranks)


def _shared_out(total: int, whole: int, ranks: int) -> int:
    return total if ranks == 1 else -(-(total - whole) // ranks) + whole


def shape_of(
    config: Config, *, name: str = "", weight_bytes: int = 0, kv_bits: int = 0, mtp: bool = False
) -> ModelShape:
    """Return the shape of the model with this config.json.

    `weight_bytes` is the size of its weights on disk; if it is unknown (0), the configuration implies the
    size. If both are known, the disk counts, and reading is scaled with it: configurations of mixed
    quantizations are rarely complete. `kv_bits` quantizes the KV cache (4 or 8). `mtp`: its files have an MTP
    head. Raises ModelError: MODEL_INVALID with the field that is missing or no number, MODEL_UNSUPPORTED for
    weights that mlx-lm cannot read.
    """
    if why := unreadable(config):
        raise ModelError(why, Code.MODEL_UNSUPPORTED)
    if expands(config):
        weight_bytes = 0
    text = text_config(config)
    parts = (*parts_of(text), *([mtp_head(text)] if mtp else []))
    plain = _DTYPE_BYTES.get(str(text.get("dtype") or text.get("torch_dtype")), 2.0)
    stored = _Quantization(config, plain)
    implied = sum(part.count * stored.bytes_each(part.role) for part in parts)
    scale = weight_bytes / implied if weight_bytes else 1.0
    experts, picked = experts_of(text)
    known, mixers = family(config), mixers_of(text)
    caches = traits_of(known, text.get("layer_types"))
    number_bytes = kv_bits / 8 + 4 / 64 if kv_bits else plain
    kept = cached_numbers(text, states=caches in (STATES, FED_AGAIN))
    cached = [numbers * number_bytes for numbers in kept]
    slides = caches in (WINDOWS, STATES, CHUNKS) and sliding_layers(text)
    window = number(text, *_WINDOW_SIZES) if slides else 0
    window = ring_slots(window) if window else 0

    dense = sum(part.count * stored.bytes_each(part.role) for part in parts if part.role == "mlp")
    sliding = sliding_layers(text) if window else ()
    each_layer = _each_layer(text, parts, lambda part: scale * stored.bytes_each(part.role), cached, sliding)

    def size(count: str, *, whole: bool) -> int:
        chosen = (part for part in parts if not (whole and part.divides))
        return int(scale * sum(getattr(part, count) * stored.bytes_each(part.role) for part in chosen))

    made = ModelShape(
        name=name or str(config.get("model_type", "")),
        family=str(config.get("model_type", "")),
        layers=layers(text),
        hidden=hidden(text),
        heads=heads(text),
        kv_heads=kv_heads(text),
        head_dim=head_dim(text),
        intermediate=number(text, "intermediate_size"),
        vocabulary=number(text, "vocab_size"),
        experts=experts,
        experts_per_token=picked,
        expert_width=number(text, "moe_intermediate_size"),
        bits=stored.bits or int(plain * 8),
        group=number(stored.table, "group_size") or 1,
        max_context=number(text, "max_position_embeddings") or 4096,
        weight_bytes=weight_bytes or int(implied),
        whole_bytes=size("count", whole=True),
        token_bytes=size("active", whole=False),
        token_whole_bytes=size("active", whole=True),
        mlp_bytes=int(scale * dense),
        token_weights=sum(part.active for part in parts if part.role != "embedding"),
        kv_token_bytes=int(sum(cached)),
        kv_divides=not keeps_latent(text),
        collectives=mixers.all + (2 * mixers.attention if known in _NORM_SUMS else 0) + 1,
        kernels=_kernels(text, parts),
        shardable=known in TENSOR_FAMILIES,
        dimensions=dimensions_of(config),
        caches=caches,
        kv_window_bytes=int(sum(cached[layer] for layer in sliding)),
        window=window,
        mtp_kv_bytes=int(cached[-1]) if mtp else 0,
        drafts=bool(mtp_place(config)),
        before=tuple(accumulate(each_layer, initial=PartShape())),
        cuttable=known in PIPELINE_FAMILIES,
        rules=stage_rules(text),
    )
    embedding = next(part for part in parts if part.role == "embedding")
    table_bytes = int(scale * embedding.count * stored.bytes_each("embedding"))
    tied = not any(part.role == "head" for part in parts)
    # What the layers leave is the last stage's, so that all stages together have all bytes.
    all_of_it = PartShape(*(getattr(made, name) for name in PartShape.__slots__))
    last = all_of_it - PartShape(0 if tied else table_bytes) - made.before[-1]
    if mtp and not tied:  # an embedding for the head, beside that of the first stage
        last += PartShape(table_bytes)
    output_bytes = int(scale * embedding.count * stored.bytes_each("embedding" if tied else "head"))
    head = None
    if mtp_place(config) or number(text, *MTP_LAYERS):
        joins = 2 * hidden(text) ** 2
        joining = int(scale * joins * stored.bytes_each("mtp"))
        head = each_layer[-1] + PartShape(joining, joining, joins, _KERNELS["draft"])
    return replace(made, ends=(PartShape(table_bytes), last), mtp_head=head, output_bytes=output_bytes)


def _each_layer(
    text: Config,
    parts: Sequence[WeightKind],
    bytes_each: Callable[[WeightKind], float],
    cached: Sequence[float],
    sliding: Sequence[int],
) -> tuple[PartShape, ...]:
    """Return the sizes of every layer.

    `cached`: bytes of one token in the cache of each. `sliding`: those whose caches keep a window of tokens.
    """
    total = layers(text)
    kernels = (_kernels(text, parts) - _KERNELS["once"]) // total
    each = [[0.0, 0.0, 0.0] for _ in range(total)]
    for part in parts:
        size = bytes_each(part)
        for layer in part.layers:
            shares = (part.count * size, part.active * size, part.active)
            each[layer] = [a + b / len(part.layers) for a, b in zip(each[layer], shares, strict=True)]
    sizes = [tuple(map(int, size)) for size in each]
    return tuple(
        PartShape(
            weights,
            token_bytes,
            token_weights,
            kernels,
            int(cached[layer]),
            int(cached[layer]) if layer in sliding else 0,
        )
        for layer, (weights, token_bytes, token_weights) in enumerate(sizes)
    )


class _Quantization:
    """Bytes of a weight of each role, by the `quantization` of a configuration."""

    def __init__(self, config: Config, plain: float) -> None:
        self.table = quantization(config)
        self._plain = plain
        self._all = _bytes_each(self.table, plain)
        named: dict[str, list[float]] = {}
        for path, own in self.table.items():
            role = _role(path)
            if role and isinstance(own, dict):
                named.setdefault(role, []).append(_bytes_each({**self.table, **own}, plain))
            elif role and own is False:
                named.setdefault(role, []).append(plain)
        self._named = {role: sum(each) / len(each) for role, each in named.items()}

    @property
    def bits(self) -> int:
        return number(self.table, "bits")

    def bytes_each(self, role: str) -> float:
        """Return the average over the modules of this role that have their own entry, else the value for all.

        Routers are rarely quantized, and then less than the rest.
        """
        return self._named.get(role, self._plain if role == "router" else self._all)


def _role(path: str) -> str:
    """Return the role of the module with this path; "" if it is no path of a module."""
    if "." not in path and path not in _ROLES["head"]:
        return ""
    return next((role for role, names in _ROLES.items() if any(name in path for name in names)), "")


def _bytes_each(quantization: Config, plain: float) -> float:
    """Return a weight's bytes with its part of the scales.

    A group's scales are two 16-bit numbers if affine, else one byte.
    """
    bits, group = number(quantization, "bits"), number(quantization, "group_size")
    if not bits:
        return plain
    if not group:
        return bits / 8
    return bits / 8 + (4 if quantization.get("mode", "affine") == "affine" else 1) / group


def _kernels(config: Config, parts: Sequence[WeightKind]) -> int:
    count = mixers_of(config)
    attention = _KERNELS["latent" if is_latent(config) else "attention"]
    attention += 2 if family(config) in _QK_NORM else 0
    attention += _KERNELS["indexer"] if number(config, "index_n_heads") else 0
    moe = _KERNELS["experts"] + (_KERNELS["groups"] if number(config, "n_group") > 1 else 0)
    moe += _KERNELS["shared"] if any(part.role == "shared" for part in parts) else 0
    return (
        _KERNELS["once"]
        + count.all * _KERNELS["mixer"]
        + count.attention * attention
        + count.linear * _KERNELS["linear"]
        + count.dense * _KERNELS["mlp"]
        + count.experts * moe
    )

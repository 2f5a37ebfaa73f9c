"""Shape of a model, for its placement. Pure: config.json and the size of the weights in, numbers out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import model_weights
from .model_weights import Config, WeightKind, number, table

MAX_RANKS = 8
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

#: Families that mlx-lm can divide among ranks. A test compares this with the installed mlx-lm.
SHARDABLE = frozenset(
    ("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "exaone_moe", "glm4_moe", "glm4_moe_lite",
     "glm_moe_dsa", "gpt_oss", "iquestloopcoder", "kimi_k25", "kimi_k3", "llama", "longcat_flash",
     "longcat_flash_ngram", "minimax", "minimax_m3_vl", "ministral3", "mistral4", "muse_spark",
     "prism_hadamard_qwen35", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "step3p5")
)  # fmt: skip
#: Other names of families, by mlx-lm's own table. A test compares the two tables.
ALSO_CALLED = {
    "mistral": "llama", "iquestcoder": "llama", "xverse": "llama", "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3", "minimax_m2": "minimax", "deepseek_v41_text": "deepseek_v41",
    "llava": "mistral3", "phi-msft": "phixtral", "falcon_mamba": "mamba", "qwen2_5_vl": "qwen2_vl",
    "gemma4_unified": "gemma4",
}  # fmt: skip

#: GPU kernels that one token starts one after the other, counted in mlx-lm's models.
_KERNELS = {
    "layer": 4,  # two norms, two residual sums
    "attention": 10,  # queries, keys, values, two rotations, two cache updates, attention (2), output
    "latent": 20,  # the same through compressions, with scores of the rotated part beside
    "indexer": 8,
    "linear": 16,
    "mlp": 4,  # gate, up, activation, down
    "experts": 16,  # router (8), three gathered products, activation, weighted sum
    "groups": 8,  # a router that scores groups of experts first
    "shared": 5,
    "once": 12,  # embedding, last norm, head, choice of a token
}
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "glm4_moe", "minimax", "exaone_moe", "step3p5"})
#: Families that sum over the ranks for the norms of queries and keys too.
_NORM_SUMS = frozenset({"minimax"})


_COPIES_KV_HEADS = ("qwen3_5", "qwen3_5_moe")  #: Families in which several ranks may have the same KV head.
#: Families in which each rank has the few dense MLPs whole, beside experts, if ranks cannot share them.
_KEEPS_MLP_WHOLE = ("deepseek_v2", "glm4_moe")


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
    kv_divides        whether ranks share these; a compressed cache is on every rank
    collectives       sums and gathers over the ranks for one token
    kernels           GPU kernels started one after the other for one token
    shardable         whether mlx-lm can divide it at all
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

    def rank_weights(self, ranks: int) -> int:
        """Return the bytes of weights on each of `ranks` ranks."""
        return _shared_out(self.weight_bytes, self.whole_bytes + self._whole_mlps(ranks), ranks)

    def rank_token_bytes(self, ranks: int) -> int:
        """Return the bytes of weights that each rank reads for one token."""
        return _shared_out(self.token_bytes, self.token_whole_bytes + self._whole_mlps(ranks), ranks)

    def _whole_mlps(self, ranks: int) -> int:
        """Return the bytes of the dense MLPs that each of `ranks` ranks has whole."""
        keeps = self.family in _KEEPS_MLP_WHOLE and self.expert_width
        divide = self.intermediate % ranks == 0 and self.intermediate // ranks % self.group == 0
        return self.mlp_bytes if keeps and not divide else 0

    def rank_kv(self, ranks: int, tokens: int) -> int:
        """Return the bytes of the KV caches of `tokens` tokens on each rank."""
        return -(-self.kv_token_bytes * tokens // (min(ranks, self.kv_heads) if self.kv_divides else 1))

    def obstacles(self, ranks: int) -> tuple[str, ...]:
        """Return why `ranks` ranks cannot divide it, by the rules that `engine/sharding.py` checks."""
        if ranks == 1:
            return ()
        if not self.shardable:
            return (f"mlx-lm cannot divide the family {self.family!r} among {ranks} ranks",)
        sizes = {
            "attention heads": self.heads,
            "KV heads": self.kv_heads,
            "intermediate size": self.intermediate,
            "expert intermediate size": self.expert_width,
        }
        if self.family in _COPIES_KV_HEADS and ranks % self.kv_heads == 0:
            del sizes["KV heads"]
        if self.family in _KEEPS_MLP_WHOLE and self.expert_width:
            del sizes["intermediate size"]
        found = []
        for what, size in sizes.items():
            if size % ranks:
                found.append(
                    f"{size} {what} do not divide by {ranks}"
                    if what.endswith("heads")
                    else f"{what} {size} does not divide by {ranks}"
                )
        inputs = {
            "attention output": self.heads * self.head_dim,
            "intermediate size": sizes.get("intermediate size", 0),
            "expert intermediate size": self.expert_width,
        }
        found += [
            f"{what} {size} / {ranks} = {size // ranks} is no multiple of the quantization group {self.group}"
            for what, size in inputs.items()
            if size % ranks == 0 and (size // ranks) % self.group
        ]
        return tuple(found)


def _shared_out(total: int, whole: int, ranks: int) -> int:
    return total if ranks == 1 else -(-(total - whole) // ranks) + whole


def shape_of(config: Config, *, name: str = "", weight_bytes: int = 0, kv_bits: int = 0) -> ModelShape:
    """Return the shape of the model with this config.json.

    `weight_bytes` is the size of its weights on disk; if it is unknown (0), the configuration implies the
    size. If both are known, the disk counts, and reading is scaled with it: configurations of mixed
    quantizations are rarely complete. `kv_bits` quantizes the KV cache (4 or 8). Raises ModelError
    (MODEL_INVALID) with the field that is missing or no number.
    """
    text = model_weights.text_config(config)
    parts = model_weights.parts(text)
    plain = _plain_bytes(text)
    stored = _Quantization(config, plain)
    implied = sum(part.count * stored.bytes_each(part.role) for part in parts)
    scale = weight_bytes / implied if weight_bytes else 1.0
    experts, picked = model_weights.experts(text)
    family = str(config.get("model_type", ""))
    sums = 2 + (2 if family in _NORM_SUMS or ALSO_CALLED.get(family) in _NORM_SUMS else 0)

    dense = sum(part.count * stored.bytes_each(part.role) for part in parts if part.role == "mlp")

    def size(count: str, *, whole: bool) -> int:
        chosen = (part for part in parts if not (whole and part.divides))
        return int(scale * sum(getattr(part, count) * stored.bytes_each(part.role) for part in chosen))

    return ModelShape(
        name=name or family,
        family=family,
        layers=model_weights.layers(text),
        hidden=model_weights.hidden(text),
        heads=model_weights.heads(text),
        kv_heads=model_weights.kv_heads(text),
        head_dim=model_weights.head_dim(text),
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
        kv_token_bytes=int(model_weights.cached_numbers(text) * (kv_bits / 8 + 4 / 64 if kv_bits else plain)),
        kv_divides=not model_weights.keeps_latent(text),
        collectives=sums * model_weights.layers(text) + 1,
        kernels=_kernels(text, parts),
        shardable=ALSO_CALLED.get(family, family) in SHARDABLE,
    )


def _plain_bytes(config: Config) -> float:
    """Return the bytes of a number that is not quantized."""
    return _DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2.0)


class _Quantization:
    """Bytes of a weight of each role, by the `quantization` of a configuration."""

    def __init__(self, config: Config, plain: float) -> None:
        self.table = table(config, "quantization") or table(config, "quantization_config")
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


def _kernels(config: Config, parts: tuple[WeightKind, ...]) -> int:
    family = str(config.get("model_type", ""))
    total, linear = model_weights.layers(config), model_weights.linear_layers(config)
    sparse = model_weights.expert_layers(config)
    attention = _KERNELS["latent" if model_weights.is_latent(config) else "attention"]
    attention += 2 if ALSO_CALLED.get(family, family) in _QK_NORM else 0
    attention += _KERNELS["indexer"] if number(config, "index_n_heads") else 0
    moe = _KERNELS["experts"] + (_KERNELS["groups"] if number(config, "n_group") > 1 else 0)
    moe += _KERNELS["shared"] if any(part.role == "shared" for part in parts) else 0
    return (
        _KERNELS["once"]
        + total * _KERNELS["layer"]
        + (total - linear) * attention
        + linear * _KERNELS["linear"]
        + (total - sparse) * _KERNELS["mlp"]
        + sparse * moe
    )

"""Division of layers among ranks, for families without a `shard` in mlx-lm: one small function each.

As in mlx-lm, input projections are divided by rows and output projections by columns, and one sum adds all
ranks' results. Shapes of weights are [out, in], and [experts, out, in] for a layer's experts.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from sys import modules
from textwrap import dedent
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.utils import tree_flatten, tree_map

from ..description import Dimension, Dimensions
from ..errors import Code, ModelError
from ..model_config import Config, family, number, quantization, text_config
from .group import Group

# --- parts of layers ------------------------------------------------------------------------------------

_HEADS = ("n_heads", "num_heads", "num_attention_heads")
_KV_HEADS = ("n_kv_heads", "num_key_value_heads", "num_kv_heads")
_GATED = ("gate_proj", "up_proj")


def attention_heads(model: Any) -> tuple[int, int]:
    """Return a rank's query heads, and its fewest KV heads; 0, 0 if query heads differ between layers."""
    found = [(_first_of(part, _HEADS), _first_of(part, _KV_HEADS)) for part in model.modules()]
    pairs = sorted(pair for pair in found if all(pair))
    return pairs[0] if pairs and pairs[0][0] == pairs[-1][0] else (0, 0)


def _first_of(part: Any, names: Sequence[str]) -> int:
    return next((int(getattr(part, name)) for name in names if hasattr(part, name)), 0)


def _name_in(part: Any, names: Sequence[str]) -> str:
    if found := [name for name in names if hasattr(part, name)]:
        return found[0]
    raise AttributeError(f"{type(part).__name__} has none of {', '.join(names)}")


def attention(part: Any, group: Group) -> None:
    heads, kv_heads = _name_in(part, _HEADS), _name_in(part, _KV_HEADS)
    count = getattr(part, kv_heads)
    into = [name for name in ("k_proj", "v_proj") if name in part]  # a layer may share another one's keys
    for name in into:
        copy_heads(part[name], count, group)
    projections(part, group, ["q_proj", *into], "o_proj")
    _divide_sizes(part, group, heads)
    setattr(part, kv_heads, max(1, count // group.size))


def _divide_sizes(part: Any, group: Group, *names: str) -> None:
    for name in names:
        setattr(part, name, getattr(part, name) // group.size)


def copy_heads(module: Any, heads: int, group: Group) -> None:
    if group.size <= heads:
        return

    def repeated(weight: mx.array) -> mx.array:
        by_heads = weight.reshape(heads, -1, *weight.shape[1:])
        return mx.repeat(by_heads, group.size // heads, axis=0).reshape(-1, *weight.shape[1:])

    module.update(tree_map(repeated, module.parameters()))


def projections(part: Any, group: Group, into: Sequence[str] = _GATED, back: str = "down_proj") -> None:
    for name in into:
        part[name] = shard_linear(part[name], "all-to-sharded", group=group.handle)
    part[back] = shard_linear(part[back], "sharded-to-all", group=group.handle)


def experts(part: Any, group: Group, into: Sequence[str] = _GATED, back: str = "down_proj") -> None:
    """Divide every expert by its width, in place. The results need a sum over ranks: see `summed`."""
    for name in into:
        shard_inplace(part[name], "all-to-sharded", group=group.handle)
    shard_inplace(part[back], "sharded-to-all", group=group.handle)
    share_bias(part[back], group)


def share_bias(module: Any, group: Group) -> None:
    if "bias" in module:
        module.bias = module.bias / group.size


def summed(part: Any, group: Group) -> None:
    whole = type(part).__call__

    def call(module: Any, *args: Any, **kwargs: Any) -> mx.array:
        return group.total(whole(module, *args, **kwargs))

    change(part, call)


def own_rows(array: mx.array, group: Group) -> mx.array:
    return mx.contiguous(mx.split(array, group.size)[group.rank])


def shard_segments(module: Any, axis: int, segments: Sequence[int], group: Group) -> None:
    """Divide each segment, along `axis` of all weights, in place. They begin at 0 and at `segments`."""
    shard_inplace(module, lambda _path, _weight: (axis, list(segments)), group=group.handle)


class SharedNorm(nn.Module):  # type: ignore[misc]  # mlx is untyped here
    """RMS norm over numbers that ranks share equally, with one small sum. `weight`: of this rank's part."""

    def __init__(self, norm: Any, group: Group) -> None:
        super().__init__()
        self.weight = own_rows(norm.weight, group)
        self._eps, self._group = norm.eps, group

    def __call__(self, x: mx.array) -> mx.array:
        wide = x.astype(mx.float32)
        squares = self._group.total(wide.square().sum(axis=-1, keepdims=True))
        mean = squares / (x.shape[-1] * self._group.size)
        return (wide * mx.rsqrt(mean + self._eps) * self.weight).astype(x.dtype)


def change(module: Any, call: Callable[..., Any], **methods: Callable[..., Any]) -> None:
    kind = type(module)
    module.__class__ = type(
        kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, **methods}
    )


# --- attention over compressed keys and values (MLA) ----------------------------------------------------


def attend_to_latents(model: Any) -> None:
    """Make MLA attention use latents for several new tokens, as mlx-lm does for one, while that takes less
    work than computing all heads' keys and values of the whole cache.
    """
    for part in model.modules():
        if "embed_q" in part and "unembed_out" in part and type(part).__module__.startswith("mlx_lm."):
            rank, sizes = part.kv_lora_rank, part.qk_nope_head_dim + part.v_head_dim
            part.latent_width = rank * sizes // max(2 * rank - sizes, 1)  # most new tokens
            change(part, _to_latents(part.__class__))


@cache
def _to_latents(kind: Any) -> Callable[..., mx.array]:
    tree = ast.parse(dedent(inspect.getsource(kind.__call__)))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and ast.unparse(node.test).endswith(" == 1")
        and any(name in ast.unparse(node) for name in ("embed_q", "unembed_out"))
    ]
    if not found:
        raise ValueError(f"{kind.__name__} of mlx-lm has no branch for one token")
    for node in found:
        count = ast.unparse(node.test).removesuffix(" == 1")
        test = f"{count} <= self.latent_width and not isinstance(mask, str)"  # a mask by name
        node.test = ast.parse(test, mode="eval").body
    made: dict[str, Any] = {}
    code = compile(tree, inspect.getsourcefile(kind) or kind.__name__, "exec")
    exec(code, vars(modules[kind.__module__]), made)  # mlx-lm's own code
    return cast("Callable[..., mx.array]", made["__call__"])


#: Head sizes of Metal's fused attention kernel for many tokens, which stores no scores (MLX 0.32.4,
#: `has_fused_kernel` and `use_fallback`).
FUSED = frozenset({64, 72, 80, 96, 128})
SCORES = 3 * 2  #: bytes a score: computed, masked, and as a weight, with 16 bits each


def score_bytes(model: Any, kv_bits: int) -> int:
    """Return a layer's bytes of scores per token of a chunk and per token of context; 0 if fused."""
    found = [0]
    for part in model.modules():
        if "embed_q" in part:
            indexer = part["indexer"].n_heads if "indexer" in part else 0
            found.append(_first_of(part, _HEADS) + indexer)
        elif _first_of(part, _KV_HEADS) and (kv_bits or getattr(part, "head_dim", 128) not in FUSED):
            found.append(_first_of(part, _HEADS))
    return SCORES * max(found)


# --- families -------------------------------------------------------------------------------------------


def divide_usual(model: Any, group: Group) -> None:
    for layer in model.layers:
        part = layer.self_attn
        if "q_norm" in part and part.q_norm.weight.size == part.q_proj.weight.shape[0]:
            # In olmo2 and olmo3, norms of queries and keys are over all heads, not over each head.
            copy_heads(part.k_norm, part.k_norm.weight.size // part.head_dim, group)
            part.q_norm, part.k_norm = SharedNorm(part.q_norm, group), SharedNorm(part.k_norm, group)
        attention(part, group)
        part = layer[_name_in(layer, ("mlp", "block_sparse_moe", "feed_forward"))]
        found = [part[name] for name in ("switch_mlp", "experts") if name in part]
        if not found:
            projections(part, group)
            continue
        shared = [part[name] for name in _SHARED_EXPERTS if name in part and part[name] is not None]
        for each in found + shared:
            experts(each, group)
        summed(part, group)


_SHARED_EXPERTS = ("shared_experts", "shared_expert", "share_expert")
#: Parts of layers that `divide_standard` knows: their divided parts, and their whole ones.
_ATTENTION = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"g_proj", "q_norm", "k_norm"})
_MLP = ({*_GATED, "down_proj"}, set[str]())
_ROUTED = ({"switch_mlp"}, {"gate", "shared_expert_gate", *_SHARED_EXPERTS})


def divide_standard(model: Any, group: Group) -> None:
    """Divide layers of usual attention, and MLPs or experts. Raises ModelError that names another part."""
    for at, layer in enumerate(model.layers):
        if other := _unusual(layer):
            why = f"no rank can hold a part of layer {at}: {other}"
            raise ModelError(why, Code.MODEL_UNSUPPORTED)
    for layer in model.layers:
        if "g_proj" in layer.self_attn:  # one gate a head, or one a number of its result
            layer.self_attn.g_proj = shard_linear(
                layer.self_attn.g_proj, "all-to-sharded", group=group.handle
            )
    divide_usual(model, group)


def _unusual(layer: Any) -> str:
    """Return what `divide_standard` cannot divide in a layer; "" if it knows every part with weights."""
    if "self_attn" not in layer or "mlp" not in layer:
        return f"{type(layer).__name__} has other parts than attention and MLP"
    routed = "switch_mlp" in layer.mlp
    kinds = [(layer.self_attn, _ATTENTION), (layer.mlp, _ROUTED if routed else _MLP)]
    kinds += [
        (layer.mlp[name], _MLP) for name in ("switch_mlp", *_SHARED_EXPERTS) if routed and name in layer.mlp
    ]
    for part, (divided, whole) in kinds:
        found = {path.partition(".")[0] for path, _ in tree_flatten(part.parameters())}
        if not divided <= found <= divided | whole:
            odd = sorted(found ^ divided - whole)
            return f"{type(part).__name__} is not the usual one ({', '.join(odd)})"
    return ""


def divide_gemma4(model: Any, group: Group) -> None:
    for layer in model.layers:
        attention(layer.self_attn, group)
        projections(layer.mlp, group)
        if layer.enable_moe:
            experts(layer.experts.switch_glu, group)
            summed(layer.experts, group)  # not with the MLP's sum: each is normed separately


def divide_nemotron_h(model: Any, group: Group) -> None:
    for layer in model.layers:
        part = layer.mixer
        if layer.block_type == "M":
            _mamba(part, group)
        elif layer.block_type == "*":
            attention(part, group)
        elif layer.block_type == "-":
            projections(part, group, ("up_proj",))
        else:
            _experts(part, group)


def _mamba(part: Any, group: Group) -> None:
    """Divide by groups of heads; a group shares B, C and a norm."""
    inner, states = part.intermediate_size, part.n_groups * part.ssm_state_size
    convolved = (inner, inner + states)
    ends = (inner, *(inner + end for end in convolved), inner + part.conv_dim)
    shard_segments(part.in_proj, 0, ends, group)  # gates, inputs, all B, all C, the steps of all heads
    shard_segments(part.conv1d, 0, convolved, group)
    part.conv1d.groups //= group.size
    for name in ("dt_bias", "A_log", "D"):
        part[name] = own_rows(part[name], group)
    part.norm.weight = own_rows(part.norm.weight, group)
    projections(part, group, (), "out_proj")
    _divide_sizes(part, group, "num_heads", "intermediate_size", "n_groups", "conv_dim")


def _experts(part: Any, group: Group) -> None:
    experts(part.switch_mlp, group, ("fc1",), "fc2")
    if "fc2_latent_proj" in part:
        share_bias(part.fc2_latent_proj, group)
    if "shared_experts" in part:
        experts(part.shared_experts, group, ("up_proj",))
    summed(part, group)


def divide_qwen3_next(model: Any, group: Group) -> None:
    for layer in model.layers:
        if layer.is_linear:
            _linear(layer.linear_attn, group)
        else:
            attention(layer.self_attn, group)
        if "switch_mlp" in layer.mlp:
            layer.mlp.sharding_group = group.handle  # the MLP then sums over ranks
            experts(layer.mlp.switch_mlp, group)
            experts(layer.mlp.shared_expert, group)
        else:
            projections(layer.mlp, group)


def _linear(part: Any, group: Group) -> None:
    """Divide by key heads. A head's queries, keys, values and gates are consecutive rows."""
    projections(part, group, ("in_proj_qkvz", "in_proj_ba"), "out_proj")
    shard_segments(part.conv1d, 0, (part.key_dim, 2 * part.key_dim), group)  # all queries, keys, values
    part.conv1d.groups //= group.size
    for name in ("dt_bias", "A_log"):
        part[name] = own_rows(part[name], group)
    _divide_sizes(part, group, "num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")


def divide_language_model(model: Any, group: Group) -> None:
    model.language_model.shard(group.handle)


def divide_deepseek(model: Any, group: Group) -> None:
    from mlx_lm.models.deepseek_v3 import Model

    Model.shard(model.language_model, group.handle)


def divide_deepseek_v4(model: Any, group: Group) -> None:
    """Divide as mlx-vlm does, but the sinks as the heads: a part of each group of heads."""
    sinks = [layer.attn.attn_sink for layer in model.layers]
    model.language_model.shard(group.handle)
    for layer, whole in zip(model.layers, sinks, strict=True):
        by_groups = whole.reshape(layer.attn.o_groups, group.size, -1)
        layer.attn.attn_sink = mx.contiguous(by_groups[:, group.rank].reshape(-1))


def _one_after_the_other(first: Any, second: Any) -> None:
    done: list[mx.array] = []
    compute, follow = type(first).__call__, type(second).__call__

    def computing(part: Any, x: mx.array) -> mx.array:
        done[:] = [compute(part, x)]
        return done[0]

    def waiting(part: Any, x: mx.array) -> mx.array:
        return cast("mx.array", follow(part, mx.depends(x, [done.pop()])))

    change(first, computing)
    change(second, waiting)


#: Divides a model's layers among a group of ranks, in place, without evaluation or collectives.
Divide = Callable[[Any, Group], None]

#: By mlx-lm's names of families. `dimensions_of` has the sizes that they divide.
DIVIDE: Mapping[str, Divide] = {
    **dict.fromkeys(("cohere2", "exaone4", "granite", "olmo2", "olmo3", "seed_oss"), divide_usual),
    **dict.fromkeys(("gemma3", "gemma3_text", "llama4", "llama4_text"), divide_usual),
    **dict.fromkeys(("dots1", "ernie4_5_moe", "granitemoe", "mixtral"), divide_usual),
    **dict.fromkeys(("gemma4", "gemma4_text"), divide_gemma4),
    **dict.fromkeys(("mistral3", "qwen3_vl", "qwen3_vl_moe"), divide_language_model),
    "kimi_vl": divide_deepseek,
    "deepseek_v4": divide_deepseek_v4,
    "nemotron_h": divide_nemotron_h,
    "qwen3_next": divide_qwen3_next,
}


def divide_layers(model: Any, group: Group) -> None:
    family = type(model).__module__.rpartition(".")[2]
    if family in DIVIDE:
        DIVIDE[family](model, group)
    elif whole := next(
        (each for each in (model, getattr(model, "language_model", None)) if hasattr(each, "shard")), None
    ):
        whole.shard(group.handle)
        for layer in model.layers:
            if "mlps" in layer:  # LongCat's sum over experts depends on no other sum of its layer
                _one_after_the_other(layer.mlp, layer.mlps[0])
    else:
        divide_standard(model, group)


# --- sizes that ranks divide ------------------------------------------------------------------------------

#: Families whose ranks share KV heads if there are fewer heads than ranks.
COPIES_KV_HEADS = frozenset({"qwen3_5", "qwen3_5_moe"}) | {
    name
    for name, by in DIVIDE.items()
    if by not in (divide_language_model, divide_deepseek, divide_deepseek_v4)
}
#: Families of experts with a few dense MLPs, which stay whole on each rank if they do not divide.
KEEPS_MLP_WHOLE = frozenset({"deepseek_v2", "glm4_moe"})


def dimensions_of(config: Config) -> Dimensions:
    """Return the sizes that ranks divide. Raises ModelError (MODEL_INVALID) if one is no number."""
    return Dimensions(tuple(_dimensions(config)), number(quantization(config), "group_size") or 1)


def _dimensions(config: Config) -> Iterator[Dimension]:
    text, name = text_config(config), family(config)
    heads = number(text, "num_attention_heads")
    kv_heads = number(text, "num_key_value_heads") or heads
    head_dim = number(text, "head_dim") or number(text, "hidden_size") // max(heads, 1)
    if name == "deepseek_v4":  # heads of a group share a projection, and all heads a latent
        groups = number(text, "o_groups") or 8
        yield Dimension(
            "attention heads of a group", heads // groups, "attention output of a group", head_dim
        )
    else:
        yield Dimension("attention heads", heads, "attention output", head_dim)
        if kv_heads > 1 or not number(text, "kv_lora_rank"):  # else a latent, which all heads read
            yield Dimension("KV heads", kv_heads, copies=name in COPIES_KV_HEADS)
    experts = number(text, "moe_intermediate_size")
    if not (name in KEEPS_MLP_WHOLE and experts):
        yield _width("intermediate size", number(text, "intermediate_size"))
    yield _width("expert intermediate size", experts)
    if name in ("gemma4", "gemma4_text"):
        yield Dimension("attention heads", heads, "global attention output", number(text, "global_head_dim"))
        global_heads = number(text, "num_global_key_value_heads")
        yield Dimension("global KV heads", global_heads, copies=True)
    if name in ("llama4", "llama4_text"):
        yield _width("dense intermediate size", number(text, "intermediate_size_mlp"))
    if name in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        keys, values = number(text, "linear_num_key_heads"), number(text, "linear_num_value_heads")
        width = values * number(text, "linear_value_head_dim") // max(keys, 1)
        yield Dimension("linear key heads", keys, "linear attention output", width)
        yield _width("shared expert intermediate size", number(text, "shared_expert_intermediate_size"))
    if name == "nemotron_h":
        groups, inner = number(text, "n_groups"), number(text, "mamba_num_heads")
        width = inner * number(text, "mamba_head_dim") // max(groups, 1)
        yield Dimension("Mamba groups", groups, "Mamba output", width)
        yield _width("shared expert intermediate size", number(text, "moe_shared_expert_intermediate_size"))


def _width(what: str, size: int) -> Dimension:
    return Dimension(what, size, what)

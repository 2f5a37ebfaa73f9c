"""Description of a model from its own modules, built from config.json without weights, printed as JSON.

Agents run this in a short-lived process, because a stranger's configuration decides which mlx-lm code runs.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from ..description import INVALID, Description, PartFacts, to_text
from ..errors import Code, MlxtpError, ModelError
from ..model_config import (
    MTP_LAYERS,
    Config,
    expands,
    mtp_place,
    number,
    quantization,
    text_config,
    unreadable,
)
from ..model_files import MAX_CONFIG_BYTES, table
from ..wire.messages import MAX_LAYERS
from .batch import CacheKind
from .families import KEEPS_MLP_WHOLE, dimensions_of
from .group import CollectiveCounter, Group, alone
from .loader import MLX_LM_RAISES, brief, cache_facts, make_cache, read_config, steps
from .mlx_compat import import_mlx_lm
from .pipeline import LayerTrace, border_rules, embeddings_of, trace_layers, whole_vocabulary
from .sharding import HEADS, dense_mlps, family_of, is_divided, shard
from .vlm_models import classes_of

_LAYERS = ("num_layers", "num_hidden_layers", "n_layer", "n_layers")
_ROWS = (nn.Embedding, nn.QuantizedEmbedding)  #: modules of which a token reads one row
_GATHERING = ("gather_mm", "gather_qmm")
MOST_SHARING = 8  #: most ranks to try sharing layers with
#: Head sizes of Metal's fused attention kernel for one query; other sizes take five kernels.
_FUSED_HEADS, _UNFUSED_KERNELS = frozenset((64, 96, 128, 256)), 5
#: Operations that start no kernel: other shapes of the same numbers, and new caches.
VIEWS = frozenset(
    ("AsStrided", "Broadcast", "BroadcastAxes", "Depends", "ExpandDims", "Flatten", "Full", "Load", "Reshape",
     "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View")
)  # fmt: skip


def describe(config: Config) -> Description:
    """Describe the model with this config.json. Raises ModelError if mlx-lm cannot build or read it."""
    family = family_of(config)
    if why := unreadable(config):
        raise ModelError(why, Code.MODEL_UNSUPPORTED)
    if (count := number(text_config(config), *_LAYERS)) > MAX_LAYERS:
        raise ModelError(f"config.json names {count} layers, more than {MAX_LAYERS}", Code.MODEL_INVALID)
    try:
        return _described(family, config)
    except SystemExit as error:
        words = "mlx-lm's code for this family ends the process that imports it"
        raise ModelError(words, Code.MODEL_UNSUPPORTED) from error
    except MLX_LM_RAISES as error:
        why = _lack(str(error)) or f"mlx-lm cannot build it: {brief(error)}"
        raise ModelError(why, Code.MODEL_INVALID) from error


def _why(error: Exception) -> str:
    return error.detail if isinstance(error, MlxtpError) else brief(error)


def _lack(said: str) -> str:
    """Return a sentence on fields that config.json lacks, if a constructor's error names them; else ""."""
    fields = re.findall(r"'(\w+)'", said) if "required positional argument" in said else []
    return f"config.json lacks {', '.join(fields)}" if fields else ""


def _described(family: str, config: Config) -> Description:
    model, told = hollow_model(config), quantization(config)
    plain = plain_type(config).size
    with _Watch() as watch:
        logits = model(mx.zeros((1, 1), dtype=mx.int32), cache=make_cache(model))
        kernels = len([name for name in steps(logits) if name not in VIEWS])
    with _Watch() as reading:
        model(mx.zeros((1, 2), dtype=mx.int32), cache=make_cache(model))
    sizes, tied = _sizes(model, watch.picked)
    collectives, dimensions = 0, dimensions_of(config)
    ranks = next((n for n in range(2, MOST_SHARING + 1) if not dimensions.obstacles(n)), 0)
    unsharable = "" if is_divided(family) else "mlx-lm divides none"
    if ranks and not unsharable:
        try:
            share, collectives = _share_of(hollow_model(config), ranks)
            shares = _sizes(share, watch.picked)[0]
            sizes = [_with_whole(*each, ranks) for each in zip(sizes, shares, strict=True)]
        except (MlxtpError, *MLX_LM_RAISES) as error:
            unsharable = _why(error)
    caches = make_cache(model)
    traces: list[LayerTrace] = []
    uncuttable = ""
    try:
        whole_vocabulary(model)
        traces = trace_layers(model, caches)
    except (ModelError, *MLX_LM_RAISES) as error:
        uncuttable = _why(error)
    joined, keepers = border_rules(traces, caches)
    embedding, *layers, head = sizes
    for at, cache in enumerate(cache_facts(model)):
        given = (layer for layer, trace in enumerate(traces) if at in trace.caches)
        layers[next(given, min(at, len(layers) - 1))] += cache
    layers = [
        layer + PartFacts(attended=each) for layer, each in zip(layers, reading.by_layer(layers), strict=True)
    ]
    text, place = text_config(config), mtp_place(config)
    keeps_mlp = family in KEEPS_MLP_WHOLE and bool(watch.experts)
    mlps = dense_mlps(model) if keeps_mlp else []
    return Description(
        family=family,
        hidden=watch.hidden,
        vocabulary=logits.shape[-1],
        embedding=embedding,
        layers=tuple(layers),
        head=head,
        tied=tied,
        experts=watch.experts,
        picked=watch.picked,
        mlp_bytes=sum(array.nbytes for mlp in mlps for _, array in tree_flatten(mlp.parameters())),
        mlp_width=number(text, "intermediate_size") if keeps_mlp else 0,
        bits=int(told.get("bits") or 8 * plain),
        group=int(told.get("group_size") or 1),
        number_bytes=plain,
        expands=expands(config),
        context=number(text, "max_position_embeddings"),
        has_head=bool(place or number(text, *MTP_LAYERS)),
        drafts=bool(place),
        dimensions=dimensions,
        kernels=kernels,
        collectives=collectives,
        caches=CacheKind(model).can,
        joined=joined,
        keepers=keepers,
        unsharable=unsharable,
        uncuttable=uncuttable,
    )


class _Pretended:
    """Pretended group of several ranks; only this rank exists, and `alone` leaves collectives out."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.handle = type("Handle", (), {"rank": lambda _: 0, "size": lambda _: size})()  # as MLX's
        self.sums = 0

    def total(self, array: mx.array) -> mx.array:
        self.sums += 1
        return array


def _share_of(model: Any, ranks: int) -> tuple[Any, int]:
    group = _Pretended(ranks)
    shard(model, cast("Group", group))
    with alone(ranks, compiled=False):
        before = CollectiveCounter.left_out
        model(mx.zeros((1, 1), dtype=mx.int32), cache=make_cache(model))
        # A decode step is given its embeddings.
        return model, CollectiveCounter.left_out - before + group.sums - 1


# --- a model without weights ----------------------------------------------------------------------------


def hollow_model(config: Config) -> Any:
    """Build a model, quantized as its configuration says. Each weight is a view of a single zero."""
    model_class, arguments_class = classes_of(config)
    model = model_class(arguments_class.from_dict(dict(config)))
    model.set_dtype(plain_type(config))
    _hollow_out(model)
    told = quantization(config)
    if told.get("bits"):
        names = ("group_size", "bits", "mode")
        usual = {name: told[name] for name in names if name in told}
        keeps = getattr(model, "quant_predicate", None)
        plain = _any_of([name for name, own in told.items() if own is False])

        def as_told(path: str, part: Any) -> bool | dict[str, Any]:
            if path in told or plain.fullmatch(path):
                own: bool | dict[str, Any] = told.get(path, False)
                return own
            fits = hasattr(part, "to_quantized") and part.weight.shape[-1] % usual["group_size"] == 0
            return fits and (keeps is None or keeps(path, part) is True)

        nn.quantize(model, **usual, class_predicate=as_told)
        _hollow_out(model)
    return model


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    each = [name[3:] if name.startswith("re:") else re.escape(name).replace("\\*", ".*") for name in names]
    return re.compile("|".join(f"(?:{one})(?:[.].*)?" for one in each) or r"(?!)")


def plain_type(config: Config) -> mx.Dtype:
    text = text_config(config)
    found = getattr(mx, str(text.get("dtype") or text.get("torch_dtype")), None)
    return found if isinstance(found, mx.Dtype) else mx.bfloat16


def _hollow_out(model: Any) -> None:
    zeros: dict[mx.Dtype, mx.array] = {}

    def hollow(array: mx.array) -> mx.array:
        zero = zeros.setdefault(array.dtype, mx.zeros((), dtype=array.dtype))
        return mx.broadcast_to(zero, array.shape)

    model.update(tree_map(hollow, model.parameters()))
    mx.eval(model.parameters())  # a forward's graph then begins at these views


class _Watch(contextlib.ExitStack):
    """Watch of a forward's graph, with each of MLX's fast operations as one kernel, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = self.picked = 0  #: experts of a layer; experts of a token
        self.hidden = 0  #: size of the last normalization
        self.attended: list[int] = []  #: of each attention, as in `PartFacts`
        patches: list[Any] = [
            *(patch.object(mx.fast, name, self._norm) for name in ("rms_norm", "layer_norm")),
            patch.object(mx.fast, "rope", lambda x, *_args, **_named: mx.abs(x)),
            patch.object(mx.fast, "scaled_dot_product_attention", self._attend),
            patch.object(mx, "dequantize", _dequantized),
            *(patch.object(mx, name, self._gathering(getattr(mx, name))) for name in _GATHERING),
        ]
        for each in patches:
            self.enter_context(each)

    def _norm(self, x: mx.array, *_args: Any, **_named: Any) -> mx.array:
        self.hidden = x.shape[-1]
        return mx.abs(x)

    def _attend(self, q: mx.array, k: mx.array, v: mx.array, **_named: Any) -> mx.array:
        self.attended.append(q.shape[1] * (q.shape[-1] + v.shape[-1]))
        return _attended(q, k, v)

    def by_layer(self, layers: Sequence[PartFacts]) -> list[int]:
        """Return each layer's `attended`: of the layers with growing caches, or of all alike."""
        own = [bool(layer.kv_token_bytes) for layer in layers]
        if len(self.attended) == sum(own):
            each = iter(self.attended)
            return [next(each) if has else 0 for has in own]
        return [sum(self.attended) // len(layers)] * len(layers)

    def _gathering(self, product: Any) -> Any:
        def gathering(x: mx.array, weight: mx.array, *args: Any, **named: Any) -> mx.array:
            self.experts = max(self.experts, weight.shape[0])
            self.picked = max(self.picked, named["rhs_indices"].size)
            result: mx.array = product(x, weight, *args, **named)
            return result

        return gathering


def _attended(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    fused = q.shape[-1] == v.shape[-1] and q.shape[-1] in _FUSED_HEADS
    result = mx.broadcast_to(mx.depends(q, [k, v])[..., :1], (*q.shape[:-1], v.shape[-1]))
    for _ in range(1 if fused else _UNFUSED_KERNELS):
        result = mx.abs(result)
    return result


def _dequantized(
    weight: mx.array, scales: mx.array, biases: mx.array | None = None, *, bits: int = 4, **_named: Any
) -> mx.array:
    parts = [weight] if biases is None else [weight, biases]
    numbers = mx.depends(scales, parts)[..., :1].astype(mx.float32 if biases is None else scales.dtype)
    return mx.abs(mx.broadcast_to(numbers, (*weight.shape[:-1], weight.shape[-1] * 32 // bits)))


# --- sizes ----------------------------------------------------------------------------------------------


def _weights(modules: Iterable[tuple[Any, bool]], picked: int) -> PartFacts:
    total = PartFacts()
    for module, rows in modules:
        for name, array in module.items():
            if not isinstance(array, mx.array):
                continue
            numbers = 0 if name in ("scales", "biases") or array.ndim < 2 else array.size
            if name == "weight" and "scales" in module:
                numbers = array.nbytes * 8 // module.bits
            met = of = 1
            if rows and array.ndim:
                of = array.shape[0]
            elif array.ndim > 2 and type(module).__module__.endswith(".models.switch_layers"):  # experts
                met, of = min(picked, array.shape[0]), array.shape[0]
            total += PartFacts(
                numbers=numbers,
                weight_bytes=array.nbytes,
                token_numbers=0 if rows else numbers * met // of,
                token_bytes=array.nbytes * met // of,
            )
    return total


def _with_whole(part: PartFacts, share: PartFacts, ranks: int) -> PartFacts:
    names = {"whole_bytes": "weight_bytes", "token_whole_bytes": "token_bytes"}
    found = {x: ranks * getattr(share, of) - getattr(part, of) for x, of in names.items()}
    return replace(part, **{name: max(size // (ranks - 1), 0) for name, size in found.items()})


def _sizes(model: Any, picked: int) -> tuple[list[PartFacts], bool]:
    layers = [list(layer.modules()) for layer in model.layers]
    inside = {id(part) for layer in layers for part in layer}
    tables = {id(part): part for whole in embeddings_of(model) for part in whole.modules()}
    outside = [part for part in model.modules() if id(part) not in inside | tables.keys()]
    tied = not any(path.rpartition(".")[2] in HEADS for path, _ in model.named_modules())
    embedding, rest = (
        _weights(((part, isinstance(part, _ROWS)) for part in parts), picked)
        for parts in (tables.values(), outside)
    )
    if tied:
        rest += PartFacts(token_numbers=embedding.numbers, token_bytes=embedding.weight_bytes)
    return [embedding, *(_weights(((part, False) for part in layer), picked) for layer in layers), rest], tied


# --- the command ----------------------------------------------------------------------------------------


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m mlxtp.engine.describe FOLDER|config.json|-")
    path = Path("/dev/stdin" if sys.argv[1] == "-" else sys.argv[1])
    try:
        with contextlib.redirect_stdout(sys.stderr):  # modules of mlx-lm print remarks
            import_mlx_lm()
            CollectiveCounter().install()
            config = read_config(path) if path.is_dir() else table(path, MAX_CONFIG_BYTES)
            text = to_text(describe(config))
    except (MlxtpError, OSError, ValueError) as error:
        sys.stderr.write(f"mlxtp: {error.detail if isinstance(error, MlxtpError) else error}\n")
        sys.exit(INVALID if isinstance(error, MlxtpError) and error.code is Code.MODEL_INVALID else 1)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()

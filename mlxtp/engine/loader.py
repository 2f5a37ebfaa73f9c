"""Strict loading of this rank's share of a model from a folder."""

from __future__ import annotations

import contextlib
import json
import struct
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import Code, GroupError, MlxtpError, ModelError
from ..tokenizer_file import MAX_CONFIG_BYTES, text_of, token_count
from .group import Group, alone, uncounted
from .mlx_compat import code_of
from .sharding import (
    Config,
    ShardedEmbedding,
    ShardedHead,
    Vocabulary,
    check_divisible,
    check_shardable,
    compiles_collectives,
    context_length,
    shard,
    text_config,
)
from .tensor_files import Folder, StoredTensor, is_plain, read_header, read_share, share_of

_BRIEF = 200
#: Raised for missing and surplus tensors, wrong shapes, broken files, layers that do not divide, no memory.
_MLX_LM_RAISES = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    RuntimeError,
    MemoryError,
    OSError,
    struct.error,
)
_AT_ONCE = 256 << 20  #: bytes of weights that are read and checked in one evaluation
_CUT_AT_ONCE = 1 / 16  #: part of a rank's share that whole tensors may take while they are cut
#: A type's bits as signed and unsigned numbers, then infinity and minus infinity. The largest signed number
#: is a positive one, and the largest unsigned number a negative one, if there is any. NaN and infinity are at
#: the end of each. Neither check takes memory, nor as much time as `isfinite`.
_FLOATS = {
    mx.float32: (mx.int32, mx.uint32, 0x7F800000, 0xFF800000),
    mx.bfloat16: (mx.int16, mx.uint16, 0x7F80, 0xFF80),
    mx.float16: (mx.int16, mx.uint16, 0x7C00, 0xFC00),
}
#: NaN in the one-byte scales of mxfp4 and mxfp8 weights, and a NaN in those of nvfp4.
_NAN_SCALE = 255


@dataclass(frozen=True, slots=True)
class ModelShare:
    """Model whose weights are this rank's share, all of them in memory."""

    model: Any
    name: str
    context: int
    vocabulary: Vocabulary
    eos: frozenset[int]
    weight_bytes: int
    batches: bool  # its caches can be merged; otherwise sequences run one at a time
    peak_bytes: int  # the most that arrays took at any time of the load
    #: Bytes of one more token in this rank's caches, over all layers. A cache that keeps a window of tokens
    #: counts like one that keeps them all; one that does not grow counts nothing.
    kv_token_bytes: int


def load(folder: Path, group: Group, progress: Callable[[], None]) -> ModelShare:
    """Load this rank's share. Calls `progress` after the vocabulary and after each layer.

    Never leaves a model half-loaded. Raises ModelError that names the folder, or GroupError (OUT_OF_MEMORY,
    GPU_TIMEOUT) when the machine failed and not the model. No collective runs, so a rank may fail alone.
    Peak memory is about the share plus one tensor: a few tensors are cut and evaluated before others are
    read, and only this rank's rows of the vocabulary, which holds the largest, are read.
    """
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    maybe_set_recommended_wired_limit()  # keeps Metal from paging out the weights; elsewhere no effect
    config = read_config(folder)
    check_shardable(config, group.size)
    check_divisible(config, group.size)
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    model, config = _read_weights(folder)
    try:
        with _unkept():
            tensors = Folder(folder)
            stored = tensors.untouched(_weights(model)) if group.size > 1 else {}
            vocabulary = shard(model, group, cut=tensors.cut, size=_vocabulary(config))
            _evaluate(model, folder.name, group.size, progress, partial(_own_bytes, stored, group))
        peak_bytes = mx.get_peak_memory() - held
        kv_token_bytes = _kv_token_bytes(model)
    except _MLX_LM_RAISES as error:
        raise _failure(f"{folder.name}: sharding or reading the weights failed", error) from error
    if not vocabulary.size:
        raise ModelError("config.json names no vocab_size", Code.MODEL_INVALID)
    vocabulary.limit(max(token_count(folder), *(end + 1 for end in _eos(config)), 0))
    return ModelShare(
        model=model,
        name=folder.name,
        context=context_length(config),
        vocabulary=vocabulary,
        eos=_eos(config),
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
        batches=all(hasattr(cache, "merge") for cache in make_cache(model)),
        peak_bytes=peak_bytes,
        kv_token_bytes=kv_token_bytes,
    )


@contextlib.contextmanager
def _unkept() -> Iterator[None]:
    """Return buffers of cut tensors to the system at once instead of keeping them for reuse."""
    limit = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(limit)
        mx.clear_cache()


def _weights(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _own_bytes(stored: Mapping[str, StoredTensor], group: Group, name: str, weight: mx.array) -> mx.array:
    """Return the weight unchanged. If it is some rows of a file's tensor, read only these rows."""
    whole = stored.get(name)
    if whole is None or not share_of(whole, weight, group.size):
        return weight
    return read_share(whole, group.rank, group.size)


def _evaluate(
    model: Any,
    name: str,
    ranks: int,
    progress: Callable[[], None],
    own: Callable[[str, mx.array], mx.array],
) -> None:
    """Read every weight: the vocabulary, each layer in order, then the rest. `own` may replace one.

    Raises ModelError (MODEL_INVALID) with the names of weights that are not numbers.
    """
    done: set[str] = set()
    weights = _weights(model)
    room = int(min(sum(weight.nbytes for weight in weights.values()) * _CUT_AT_ONCE, _AT_ONCE))
    paths = {id(module): path for path, module in model.named_modules()}
    parts = [
        path for path, module in model.named_modules() if isinstance(module, ShardedEmbedding | ShardedHead)
    ]
    layers = [paths[id(layer)] for layer in model.layers if id(layer) in paths]
    for prefix in [*parts, *layers, ""]:
        names = [n for n in weights if n not in done and (not prefix or n.startswith(f"{prefix}."))]
        for weight in names:
            if (share := own(weight, weights[weight])) is not weights[weight]:
                weights[weight] = share
                model.update(tree_unflatten([(weight, share)]))
        looks: dict[str, mx.array] = {}
        for batch in _batches(names, weights, ranks, room):
            found = {weight: _look(weights[weight], weight) for weight in batch}
            mx.eval([weights[weight] for weight in batch], list(found.values()))
            looks |= {weight: look for weight, look in found.items() if look is not None}
            for weight in batch:
                if _is_faster_by_columns(weights[weight]):
                    weights[weight] = _by_columns(weights[weight])
                    model.update(tree_unflatten([(weight, weights[weight])]))
        bad = [weight.replace(".rows.", ".") for weight in _broken(looks)]
        if bad:
            raise ModelError(
                f"{name}: {_tensors(len(bad))} NaN or infinite numbers: {', '.join(bad[:5])}",
                Code.MODEL_INVALID,
            )
        done.update(names)
        if prefix:
            progress()


def _batches(
    names: Iterable[str], weights: Mapping[str, mx.array], ranks: int, room: int
) -> Iterator[list[str]]:
    """Yield names of weights to evaluate together, because a wait for each costs seconds on a GPU.

    One batch has at most `_AT_ONCE` bytes, because Metal ends a command that waits too long for a disk. A
    weight that is computed, such as a rank's part of a tensor, takes the whole tensor meanwhile. Such whole
    tensors take at most `room` bytes together, except for a single larger one.
    """
    batch: list[str] = []
    held = wholes = 0
    for name in names:
        size = weights[name].nbytes
        whole = 0 if is_plain(weights[name]) else size * ranks
        if batch and (held + size > _AT_ONCE or (whole and wholes + whole > room)):
            yield batch
            batch, held, wholes = [], 0, 0
        batch.append(name)
        held, wholes = held + size, wholes + whole
    if batch:
        yield batch


def _is_faster_by_columns(weight: mx.array) -> bool:
    """Return True for a layer's weight on a CPU, because a layer multiplies by the transpose.

    The reference BLAS of MLX's Linux wheels does that twice as fast where columns are contiguous, with the
    same result bit for bit.
    """
    return mx.default_device() == mx.cpu and weight.ndim == 2 and weight.dtype == mx.float32


def _by_columns(weight: mx.array) -> mx.array:
    """Return the same matrix with contiguous columns in memory."""
    columns = mx.contiguous(weight.T)
    mx.eval(columns)
    view: mx.array = columns.T
    mx.eval(view)
    return view


def _tensors(count: int) -> str:
    return "1 tensor holds" if count == 1 else f"{count} tensors hold"


def _look(array: mx.array, name: str) -> mx.array | None:
    """Return one boolean, true if some values are NaN or infinite; None for a type without such values."""
    row = array.reshape(-1)
    if not row.size:
        return None
    if array.dtype in _FLOATS:
        signed, unsigned, infinity, minus_infinity = _FLOATS[array.dtype]
        return (row.view(signed).max() >= infinity) | (row.view(unsigned).max() >= minus_infinity)
    if array.dtype == mx.uint8 and name.endswith(".scales"):
        return row.max() >= _NAN_SCALE
    return None


def _broken(looks: dict[str, mx.array]) -> list[str]:
    """Return the names of broken tensors, after one wait for the device."""
    found = mx.stack(list(looks.values())).tolist() if looks else []
    return [name for name, broken in zip(looks, cast("list[bool]", found), strict=True) if broken]


def _kv_token_bytes(model: Any) -> int:
    """Return the bytes of one token's caches, from the shapes of two forwards that are never run."""
    few, many = 256, 512  # mlx-lm's caches grow by 256
    with uncounted():
        return (_cache_bytes(model, many) - _cache_bytes(model, few)) // (many - few)


def _cache_bytes(model: Any, tokens: int) -> int:
    cache = make_cache(model)
    model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
    states = tree_flatten([c.state for c in cache if not c.empty()])
    return sum(array.nbytes for _, array in states if isinstance(array, mx.array))


def run_alone(loaded: ModelShare, ranks: int, forwards: Callable[[], None]) -> None:
    """Call `forwards`, which runs and evaluates some, without the other ranks.

    Metal loads and compiles kernels at a first forward. In a joint one, the other ranks' command buffers
    would wait for that, and macOS ends a buffer that waits for some seconds. Raises as `load` does.
    """
    try:
        with alone(ranks, compiled=not compiles_collectives(loaded.model)):
            forwards()
    except _MLX_LM_RAISES as error:
        raise _failure(f"{loaded.name}: a first forward failed", error) from error


def make_cache(model: Any) -> list[Any]:
    """Return one empty KV cache for each layer, of the kind that the model wants."""
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    return caches


def read_config(folder: Path) -> Config:
    """Return the model's config.json. Raises ModelError when it is missing or is not JSON."""
    path = folder / "config.json"
    try:
        config = json.loads(text_of(path, MAX_CONFIG_BYTES))
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
    """Load the whole model lazily: no weight is read before it is evaluated."""
    from mlx_lm.utils import load_model

    _check_shards_present(folder)
    _check_headers(folder)
    try:
        model, config = load_model(folder, lazy=True, strict=True, trust_remote_code=False)
    except FileNotFoundError:
        raise ModelError(f"{folder} holds no model*.safetensors", Code.MODEL_NOT_FOUND) from None
    except SystemExit as error:  # mlx-lm's olmo raises this without a package that it needs
        detail = f"{folder.name}: mlx-lm's code for this family ends the process that imports it"
        raise ModelError(detail, Code.MODEL_UNSUPPORTED) from error
    except _MLX_LM_RAISES as error:
        raise _failure(folder.name, error) from error
    return model, config


def _failure(what: str, error: Exception) -> MlxtpError:
    """Return a ModelError, or a GroupError if this machine ran out of memory or its GPU took too long."""
    code = code_of(error, Code.MODEL_INVALID)
    detail = f"{what}: {type(error).__name__}: {_brief(error)}"
    if code is Code.MODEL_INVALID:
        return ModelError(detail, code)
    return GroupError(f"{detail}; MLX held {mx.get_active_memory() / 1e9:.2f} GB", code)


def _brief(error: Exception) -> str:
    """Return one line, short enough for every rank's to fit one frame. MLX lists all missing tensors."""
    return textwrap.shorten(str(error), _BRIEF, placeholder=" ...")


def _check_shards_present(folder: Path) -> None:
    """Check every file that the index names. A missing one would otherwise surface as a list of tensors."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        files = set(json.loads(text_of(index))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}", Code.MODEL_INVALID) from None
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(files)} weight files: {', '.join(missing[:5])}"
        )


def _check_headers(folder: Path) -> None:
    """Check the header of every weight file, because MLX trusts it. Raises ModelError."""
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            read_header(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder.name}: {path.name} is damaged: {error}", Code.MODEL_INVALID) from None


def _vocabulary(config: Config) -> int:
    """Return config.json's vocabulary size, for models whose embedding is not known; 0 without one."""
    size = text_config(config).get("vocab_size")
    return size if isinstance(size, int) else 0


def _eos(config: Config) -> frozenset[int]:
    eos = config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return frozenset(i for i in ids if isinstance(i, int))

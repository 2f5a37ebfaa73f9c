"""Strict loading of this rank's share of a model from a folder."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import struct
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..chunks import ring_slots
from ..description import PartFacts
from ..errors import Code, GroupError, MlxtpError, ModelError
from ..model_config import Config, context_length, family, number, quantizations, text_config, unreadable
from ..model_files import INDEX, LFS, config_in, indexed, lfs_pointer, stray_files, token_count, weight_files
from ..vector_files import headless, vector_model
from . import sharding
from .families import attend_to_latents
from .group import Group, alone, uncounted
from .mlx_compat import code_of
from .pipeline import Stage, StageVocabulary, cut_into_stage
from .recurrent import STATE, recurrent_layers
from .vlm_models import classes_of, is_of_vlm

# --- headers of safetensors, checked before MLX reads them -----------------------------------------------
# MLX multiplies a shape without an overflow check: if the product wraps, it reads beyond the array.

MAX_HEADER_BYTES = 1 << 25  #: enough for some 200,000 tensors in one file; models have a few thousand
MAX_AXES = 16
MAX_LENGTH = 2**31 - 1  #: of an axis; MLX counts in 32 bits
#: Bits of one element, for each type of the format.
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor of a file. `begin` and `end` are byte offsets in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    begin: int
    end: int
    path: Path = Path()


def check_header(text: bytes, file_bytes: int) -> list[StoredTensor]:
    """Return the tensors in file order. Raises ValueError unless they fill the file exactly."""
    try:
        table = json.loads(text.decode(), object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("its header is nested too deep") from None
    if not isinstance(table, dict):
        raise ValueError("its header is not a JSON object")
    about = table.pop("__metadata__", None) or {}  # MLX writes null
    if not (isinstance(about, dict) and all(isinstance(value, str) for value in about.values())):
        raise ValueError("its metadata are not strings")
    data = 8 + len(text)
    tensors = sorted((_tensor(name, of, data) for name, of in table.items()), key=lambda t: (t.begin, t.end))
    at = data
    for tensor in tensors:
        if tensor.begin != at:
            raise ValueError(f"{tensor.name!r:.80} begins at byte {tensor.begin}, not at {at}")
        at = tensor.end
    if at != file_bytes:
        raise ValueError(f"its tensors end at byte {at}, and the file at {file_bytes}")
    return tensors


def read_header(path: Path) -> list[StoredTensor]:
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == LFS[:8]:
            raise ValueError(lfs_pointer(path))
        if not start:
            raise ValueError("it is empty")
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else file_bytes
        if size > min(file_bytes - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"a header of {size} bytes in a file of {file_bytes}; at most {MAX_HEADER_BYTES} are read"
            )
        return [replace(tensor, path=path) for tensor in check_header(file.read(size), file_bytes)]


def _tensor(name: str, of: object, data: int) -> StoredTensor:
    match of:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [begin, end], **others} if not others:
            pass
        case _:
            raise ValueError(f"{name!r:.80} lacks a type, a shape or its place")
    if kind not in BITS:
        raise ValueError(f"{name!r:.80} has the type {kind!r:.20}, which the format does not know")
    if len(shape) > MAX_AXES or not all(type(n) is int and 0 <= n <= MAX_LENGTH for n in shape):
        raise ValueError(f"{name!r:.80} has no shape that an array can have: {shape!r:.80}")
    bits = prod(shape) * BITS[kind]
    if not (type(begin) is int and type(end) is int and begin >= 0 and (end - begin) * 8 == bits):
        raise ValueError(f"{name!r:.80} is {bits} bits and lies at {[begin, end]!r:.60}")
    return StoredTensor(name, kind, tuple(shape), data + begin, data + end)


def _without_doubles(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has a name twice")
    return found


# --- rows of a tensor ------------------------------------------------------------------------------------
# MLX reads a whole tensor before it cuts it. The largest tensors would take most of a load's memory.

#: Types for weights and their scales; tensors of other types are read whole.
TYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "U16": mx.uint16,
    **dict.fromkeys(("U8", "F8_E4M3", "F8_E8M0"), mx.uint8),  # as MLX loads them
}


def untouched(folder: Path, parameters: Mapping[str, mx.array]) -> dict[str, StoredTensor]:
    by_shape: dict[tuple[tuple[int, ...], mx.Dtype | None], list[StoredTensor]] = {}
    for path in weight_files(folder):
        for stored in read_header(path):
            by_shape.setdefault((stored.shape, TYPES.get(stored.type)), []).append(stored)

    def own(name: str) -> str:  # "model.language_model" in a file can be "language_model.model" in mlx-lm
        return "".join(f".{part}" for part in name.split(".") if part not in ("model", "language_model"))

    def same_end(one: str, other: str) -> bool:  # further prefixes may differ, too
        return one.endswith(other) or other.endswith(one)

    found = {}
    for name, array in parameters.items():
        alike = by_shape.get((array.shape, array.dtype), [])
        if len(alike) > 1:
            alike = [s for s in alike if same_end(own(s.name), own(name))]
            alike = [s for s in alike if s.name == name] or alike
        if len(alike) == 1 and steps(array) == ["Load"]:
            found[name] = alike[0]
    return found


def cut_stored(
    stored: Mapping[str, StoredTensor], array: mx.array, name: str, first: int, rows: int
) -> mx.array:
    if name in stored and (first, rows) != (0, array.shape[0]):
        return _read_rows(stored[name], first, rows)
    return sharding.cut_rows(array, name, first, rows)


def share_of(stored: StoredTensor, array: mx.array, ranks: int) -> bool:
    whole = (*array.shape[:-2], array.shape[-2] * ranks, array.shape[-1]) if array.ndim > 1 else ()
    return whole == stored.shape and steps(array) == ["Load", "Split", "Contiguous"]  # as mlx-lm shards


def read_share(stored: StoredTensor, rank: int, ranks: int) -> mx.array:
    rows = stored.shape[-2] // ranks
    return _read_rows(stored, rank * rows, rows, axis=len(stored.shape) - 2)


def steps(*arrays: mx.array) -> list[str]:
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return [line.split('"')[1] for line in graph.getvalue().splitlines() if "shape=rectangle" in line]


def _read_rows(stored: StoredTensor, first: int, rows: int, axis: int = 0) -> mx.array:
    with _Window(stored, first, rows, axis) as window:
        loaded = mx.load(cast("BinaryIO", window), format="safetensors")
    return cast("dict[str, mx.array]", loaded)["rows"]


class _Window(io.RawIOBase):
    """Virtual file of a stored tensor's rows along `axis`. MLX reads it straight into an array's memory.

    It has a run of rows for each index of the axes before, and zeros beyond the end of axis 0.
    """

    def __init__(self, stored: StoredTensor, first: int, rows: int, axis: int) -> None:
        before, after = stored.shape[:axis], stored.shape[axis + 1 :]
        row_bytes = TYPES[stored.type].size * prod(after)
        here = max(min(stored.shape[axis] - first, rows), 0)
        self._run, self._stride = here * row_bytes, stored.shape[axis] * row_bytes
        shape, size = [*before, rows, *after], prod(before) * rows * row_bytes
        tensor = {"dtype": stored.type, "shape": shape, "data_offsets": [0, size]}
        text = json.dumps({"rows": tensor}).encode()
        self._header = struct.pack("<Q", len(text)) + text
        self._body = prod(before) * self._run
        self._size = len(self._header) + size
        self._begins = stored.begin + first * row_bytes
        self._file = stored.path.open("rb", buffering=0)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):  # fill the buffer, because MLX calls this once
            done += self._read_some(view[done:], self._at + done)
        self._at += done
        return done

    def _read_some(self, view: memoryview, at: int) -> int:
        header, body = len(self._header), len(self._header) + self._body
        if at < header:
            part = self._header[at : at + len(view)]
            view[: len(part)] = part
            return len(part)
        if at < body:
            run, within = divmod(at - header, self._run)
            self._file.seek(self._begins + run * self._stride + within)
            count = self._file.readinto(view[: self._run - within])
            if not count:
                raise OSError(f"{self._file.name} ends within a tensor")
            return count
        view[:] = bytes(len(view))
        return len(view)

    def close(self) -> None:
        self._file.close()
        super().close()


# --- models ----------------------------------------------------------------------------------------------

_BRIEF = 200
#: For missing and surplus tensors, wrong shapes, broken files, layers that do not divide, no memory.
MLX_LM_RAISES = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    RuntimeError,
    MemoryError,
    OSError,
    struct.error,
    ArithmeticError,  # sizes of 0
    ImportError,
)
_AT_ONCE = 256 << 20  #: most bytes of weights to read and check in one evaluation
_CUT_AT_ONCE = 1 / 16  #: fraction of a rank's share that whole tensors may take while they are cut
#: Signed and unsigned types of the same size, and the bits of infinity and minus infinity. Read as integers,
#: infinities and NaN are the largest signed and unsigned numbers; finding a maximum takes no memory.
_FLOATS = {
    mx.float32: (mx.int32, mx.uint32, 0x7F800000, 0xFF800000),
    mx.bfloat16: (mx.int16, mx.uint16, 0x7F80, 0xFF80),
    mx.float16: (mx.int16, mx.uint16, 0x7C00, 0xFC00),
}
#: NaN in one-byte scales: the only one for mxfp4 and mxfp8 weights, one of two for nvfp4.
_NAN_SCALE = 255


@dataclass(frozen=True, slots=True)
class ModelShare:
    """Model with this rank's share of the weights in memory."""

    model: Any
    name: str
    context: int
    vocabulary: sharding.Vocabulary
    eos: frozenset[int]
    weight_bytes: int
    peak_bytes: int  # peak memory of arrays during the load
    kv_token_bytes: int  # of one more token in this rank's caches, over all layers
    kv_row_bytes: int  # of a sequence's caches that do not grow: windows of tokens, and recurrent states
    stage: Stage | None = None  # this rank's layers in a pipeline

    @property
    def mtp_head(self) -> Any:
        return getattr(self.model, _HEAD, None)


_HEAD = "mtp_head"  # a model's attribute


def load(
    folder: Path,
    group: Group,
    progress: Callable[[], None],
    split: Sequence[int] = (),
    read_head: Callable[[Path, Config], Any] = lambda _folder, _config: None,
) -> ModelShare:
    """Load this rank's share. `split`: layers of each rank, or (). `read_head` returns the MTP head, or None.

    Raises ModelError that names the folder, or GroupError (OUT_OF_MEMORY, GPU_TIMEOUT) if the machine failed.
    Runs no collective, so one rank may fail alone. Peak memory is about the share plus one tensor.
    """
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    maybe_set_recommended_wired_limit()  # keeps Metal from paging out the weights; no effect elsewhere
    config = read_config(folder)
    if why := unreadable(config):
        raise ModelError(f"{folder.name}: {why}", Code.MODEL_UNSUPPORTED)
    parts = 1 if split else group.size  # of each layer
    sharding.check_shardable(config, parts)
    sharding.check_divisible(config, parts)
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    model, config = _read_weights(folder, config)
    what, size = "cutting the model", number(text_config(config), "vocab_size")
    try:
        with _unkept():
            stored = untouched(folder, _weights(model)) if parts > 1 else {}
            holds = not (split and group.rank) and _goes_back(model, split)
            head = read_head(folder, config) if holds else None
            vocabulary = (
                cut_into_stage(model, group, split, size, embeds=head is not None)
                if split
                else sharding.shard(model, group, cut=partial(cut_stored, stored), size=size)
            )
            if head is not None and vocabulary.taps():
                if split and vocabulary.embedding is not vocabulary.head:
                    head.embedding = vocabulary.embedding  # the model's own is on another rank
                model.mtp_head = head
            what = _share_in_words(model, group.rank, split)
            _evaluate(model, folder.name, group, parts, progress=progress, stored=stored)
        peak_bytes = mx.get_peak_memory() - held
        kv_token_bytes, kv_row_bytes = kv_sizes(model)
    except MLX_LM_RAISES as error:
        raise _failure(f"{folder.name}: {what} failed", error) from error
    if not vocabulary.size:
        raise ModelError("config.json names no vocab_size", Code.MODEL_INVALID)
    attend_to_latents(model)
    vocabulary.limit(max(token_count(folder), *(end + 1 for end in _eos(config)), 0))
    return ModelShare(
        model=model,
        name=folder.name,
        context=context_length(config),
        vocabulary=vocabulary,
        eos=_eos(config),
        weight_bytes=sum(array.nbytes for array in _weights(model).values()),
        peak_bytes=peak_bytes,
        kv_token_bytes=kv_token_bytes,
        kv_row_bytes=kv_row_bytes,
        stage=vocabulary.stage if isinstance(vocabulary, StageVocabulary) else None,
    )


def _goes_back(model: Any, split: Sequence[int]) -> bool:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    caches = make_cache(model)
    plain = [type(cache) in (KVCache, RotatingKVCache) for cache in caches]
    states = sum(type(cache).__name__ == STATE for cache in caches)
    if not states:
        return all(plain)
    ends = list(accumulate(reversed(split), initial=0)) if split else [0, len(caches)]
    stages = all(any(plain[first:end]) for first, end in pairwise(ends))
    return stages and sum(plain) + states == len(caches) and bool(recurrent_layers(model, states)[1])


@contextlib.contextmanager
def _unkept() -> Iterator[None]:
    limit = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(limit)
        mx.clear_cache()


def _weights(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _share_in_words(model: Any, rank: int, split: Sequence[int]) -> str:
    part, size = "its share of the model", sum(weight.nbytes for weight in _weights(model).values())
    if split:
        first = sum(split[rank + 1 :])
        part = f"layers {first} to {first + split[rank] - 1} of {sum(split)}"
    return f"reading {part} ({size / 1e9:.2f} GB)"


def _evaluate(
    model: Any,
    name: str,
    group: Group,
    ranks: int,
    *,
    progress: Callable[[], None],
    stored: Mapping[str, StoredTensor],
) -> None:
    """Read every weight: vocabulary, each layer in order, then the rest. Raises as `read_numbers` does."""
    done: set[str] = set()
    weights = _weights(model)
    room = int(min(sum(weight.nbytes for weight in weights.values()) * _CUT_AT_ONCE, _AT_ONCE))
    paths = {id(module): path for path, module in model.named_modules()}
    parts = [path for path, module in model.named_modules() if isinstance(module, sharding.ShardedHead)]
    layers = [paths[id(layer)] for layer in model.layers if id(layer) in paths]
    for prefix in [*parts, *layers, ""]:
        names = [n for n in weights if n not in done and (not prefix or n.startswith(f"{prefix}."))]
        for weight in names:
            if weight in stored and share_of(stored[weight], weights[weight], ranks):
                weights[weight] = read_share(stored[weight], group.rank, ranks)
                model.update(tree_unflatten([(weight, weights[weight])]))
        for batch in read_numbers(f"{name}: ", names, weights, ranks, room):
            for weight in batch:
                if (columns := _by_columns(weights[weight])) is not weights[weight]:
                    weights[weight] = columns
                    model.update(tree_unflatten([(weight, columns)]))
        done.update(names)
        if prefix:
            progress()


def read_numbers(
    where: str, names: Iterable[str], weights: Mapping[str, mx.array], ranks: int = 1, room: int = 0
) -> Iterator[list[str]]:
    """Read weights; yield each batch's names. At the end, raises ModelError (MODEL_INVALID) for NaN."""
    looks: dict[str, mx.array] = {}
    for batch in _batches(names, weights, ranks, room):
        found = {weight: _look(weights[weight], weight) for weight in batch}
        mx.eval([weights[weight] for weight in batch], list(found.values()))
        looks |= {weight: look for weight, look in found.items() if look is not None}
        yield batch
    broken = mx.stack(list(looks.values())).tolist() if looks else []  # one wait for the device
    found_bad = zip(looks, cast("list[bool]", broken), strict=True)
    if bad := [weight.replace(".rows.", ".") for weight, is_bad in found_bad if is_bad]:
        hold = "1 tensor holds" if len(bad) == 1 else f"{len(bad)} tensors hold"
        raise ModelError(f"{where}{hold} NaN or infinite numbers: {', '.join(bad[:5])}", Code.MODEL_INVALID)


def _batches(
    names: Iterable[str], weights: Mapping[str, mx.array], ranks: int, room: int
) -> Iterator[list[str]]:
    """Yield names of weights to evaluate together, because a wait for each costs seconds on a GPU.

    A batch has at most `_AT_ONCE` bytes, because Metal ends a command that waits too long for a disk. Cutting
    a weight holds the whole tensor in memory: at most `room` bytes in a batch, unless a single one is larger.
    """
    batch: list[str] = []
    held = wholes = 0
    for name in names:
        size = weights[name].nbytes
        whole = 0 if steps(weights[name]) in ([], ["Load"]) else size * ranks
        if batch and (held + size > _AT_ONCE or (whole and wholes + whole > room)):
            yield batch
            batch, held, wholes = [], 0, 0
        batch.append(name)
        held, wholes = held + size, wholes + whole
    if batch:
        yield batch


def _by_columns(weight: mx.array) -> mx.array:
    """Store a weight by columns on a CPU: BLAS then multiplies twice as fast, with the same bits."""
    if mx.default_device() != mx.cpu or weight.ndim != 2 or weight.dtype != mx.float32:
        return weight
    view: mx.array = mx.contiguous(weight.T).T
    mx.eval(view)
    return view


def _look(array: mx.array, name: str) -> mx.array | None:
    """Return one boolean, true if any value is NaN or infinite; None if the type has no such values."""
    row = array.reshape(-1)
    if not row.size:
        return None
    if array.dtype in _FLOATS:
        signed, unsigned, infinity, minus_infinity = _FLOATS[array.dtype]
        return (row.view(signed).max() >= infinity) | (row.view(unsigned).max() >= minus_infinity)
    if array.dtype == mx.uint8 and name.endswith(".scales"):
        return row.max() >= _NAN_SCALE
    return None


def cache_facts(model: Any) -> list[PartFacts]:
    """Return the sizes of each layer's cache, which may consist of several."""
    few, many = 256, 512  # mlx-lm's caches grow by 256
    caches = [make_cache(model) for _ in (few, many)]
    for each, tokens in zip(caches, (few, many), strict=True):
        unrun_arrays(model, each, tokens)

    def facts(shorter: Any, longer: Any) -> PartFacts:
        small, large = (sum(array.nbytes for array in arrays_of([cache])) for cache in (shorter, longer))
        growth = (large - small) // (many - few)
        ring = getattr(shorter, "max_size", 0)
        window = ring_slots(ring) if ring else getattr(shorter, "chunk_size", 0)  # a chunk is no ring
        heads = [array.shape[1] for array in arrays_of([longer]) if growth and array.ndim == 4]
        return PartFacts(
            kv_token_bytes=growth,
            kv_window_bytes=growth if window else 0,
            kv_heads=max([1, *heads]),
            window=window,
            state_bytes=0 if window else small - growth * few,
        )

    pairs = [zip(*(leaves([cache]) for cache in two), strict=True) for two in zip(*caches, strict=True)]
    return [sum((facts(*two) for two in pair), PartFacts()) for pair in pairs]


def kv_sizes(model: Any) -> tuple[int, int]:
    """Return the bytes of one more token in a sequence's caches, and the bytes that do not grow."""
    found = cache_facts(model)
    rows = [cache.kv_window_bytes * cache.window + cache.state_bytes for cache in found]
    return sum(cache.kv_token_bytes - cache.kv_window_bytes for cache in found), sum(rows)


def leaves(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        yield from leaves(cache.caches) if hasattr(cache, "caches") else (cache,)


def unrun_arrays(model: Any, caches: list[Any], tokens: int = 1) -> list[mx.array]:
    """Return the arrays of `caches` after a forward that is never computed, to learn their shapes."""
    head = getattr(model, _HEAD, None)
    with uncounted():
        model(mx.zeros((1, tokens), dtype=mx.int32), cache=caches[:-1] if head else caches)
        if head is not None:
            head.unrun(tokens, caches[-1])
    return arrays_of(caches)


def arrays_of(caches: list[Any]) -> list[mx.array]:
    states = tree_flatten([cache.state for cache in caches])
    return [array for _, array in states if isinstance(array, mx.array)]


def run_alone(loaded: ModelShare, ranks: int, forwards: Callable[[], None]) -> None:
    """Call `forwards` without the other ranks: macOS ends command buffers that wait while a rank compiles.
    Raises as `load` does.
    """
    try:
        with alone(ranks, compiled=not sharding.compiles_collectives(loaded.model)):
            forwards()
    except MLX_LM_RAISES as error:
        raise _failure(f"{loaded.name}: a first forward failed", error) from error


def make_cache(model: Any) -> list[Any]:
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    return [*caches, KVCache()] if has_head(model) else caches


def has_head(model: Any) -> bool:
    """Return True if the model's MTP head is loaded. Its cache follows the layers' caches."""
    return hasattr(model, _HEAD)


def read_config(folder: Path) -> Config:
    """Return config.json. Raises ModelError if it is missing or is not JSON."""
    try:
        return config_in(folder)
    except FileNotFoundError:
        detail = f"{folder} holds no config.json, so it is not a model folder"
        raise ModelError(detail, Code.MODEL_NOT_FOUND) from None
    except (OSError, ValueError) as error:
        detail = f"{folder / 'config.json'} cannot be read: {error}"
        raise ModelError(detail, Code.MODEL_INVALID) from None


def _read_weights(folder: Path, config: Config) -> tuple[Any, Config]:
    from mlx_lm.utils import load_model

    _check_files(folder)
    try:
        with as_mlx_lm_reads(folder) as alone:
            whole = headless(vector_model(folder, config))
            more = {**quantizations(config), **whole}
            own = _bare_classes if whole else classes_of if is_of_vlm(config) else None
            classes = {"get_model_classes": own} if own else {}
            model, config = load_model(
                alone, lazy=True, strict=True, model_config=more, trust_remote_code=False, **classes
            )
    except FileNotFoundError:
        raise ModelError(f"{folder} holds no model*.safetensors", Code.MODEL_NOT_FOUND) from None
    except SystemExit as error:  # mlx-lm's olmo raises this without a package that it needs
        detail = f"{folder.name}: mlx-lm's code for this family ends the process that imports it"
        raise ModelError(detail, Code.MODEL_UNSUPPORTED) from error
    except MLX_LM_RAISES as error:
        raise _failure(folder.name, error) from error
    return model, config


def _bare_classes(config: Config) -> tuple[Any, Any]:
    """Return a family's classes for a decoder that may be stored without its head and prefix."""
    module = importlib.import_module(f"mlx_lm.models.{family(config)}")

    def sanitize(self: Any, weights: dict[str, mx.array]) -> Any:
        if not any(name.startswith("model.") for name in weights):
            weights = {f"model.{name}": array for name, array in weights.items()}
        weights = {name: array for name, array in weights.items() if not name.startswith("lm_head.")}
        return getattr(super(whole, self), "sanitize", dict)(weights)

    own = {"sanitize": sanitize, "__module__": module.__name__}
    whole = type(module.Model.__name__, (module.Model,), own)
    return whole, module.ModelArgs


@contextlib.contextmanager
def as_mlx_lm_reads(folder: Path) -> Iterator[Path]:
    """Yield a folder with only the model's files, because mlx-lm would read stray weight files, too."""
    if not stray_files(folder):
        yield folder
        return
    with TemporaryDirectory() as found:
        for path in (*folder.glob("*.json"), *weight_files(folder)):
            (Path(found) / path.name).symlink_to(path.resolve())
        yield Path(found)  # MLX keeps its files open, and reads them later


def _failure(what: str, error: Exception) -> MlxtpError:
    """Return a ModelError, or a GroupError if this machine ran out of memory or its GPU took too long."""
    code = code_of(error, Code.MODEL_INVALID)
    detail = f"{what}: {type(error).__name__}: {brief(error)}"
    if code is Code.MODEL_INVALID:
        return ModelError(detail, code)
    return GroupError(f"{detail}; MLX held {mx.get_active_memory() / 1e9:.2f} GB", code)


def brief(error: Exception) -> str:
    """Return one line that is short enough for one frame with a line from every rank."""
    return textwrap.shorten(str(error), _BRIEF, placeholder=" ...")


def _check_files(folder: Path) -> None:
    try:
        files = indexed(folder)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / INDEX} cannot be read: {error}", Code.MODEL_INVALID) from None
    if missing := sorted(name for name in files if not (folder / name).is_file()):
        named = ", ".join(missing[:5])
        raise ModelError(f"{folder} lacks {len(missing)} of {len(files)} weight files: {named}")
    for path in weight_files(folder):
        try:
            read_header(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder.name}: {path.name} is damaged: {error}", Code.MODEL_INVALID) from None


def _eos(config: Config) -> frozenset[int]:
    eos = config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    return frozenset(i for i in ids if isinstance(i, int))

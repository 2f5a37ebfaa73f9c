"""Files of safetensors: checked headers, and rows of a tensor straight from its file."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx

from .sharding import cut_rows

# --- headers, checked before MLX reads them --------------------------------------------------------------
# MLX multiplies a shape without an overflow check, and reads beyond the array where the product wraps.
# Only headers that the format allows pass here: contiguous tensors that fill the file.

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
class TensorHeader:
    """Tensor of a file. `begin` and `end` are byte offsets in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


def check_header(text: bytes, file_bytes: int) -> list[TensorHeader]:
    """Return the tensors in the header `text` of a file of `file_bytes`, in their order there.

    Raises ValueError for a header that the format does not allow.
    """
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


def read_header(path: Path) -> list[TensorHeader]:
    """Return the tensors of a file. Raises OSError, and ValueError as `check_header`."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else file_bytes
        if size > min(file_bytes - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"a header of {size} bytes in a file of {file_bytes}; at most {MAX_HEADER_BYTES} are read"
            )
        return check_header(file.read(size), file_bytes)


def _tensor(name: str, of: object, data: int) -> TensorHeader:
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
    return TensorHeader(name, kind, tuple(shape), data + begin, data + end)


def _without_doubles(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has a name twice")
    return found


# --- rows of a tensor ------------------------------------------------------------------------------------
# MLX reads a tensor whole before it cuts it. For the largest ones that would be most of a load's memory.

#: Types of the safetensors format for weights and their scales; tensors of other types are read whole.
TYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "U16": mx.uint16,
    "U8": mx.uint8,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor in a safetensors file. Its bytes begin at `offset` in the file."""

    name: str
    path: Path
    type: str
    shape: tuple[int, ...]
    offset: int


class Folder:
    """Tensors in a model folder's files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def cut(self, array: mx.array, name: str, first: int, rows: int) -> mx.array:
        """Return `rows` rows of `array` from `first` on, zeros beyond its end, like `cut_rows`.

        Reads nothing else when `array` is an unchanged tensor of a file. `name` is the last two parts of the
        tensor's name, such as `embed_tokens.weight`, to distinguish tensors of the same shape.
        """
        whole = (first, rows) == (0, array.shape[0])
        stored = None if whole else self._find(array, name)
        return _read_rows(stored, first, rows) if stored else cut_rows(array, name, first, rows)

    def _find(self, array: mx.array, name: str) -> StoredTensor | None:
        """Return the stored tensor of `array`, if exactly one matches."""
        if not _is_untouched(array):
            return None
        alike = [s for s in self._stored if s.shape == array.shape and TYPES.get(s.type) == array.dtype]
        if len(alike) > 1:
            alike = [s for s in alike if f".{s.name}".endswith(f".{name}")]
        return alike[0] if len(alike) == 1 else None

    def untouched(self, parameters: Mapping[str, mx.array]) -> dict[str, StoredTensor]:
        """Return the stored tensors of parameters that are unchanged from a file, by name."""
        by_shape: dict[tuple[tuple[int, ...], mx.Dtype | None], list[StoredTensor]] = {}
        for stored in self._stored:
            by_shape.setdefault((stored.shape, TYPES.get(stored.type)), []).append(stored)
        found = {}
        for name, array in parameters.items():
            alike = [s for s in by_shape.get((array.shape, array.dtype), ()) if _same_end(s.name, name)]
            alike = [s for s in alike if s.name == name] or alike
            if len(alike) == 1 and _is_untouched(array):
                found[name] = alike[0]
        return found

    @cached_property
    def _stored(self) -> list[StoredTensor]:
        return [
            StoredTensor(tensor.name, path, tensor.type, tensor.shape, tensor.begin)
            for path in sorted(self._folder.glob("model*.safetensors"))
            for tensor in read_header(path)
        ]


def share_of(stored: StoredTensor, array: mx.array, ranks: int) -> bool:
    """Return True for one of `ranks` equal parts of a stored tensor, cut between its rows.

    Rows are the last axis but one. mlx-lm's `shard` splits and takes the part of its own rank.
    """
    whole = (*array.shape[:-2], array.shape[-2] * ranks, array.shape[-1]) if array.ndim > 1 else ()
    return whole == stored.shape and _steps(array) == ["Load", "Split", "Contiguous"]


def read_share(stored: StoredTensor, rank: int, ranks: int) -> mx.array:
    """Read rank `rank`'s part of the tensor, and nothing else of it."""
    rows = stored.shape[-2] // ranks
    return _read_rows(stored, rank * rows, rows, axis=len(stored.shape) - 2)


def _same_end(one: str, other: str) -> bool:
    """Return True if one name ends with the other, because files and models use different prefixes."""
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")


def is_plain(array: mx.array) -> bool:
    """Return True for an array that is in memory, or unchanged from a file."""
    return _steps(array) in ([], ["Load"])


def _is_untouched(array: mx.array) -> bool:
    """Return True for an array that is unchanged from a file: its whole graph is one Load."""
    return _steps(array) == ["Load"]


def _steps(array: mx.array) -> list[str]:
    """Return the names of the operations in an array's graph."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return [line.split('"')[1] for line in graph.getvalue().splitlines() if "shape=rectangle" in line]


def _read_rows(stored: StoredTensor, first: int, rows: int, axis: int = 0) -> mx.array:
    with _Window(stored, first, rows, axis) as window:
        loaded = mx.load(cast("BinaryIO", window), format="safetensors")
    return cast("dict[str, mx.array]", loaded)["rows"]


class _Window(io.RawIOBase):
    """File-like view of some rows of a stored tensor, with zeros for rows beyond its end.

    Rows are along `axis`. If other axes come before it, there is a run of rows for each of their indices, and
    no row is beyond the end. MLX reads such a file in one call, straight into the array's memory.
    """

    def __init__(self, stored: StoredTensor, first: int, rows: int, axis: int) -> None:
        before, after = stored.shape[:axis], stored.shape[axis + 1 :]
        row_bytes = TYPES[stored.type].size * prod(after)
        here = max(min(stored.shape[axis] - first, rows), 0)
        runs = prod(before)
        assert here == rows or runs == 1
        self._run, self._stride = here * row_bytes, stored.shape[axis] * row_bytes
        tensor = {
            "dtype": stored.type,
            "shape": [*before, rows, *after],
            "data_offsets": [0, runs * rows * row_bytes],
        }
        text = json.dumps({"rows": tensor}).encode()
        self._header = struct.pack("<Q", len(text)) + text
        self._body = runs * self._run
        self._size = len(self._header) + runs * rows * row_bytes
        self._begins = stored.offset + first * row_bytes
        self._file = stored.path.open("rb", buffering=0)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill all of `buffer`, because MLX calls this once. Raises OSError."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            done += self._read_some(view[done:], self._at + done)
        self._at += done
        return done

    def _read_some(self, view: memoryview, at: int) -> int:
        """Fill the beginning of `view` with the bytes at `at`; returns their number."""
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

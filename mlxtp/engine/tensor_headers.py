"""Headers of safetensors files, checked before MLX reads them. Pure except for `read_header`.

MLX multiplies a shape without an overflow check, and reads beyond the array where the product wraps. Only
headers that the format allows pass here: contiguous tensors that fill the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

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

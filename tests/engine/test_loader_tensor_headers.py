"""Headers of safetensors files: what the format allows passes, and nothing else reaches MLX."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtp.engine.loader import BITS, MAX_HEADER_BYTES, check_header, read_header

GOOD: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "none": {"dtype": "F16", "shape": [0, 5], "data_offsets": [24, 24]},
    "one": {"dtype": "U8", "shape": [], "data_offsets": [24, 25]},
}


def checked(table: object, data_bytes: int = 25) -> list[str]:
    text = json.dumps(table).encode()
    return [tensor.name for tensor in check_header(text, 8 + len(text) + data_bytes)]


def test_tensors_are_named_in_the_order_of_their_bytes() -> None:
    assert checked({"one": GOOD["one"], "a": GOOD["a"], "none": GOOD["none"]}) == ["a", "none", "one"]
    assert checked(GOOD | {"__metadata__": {"format": "mlx"}}) == ["a", "none", "one"]
    assert checked({}, 0) == []


@pytest.mark.parametrize(
    ("changes", "data_bytes", "words"),
    [
        ({"shape": [65536] * 4, "data_offsets": [0, 0]}, 1, "590295810358705651712 bits"),  # 2^64 bytes
        ({"shape": [2**64, 6]}, 25, "no shape"),
        ({"shape": [2**31, 0], "data_offsets": [0, 0]}, 1, "no shape"),
        ({"shape": [-2, -3]}, 25, "no shape"),
        ({"shape": [True] * 6, "dtype": "F32"}, 25, "no shape"),
        ({"shape": [2.0, 3.0]}, 25, "no shape"),
        ({"shape": [1] * 20 + [6]}, 25, "no shape"),
        ({"shape": "23"}, 25, "lacks"),
        ({"shape": [2, 4]}, 25, "256 bits"),
        ({"dtype": "F16"}, 25, "96 bits"),
        ({"dtype": "Q4"}, 25, "which the format does not know"),
        ({"dtype": None}, 25, "lacks"),
        ({"data_offsets": [24, 0]}, 25, "192 bits"),
        ({"data_offsets": [-24, 0]}, 25, "192 bits"),
        ({"data_offsets": [1, 25]}, 26, "begins at byte"),
        ({"data_offsets": [0, 24.0]}, 25, "192 bits"),
        ({"data_offsets": [0]}, 25, "lacks"),
        ({"data_offsets": [10**6, 10**6 + 24]}, 25, "begins at byte"),
        ({"more": 1}, 25, "lacks"),
        ({}, 24, "and the file at"),
        ({}, 26, "and the file at"),
    ],
)
def test_what_no_writer_makes_is_refused(changes: dict[str, Any], data_bytes: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked({"a": GOOD["a"] | changes, "one": GOOD["one"]}, data_bytes)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b'{"a": 1}',
        b'{"a": [1]}',
        b'{"__metadata__": {"a": 1}}',
        b'{"__metadata__": [1]}',
        b'{"a":' * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_table_of_tensors_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        check_header(text, 8 + len(text))


def test_a_name_that_comes_twice_is_refused() -> None:
    """Parsers differ in which of the two they take."""
    row = json.dumps(GOOD["one"] | {"data_offsets": [0, 1]})
    text = f'{{"a": {row}, "a": {row}}}'.encode()
    with pytest.raises(ValueError, match="twice"):
        check_header(text, 8 + len(text) + 1)


@pytest.mark.parametrize(
    "content",
    [
        *(struct.pack("<Q", size) + b"{}" + bytes(8) for size in (0, 1 << 60, MAX_HEADER_BYTES + 1, 11)),
        *map(bytes, range(8)),
    ],
)
def test_a_header_that_is_cut_or_longer_than_it_can_be_is_not_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"\S"):
        read_header(path)


def test_what_mlx_writes_passes(tmp_path: Path) -> None:
    path, arrays = tmp_path / "model.safetensors", {}
    for kind in (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.int64, mx.bool_, mx.uint8, mx.complex64):
        for shape in ((), (0,), (3,), (2, 3, 5)):
            arrays[f"{kind}{shape}"] = mx.zeros(shape, kind)
    for about in ({"format": "mlx"}, None):
        mx.save_safetensors(str(path), arrays, about)
        assert {tensor.name: tensor.shape for tensor in read_header(path)} == {
            name: array.shape for name, array in arrays.items()
        }


_NUMBER = st.one_of(
    st.integers(-1, 70), st.sampled_from([2**31, 2**32, 65536, 2**63, 2**64, 1.0, True, None])
)
_TENSOR = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BITS, "X", 1]),
        "shape": st.lists(_NUMBER, max_size=5),
        "data_offsets": st.lists(_NUMBER, min_size=1, max_size=3),
    }
)


@given(st.dictionaries(st.sampled_from("abc"), _TENSOR, max_size=3), st.integers(0, 80))
def test_what_passes_fills_the_file_and_nothing_else(table: dict[str, Any], data_bytes: int) -> None:
    text = json.dumps(table).encode()
    try:
        tensors = check_header(text, 8 + len(text) + data_bytes)
    except ValueError:
        return
    sizes = [(tensor.end - tensor.begin) for tensor in tensors]
    assert sum(sizes) == data_bytes
    assert all(tensor.begin >= 8 + len(text) and tensor.end >= tensor.begin for tensor in tensors)
    for tensor in tensors:
        count = 1
        for axis in tensor.shape:
            count *= axis
        assert count * BITS[tensor.type] == 8 * (tensor.end - tensor.begin)


_TYPES = {"F32": mx.float32, "U8": mx.uint8, "BF16": mx.bfloat16, "I64": mx.int64}


@given(st.lists(st.tuples(st.sampled_from([*_TYPES]), st.lists(st.integers(0, 4), max_size=4)), max_size=5))
def test_what_mlx_makes_of_a_file_that_passes_is_what_the_header_says(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("header") / "model.safetensors"
    arrays = {f"t{n}": mx.ones(shape, _TYPES[kind]) for n, (kind, shape) in enumerate(tensors)}
    mx.save_safetensors(str(path), arrays)
    assert {(t.name, _TYPES[t.type], t.shape) for t in read_header(path)} == {
        (name, array.dtype, array.shape)
        for name, array in mx.load(str(path)).items()  # type: ignore[union-attr]
    }

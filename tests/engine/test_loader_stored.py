"""Rows straight from a file: the same numbers as those of a tensor that is read whole, in less memory."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxtp.engine.loader import cut_stored, read_share, share_of, untouched
from mlxtp.engine.sharding import cut_rows

from .small_models import split_weights, write_model

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
BYTES = 509 * 64 * 4


def weights(folder: Path) -> dict[str, mx.array]:
    """All tensors, none of them read."""
    return {
        name: array for path in folder.glob("*.safetensors") for name, array in mx.load(str(path)).items()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", vocab_size=509, tie_word_embeddings=False)


def cut_and_peak(folder: Path, array: mx.array, tensor: str, first: int, rows: int) -> tuple[mx.array, int]:
    """The rows, and the memory that was taken for them."""
    mx.synchronize()
    mx.clear_cache()  # a kept buffer that is somewhat larger would be taken for the rows
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    part = cut_stored(untouched(folder, {tensor: array}), array, tensor, first, rows)
    mx.eval(part)
    return part, mx.get_peak_memory() - before


@pytest.mark.parametrize(("first", "rows"), [(0, 255), (255, 255), (381, 127), (0, 1), (508, 4), (600, 3)])
@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": mx.bfloat16}, {"dtype": mx.float16}, {"quantize": 32}, {"quantize": 32, "mode": "mxfp4"}],
)
def test_the_rows_are_those_of_the_tensor(
    tmp_path: Path, changes: dict[str, Any], first: int, rows: int
) -> None:
    folder = write_model(tmp_path / "model", vocab_size=509, **changes)
    found = [(name, array) for name, array in weights(folder).items() if "embed_tokens" in name]
    assert found
    for name, array in found:
        part, _ = cut_and_peak(folder, array, name, first, rows)
        expected = cut_rows(mx.array(array), name, first, rows)
        assert part.dtype == expected.dtype
        assert mx.array_equal(part, expected)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("tensor", [EMBEDDING, HEAD])
def test_nothing_but_the_rows_is_read(folder: Path, tensor: str, parts: int) -> None:
    """Both tensors have one shape; their names tell them apart."""
    if parts > 1:
        split_weights(folder, parts)
    part, peak = cut_and_peak(folder, weights(folder)[tensor], tensor, 0, 255)
    assert mx.array_equal(part, weights(folder)[tensor][:255])
    assert peak < 1.01 * BYTES / 2


def test_a_tensor_that_was_computed_is_cut_and_not_read_again(folder: Path) -> None:
    doubled = weights(folder)[EMBEDDING] * 2
    part, peak = cut_and_peak(folder, doubled, EMBEDDING, 0, 255)
    assert mx.array_equal(part, weights(folder)[EMBEDDING][:255] * 2)
    assert peak >= BYTES


def test_a_tensor_that_could_be_two_is_cut_as_either(folder: Path) -> None:
    mx.save_safetensors(str(folder / "model-more.safetensors"), {f"other.{EMBEDDING}": mx.zeros((509, 64))})
    head = mx.load(str(folder / "model.safetensors"))[EMBEDDING]
    part, peak = cut_and_peak(folder, head, "embed_tokens.weight", 0, 255)
    assert mx.array_equal(part, mx.load(str(folder / "model.safetensors"))[EMBEDDING][:255])
    assert peak >= BYTES


def test_a_whole_tensor_is_left_alone(folder: Path) -> None:
    array = weights(folder)[EMBEDDING]
    assert cut_stored(untouched(folder, {EMBEDDING: array}), array, EMBEDDING, 0, 509) is array


def test_a_file_that_ends_within_the_rows_is_an_error(folder: Path) -> None:
    array = weights(folder)[EMBEDDING]
    path = folder / "model.safetensors"
    stored = untouched(folder, {EMBEDDING: array})
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises((OSError, RuntimeError)):
        cut_stored(stored, array, EMBEDDING, 254, 255)


def test_tensors_of_one_shape_are_found_where_mlx_lm_renames_their_prefixes(tmp_path: Path) -> None:
    """As in originals of Qwen3.5 and Qwen3-VL, whose embedding every rank would read whole."""
    names = "model.language_model.embed_tokens.weight", "lm_head.weight"
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {name: mx.zeros((1000, 64)) for name in names})
    loaded = weights(tmp_path)
    renamed = {
        "language_model.model.embed_tokens.weight": loaded[names[0]],
        "language_model.lm_head.weight": loaded[names[1]],
    }
    found = {name: stored.name for name, stored in untouched(tmp_path, renamed).items()}
    assert found == dict(zip(renamed, names, strict=True))


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E8M0"])
def test_a_tensor_of_bytes_is_not_taken_for_one_of_another_type(tmp_path: Path, kind: str) -> None:
    """MLX loads numbers of 8 bits as integers, too."""
    tensors = {
        name: {"dtype": dtype, "shape": [4, 4], "data_offsets": [at, at + 16]}
        for name, dtype, at in (("a.weight", kind, 0), ("b.scales", "U8", 16))
    }
    header = json.dumps(tensors).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(32)))
    array = weights(tmp_path)["a.weight"]
    [stored] = untouched(tmp_path, {"a.weight": array}).values()
    assert (stored.name, stored.type) == ("a.weight", kind)
    part = cut_stored({"a.weight": stored}, array, "a.weight", 1, 2)
    assert part.tolist() == array[1:3].tolist()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shape", [(8, 6), (5, 8, 6), (2, 3, 8, 1)])
def test_a_share_is_the_part_of_the_rows_behind_every_other_index(
    tmp_path: Path, shape: tuple[int, ...], ranks: int
) -> None:
    whole = mx.arange(prod(shape)).reshape(shape).astype(mx.float32)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"layers.0.up.weight": whole})
    for rank in range(ranks):
        loaded = weights(tmp_path)["layers.0.up.weight"]  # evaluating a part makes the whole no Load any more
        [stored] = untouched(tmp_path, {"model.layers.0.up.weight": loaded}).values()
        part = mx.contiguous(mx.split(loaded, ranks, axis=-2)[rank])
        assert share_of(stored, part, ranks)
        assert mx.array_equal(read_share(stored, rank, ranks), part)


def test_what_is_no_run_of_rows_of_one_tensor_is_no_share(tmp_path: Path) -> None:
    whole = mx.zeros((8, 8))
    tensors = {"text.layers.1.up.weight": whole, "vision.layers.1.up.weight": whole}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    array = weights(tmp_path)["text.layers.1.up.weight"]
    assert untouched(tmp_path, {"layers.1.up.weight": array}) == {}, "either could be meant"
    assert untouched(tmp_path, {"layers.11.up.weight": array}) == {}
    assert untouched(tmp_path, {"text.layers.1.up.weight": array + 0}) == {}
    [stored] = untouched(tmp_path, {"text.layers.1.up.weight": array}).values()
    assert stored.name == "text.layers.1.up.weight"
    assert not share_of(stored, mx.contiguous(mx.split(array, 2, axis=-1)[0]), 2)
    assert not share_of(stored, mx.contiguous(mx.split(array + 0, 2, axis=-2)[0]), 2)
    assert not share_of(stored, mx.contiguous(mx.split(array, 4, axis=-2)[0]), 2)

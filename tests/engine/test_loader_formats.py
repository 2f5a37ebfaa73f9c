"""Weights in formats of other programs: mlx-lm reads them as `model_config` says, or they are refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxtp.engine.group import LoneGroup
from mlxtp.engine.loader import load
from mlxtp.errors import Code, ModelError
from mlxtp.model_config import _FORMATS, Config, expands, unreadable
from mlxtp.models.inspect import facts_in, read_config

from .families import FAMILIES, FOUR, PIPELINE
from .small_models import change_config, write_model
from .tables import refused

Stored = tuple[str, Any]
"""The format's name of a type, and an array that has its bits."""
Write = Callable[[str, Any], Mapping[str, Stored]]
PROMPT = mx.array([[3, 1, 4, 1, 5]])
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


def fp8(name: str, weight: Any) -> Mapping[str, Stored]:
    scale = np.abs(weight).max() / 448
    blocks = [-(-size // 128) for size in weight.shape]
    numbers = np.array(mx.to_fp8(mx.array(weight / scale)))
    return {name: ("F8_E4M3", numbers), f"{name}_scale_inv": ("F32", np.full(blocks, scale, np.float32))}


def packed(name: str, weight: Any) -> Mapping[str, Stored]:
    groups = weight.reshape(len(weight), -1, 32)
    scales = np.abs(groups).max(-1) / 7
    numbers = np.clip(np.round(groups / scales[..., None]) + 8, 0, 15).reshape(weight.shape)
    return {
        f"{name}_packed": ("I32", _words(numbers)),
        f"{name}_scale": ("F32", scales.astype(np.float32)),
        f"{name}_shape": ("I64", np.array(weight.shape)),
    }


def awq(name: str, weight: Any) -> Mapping[str, Stored]:
    groups = weight.reshape(len(weight), -1, 32)
    low, high = groups.min(-1), groups.max(-1)
    scales = (high - low) / 15
    zeros = np.clip(np.round(-low / scales), 0, 15)
    numbers = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, 15).reshape(weight.shape)
    order, base = [0, 2, 4, 6, 1, 3, 5, 7], name.removesuffix("weight")

    def words(columns: Any) -> Any:
        return _words(columns.T.reshape(-1, 8)[:, order].reshape(columns.T.shape))

    return {
        f"{base}qweight": ("I32", words(numbers)),
        f"{base}qzeros": ("I32", words(zeros)),
        f"{base}scales": ("F16", scales.T.astype(np.float16)),
    }


def _words(numbers: Any) -> Any:
    """Pack eight numbers of four bits into a word, the first in its lowest bits."""
    eights = numbers.reshape(len(numbers), -1, 8).astype(np.uint32)
    return (eights << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1).astype(np.uint32)


def rewrite(folder: Path, written: Write, quantization: Config) -> None:
    """Store the projections in another format, and name it in config.json."""
    stored: dict[str, Stored] = {}
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        weight = np.array(array)
        if weight.ndim == 2 and "proj" in name and weight.shape[1] % 32 == 0:
            stored.update(written(name, weight))
        else:
            stored[name] = ("F32", weight)
    at, header, data = 0, {}, b""
    for name, (kind, numbers) in stored.items():
        piece = np.ascontiguousarray(numbers).tobytes()
        offsets = [at, at := at + len(piece)]
        header[name] = {"dtype": kind, "shape": list(numbers.shape), "data_offsets": offsets}
        data += piece
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    change_config(folder, quantization_config=quantization)


def model_folder(tmp_path: Path, family: str) -> Path:
    sizes = {**FOUR, **PIPELINE[family]} if family in PIPELINE else FAMILIES.get(family, {})
    return write_model(tmp_path / "m", model_type=family, **sizes)


FORMATS: Mapping[str, tuple[Write, Config]] = {
    "fp8": (fp8, FP8),
    "pack-quantized": (packed, PACKED),
    "awq": (awq, AWQ),
}
READ = [(name, family) for name in FORMATS for family in _FORMATS[name][1] or ("llama", "qwen3")]


@pytest.mark.parametrize(("name", "family"), READ)
def test_what_mlx_lm_reads_is_loaded_and_counted(tmp_path: Path, name: str, family: str) -> None:
    folder = model_folder(tmp_path, family)
    plain = load_model(folder)[0](PROMPT)
    rewrite(folder, *FORMATS[name])
    loaded = load(folder, LoneGroup(), lambda: None)
    off = mx.abs(loaded.model(PROMPT).astype(mx.float32) - plain).max() / mx.abs(plain).max()
    assert off.item() < 0.06
    config = {**read_config(folder), "dtype": "bfloat16"}
    if expands(config):
        # 4 of 2 bytes stay, as those that are not quantized are of 32 bits here.
        counted = facts_in(folder).shape("m", 0).weight_bytes
        assert counted < loaded.weight_bytes < 2.1 * counted


@pytest.mark.parametrize(
    ("name", "family"),
    [
        (name, family)
        for name in ("fp8", "pack-quantized")
        for family in ("llama", "ministral3", "qwen3_moe", "kimi_vl")
    ],
)
def test_what_it_does_not_read_is_refused_before(tmp_path: Path, name: str, family: str) -> None:
    """mlx-lm fails, or takes the bits of ministral3's FP8 for whole numbers."""
    folder = model_folder(tmp_path, family)
    plain = load_model(folder)[0](PROMPT)
    rewrite(folder, *FORMATS[name])
    try:
        wrong = load_model(folder)[0](PROMPT)
    except ValueError:
        pass
    else:
        assert (mx.abs(wrong - plain).max() / mx.abs(plain).max()).item() > 0.5
    with refused(ModelError, Code.MODEL_UNSUPPORTED, name):
        load(folder, LoneGroup(), lambda: None)


def test_a_quantization_of_the_language_model_alone_is_found(tmp_path: Path) -> None:
    sizes = {**FOUR, **PIPELINE["qwen3_5"]}
    folder = write_model(tmp_path / "m", model_type="qwen3_5", quantize=32, **sizes)
    before = load(folder, LoneGroup(), lambda: None)
    config = json.loads((folder / "config.json").read_text())
    nested = {**config["text_config"], "quantization": config["quantization"]}
    change_config(folder, quantization=None, text_config=nested)
    found = load(folder, LoneGroup(), lambda: None)
    assert mx.array_equal(found.model(PROMPT), before.model(PROMPT))
    assert facts_in(folder).shape("m", 0).model.bits == 4


def test_what_modelopt_writes_beside_counts(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    assert "modelopt (NVFP4)" in unreadable(read_config(folder))
    with pytest.raises(ModelError, match=r"modelopt \(NVFP4\)"):
        load(folder, LoneGroup(), lambda: None)

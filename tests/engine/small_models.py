"""Model folders made on the spot: any family, random weights, the embedded model's tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from mlxtp.config import embedded_model_path
from mlxtp.engine.vlm_models import classes_of, is_of_vlm

CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": [5, 1],
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight")
ATTENTIVE: Mapping[tuple[str, ...], float] = {
    ("q_proj.weight", "q_b_proj.weight", "q_norm.weight"): 10.0,
    ("lm_head.weight",): 14.0,
    ("v_proj.weight", "unembed_out.weight", "o_proj.weight", "out_proj.weight"): 7.0,
}
"""Factors of weights, by the ends of their names: a token attends to some more than to others, and what it
gets from them outweighs its own embedding."""


def write_model(
    folder: Path,
    *,
    seed: int = 0,
    quantize: int = 0,
    bits: int = 4,
    mode: str = "affine",
    dtype: mx.Dtype = mx.float32,
    attentive: bool = False,
    **changes: object,
) -> Path:
    """A whole model folder; `quantize` is a group size for weights of `bits` bits. Returns `folder`.

    Random weights see little of tokens that are far back. With `attentive`, each of them changes the answer.
    A `text_config` gets the sizes of the vocabulary and whether head and embedding are tied.
    """
    config: dict[str, Any] = {**CONFIG, **changes}
    if "text_config" in config:
        shared = {name: config[name] for name in ("vocab_size", "tie_word_embeddings")}
        config["text_config"] = {**config["text_config"], **shared}
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(embedded_model_path() / name, folder / name)
    mx.random.seed(seed)
    model_class, arguments_class = (classes_of if is_of_vlm(config) else _get_classes)(config)
    model = model_class(arguments_class.from_dict(config))
    # Large enough for one token to stand out, so that rounding changes no answer.
    parameters = dict(tree_flatten(model.parameters()))
    large = [name for name in parameters if name.endswith(EMBEDDINGS)]
    changed = {name: mx.random.normal(parameters[name].shape) for name in large}
    # What begins as zeros would hide how it is divided.
    zeros = [name for name, array in parameters.items() if not array.any().item()]
    changed |= {name: 0.2 * mx.random.normal(parameters[name].shape) for name in zeros}
    for ends, factor in ATTENTIVE.items() if attentive else ():
        changed |= {name: factor * array for name, array in parameters.items() if name.endswith(ends)}
    model.update(tree_unflatten(list(changed.items())))
    model.set_dtype(dtype)
    if quantize:

        def fits(_: str, module: nn.Module) -> bool:
            return hasattr(module, "to_quantized") and module.weight.shape[-1] % quantize == 0

        nn.quantize(model, group_size=quantize, bits=bits, mode=mode, class_predicate=fits)
        config["quantization"] = {"group_size": quantize, "bits": bits, "mode": mode}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_config(folder, config)
    return folder


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def change_config(folder: Path, **changes: object) -> None:
    """Set fields; a field that becomes None is left out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    write_config(folder, {name: value for name, value in config.items() if value is not None})


def change_weights(folder: Path, **changes: mx.array | None) -> None:
    """Set tensors, `__` for a dot in a name; one that becomes None is left out."""
    path = folder / "model.safetensors"
    weights = mx.load(str(path))
    for name, value in changes.items():
        weights[name.replace("__", ".")] = value
    mx.eval(weights)
    kept = {name: value for name, value in weights.items() if value is not None}
    mx.save_safetensors(str(path), kept, metadata={"format": "mlx"})


def remember(folder: Path) -> Path:
    """Have recurrent states hold tokens that are far back, as those of trained models do."""
    weights = mx.load(str(folder / "model.safetensors"))
    lasting = {name: array - 5.0 for name, array in weights.items() if name.endswith("A_log")}
    change_weights(folder, **lasting)
    return folder


def split_weights(folder: Path, parts: int = 2) -> list[Path]:
    """Spread the weights over several files with an index, as large models come."""
    whole = folder / "model.safetensors"
    weights = mx.load(str(whole))
    mx.eval(weights)
    names = sorted(weights)
    files, weight_map = [], {}
    for part in range(parts):
        files.append(folder / f"model-{part + 1:05}-of-{parts:05}.safetensors")
        chosen = {name: weights[name] for name in names[part::parts]}
        mx.save_safetensors(str(files[-1]), chosen, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(chosen, files[-1].name)
    whole.unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files

"""MTP heads for tiny models, fitted so that they propose some tokens right and some wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model

from mlxtp.engine.mtp_head import FAMILIES, one_layer
from mlxtp.model_config import mtp_place
from mlxtp.model_files import MTP_FILE

from .small_models import write_config

MILD = 0.05
"""Factor of the layer's results, beside what the fitted projection gives."""


def add_head(folder: Path, *prompts: Sequence[int], file: str = MTP_FILE, length: int = 48) -> Path:
    """Write a head beside the model of a folder, or into its own file; returns `folder`.

    The projection is fitted to the model's own answers to `prompts`. Longer ones leave more proposals wrong.
    """
    model, config = load_model(folder)
    names = FAMILIES[config["model_type"]]
    texts = [_answer(model, list(prompt), length) for prompt in prompts]
    pairs, wanted = [], []
    for text in texts:
        hidden = model.model(mx.array([text]))[0]
        embeddings = model.model.embed_tokens(mx.array(text))
        own = [_normed(embeddings[1:-1]), _normed(hidden[:-2])]
        pairs.append(mx.concatenate(own[::-1] if names.hidden_first else own, axis=-1))
        wanted.append(hidden[1:-1])
    fitted = np.linalg.lstsq(*(np.array(mx.concatenate(each)) for each in (pairs, wanted)), rcond=1e-3)[0]
    tensors = {
        f"{names.embedding_norm}.weight": mx.ones(fitted.shape[1]),
        f"{names.hidden_norm}.weight": mx.ones(fitted.shape[1]),
        f"{names.norm}.weight": mx.ones(fitted.shape[1]),
        f"{names.projection}.weight": mx.array(fitted.T.astype(np.float32)),
        **{names.layer + name: weight for name, weight in _layer(config).items()},
    }
    config = json.loads((folder / "config.json").read_text())
    field = "mtp_num_hidden_layers" if names.less_one else "num_nextn_predict_layers"
    config.get("text_config", config)[field] = 1
    place = mtp_place(config)
    head = {place + name: weight for name, weight in tensors.items()}
    path = folder / file
    held = mx.load(str(path)) if path.exists() else {}
    mx.eval(held)
    mx.save_safetensors(str(path), {**held, **head}, metadata={"format": "mlx"})
    write_config(folder, config)
    return folder


def _layer(config: dict[str, Any]) -> dict[str, mx.array]:
    kind, arguments = _get_classes(config)
    mx.random.seed(7)
    layer = kind(arguments.from_dict({**config, **one_layer(config)})).layers[0]
    mild = ("o_proj.weight", "down_proj.weight")
    return {
        name: weight * (MILD if name.endswith(mild) else 1.0)
        for name, weight in tree_flatten(layer.parameters())
    }


def _normed(x: mx.array) -> mx.array:
    return mx.fast.rms_norm(x, mx.ones(x.shape[-1]), 1e-5)


def _answer(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(mx.argmax(model(mx.array([tokens]))[0, -1]).item())
    return tokens

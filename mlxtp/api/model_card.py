"""Facts from a model's folder, and its makers' sampling defaults in `generation_config.json`.

Facts that are not there stay unknown: nothing is guessed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tokenizer_file import content_of, text_of
from .backend import GREEDY, ModelInfo, Sampling, StoredModelInfo

# --- the card ---------------------------------------------------------------------------------------------


Json = dict[str, Any]

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_UNITS = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3))


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts of a model. An empty string, or 0, is unknown.

    `family` is the `model_type` of `config`, the whole of config.json. `parameters` is such as "8.0B".
    `quantization` is such as "4-bit", or the type of weights that are not quantized. `weight_bytes` on this
    disk. `digest`, 64 hexadecimal digits, identifies a folder by its configuration and by the names and sizes
    of the files of weights. `template` is the chat template, in Jinja.
    """

    config: Mapping[str, Any]
    family: str
    parameters: str
    quantization: str
    weight_bytes: int
    digest: str
    template: str

    def number(self, name: str) -> int | None:
        """Return an integer of the language model's configuration."""
        text = self.config.get("text_config")
        for config in (text if isinstance(text, dict) else {}, self.config):
            if type(config.get(name)) is int:
                return int(config[name])
        return None


def read_card(model: ModelInfo | StoredModelInfo) -> ModelCard:
    """Read the small files of the model's folder. Blocks: call it in a thread."""
    config = _read_json(model.path / "config.json")
    weights = _weights(model.path)
    family = config.get("model_type")
    known = json.dumps([model.id, config, sorted(weights.items())])
    return ModelCard(
        config=config,
        family=family if isinstance(family, str) else "",
        parameters=_parameters(_read_json(model.path / "model.safetensors.index.json")),
        quantization=_quantization(config),
        weight_bytes=sum(weights.values()),
        digest=hashlib.sha256(known.encode()).hexdigest(),
        template=_template(model.path),
    )


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(content_of(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _weights(folder: Path) -> dict[str, int]:
    """Return the bytes of each file of weights."""
    try:
        return {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    except OSError:
        return {}


def _parameters(index: Json) -> str:
    """Return the number of parameters that mlx-lm counted when it wrote the weights."""
    metadata = index.get("metadata")
    count = metadata.get("total_parameters") if isinstance(metadata, dict) else None
    if type(count) is not int or count <= 0:
        return ""
    return next((f"{count / unit:.1f}{letter}" for letter, unit in _UNITS if count >= unit), str(count))


def _quantization(config: Json) -> str:
    for name in ("quantization", "quantization_config"):
        table = config.get(name)
        if isinstance(table, dict):
            bits, method = table.get("bits"), table.get("quant_method")
            return f"{bits}-bit" if type(bits) is int else method if isinstance(method, str) else ""
    text = config.get("text_config")
    both = {**config, **(text if isinstance(text, dict) else {})}
    dtype = both.get("dtype", both.get("torch_dtype"))
    return _DTYPES.get(dtype, "") if isinstance(dtype, str) else ""


def _template(folder: Path) -> str:
    try:
        return text_of(folder / "chat_template.jinja")
    except (OSError, ValueError):
        template = _read_json(folder / "tokenizer_config.json").get("chat_template")
        return template if isinstance(template, str) else ""


# --- sampling defaults ------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


def load_defaults(folder: Path) -> Sampling:
    """Return the defaults for requests that leave settings out. Greedy if the file is missing or unusable."""
    path = folder / "generation_config.json"
    try:
        config = json.loads(content_of(path))
    except FileNotFoundError:
        return GREEDY
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is not used: %s", path, error)
        return GREEDY
    return defaults_of(config) if isinstance(config, dict) else GREEDY


def defaults_of(config: Mapping[str, Any]) -> Sampling:
    """Return temperature, top_p, top_k and min_p if the model is to be sampled (`do_sample`), else greedy.

    A value out of range counts as absent. Pure.
    """
    if config.get("do_sample") is not True:
        return GREEDY
    return Sampling(
        temperature=_number(config.get("temperature"), 0.0, 2.0, 1.0),
        top_p=_number(config.get("top_p"), 0.0, 1.0, 1.0),
        top_k=int(_number(config.get("top_k"), 0, 2**31 - 1, 0)),
        min_p=_number(config.get("min_p"), 0.0, 1.0, 0.0),
    )


def _number(value: object, low: float, high: float, absent: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return absent
    return float(value) if low <= value <= high else absent

"""What config.json alone tells of a model: whether it can be served at all, and what placement depends on."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

from ..errors import Code, ModelError
from ..placement.model_shape import ALSO_CALLED, ModelShape, shape_of
from ..placement.model_weights import Config
from ..tokenizer_file import MAX_CONFIG_BYTES, text_of

_WRITES_NO_TEXT = re.compile(
    r"(?:(?<!LMHead)Model|For(?:SequenceClassification|TokenClassification|MaskedLM|QuestionAnswering))$"
)
"""Classes for embeddings and labels. Those that write are called ForCausalLM, LMHeadModel or the like."""


def read_config(folder: Path) -> Config:
    """Raises ModelError. Reads the disk."""
    try:
        config = json.loads(text_of(folder / "config.json", MAX_CONFIG_BYTES))
        if not isinstance(config, dict):
            raise ValueError("config.json holds no table")
    except (OSError, ValueError, RecursionError) as error:  # its disk may be gone meanwhile
        raise ModelError(f"{folder} cannot be read: {error}") from None
    return config


def shape_in(folder: Path, config: Config, name: str, kv_bits: int) -> ModelShape:
    """Of the model in this folder. Raises ModelError. Reads the disk."""
    try:
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    except OSError as error:
        raise ModelError(f"{folder} cannot be read any more: {error}") from None
    return shape_of(config, name=name, weight_bytes=weights, kv_bits=kv_bits)


def check_servable(config: Config) -> None:
    """Raises ModelError for what no group could serve: a family that mlx-lm has no code for, an embedding
    model, or a configuration that lacks what placement depends on."""
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ModelError("config.json names no model_type, so nobody knows which model this is")
    code = ALSO_CALLED.get(family, family)
    if not code.isidentifier() or code not in _families():
        raise ModelError(f"mlx-lm has no model family {family!r}", Code.MODEL_UNSUPPORTED)
    said = config.get("architectures")
    classes = [each for each in said if isinstance(each, str)] if isinstance(said, list) else []
    if classes and all(_WRITES_NO_TEXT.search(each) for each in classes):
        raise ModelError(f"it is a {classes[0]}, which writes no text", Code.MODEL_UNSUPPORTED)
    shape_of(config)


@cache
def _families() -> frozenset[str]:
    """What the installed mlx-lm has code for, by its files: to import it would import MLX."""
    mlx_lm = importlib.util.find_spec("mlx_lm")
    assert mlx_lm is not None
    assert mlx_lm.submodule_search_locations
    models = Path(mlx_lm.submodule_search_locations[0]) / "models"
    return frozenset(path.stem for path in models.glob("*.py"))

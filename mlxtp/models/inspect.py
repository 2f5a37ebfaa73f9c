"""Facts from config.json alone: the checks that a model can be served, and its shape for placement."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

from ..errors import Code, ModelError
from ..placement.model_shape import ALSO_CALLED, Config, ModelShape, shape_of
from ..tokenizer_file import MAX_CONFIG_BYTES, text_of

#: Classes for embeddings and labels. Those that write are called ForCausalLM, LMHeadModel or the like.
_WRITES_NO_TEXT = re.compile(
    r"(?:(?<!LMHead)Model|For(?:SequenceClassification|TokenClassification|MaskedLM|QuestionAnswering))$"
)


def read_config(folder: Path) -> Config:
    """Return the configuration of the model in this folder. Raises ModelError. Reads the disk."""
    try:
        config = json.loads(text_of(folder / "config.json", MAX_CONFIG_BYTES))
        if not isinstance(config, dict):
            raise ValueError("config.json holds no table")
    except (OSError, ValueError, RecursionError) as error:  # its disk may have gone
        raise ModelError(f"{folder} cannot be read: {error}") from None
    return config


def shape_in(folder: Path, config: Config, name: str, kv_bits: int) -> ModelShape:
    """Return the shape of the model in this folder. Raises ModelError. Reads the disk."""
    try:
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    except OSError as error:
        raise ModelError(f"{folder} cannot be read any more: {error}") from None
    return shape_of(config, name=name, weight_bytes=weights, kv_bits=kv_bits)


def check_servable(config: Config) -> None:
    """Raise ModelError for a model that no group could serve.

    That is a family unknown to mlx-lm, an embedding model, or a configuration that lacks what placement
    depends on.
    """
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ModelError("config.json names no model_type, so the model's family is unknown")
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
    """Return the families that the installed mlx-lm supports, by its files: an import would load MLX."""
    mlx_lm = importlib.util.find_spec("mlx_lm")
    assert mlx_lm is not None
    assert mlx_lm.submodule_search_locations
    models = Path(mlx_lm.submodule_search_locations[0]) / "models"
    return frozenset(path.stem for path in models.glob("*.py"))

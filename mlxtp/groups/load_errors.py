"""Errors of ranks that cannot load a model, worded for the user. Pure."""

from __future__ import annotations

import re

from ..errors import Code, ModelError
from ..models.manifest import is_commit

_RANK = re.compile(r"(?:^|; )rank (\d+): ")


def refusal(model: str, folder: str, ranks: int, error: ModelError) -> ModelError:
    """Return the error, about `model` with its `folder`'s name; equal texts of all `ranks` appear once."""
    _, *parts = _RANK.split(error.detail)
    said = [words.removeprefix(f"{folder}: ") for words in parts[1::2]]
    words = "; ".join(f"rank {rank}: {each}" for rank, each in zip(parts[::2], said, strict=True))
    if len(said) == ranks and len(set(said)) == 1:
        words = said[0]
    words = words or error.detail
    if is_commit(folder) and error.code in (Code.MODEL_INVALID, Code.MODEL_NOT_FOUND):
        words += f"; `mlxtp verify {model}` checks its files for damage"
    return ModelError(f"{model} cannot be loaded: {words}", error.code)

"""Text parts of models that also see: their language models are of families that mlx-lm can divide."""

from __future__ import annotations

from typing import Any

from ..group import Group


def divide(model: Any, group: Group) -> None:
    """Divide the language model as its own family is divided."""
    model.language_model.shard(group.handle)


def divide_deepseek(model: Any, group: Group) -> None:
    """Divide a language model whose class has DeepSeek V3's layers and no `shard`."""
    from mlx_lm.models.deepseek_v3 import Model

    Model.shard(model.language_model, group.handle)

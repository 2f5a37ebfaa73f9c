"""Packages that have the code of a model's family, found without importing them: mlx-lm, then mlx-vlm."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from .model_config import VLM_FAMILIES

MLX_LM, MLX_VLM = "mlx_lm", "mlx_vlm"


@cache
def _families(package: str) -> frozenset[str]:
    """Return the families of a package by its file names, because an import would load MLX; () without it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    models = Path(spec.submodule_search_locations[0]) / "models"
    modules = models.glob("*.py") if package == MLX_LM else models.glob("*/")
    return frozenset(path.stem for path in modules)


def source_of(family: str) -> str:
    """Return the package whose code for a family runs here; "" if none is installed."""
    if family in _families(MLX_LM) and family.isidentifier():
        return MLX_LM
    return MLX_VLM if family in VLM_FAMILIES & _families(MLX_VLM) else ""


def lack(name: str, family: str) -> str:
    """Return why no installed package runs the family of the `model_type` `name`; "" if one does."""
    if source_of(family):
        return ""
    if family not in VLM_FAMILIES:
        untried = ", and mlx-vlm's has not been tried" if family in _families(MLX_VLM) else ""
        return f"mlx-lm has no model family {name!r}{untried}"
    return f"the model family {name!r} needs mlx-vlm on each Mac: pip install 'mlxtp[vision]'"

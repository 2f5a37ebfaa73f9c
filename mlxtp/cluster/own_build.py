"""Versions and flags of this agent, as it reports them to others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from ..config import Settings

_PACKAGES = ("mlxtp", "mlx", "mlx-lm")
#: Settings that decide how ranks compute, or of which the coordinator's value holds for all.
_FLAGS = (
    "agreement", "compiled", "speculation", "prefix_cache", "prefill_chunk", "max_context", "kv_bits",
    "kv_bytes", "fabric", "fast_fences", "repeatable",
)  # fmt: skip
#: Prefixes of MLX's variables that ranks get from their agent. All others must be equal: with another
#: MLX_BFS_MAX_WIDTH a rank runs collectives of one layer in another order, which gives wrong numbers.
_PER_RANK = ("MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL", "MLX_METAL_FAST_SYNCH")


def versions_here() -> tuple[str, ...]:
    """Return the versions of packages that ranks must have in common, "name=version" each."""
    return tuple(f"{package}={_version(package)}" for package in _PACKAGES)


def flags_of(settings: Settings, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return settings that differ from their defaults and MLX's variables, "name=value" each."""
    defaults = type(settings)(settings.home, "", 0, 1, "")
    flags = [
        f"{name}={getattr(settings, name)}"
        for name in _FLAGS
        if getattr(settings, name) != getattr(defaults, name)
    ]
    names = [name for name in environment if name.startswith("MLX_") and not name.startswith(_PER_RANK)]
    return tuple(flags + [f"{name}={environment[name]}" for name in sorted(names)])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"

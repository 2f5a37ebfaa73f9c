"""What this agent runs, as it tells others."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ..config import Settings

_PACKAGES = ("mlxtp", "mlx", "mlx-lm")
_FLAGS = (
    "agreement", "compiled", "speculation", "prefix_cache", "prefill_chunk", "max_context", "kv_bits",
    "kv_bytes", "fabric", "fast_fences",
)  # fmt: skip
"""Settings by which ranks compute, or of which the coordinator's hold for all."""


def versions_here() -> tuple[str, ...]:
    """Installed packages that ranks must have in common, "name=version" each."""
    return tuple(f"{package}={_version(package)}" for package in _PACKAGES)


def flags_of(settings: Settings) -> tuple[str, ...]:
    """Those that differ from their defaults, "name=value" each."""
    defaults = type(settings)(settings.home, "", 0, 1, "")
    return tuple(
        f"{name}={getattr(settings, name)}"
        for name in _FLAGS
        if getattr(settings, name) != getattr(defaults, name)
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"

"""`mlxtp version --verbose`: facts for a bug report. Imports nothing heavy."""

from __future__ import annotations

import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from .. import __version__
from ..client import agent_runs

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def about(home: Path) -> dict[str, str]:
    """Return the facts, most important first.

    Paths name the user's folders, and nothing else about the user.
    """
    return {
        "mlxtp": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": _system(),
        **{name: _installed(name) for name in _needed()},
        "installed in": str(Path(__file__).parent.parent),
        "home": str(home),
        "agent": "runs" if agent_runs(home) else "does not run",
    }


def _system() -> str:
    release = platform.mac_ver()[0]
    name = f"macOS {release}" if release else f"{platform.system()} {platform.release()}"
    return f"{name}, {platform.machine()}"


def _needed() -> list[str]:
    """Return the packages that pyproject.toml requires; none where mlxtp is not installed."""
    try:
        wanted = [each for each in requires("mlxtp") or () if "extra ==" not in each]
    except PackageNotFoundError:
        return []
    return list(dict.fromkeys(match[0] for each in wanted if (match := _NAME.match(each))))


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"

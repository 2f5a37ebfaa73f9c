"""A copy of the package with lines added to it, for tests of what an addition touches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlxtp


def run_changed(folder: Path, script: str, *added: tuple[str, str, str]) -> list[str]:
    """What a script prints where lines are added: each file, the beginning of the line before, the line."""
    package = folder / "mlxtp"
    shutil.copytree(Path(mlxtp.__file__).parent, package, ignore=shutil.ignore_patterns("*.safetensors"))
    for file, after, line in added:
        lines = (package / file).read_text().splitlines()
        [at] = [number for number, each in enumerate(lines) if each.strip().startswith(after)]
        (package / file).write_text("\n".join([*lines[: at + 1], line, *lines[at + 1 :]]))
    how: dict[str, Any] = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(folder)}}
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    assert told.returncode == 0, told.stderr
    return told.stdout.splitlines()

"""Check that each pin has a wheel with one of its hashes, for each system and Python that mlxtp is made for.

`python scripts/wheels.py UV`, with the path of a uv, which asks the package index and installs nothing. A pin
without a wheel would be built from source, for minutes and without a word.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: As uv names them. MLX needs macOS 14 and glibc 2.35.
SYSTEMS = ("aarch64-apple-darwin", "x86_64-manylinux_2_35", "aarch64-manylinux_2_35")
_OLDEST_MAC = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}


def unknown(lock: str, hashes: str) -> list[str]:
    """Return the packages of a pylock.toml of which no wheel has a hash that stands in `hashes`. Pure."""
    return [
        package["name"]
        for package in tomllib.loads(lock)["packages"]
        if not any(f"sha256:{wheel['hashes']['sha256']}" in hashes for wheel in package.get("wheels", ()))
    ]


def problems(uv: str, root: Path = ROOT) -> list[str]:
    """Return a line for each system and Python that lacks wheels."""
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--format", "pylock.toml"]
    found = []
    for system in SYSTEMS:
        for python in PYTHONS:
            where = ["--python-platform", system, "--python-version", python]
            done = subprocess.run(
                [uv, "pip", "compile", *options, *where, "hashes.txt"],
                cwd=root, env={**os.environ, **_OLDEST_MAC}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                found.append(f"Python {python} on {system}: {done.stderr.strip()}")
            elif names := unknown(done.stdout, (root / "hashes.txt").read_text()):
                found.append(f"Python {python} on {system}: no wheel with a known hash of {', '.join(names)}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems(sys.argv[1])) or 0)

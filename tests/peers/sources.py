"""What the suites need, fetched once into a cache folder: their sources, a virtual environment, bun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlxtp-peers"
LIMIT_S = 1800.0
PACKAGES = (
    "pytest", "pytest-asyncio", "pytest-timeout", "openai", "anthropic", "ollama", "requests", "httpx",
    "filelock", "jsonschema", "pybase64", "regex", "transformers", "jinja2", "fastapi", "openai-harmony",
    "prometheus_client", "schemathesis", "lm_eval[api]",
)  # fmt: skip
#: pip keeps a source archive once its build backend has told its name. This one builds nothing.
BACKEND = """
from pathlib import Path
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    head = dict(line.split(": ", 1) for line in Path("PKG-INFO").read_text().splitlines()[:3])
    kept = Path(folder) / f"{head['Name'].replace('-', '_')}-{head['Version']}.dist-info"
    kept.mkdir()
    (kept / "METADATA").write_text("".join(f"{name}: {value}\\n" for name, value in head.items()))
    return kept.name
"""


def run(command: Sequence[object], *, limit_s: float = LIMIT_S, **given: Any) -> str:
    """Return what a command wrote. Raises LookupError with its last line if it fails or takes too long."""
    words = [str(part) for part in command]
    given["env"] = os.environ | given.get("env", {})
    try:
        done = subprocess.run(words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=limit_s, **given)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LookupError(str(error)) from None
    if done.returncode:
        raise LookupError(f"{Path(words[0]).name}: {done.stdout.strip() or 'failed'}")
    return done.stdout


def environment() -> Path:
    """Return the Python of the suites' virtual environment."""
    python, mark = CACHE / "venv/bin/python", CACHE / "venv/packages"
    if not mark.exists() or mark.read_text() != " ".join(PACKAGES):
        run([sys.executable, "-m", "venv", CACHE / "venv"])
        run([python, "-m", "pip", "install", "--quiet", *PACKAGES])
        mark.write_text(" ".join(PACKAGES))
    return python


def unpacked(requirement: str, folders: Sequence[str], rewrites: Mapping[str, str]) -> Path:
    """Return a folder with these folders of a package's source archive, rewritten. Nothing is built."""
    name, version = requirement.split("==")
    archive = CACHE / f"{name.replace('-', '_')}-{version}.tar.gz"
    if not archive.exists():
        for module in ("setuptools/build_meta.py", "scikit_build_core/build.py"):
            (path := CACHE / "backends" / module).parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(BACKEND)
        pip = [environment(), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        run([*pip, "--no-build-isolation", "--dest", CACHE, requirement],
            env={"PYTHONPATH": str(CACHE / "backends")})  # fmt: skip
    shutil.rmtree(folder := CACHE / name, ignore_errors=True)
    with tarfile.open(archive) as source:
        for member in source:
            inside = member.name.partition("/")[2]
            root = next((each for each in folders if inside.startswith(each)), None)
            if root is None or not member.isfile():
                continue
            words = (found.read() if (found := source.extractfile(member)) else b"").decode(errors="replace")
            for pattern, other in rewrites.items():
                words = re.sub(pattern, other, words, flags=re.MULTILINE)
            (path := folder / inside).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(words)
    return folder


def cloned(repository: str) -> Path:
    """Return a clone. `PEERS_MIRROR` names a folder that has it, where its host is out of reach."""
    if not (folder := CACHE / Path(repository).name).exists():
        run(["git", "clone", "--quiet", os.environ.get("PEERS_MIRROR", repository), folder], limit_s=120)
    return folder


def bun(folder: Path) -> Path:
    """Return bun, with zod for the sources in `folder`."""
    if not (CACHE / "npm/node_modules").exists():
        (CACHE / "npm").mkdir(parents=True, exist_ok=True)
        run(["npm", "install", "--silent", "--prefix", CACHE / "npm", "bun@1", "zod@3"])
    if not (link := folder / "node_modules").exists():
        link.symlink_to(CACHE / "npm/node_modules")
        (folder / "package.json").unlink(missing_ok=True)
    return CACHE / "npm/node_modules/.bin/bun"

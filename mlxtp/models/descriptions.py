"""Descriptions of models, each made once by a process with limits, and kept on disk."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from ..description import INVALID, Description, from_text
from ..errors import Code, ModelError
from ..model_config import Config
from ..wire.rank_process import without_secrets

log = logging.getLogger(__name__)

MOST_CPU_S = 60.0  #: The largest published models take 3 s.
MOST_BYTES = 2 << 30  #: The largest published models take 0.6 GB.
MOST_S = 300.0
MOST_KEPT = 256  #: descriptions on disk; the oldest are removed
TICK_S = 0.2  #: between looks at the process's memory and time
_REFUSED = "mlxtp: "  # begins the process's message about a model that mlx-lm cannot build


def description_of(config: Config) -> Description:
    """Describe the model with this config.json. Blocks, for seconds the first time. Raises ModelError."""
    text = json.dumps(config, sort_keys=True)
    path = folder() / f"{sha256((_made_by() + text).encode()).hexdigest()[:40]}.json"
    with contextlib.suppress(OSError, ValueError):
        found = from_text(path.read_text())
        with contextlib.suppress(OSError):
            os.utime(path)
        return found
    said = _said_of(text)
    try:
        found = from_text(said)
        _keep(path, said)
    except ValueError as error:
        raise ModelError(f"the process that describes the model failed: {error}") from None
    except OSError as error:
        log.warning("the description of a model is not kept: %s", error)
    return found


def folder() -> Path:
    usual = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or usual).expanduser() / "mlxtp" / "descriptions"


@cache
def _made_by() -> str:
    """Return the versions that a description depends on: of the libraries and of our own code."""
    package = Path(__file__).parents[1]
    own = ("description.py", "model_config.py", "model_files.py", "chunks.py")
    sources = [*sorted((package / "engine").glob("*.py")), *(package / name for name in own)]
    code = sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return " ".join((version("mlx"), version("mlx-lm"), code, ""))


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:  # agents may write at once
        file.write(text)
    Path(file.name).replace(path)
    kept = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
    for old in kept[:-MOST_KEPT]:
        old.unlink(missing_ok=True)


def _said_of(text: str) -> str:
    import psutil

    command, environment = [sys.executable, "-m", "mlxtp.engine.describe", "-"], without_secrets(os.environ)
    environment.pop("MLX_DISABLE_COMPILE", None)  # it would change the graph's kernels
    pipe, given = subprocess.PIPE, text
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
    except OSError as error:
        raise ModelError(f"no process can be started that describes the model: {error}") from None
    with process:
        watched, turns = psutil.Process(process.pid), 0
        while True:
            try:
                said, complaint = process.communicate(given or None, timeout=TICK_S)
                break
            except subprocess.TimeoutExpired:
                given, turns = "", turns + 1
            with contextlib.suppress(psutil.Error):
                if why := _excess(watched.memory_info().rss, sum(watched.cpu_times()[:2]), turns * TICK_S):
                    process.kill()
                    raise ModelError(f"its configuration cannot be read: to build its model takes {why}")
    if process.returncode == 0:
        return said
    last = complaint.strip().rpartition("\n")[2]
    if last.startswith(_REFUSED):
        code = Code.MODEL_INVALID if process.returncode == INVALID else Code.MODEL_UNSUPPORTED
        raise ModelError(last.removeprefix(_REFUSED), code)
    log.warning("the process that describes a model ended with %d: %s", process.returncode, complaint[-2000:])
    raise ModelError(f"the process that describes the model ended with status {process.returncode}")


def _excess(resident: int, cpu_s: float, seconds: float) -> str:
    if resident > MOST_BYTES:
        return f"more than {MOST_BYTES >> 30} GiB of memory"
    if cpu_s > MOST_CPU_S or seconds > MOST_S:
        return f"more than {MOST_CPU_S if cpu_s > MOST_CPU_S else MOST_S:g} s"
    return ""

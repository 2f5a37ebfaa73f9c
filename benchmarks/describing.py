"""Time and memory of the processes that describe the largest published models, one for each model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time

from .errors import Unmeasured
from .measures import Row, absolute
from .published_models import folder_of
from .stage import Stage

#: The largest of some families, among them those whose modules take longest.
LARGEST = (
    "qwen3.5-397b-a17b-4bit",
    "deepseek-v3.1-4bit",
    "qwen3-235b-a22b-4bit",
    "glm-5-4bit",
    "kimi-k2-thinking",
)
_RESIDENT_UNIT = (
    1 if sys.platform == "darwin" else 1024
)  # bytes, in which the system counts the most of a process


async def measure(stage: Stage) -> list[Row]:
    names = LARGEST[: stage.pick(full=len(LARGEST), quick=1)]
    slowest, largest = [], []
    for _ in range(stage.pick(full=3, quick=1)):
        seconds, megabytes = zip(*[await asyncio.to_thread(_cost_of, name) for name in names], strict=True)
        slowest.append(max(seconds))
        largest.append(max(megabytes))
    return [
        absolute("description of the largest published models", slowest),
        absolute("description of the largest published models, memory", largest),
    ]


def _cost_of(name: str) -> tuple[float, float]:
    """Return the seconds of a process from start to end, and the most MB of memory that it had."""
    command = (sys.executable, "-m", "mlxtp.engine.describe", str(folder_of(name)))
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        seconds, process.returncode = time.perf_counter() - began, os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise Unmeasured(f"{name} is not described: {said.read().decode()[-300:]}")
    return seconds, used.ru_maxrss * _RESIDENT_UNIT / 1e6

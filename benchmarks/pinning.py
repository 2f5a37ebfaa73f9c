"""Ranks that wait for each other spin; two on one core take turns of milliseconds. So: a core each."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def pin(pid: int, rank: int) -> None:
    """Keep every thread of process `pid` on the core of `rank`. Where the system cannot do it, nothing."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank % len(cores)]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})

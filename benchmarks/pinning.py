"""Ranks that wait for each other spin; two on one core take turns of milliseconds. So: a core each."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: Cores of the whole run: a case may keep this process, and all that it starts, on one of them.
_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


def pin(pid: int, rank: int) -> None:
    """Keep every thread of process `pid` on the core of `rank`. Where the system cannot do it, nothing."""
    if not _CORES:
        return
    core = _CORES[rank % len(_CORES)]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})

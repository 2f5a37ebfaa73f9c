"""`python -m benchmarks.child CORE MODULE ...`: run a module as a program, pinned to a core.

On Linux it ends with its parent. CORE is a rank's number, or `-` for wherever the system puts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

from .pinning import pin

_LINE_BYTES = 1 << 24


async def start(
    core: int | None,
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> asyncio.subprocess.Process:
    """Start `module` in a process of its own: lines in on stdin, lines out unless `output` takes them.

    It stays in the benchmark's session, where the system's scheduler treats it like our own ranks.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.child",
        "-" if core is None else str(core),
        module,
        *arguments,
        stdin=subprocess.PIPE,
        stdout=output if output is not None else subprocess.PIPE,
        stderr=output,
        env={**os.environ, **(environment or {})},
        limit=_LINE_BYTES,
    )


async def end(*processes: asyncio.subprocess.Process) -> None:
    """End processes now, stopped or not, all before one can complain of another's end; and reap them."""
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    for process in processes:
        await process.wait()


def _main() -> None:
    core, module = sys.argv[1:3]
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the benchmark decides
    if core != "-":
        pin(os.getpid(), int(core))
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()

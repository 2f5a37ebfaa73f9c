"""How much memory this machine has left, asked when a request comes."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

from .admission import SystemMemory

FRESH_S = 0.5
"""For how long an answer counts: a crowd of requests asks once."""
CRITICAL = 4
"""Of 1 (normal), 2 (warning) and 4: `kern.memorystatus_vm_pressure_level`, as <dispatch/source.h> has it."""


class FreeMemory:
    """Call it for the memory of now. `look` and `clock` are what tests replace."""

    def __init__(
        self, look: Callable[[], SystemMemory] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look = look or look_at_memory
        self._clock = clock
        self._seen = SystemMemory(0)
        self._until = float("-inf")

    def __call__(self) -> SystemMemory:
        if (now := self._clock()) >= self._until:
            self._seen, self._until = self._look(), now + FRESH_S
        return self._seen


def look_at_memory(system: str = sys.platform, level: Callable[[], int] | None = None) -> SystemMemory:
    """What psutil says is available, and on a Mac whether the kernel calls the pressure critical."""
    import psutil

    available = int(psutil.virtual_memory().available)
    return SystemMemory(available, system == "darwin" and (level or _pressure_level)() >= CRITICAL)


def _pressure_level() -> int:
    """0 when the kernel does not say."""
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    library = ctypes.CDLL(None)
    name = b"kern.memorystatus_vm_pressure_level"
    failed = library.sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else level.value

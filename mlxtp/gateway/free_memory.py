"""Free memory of this machine, read when a request arrives."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

from .admission import SystemMemory

FRESH_S = 0.5  #: Seconds that a reading counts, so that a crowd of requests reads once.
#: Of 1 (normal), 2 (warning) and 4: `kern.memorystatus_vm_pressure_level`, as <dispatch/source.h> has it.
CRITICAL = 4


class FreeMemory:
    """A callable that returns the present memory. Tests replace `look` and `clock`."""

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
    """Read the available memory from psutil, and on a Mac whether the kernel calls the pressure critical."""
    import psutil

    available = int(psutil.virtual_memory().available)
    return SystemMemory(available, system == "darwin" and (level or _pressure_level)() >= CRITICAL)


def _pressure_level() -> int:
    """Return the kernel's level of memory pressure; 0 if it reports none."""
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    library = ctypes.CDLL(None)
    name = b"kern.memorystatus_vm_pressure_level"
    failed = library.sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else level.value

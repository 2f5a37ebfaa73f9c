"""Import of many modules at the start of a process, and what is known of a package without its import."""

from __future__ import annotations

import gc
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def importing() -> Iterator[None]:
    """Let Ctrl-C end the process silently, and collect no garbage, until the context ends.

    The system ends the process: a module being imported could catch or print an exception. A process in the
    background still ignores Ctrl-C. Collections would find nothing, and take a tenth of the start of an
    agent. Later ones skip all that is there at the end of the context.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def metal_wheel() -> str:
    """Return the platform of the installed mlx-metal, such as "macosx_26_0_arm64"; "" without it.

    The wheels of one version for macOS 14, 15 and 26 have unlike kernels.
    """
    import importlib.metadata

    with suppress(importlib.metadata.PackageNotFoundError):
        about = importlib.metadata.distribution("mlx-metal").read_text("WHEEL") or ""
        return "".join(re.findall(r"^Tag: .*-(macosx_\w+)$", about, re.MULTILINE)[:1])
    return ""

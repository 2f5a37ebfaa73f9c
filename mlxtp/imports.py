"""Import of many modules at the start of a process: what Ctrl-C and the garbage collector do meanwhile."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager


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

"""`python -m mlxtp` is the `mlxtp` command."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Entry of the `mlxtp` command. Until it is imported, Ctrl-C ends it at once and without a word."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so in the background
    if heeded:
        signal.signal(signal.SIGINT, _end)
    from .cli import main as run

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _end(_number: int, _frame: FrameType | None) -> None:
    """Nothing has begun. An exception could be caught, or printed, by whatever is just being imported."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()

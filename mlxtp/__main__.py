"""`python -m mlxtp` is the `mlxtp` command."""

from __future__ import annotations

import signal


def main() -> None:
    """Entry of the `mlxtp` command. Until that is imported, Ctrl-C ends the process without a word.

    The system ends it: an exception could be caught, or printed, by whatever is just being imported.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so in the background
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as run

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()

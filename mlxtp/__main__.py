"""`python -m mlxtp` is the `mlxtp` command."""

from __future__ import annotations

from .interrupts import ending_at_once


def main() -> None:
    """Entry of the `mlxtp` command. Until that is imported, Ctrl-C ends the process without a word."""
    with ending_at_once():
        from .cli.main import main as run
    run()


if __name__ == "__main__":
    main()

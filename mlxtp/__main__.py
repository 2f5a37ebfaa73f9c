"""`python -m mlxtp` is the `mlxtp` command."""

from __future__ import annotations

from .interrupts import ending_at_once


def main() -> None:
    """Entry point of the `mlxtp` command. Until the command is imported, Ctrl-C ends the process silently."""
    with ending_at_once():
        from .cli.main import main as run
    run()


if __name__ == "__main__":
    main()

"""`python -m mlxtp` is the `mlxtp` command."""

from __future__ import annotations

from .imports import importing


def main() -> None:
    """Entry point of the `mlxtp` command. Until the command is imported, Ctrl-C ends the process silently."""
    with importing():
        from .cli.main import main as run
    run()


if __name__ == "__main__":
    main()

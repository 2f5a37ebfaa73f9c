"""`python -m mlxtp` is the `mlxtp` command."""

from .cli import main

main()

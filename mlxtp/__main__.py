"""`python -m mlxtp` is the `mlxtp` command."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


def _leave_nothing_of_root() -> None:
    """Write no bytecode behind sudo: files of root in the user's environment would stop `make setup`.

    Bytecode of the package and of this module is written already, and is given to the owner of the package.
    """
    if os.geteuid() != 0 or "SUDO_UID" not in os.environ:
        return
    sys.dont_write_bytecode = True
    folder = Path(__file__).parent
    owner = folder.stat()
    for path in (*folder.glob("__pycache__/__*"), *folder.glob("__pycache__")):
        with suppress(OSError):  # a file system on which root changes nothing
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def main() -> None:
    """Entry point of the `mlxtp` command. Until the command is imported, Ctrl-C ends the process silently."""
    _leave_nothing_of_root()
    from .imports import importing

    with importing():
        from .cli.main import main as run
    run()


if __name__ == "__main__":
    main()

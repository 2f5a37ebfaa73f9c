"""`python -m mlxtp` is the `mlxtp` command."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


def _leave_nothing_of_root() -> None:
    """Keep files of root out of the user's environment under sudo: they would break `make setup`.

    Python then writes no bytecode, and the package's owner gets the files that this start has written.
    """
    if os.geteuid() != 0 or "SUDO_UID" not in os.environ:
        return
    sys.dont_write_bytecode = True
    folder = Path(__file__).parent
    owner = folder.stat()
    for path in (*folder.glob("__pycache__/__*"), *folder.glob("__pycache__")):
        with suppress(OSError):  # not every file system lets root change owners
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def main() -> None:
    """Run the `mlxtp` command. Until it is imported, Ctrl-C ends the process silently."""
    _leave_nothing_of_root()
    from .imports import importing

    with importing():
        from .cli.main import main as run
    run()


if __name__ == "__main__":
    main()

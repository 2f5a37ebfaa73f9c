"""Writes the examples in `launchd/`: `python -m tests.service.examples`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlxtp import __version__
from mlxtp.service.launchd import Launchd, Owner, Service, describe

ROOT = Path(__file__).parents[2]
ME = Owner("me", 501, "/Users/me")


def service(*, login: bool) -> Service:
    """Return the service of a user with the usual folders."""
    return describe(
        ME,
        "/Users/me/Library/Application Support/mlxtp",
        ["--http", "0.0.0.0:52415"],
        python="/Users/me/mlxtp/.venv/bin/python",
        passed_on={},
        drain_s=10,
        login=login,
        version=__version__,
    )


def examples() -> Mapping[Path, str]:
    """Return the text of each file."""
    return {
        ROOT / f"launchd/mlxtp.node.{name}.plist": Launchd(ME, login=login).render(service(login=login))
        for login, name in ((False, "daemon"), (True, "agent"))
    }


if __name__ == "__main__":
    for path, text in examples().items():
        path.write_text(text)

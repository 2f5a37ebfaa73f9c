"""Writes the examples in `launchd/` and `systemd/`: `python -m tests.service.examples`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlxtp import __version__
from mlxtp.service.managers import Launchd, Owner, Service, Systemd, describe

ROOT = Path(__file__).parents[2]


def service(manager: type[Launchd] | type[Systemd], home: str, *, login: bool) -> Service:
    """Return the service of a user with the usual folders."""
    owner = Owner("me", 501, home)
    folder = "Library/Application Support/mlxtp" if manager is Launchd else ".local/share/mlxtp"
    return describe(
        owner,
        f"{home}/{folder}",
        ["--http", "0.0.0.0:52415"],
        python=f"{home}/mlxtp/.venv/bin/python",
        path=manager.search_path,
        passed_on={},
        drain_s=10,
        login=login,
        version=__version__,
    )


def examples() -> Mapping[Path, str]:
    """Return the text of each file."""
    found = {}
    for login, name in ((False, "daemon"), (True, "agent")):
        mac = Launchd(Owner("me", 501, "/Users/me"), login=login)
        found[ROOT / f"launchd/mlxtp.node.{name}.plist"] = mac.render(
            service(Launchd, "/Users/me", login=login)
        )
    for login, folder in ((False, "system"), (True, "user")):
        unit = Systemd(Owner("me", 1000, "/home/me"), login=login)
        text = unit.render(service(Systemd, "/home/me", login=login))
        found[ROOT / f"systemd/{folder}/mlxtp.service"] = text
    return found


if __name__ == "__main__":
    for path, text in examples().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

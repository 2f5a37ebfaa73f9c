"""`mlxtp` with one thing changed: `python -m tests.agents.changed_node THING=VALUE node ...`.

version    what it tells others that its mlxtp is
token_life seconds for which its join tokens are good
issues     what it answers other members that ask it for a join token
stuck      its event loop stands still once it runs; so many turns later it ends
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import mlxtp.cluster.tokens
import mlxtp.node.administration
import mlxtp.node.cluster
import mlxtp.node.supervisor
import mlxtp.node.watchdog
from mlxtp.cli import main
from mlxtp.node.build import versions_here
from mlxtp.node.door import Door


async def stand_still(*_: Any) -> None:
    threading.Event().wait()


def change(thing: str, value: str) -> None:
    match thing:
        case "version":
            _, *others = versions_here()
            told = (f"mlxtp={value}", *others)
            for module in (mlxtp.node.cluster, mlxtp.node.administration):
                module.versions_here = lambda: told  # type: ignore[attr-defined]
        case "token_life":
            mlxtp.cluster.tokens.LIFE_S = float(value)
        case "issues":
            issue = Door.token
            Door.token = lambda door, asked_by="": value if asked_by else issue(door)  # type: ignore[method-assign]
        case "stuck":
            mlxtp.node.watchdog.TURNS = int(value)
            mlxtp.node.supervisor.Supervisor.run = stand_still  # type: ignore[method-assign,assignment]
        case _:
            raise SystemExit(f"nothing here is called {thing}")


if __name__ == "__main__":
    change(*sys.argv.pop(1).split("=", 1))
    main()

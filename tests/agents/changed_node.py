"""`mlxtp` with one thing changed: `python -m tests.agents.changed_node THING=VALUE node ...`.

version    what it tells others that its mlxtp is
token_life seconds for which its join tokens are good
"""

from __future__ import annotations

import sys

import mlxtp.cluster.tokens
import mlxtp.node.administration
import mlxtp.node.cluster
from mlxtp.cli import main
from mlxtp.node.build import versions_here


def change(thing: str, value: str) -> None:
    match thing:
        case "version":
            _, *others = versions_here()
            told = (f"mlxtp={value}", *others)
            for module in (mlxtp.node.cluster, mlxtp.node.administration):
                module.versions_here = lambda: told  # type: ignore[attr-defined]
        case "token_life":
            mlxtp.cluster.tokens.LIFE_S = float(value)
        case _:
            raise SystemExit(f"nothing here is called {thing}")


if __name__ == "__main__":
    change(*sys.argv.pop(1).split("=", 1))
    main()

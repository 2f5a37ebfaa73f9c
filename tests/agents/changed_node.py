"""`mlxtp` without spares, so that all rank processes are ranks: `-m tests.agents.changed_node node ...`.

One more thing is changed with THING=VALUE before `node`.

version    what it tells others that its mlxtp is
stuck      its event loop stands still once it runs; so many turns of half a second later it ends
busy       so many threads of the loop, and so many of a queue, work for ever
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlxtp.admin.handlers
import mlxtp.agent
import mlxtp.background
import mlxtp.cluster.introduction
import mlxtp.groups.lifecycle
from mlxtp.cli.main import main
from mlxtp.cluster.introduction import versions_here


def work_for_ever() -> None:
    while True:
        sum(range(99999))


async def be_busy(threads: int) -> None:
    queue = ThreadPoolExecutor(threads)
    for _ in range(threads):
        queue.submit(work_for_ever)
        asyncio.get_running_loop().run_in_executor(None, work_for_ever)
    print("busy", file=sys.stderr, flush=True)


async def stand_still(*_: Any) -> None:
    threading.Event().wait()


def change(thing: str, value: str) -> None:
    match thing:
        case "version":
            _, *others = versions_here()
            told = (f"mlxtp={value}", *others)
            for module in (mlxtp.cluster.introduction, mlxtp.admin.handlers):
                module.versions_here = lambda: told  # type: ignore[attr-defined]
        case "stuck":
            mlxtp.background.TURNS, mlxtp.background.TURN_S = int(value), 0.5
            mlxtp.groups.lifecycle.Supervisor.run = stand_still  # type: ignore[method-assign,assignment]
        case "busy":
            run = mlxtp.groups.lifecycle.Supervisor.run

            async def busy(*arguments: Any) -> None:
                await be_busy(int(value))
                await run(*arguments)

            mlxtp.groups.lifecycle.Supervisor.run = busy  # type: ignore[method-assign,assignment]
        case _:
            raise SystemExit(f"nothing here is called {thing}")


if __name__ == "__main__":
    mlxtp.agent.running_agent = functools.partial(mlxtp.agent.running_agent, spares=False)
    if "=" in sys.argv[1]:
        change(*sys.argv.pop(1).split("=", 1))
    main()

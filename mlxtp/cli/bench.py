"""`mlxtp bench`: measures speed. `bench_speed` and `bench_fabric` have the details."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from ..client import AgentClient
from .options import AsJson, Home
from .printing import home_of, print_answer

#: Seconds that a measurement may take, on the Mac of any rank 0.
_BENCH_S = 60.0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(bench)


def bench(
    fabric: Annotated[
        bool, typer.Option("--fabric", help="Measure sums and gathers over the group's links, by size.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast the served model reads and writes, as a table to paste. Needs an idle endpoint.

    With --fabric: measure the links between its ranks. Later plans use the result. Needs no API key.
    """
    if fabric:
        from . import bench_fabric

        answer = AgentClient(home_of(home), _BENCH_S).post("bench/fabric")
        drawn = bench_fabric.show if sys.stdout.isatty() else bench_fabric.markdown
        print_answer(answer, as_json, drawn)
        return
    from . import bench_speed
    from .launch import find_served

    agent = AgentClient(home_of(home))
    served = find_served(home_of(home), agent.key)
    with Console(stderr=True, highlight=False).status("") as shown:
        found = bench_speed.measure(served, agent, shown.update)
    print_answer(found, as_json, bench_speed.show)

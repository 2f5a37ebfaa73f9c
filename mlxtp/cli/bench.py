"""`mlxtp bench`: measures; `bench_speed` and `bench_fabric` say how, and show it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from ..client import AgentClient
from .options import AsJson, Home
from .printing import home_of, print_answer

_BENCH_S = 60.0
"""How long measuring may take, wherever rank 0 is."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(bench)


def bench(
    fabric: Annotated[
        bool, typer.Option("--fabric", help="What sums and gathers over the group's links take, by size.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast the served model reads and writes, as a table to paste, while nobody else asks.

    With --fabric: what the links between its ranks take; plans count with it from then on. Needs no API key.
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

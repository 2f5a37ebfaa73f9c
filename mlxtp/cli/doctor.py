"""`mlxtp doctor`: prints the agent's report, or one of its own, or why a group failed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..client import AgentClient, agent_runs
from ..config import resolve_settings
from ..errors import Exit, UserError
from .options import AsJson, Home
from .printing import home_of, print_json

#: Seconds that a report may take; `system_profiler` alone has 20 s.
ASK_S = 60.0


def doctor(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            help="With --postmortem: folders of a failure, from one Mac or several.",
            show_default="the newest",
        ),
    ] = None,
    postmortem: Annotated[
        bool,
        typer.Option(
            "--postmortem", help="Show why a group failed: its ranks' last steps, and the likely cause."
        ),
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Examine this machine, its network and the other members, and print problems with their remedies.

    A running agent does it; without one, this command does. Nothing is changed. The exit status is 1 when
    there is an error, 0 with warnings.
    """
    if postmortem:
        _show_failures(folders, home_of(home), as_json=as_json)
        return
    if folders:
        raise UserError("folders are read with --postmortem: `mlxtp doctor --postmortem FOLDER ...`")
    from ..diagnostics.facts import Level

    report = _report(home)
    if as_json:
        print_json(report)
    else:
        _show(report)
    if report["level"] == Level.ERROR:
        raise typer.Exit(Exit.REFUSED)


def _report(home: Path | None) -> Mapping[str, Any]:
    """Return the agent's report, or this command's own where no agent replies."""
    folder, problem = home_of(home), ""
    if agent_runs(folder):
        try:
            return AgentClient(folder, ASK_S).get("doctor")
        except UserError as error:
            problem = error.detail
    import asyncio

    from ..diagnostics.checkup import Checkup

    settings = resolve_settings({"home": folder}, refuse=lambda _: None)  # the report has the errors
    return asyncio.run(Checkup(settings, problem).report())


def _show(report: Mapping[str, Any]) -> None:
    from ..diagnostics import rows

    console = Console(highlight=False, soft_wrap=True)
    plain = not console.encoding.startswith("utf") or console.legacy_windows
    for line in rows.show(report, console.width, plain=plain):
        console.print(line)


def _show_failures(folders: list[Path] | None, home: Path, *, as_json: bool) -> None:
    """Print failures. Needs no agent."""
    from ..diagnostics import postmortem as examining

    found = examining.postmortems(folders or [examining.newest(home)])
    if as_json:
        print_json(examining.as_json(found))
        return
    console = Console(highlight=False)
    for each in found:
        for line in examining.show(each):
            console.print(line)

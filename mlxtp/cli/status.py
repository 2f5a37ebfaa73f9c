"""`mlxtp status`: the present state and the members of the cluster, as a table."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..client import AgentClient
from .options import AsJson, Home
from .printing import home_of, print_answer

_STATES = {"alive": "green", "ready": "green", "suspect": "yellow", "dead": "red", "failed": "red"}


def status(
    watch: Annotated[
        bool, typer.Option("--watch", help="Update it, with speed and requests, until Ctrl-C.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show the present state: the model, its Macs, and every member of the cluster.

    With --json it is one object with fields of its own; with --watch --json each line is the JSON of the
    agent's page, with the fields that docs/operations.md names.
    """
    if watch:
        from . import watch as watching

        if as_json:
            watching.tell(home_of(home))
        elif sys.stdout.isatty():
            watching.watch(home_of(home))
        else:
            raise typer.BadParameter("--watch needs a terminal; with --json it prints one object a line")
        return
    print_answer(AgentClient(home_of(home)).get("status"), as_json, _shown)


def _shown(answer: Mapping[str, Any]) -> list[Any]:
    state = answer["state"]
    colour = _STATES.get(state, "yellow")
    model = f" [cyan]{escape(answer['model'])}[/]" if answer["model"] else ""
    how = _where(answer) if model else ""
    kind = f", {escape(answer['kind'])}" if answer["kind"] and model else ""
    epoch = f"   epoch {answer['epoch']}" if answer["epoch"] else ""
    lines: list[Any] = [f"[bold {colour}]{state}[/]{model}{how}{kind}{epoch}"]
    if answer["reason"] and state != "ready":
        lines.append(_indented(answer["reason"]))
    if answer.get("problem"):
        lines.append(_indented(answer["problem"], "red"))
    if answer.get("left_wired"):
        lines.append(_indented(answer["left_wired"], "yellow"))
    if "members" in answer:
        lines.append(
            f"cluster {answer['cluster']}, coordinated by {escape(answer['coordinator'] or 'no Mac yet')}"
        )
        wanted = answer["desired"]
        if wanted["model"]:
            spread = "" if wanted["nodes"] == "auto" else f", --nodes {wanted['nodes']}"
            lines.append(f"wanted: {escape(wanted['model'])}{spread}")
        lines += [_indented(each, "cyan") for each in answer.get("coming", ())]
        lines += [_indented(each, "yellow") for each in answer.get("left_out", ())]
        if answer["world_size"] > 1 and answer["state"] == "ready":
            from . import bench_fabric

            known = answer["fabric"]
            said = (
                bench_fabric.summary(known) if known else "speed assumed; `mlxtp bench --fabric` measures it"
            )
            lines.append(f"fabric: {said}")
        lines += members_shown(answer)
        for member in answer["members"]:
            lines += _about(member["name"], member["notes"], "yellow")
    return lines


def _where(answer: Mapping[str, Any]) -> str:
    size = answer["world_size"]
    if "members" in answer:
        return f" on {size} {'Mac' if size == 1 else 'Macs'}"
    return " on this Mac" if size == 1 else f", {size} ranks on this Mac"


def members_shown(answer: Mapping[str, Any]) -> list[Any]:
    """Return the table, and below it the problems that keep members from serving the model."""
    lines: list[Any] = [_members_table(answer)]
    for member in answer["members"]:
        lines += _about(member["name"], filter(None, [member["model_problem"]]), "red")
        lines += _about(member["name"], filter(None, [member.get("model_progress")]), "cyan")
    return lines


def admissions_shown(answer: Mapping[str, Any]) -> list[Any]:
    """Return a line for each member whose admission is known: by which Mac, from where and when."""
    return [
        _indented(
            f"{each['name']} was admitted by {each['admitted_by_name']} "
            f"from {each['joined_from'] or 'itself'}, "
            f"at {datetime.fromtimestamp(each['joined_at']):%Y-%m-%d %H:%M}"
        )
        for each in answer["members"]
        if each.get("joined_at") and each["admitted_by"]
    ]


def _about(name: str, sentences: Iterable[str], colour: str) -> list[Any]:
    """Return a name, and each sentence about it as a paragraph below."""
    said = [_indented(f"- {sentence}", colour) for sentence in sentences]
    return [f"{escape(name)}:", *said] if said else []


def _indented(text: str, colour: str = "") -> Text:
    lines = textwrap.wrap(
        text,
        Console().width,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return Text("\n".join(lines), colour)


def _members_table(answer: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "state", "rank", "address", "machine", "memory", "node id", ""):
        table.add_column(column, justify="right" if column in ("rank", "memory") else "left")
    for member in answer["members"]:
        memory = f"{member['memory_bytes'] / 1e9:.0f} GB" if member["memory_bytes"] else ""
        roles = {"this Mac": member["self"], "coordinator": member["coordinator"]}
        roles["about to stop"] = member["draining"]
        table.add_row(
            escape(member["name"]),
            f"[{_STATES.get(member['state'], 'dim')}]{member['state']}[/]",
            "" if member["rank"] is None else str(member["rank"]),
            member["address"],
            escape(member["chip"]),
            memory,
            escape(member["node_id"][:8]),
            ", ".join(role for role, is_so in roles.items() if is_so),
        )
    return table

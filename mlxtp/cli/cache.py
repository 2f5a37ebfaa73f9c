"""`mlxtp cache`: KV caches that groups keep for later prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..client import AgentClient
from . import shell_completion
from .options import AsJson, Home
from .printing import home_of, print_answer, size_of, table_of

commands = typer.Typer(
    name="cache", no_args_is_help=True, help="Caches of earlier prompts: list and clear them."
)

_NONE = "no group has its rank 0 on this Mac"


@commands.command(name="list")
def list_(home: Home = None, as_json: AsJson = False) -> None:
    """List what each group whose rank 0 is on this Mac keeps for later prompts, and its use so far."""
    answer = AgentClient(home_of(home)).get("caches")
    print_answer(answer, as_json, _table(answer["groups"]) if answer["groups"] else _NONE)


@commands.command()
def clear(
    model: Annotated[
        str,
        typer.Argument(
            help="Name of a model. Default: all that have their rank 0 on this Mac.",
            autocompletion=shell_completion.models,
        ),
    ] = "",
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Drop the caches of earlier prompts. Requests go on; the next turns compute their whole prompts."""
    from ..models.inspect import lasting_name

    answer = AgentClient(home_of(home)).post("caches/clear", model=lasting_name(model) if model else "")
    print_answer(answer, as_json, _cleared)


def _cleared(answer: Mapping[str, Any]) -> list[str]:
    return [f"{escape(each['group'])}: {size_of(each['kept_bytes'])} dropped" for each in answer["groups"]]


def _table(groups: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("kept", "evicted", "prompts that began with one", "tokens reused")
    table = table_of("group", *columns, right=columns)
    for each in groups:
        sizes = (size_of(each[name]) for name in ("kept_bytes", "evicted_bytes"))
        counts = (f"{each[name]:,}" for name in ("reused", "reused_tokens"))
        table.add_row(escape(each["group"]), *sizes, *counts)
    return table

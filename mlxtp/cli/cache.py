"""`mlxtp cache`: KV caches of earlier prompts, in the memory of groups and on this Mac's disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..client import AgentClient, agent_runs
from ..config import resolve_settings
from ..verbs import ClearCaches, ListCaches
from . import options
from .options import AsJson, Home
from .printing import day_of, home_of, print_answer, size_of, table_of

commands = typer.Typer(
    name="cache", no_args_is_help=True, help="Caches of earlier prompts: list and clear them."
)
Json = Mapping[str, Any]


@commands.command(name="list")
def list_(home: Home = None, as_json: AsJson = False) -> None:
    """List the caches of earlier prompts, and their use: in the memory of groups, and on this Mac's disk.

    Only the Mac of a group's rank 0 knows its memory. The disk is also listed while no agent runs.
    """
    print_answer(_kept(home_of(home)), as_json, _listed)


@commands.command()
@options.sends(ClearCaches)
def clear(
    verb: ClearCaches,
    disk: Annotated[bool, typer.Option("--disk", help="Only on this Mac's disk.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Only in the memory of groups whose rank 0 is on this Mac.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Drop the caches of earlier prompts on this Mac, in memory and on its disk.

    Requests go on; the next turns compute their whole prompts. The disk can also be cleared while no agent
    runs.
    """
    from ..models.inspect import lasting_name

    folder, name = home_of(home), lasting_name(verb.model) if verb.model else ""
    where = "" if disk == memory else "disk" if disk else "memory"
    if where == "memory" or agent_runs(folder):
        answer: Json = AgentClient(folder).send(ClearCaches(name, where))
    else:
        from ..models import disk_cache

        removed = disk_cache.clear(disk_cache.folder_in(folder), name, agent_runs=False)
        answer = {"groups": [], "elsewhere": [], "other_macs": [], "disk": disk_cache.by_model(removed)}
    print_answer(answer, as_json, _cleared)


def _kept(home: Path) -> Json:
    if agent_runs(home):
        return AgentClient(home).send(ListCaches())
    from ..models import disk_cache

    settings = resolve_settings({"home": home}, refuse=lambda _: None)
    return {"groups": [], "elsewhere": [], "disk": disk_cache.listed(home, settings.cache_disk)}


def _cleared(answer: Json) -> list[Text]:
    lines = [f"{each['group']}: {size_of(each['kept_bytes'])} dropped" for each in answer["groups"]]
    lines += [
        f"{_model(each)}: {size_of(each['bytes'])} removed from this Mac's disk" for each in answer["disk"]
    ]
    lines = lines or ["nothing of it was on this Mac's disk"]
    lines += [
        f"{each['group']} has its rank 0 on {each['owner']}: clear it there" for each in answer["elsewhere"]
    ]
    if answer["other_macs"]:
        macs = ", ".join(answer["other_macs"])
        lines.append(f"not removed: what is on the disks of {macs}; clear it there")
    return [Text(each) for each in lines]


def _listed(answer: Json) -> list[Any]:
    groups, disk = answer["groups"], answer["disk"]
    found: list[Any] = [_groups(groups) if groups else "no group has its rank 0 on this Mac"]
    found += [
        Text(
            f"{each['group']} keeps {each['cached_tokens'] or 0:,} tokens; its rank 0 is on {each['owner']}, "
            "where `mlxtp cache list` has more"
        )
        for each in answer["elsewhere"]
    ]
    found += ["", Text(f"on this Mac's disk: {_room(disk)}")]
    return [*found, _models(disk["models"])] if disk["models"] else found


def _room(disk: Json) -> str:
    held, room = sum(each["bytes"] for each in disk["models"]), disk["room_bytes"]
    if not room:
        return f"off, {size_of(held)} left in {disk['folder']}" if held else "off"
    return f"{size_of(held)} of {size_of(room)}, in {disk['folder']}"


def _groups(groups: Sequence[Json]) -> Table:
    sizes = {"kept": "kept_bytes", "evicted": "evicted_bytes", "written": "spilled_bytes"}
    counts = {"prompts": "reused", "tokens reused": "reused_tokens", "from disk": "fetched_tokens"}
    table = table_of("group", *sizes, *counts, right=(*sizes, *counts), wrapped=("group",))
    for each in groups:
        table.add_row(
            escape(each["group"]),
            *(size_of(each[name]) for name in sizes.values()),
            *(f"{each[name]:,}" for name in counts.values()),
        )
    return table


def _models(models: Sequence[Json]) -> Table:
    table = table_of(
        "model", "blocks", "size", "ranks", "last used", right=("blocks", "size"), wrapped=("model", "ranks")
    )
    for each in models:
        table.add_row(
            escape(_model(each)),
            f"{each['blocks']:,}",
            size_of(each["bytes"]),
            ranks_of(each["layouts"]),
            day_of(each["used_at"]),
        )
    return table


def _model(each: Json) -> str:
    return each["model"] or "of an unknown model"


def ranks_of(layouts: Sequence[Json]) -> str:
    """Return the ranks whose shares these are, such as "0 of 1; 0, 1 of 2"."""
    by_size: dict[int, set[int]] = {}
    for each in layouts:
        by_size.setdefault(each["ranks"], set()).add(each["rank"])
    return "; ".join(f"{', '.join(map(str, sorted(found)))} of {ranks}" for ranks, found in by_size.items())

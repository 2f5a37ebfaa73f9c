"""`mlxtp status`: the present state and the members of the cluster, as a table; or as they change."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..client import AgentClient
from ..errors import MlxtpError
from ..verbs import Status
from ..wire.cluster_messages import Deployment
from .options import AsJson, Home
from .printing import Console, day_of, home_of, joined, print_answer, size_of, table_of

# --- the table -------------------------------------------------------------------------------------------


def status(
    watch: Annotated[
        bool, typer.Option("--watch", help="Update it, with speed and requests, until Ctrl-C.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show the model, its Macs, and every member of the cluster.

    With --watch --json each line is the JSON of the agent's page, whose fields docs/operations.md names.
    """
    if watch:
        if as_json:
            watch_json(home_of(home))
        elif sys.stdout.isatty():
            watch_table(home_of(home))
        else:
            raise typer.BadParameter("--watch needs a terminal; with --json it prints one object a line")
        return
    print_answer(AgentClient(home_of(home)).send(Status()), as_json, _shown)


def _shown(answer: Mapping[str, Any]) -> list[Any]:
    lines: list[Any] = [_head(answer, f"{_where(answer)}{joined(answer)}")]
    if answer["reason"] not in ("", answer.get("problem")) and answer["state"] != "ready":
        lines.append(_indented(answer["reason"]))
    about = (("problem", "red"), ("left_wired", "yellow"), ("slow_link", "yellow"))
    lines += [_indented(answer[name], colour) for name, colour in about if answer.get(name)]
    lines += map(_indented, (*_caches(answer["caches"]), *_drafts(answer["drafts"]), *_stages(answer)))
    if "members" in answer or len(answer["deployments"]) > 1:
        lines += deployments_shown(answer["deployments"], Console().width)
    if "members" in answer:
        lines.append(
            f"cluster {answer['cluster']}, coordinated by {escape(answer['coordinator'] or 'no Mac yet')}"
        )
        lines += [_indented(each, "cyan") for each in answer["coming"]]
        lines += [_indented(each, "yellow") for each in answer["left_out"]]
        if answer["world_size"] > 1 and answer["state"] == "ready":
            from . import bench

            assumed = "speed assumed; `mlxtp bench --fabric` measures it"
            known = answer["fabric"]
            lines.append(f"fabric: {bench.fabric_summary(known) if known else assumed}")
        lines += members_shown(answer)
        for member in answer["members"]:
            lines += _about(member["name"], member["notes"], "yellow")
    return lines


def _head(told: Mapping[str, Any], how: str, since: str = "") -> Text:
    """Return the first line. `how`: the Macs or ranks that run the model, if there is one."""
    line = Text.assemble((told["state"], f"bold {COLOURS.get(told['state'], 'yellow')}"))
    if told["model"]:
        line.append(" ").append(told["model"], "cyan").append(how)
    return line.append(f"   epoch {told['epoch']}" if told["epoch"] else "").append(since)


def _caches(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for each in groups:
        if not any(each[name] for name in ("kept_bytes", "evicted_bytes", "reused", "disk_bytes")):
            continue
        of = f" of {each['group']}" if len(groups) > 1 else ""
        disk = f", {each['fetched_tokens']:,} of these from disk" if each["fetched"] else ""
        room = f", {size_of(each['disk_bytes'])} of {size_of(each['disk_room_bytes'])} on disk"
        yield (
            f"caches of earlier prompts{of}: {size_of(each['kept_bytes'])} kept"
            f"{room if each['disk_room_bytes'] else ''}, {size_of(each['evicted_bytes'])} evicted; "
            f"{each['reused']:,} prompts began with {each['reused_tokens']:,} of their tokens{disk}"
        )


def _drafts(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield how many drafts were right in each group that had some, and why a group cannot draft."""
    names = {"lookup": "lookup", "mtp": "MTP head", "draft": "draft model"}
    for each in groups:
        of = f" of {each['group']}" if len(groups) > 1 else ""
        if each["note"]:
            yield f"drafts{of}: {each['note']}"
        if not any(each["drafted"].values()):
            continue
        shares = [
            f"{names[name]} {each['accepted'][name] / drafted:.0%} of {drafted:,} right"
            for name, drafted in each["drafted"].items()
            if drafted
        ]
        gain = (
            f"; recent steps gave {each['gain']:.2f} times the tokens of plain ones" if each["gain"] else ""
        )
        yield f"drafts{of}: {', '.join(shares)}; {each['width']:.1f} tokens a step and row at most{gain}"


def _stages(answer: Mapping[str, Any]) -> Iterator[str]:
    shares = {each["rank"]: stage_shares(each) for each in answer["ranks"]}
    said = "; ".join(f"rank {rank} {', '.join(each)}" for rank, each in shares.items() if each)
    several = sum(len(each["groups"]) for each in answer["deployments"]) > 1
    of = f" of {answer['group']}" if several else ""
    if said:
        yield f"stages{of}, of the time with requests: {said}"


def stage_shares(rank: Mapping[str, Any]) -> list[str]:
    """Return a stage's shares of time computing and waiting, in words; [] for other ranks."""
    busy, waiting = rank["stage_busy_us"], rank["stage_waiting_us"]
    if not busy:
        return []
    share = busy / (busy + waiting)
    return [f"busy {share:.0%}", f"waiting {1 - share:.0%}"]


def _where(answer: Mapping[str, Any]) -> str:
    size = answer["world_size"]
    if "members" in answer:
        return f" on {size} {'Mac' if size == 1 else 'Macs'}"
    return " on this Mac" if size == 1 else f", {size} ranks on this Mac"


def members_shown(answer: Mapping[str, Any]) -> list[Any]:
    lines: list[Any] = [_members_table(answer)]
    for member in answer["members"]:
        lines += _about(member["name"], filter(None, [member["model_problem"], member["refused"]]), "red")
        lines += _about(member["name"], filter(None, [member["model_progress"]]), "cyan")
    return lines


def admissions_shown(answer: Mapping[str, Any]) -> list[Any]:
    return [
        _indented(
            f"{each['name']} was admitted by {each['admitted_by_name']} from "
            f"{each['joined_from'] or 'itself'}, at {day_of(each['joined_at'])}"
        )
        for each in answer["members"]
        if each["joined_at"] and each["admitted_by"]
    ]


def _about(name: str, sentences: Iterable[str], colour: str) -> list[Any]:
    said = [_indented(f"- {sentence}", colour) for sentence in sentences]
    return [f"{escape(name)}:", *said] if said else []


def _indented(text: str, colour: str = "") -> Text:
    return _wrapped(text, Console().width, 2, colour)


def _members_table(answer: Mapping[str, Any]) -> Table:
    several = len({each for member in answer["members"] for each in member["works_for"]}) > 1
    work = "works for" if several else "rank"
    columns = ("name", "state", work, "address", "machine", "memory", "node id", "")
    table = table_of(*columns, right=("rank", "memory"))
    for member in answer["members"]:
        rank = "" if member["rank"] is None else str(member["rank"])
        table.add_row(
            escape(member["name"]),
            f"[{COLOURS.get(member['state'], 'dim')}]{member['state']}[/]",
            escape(", ".join(member["works_for"])) if several else rank,
            member["address"],
            escape(member["chip"]),
            f"{member['memory_bytes'] / 1e9:.0f} GB" if member["memory_bytes"] else "",
            escape(member["node_id"][:8]),
            _roles(member),
        )
    return table


def _roles(member: Mapping[str, Any]) -> str:
    roles = {"self": "this Mac", "coordinator": "coordinator", "draining": "about to stop"}
    roles |= {"holds_authority": "can let Macs in"}
    return ", ".join(words for name, words in roles.items() if member.get(name))


# --- --watch: `picture` is pure, the others poll -----------------------------------------------------------

LOOK_S = 1.0  #: Seconds between two polls of the agent.
_ANSWER_S = 5.0
_OPEN = {
    "generating": "generating",
    "first_token": "before the first token",
    "group": "waiting for a group",
    "held_back": "held back",
}
Moment = Mapping[str, Any]


def watch_table(home: Path) -> None:
    console = Console(highlight=False)
    shown: RenderableType = ""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            last: Moment | None = None
            for snapshot, away in _looks(home):
                last = snapshot or last
                shown = picture(last, time.time(), away, console.width)
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        console.print(shown)


def watch_json(home: Path) -> None:
    """Print one JSON object a line whenever something has changed, until Ctrl-C."""
    told = ""
    try:
        for snapshot, away in _looks(home):
            line = json.dumps({"error": away} if snapshot is None else snapshot, ensure_ascii=False)
            if line != told:
                told = line
                print(line, flush=True)
    except KeyboardInterrupt:
        return


def _looks(home: Path) -> Iterator[tuple[Moment | None, Mapping[str, str] | None]]:
    while True:
        try:
            yield AgentClient(home, _ANSWER_S).snapshot(), None
        except MlxtpError as error:
            yield None, {"code": error.code, "message": error.detail}
        time.sleep(LOOK_S)


def picture(
    snapshot: Moment | None, now: float, away: Mapping[str, str] | None = None, width: int = 80
) -> Group:
    """Draw a snapshot at `now` (seconds since 1970). `away`: why there is no newer one."""
    parts: list[RenderableType] = []
    if away is not None:
        parts += [Text(away["message"], "red"), Text("waiting for it; Ctrl-C ends this", "dim"), ""]
    if snapshot is None:
        return Group(*parts)
    history = [each for each in snapshot["history"] if each["group"] == snapshot["shown"]]
    parts += [_state(snapshot, history, now), _speed(snapshot)]
    nodes = snapshot["nodes"]
    about = (("model_problem", "red"), ("refused", "red"), ("model_progress", "cyan"))
    told = {node.get(name) for node in nodes for name, _ in about}  # shown below, with the node's name
    for name, style in (("problem", "red"), ("reason", ""), ("waiting", "yellow")):
        if (words := snapshot[name]) and words not in told and not (name == "reason" and snapshot["ready"]):
            parts.append(Text(f"  {words}", style))
            told.add(words)
    if snapshot["deployments"]:
        parts += ["", *deployments_shown(snapshot["deployments"], width)]
    parts += ["", _nodes(snapshot)]
    parts += [
        Text(f"{node['name']}: {node[name]}", style)
        for node in nodes
        for name, style in about
        if node.get(name)
    ]
    if before := next((each for each in history if each["lasted_s"] is not None), None):
        why = before["reason"] or before["code"] or "unknown reason"
        ended = f"epoch {before['epoch']} ended after {_duration(before['lasted_s'])}: {why}"
        parts += ["", Text(ended, "dim")]
    return Group(*parts)


def _state(snapshot: Moment, history: Sequence[Moment], now: float) -> Text:
    how, group = "", snapshot["group"]
    if group is not None:
        how = f" on {group['world_size']} {'rank' if group['world_size'] == 1 else 'ranks'}{joined(group)}"
    since = [f" for {_duration(now - each['began'])}" for each in history if each["lasted_s"] is None]
    return _head(snapshot, how, "".join(since[:1]))


def _speed(snapshot: Moment) -> Text:
    speed, requests = snapshot["tokens_per_second"], snapshot["requests"]
    line = Text("- tokens/s" if speed["value"] is None else f"{speed['value']:.1f} tokens/s")
    line.append(" (of requests to this Mac)" if speed["of"] == "here" else "")
    parts = [f"{requests[name]} {words}" for name, words in _OPEN.items() if requests.get(name)]
    line.append(f"   open requests: {requests['open']}{': ' if parts else ''}{', '.join(parts)}")
    return line


def _nodes(snapshot: Moment) -> Table:
    columns = ("name", "state", "rank", "phase", "memory", "step", "")
    table = table_of(*columns, right=("rank", "memory", "step"))
    for node in snapshot["nodes"]:
        said = _roles(node)
        name, state = Text(node["name"]), Text(node["state"], COLOURS.get(node["state"], "dim"))
        for cells in _ranks(node["node_id"], snapshot["ranks"]):
            table.add_row(name, state, *cells, said)
            name, state, said = Text(""), Text(""), ""
    return table


def _ranks(node: str, ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each rank of a node, or an empty row. Only rank 0's Mac gets heartbeats."""
    return [
        (
            str(rank["rank"]),
            "\n".join(filter(None, (rank["phase"], *stage_shares(rank)))),
            "" if rank["memory_bytes"] is None else size_of(rank["memory_bytes"]),
            f"{rank['step_us'] / 1000:.1f} ms" if rank["step_us"] else "",
        )
        for rank in ranks
        if rank["node"] == node
    ] or [("", "", "", "")]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


COLOURS = {"alive": "green", "ready": "green", "suspect": "yellow", "dead": "red", "failed": "red"}


def deployments_shown(deployments: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    return [line for each in deployments for line in _deployment(each, width)]


def _deployment(shown: Mapping[str, Any], width: int) -> Iterator[Text]:
    ready, wanted = shown["replicas"]["ready"], shown["replicas"]["wanted"]
    replicas = f"{ready} of {wanted}" if wanted else f"{ready}, as many as fit"
    said = f"{shown['state']}, replicas: {replicas}{_chosen(shown)}"
    line = _wrapped(f"{shown['model']}: {said}", width, 0)
    line.stylize("cyan", 0, len(shown["model"]))
    yield line
    why = shown["why"]
    told = set()
    for group in shown["groups"]:
        for text in _group(group):
            yield _wrapped(text, width, 2, COLOURS.get(group["state"], "yellow"))
        if group["why"] and group["why"] not in told and group["state"] != "ready":
            told.add(group["why"])
            yield _wrapped(group["why"], width, 5)
    if why and not told:
        yield _wrapped(why, width, 2)


def _chosen(shown: Mapping[str, Any]) -> str:
    found = chosen(shown, "replicas", "on", "keep_s")
    found += [f"on {' and '.join(shown['on'])} only"] if shown["on"] else []
    if not shown["pinned"]:
        found.append(kept(shown["keep_s"]))
    return "".join(f", {each}" for each in found)


def chosen(shown: Mapping[str, Any], *but: str) -> list[str]:
    """Return the options that a user chose for a deployment, except the fields `but`."""
    asked = Deployment("").wishes().items()
    return [f"--{name} {shown[name]}" for name, value in asked if name not in but and shown[name] != value]


def kept(keep_s: int | None) -> str:
    if keep_s is None:
        return "until its memory is needed"
    return f"until it is unused for {keep_s} s" if keep_s else "until it has answered"


def _group(group: Mapping[str, Any]) -> list[str]:
    number = group["id"].rpartition("#")[2]
    if not group["members"]:
        owner = f", to run on {group['owner_name']}" if group["owner"] else ""
        return [f"#{number} {group['state']}{owner}"]
    macs = " + ".join(
        each["name"] + (" (owner)" if each["node_id"] == group["owner"] and len(group["members"]) > 1 else "")
        for each in group["members"]
    )
    work = [f"requests: {group['requests']['running']} running, {group['requests']['waiting']} waiting"]
    if group["tokens_per_second"] is not None:
        work.append(f"{group['tokens_per_second']} tokens/s")
    if group["cached_tokens"]:
        work.append(f"{group['cached_tokens']:,} tokens cached")
    notes = [group["exposed"]] if group["exposed"] else []
    if group["faster"]:
        notes.append(f"faster: {group['faster']}; `mlxtp serve MODEL --again` moves it")
    return [
        f"#{number} {group['state']} on {macs}{joined(group)}, epoch {group['epoch']}",
        f"   {', '.join(work)}",
        *(f"   {note}" for note in notes),
    ]


def _wrapped(text: str, width: int, indent: int, style: str = "") -> Text:
    indent += len(text) - len(text.lstrip())
    lines = textwrap.wrap(
        text.lstrip(),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return Text("\n".join(lines), style)

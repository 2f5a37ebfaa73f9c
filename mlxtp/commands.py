"""The commands that ask a running agent: status, serve, unload, token, cluster, plan. Printing only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import plan as planning
from .client import AgentClient, agent_runs
from .cluster import hardware
from .cluster.identity import Store
from .cluster.known import KNOWN
from .cluster.placement import Options
from .cluster.topology import Member
from .config import resolve_settings
from .errors import MlxtpError, UserError
from .node.models import find_config, is_hub_id, lasting_name
from .wire.machine import Interface, Machine, Port

Home = Annotated[Path | None, typer.Option(help="Folder of the node's state; also MLXTP_HOME.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_STATES = {"alive": "green", "ready": "green", "suspect": "yellow", "dead": "red", "failed": "red"}


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(status)
    app.command()(serve)
    app.command()(unload)
    app.command()(token)
    app.command()(plan)
    cluster = typer.Typer(no_args_is_help=True, help="Who belongs to the cluster.")
    cluster.command()(members)
    cluster.command()(remove)
    cluster.command()(leave)
    app.add_typer(cluster, name="cluster")


def status(home: Home = None, as_json: AsJson = False) -> None:
    """What runs now: the group, its model, and every member."""
    with _refusing():
        _print(_agent(home).get("status"), as_json, _show_status)


def serve(
    model: Annotated[str, typer.Argument(help="A model folder, or an id on the Hub.")],
    nodes: Annotated[str, typer.Option(metavar="auto|all|N", help="How many Macs to spread it over.")] = "",
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Serve a model on the whole cluster; from any member."""
    with _refusing():
        answer = _agent(home).post("serve", model=lasting_name(model) if model else "", nodes=nodes)
        _print(answer, as_json, lambda a: f"{a['model']} shall be served; `mlxtp status` shows how far it is")


def unload(home: Home = None, as_json: AsJson = False) -> None:
    """Serve nothing; from any member."""
    with _refusing():
        _print(_agent(home).post("unload"), as_json, lambda _: "nothing shall be served")


def token(home: Home = None, as_json: AsJson = False) -> None:
    """A join token for one more Mac, valid for 15 minutes."""
    with _refusing():
        answer = _agent(home).post("token")
        _print(answer, as_json, lambda a: str(a["token"]))


def members(home: Home = None, as_json: AsJson = False) -> None:
    """Everybody that belongs to the cluster, present or not."""
    with _refusing():
        _print(_agent(home).get("members"), as_json, _members_table)


def remove(
    node: Annotated[str, typer.Argument(help="Its name, or the beginning of its id.")],
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Take a member out of the cluster: its links are cut, its key counts no more."""
    with _refusing():
        answer = _agent(home).post("remove", node=node)
        _print(answer, as_json, lambda a: f"{a['removed']} is no member any more")


def leave(
    force: Annotated[
        bool, typer.Option("--force", help="Also when this Mac founded the cluster, which ends joining it.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Have this Mac forget its cluster. A running agent tells the others, and ends."""
    with _refusing():
        folder = _home(home)
        try:
            answer = AgentClient(folder).post("leave", force="yes" if force else "")
        except UserError as error:
            if error.code != "not_ready" or agent_runs(folder):
                raise
            identity = Store(folder).load() if Store(folder).folder.exists() else None
            if identity is None or identity.membership is None:
                raise UserError(f"{folder} belongs to no cluster") from None
            if identity.authority is not None and not force:
                raise UserError(
                    "this Mac founded its cluster and alone can let others in; `mlxtp cluster leave --force` "
                    "leaves all the same"
                ) from None
            Store(folder).leave()
            answer = {"left": identity.cluster_id, "members": None}
        _print(answer, as_json, _farewell)


def plan(
    model: Annotated[str, typer.Option(help="A model folder, its config.json, or a model known by name.")],
    nodes: Annotated[
        Path | None, typer.Option(help="A file of machines one could have; default: those of the cluster.")
    ] = None,
    spread: Annotated[
        str, typer.Option(metavar="auto|all|N", help="How many Macs to spread it over.")
    ] = "auto",
    backend: Annotated[str, typer.Option(metavar="auto|jaccl|ring")] = "auto",
    max_context: Annotated[int, typer.Option(help="Tokens whose KV cache must have room.")] = 0,
    fast_fences: Annotated[bool, typer.Option(help="As if MLX_METAL_FAST_SYNCH=1 were set.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Who could serve a model, how fast, and why. Nothing is started."""
    with _refusing():
        coordinator = ""
        if nodes is not None:
            found = planning.read_nodes_file(nodes)
        else:
            found, coordinator = _members_here(_home(home))
        wanted: str | int = int(spread) if spread.isdecimal() else spread
        options = Options(backend=backend, nodes=wanted, max_context=max_context, fast_fences=fast_fences)
        known = model in KNOWN or not is_hub_id(model)
        shaped = model if known else find_config(model)
        made = planning.run(shaped, found, coordinator=coordinator, options=options, as_json=as_json)
    if made.chosen is None:
        raise typer.Exit(1)


def _members_here(home: Path) -> tuple[tuple[Member, ...], str]:
    """The machines of the cluster, or this one alone when no agent runs."""
    try:
        told = AgentClient(home).get("plan")
    except UserError:
        machine = asyncio.run(hardware.probe())
        return (Member("this", "this Mac", machine),), "this"
    found = tuple(
        Member(node["node_id"], node["name"], _machine(node["machine"]), held_bytes=node["held_bytes"])
        for node in told["nodes"]
    )
    return found, str(told["coordinator"])


def _machine(fields: Mapping[str, Any]) -> Machine:
    interfaces = tuple(Interface(**each) for each in fields["interfaces"])
    ports = tuple(Port(**each) for each in fields["ports"])
    rest = {**fields, "interfaces": interfaces, "ports": ports, "notes": tuple(fields["notes"])}
    return Machine(**rest)


# --- printing ---------------------------------------------------------------------------------------


class _refusing:
    """An error is one red line on stderr, and exit status 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, MlxtpError):
            console = Console(stderr=True, highlight=False, soft_wrap=True)
            console.print(f"[bold red]mlxtp:[/] {escape(error.detail)}")
            raise typer.Exit(1)


def _home(home: Path | None) -> Path:
    return resolve_settings({"home": home}).home.resolve()


def _agent(home: Path | None) -> AgentClient:
    return AgentClient(_home(home))


def _print(answer: Mapping[str, Any], as_json: bool, show: Any) -> None:
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
        return
    shown = show(answer)
    if isinstance(shown, str):
        print(shown)
        return
    console = Console(highlight=False)
    for part in shown if isinstance(shown, list) else [shown]:
        console.print(part)


def _show_status(answer: Mapping[str, Any]) -> list[Any]:
    state = answer["state"]
    colour = _STATES.get(state, "yellow")
    model = f" [cyan]{escape(answer['model'])}[/]" if answer["model"] else ""
    how = f" on {answer['world_size']} {'Mac' if answer['world_size'] == 1 else 'Macs'}" if model else ""
    kind = f", {escape(answer['kind'])}" if answer["kind"] and model else ""
    lines: list[Any] = [f"[bold {colour}]{state}[/]{model}{how}{kind}   epoch {answer['epoch']}"]
    if answer["reason"] and state != "ready":
        lines.append(f"  {escape(answer['reason'])}")
    if answer.get("problem"):
        lines.append(f"  [red]{escape(answer['problem'])}[/]")
    if "members" in answer:
        lines.append(
            f"cluster {answer['cluster']}, coordinated by {escape(answer['coordinator'] or 'nobody yet')}"
        )
        wanted = answer["desired"]
        if wanted["model"]:
            spread = "" if wanted["nodes"] == "auto" else f", --nodes {wanted['nodes']}"
            lines.append(f"wanted: {escape(wanted['model'])}{spread}")
        lines.append(_members_table(answer))
        for member in answer["members"]:
            lines += [f"[dim]{escape(member['name'])}: {escape(note)}[/]" for note in member["notes"]]
    return lines


def _members_table(answer: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "state", "rank", "address", "machine", "memory", "node id", ""):
        table.add_column(column, justify="right" if column in ("rank", "memory") else "left")
    for member in answer["members"]:
        memory = f"{member['memory_bytes'] / 1e9:.0f} GB" if member["memory_bytes"] else ""
        remarks = [
            word
            for word, is_so in (("this Mac", member["self"]), ("coordinator", member["coordinator"]))
            if is_so
        ]
        remarks += [member["model_problem"]] if member["model_problem"] else []
        table.add_row(
            escape(member["name"]),
            f"[{_STATES.get(member['state'], 'dim')}]{member['state']}[/]",
            "" if member["rank"] is None else str(member["rank"]),
            member["address"],
            escape(member["chip"]),
            memory,
            member["node_id"][:8],
            escape(", ".join(remarks)),
        )
    return table


def _farewell(answer: Mapping[str, Any]) -> str:
    left = f"this Mac left cluster {answer['left']}"
    if answer["members"] is None:
        return f"{left}; its agent did not run, so run `mlxtp cluster remove` on another member too"
    return left

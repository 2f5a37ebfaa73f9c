"""The commands that ask a running agent, such as status, serve, drain or plan. Printing only."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import webbrowser
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..client import AgentClient, agent_runs, wait_for_end
from ..config import home_folder, parse_nodes, parse_seconds
from ..errors import Code, Exit, UserError
from . import completions

if TYPE_CHECKING:
    from ..cluster.topology import Member
    from ..wire.fabric import FabricResult
    from ..wire.machine import Machine

Home = Annotated[
    Path | None, typer.Option(help="Which agent to ask, if it was started with a --home; also MLXTP_HOME.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, also for an error.")]
_BENCH_S = 60.0
"""How long measuring may take, wherever rank 0 is."""
_HUB_S = 60.0
"""How long an agent may take to ask the Hub what a model is."""
_STATES = {"alive": "green", "ready": "green", "suspect": "yellow", "dead": "red", "failed": "red"}


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(serve)
    app.command()(unload)
    app.command()(status)
    app.command()(drain)
    app.command()(plan)
    app.command()(bench)
    app.command()(token)
    app.command()(page)
    cluster = typer.Typer(
        no_args_is_help=True, help="Who belongs to the cluster: list members, remove one, or leave."
    )
    cluster.command()(members)
    cluster.command()(remove)
    cluster.command()(leave)
    app.add_typer(cluster, name="cluster")


def status(
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on showing it, with speed and requests, until Ctrl-C.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show what runs now: the model, on which Macs, and every member of the cluster."""
    if watch:
        from . import watch as watching

        if as_json:
            watching.tell(_home(home))
        elif sys.stdout.isatty():
            watching.watch(_home(home))
        else:
            raise typer.BadParameter("--watch needs a terminal; with --json it prints one object a line")
        return
    _print(_agent(home).get("status"), as_json, _show_status)


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="A model folder that every Mac has, or an id on the Hugging Face Hub (OWNER/NAME).",
            autocompletion=completions.models,
        ),
    ],
    nodes: Annotated[
        str,
        typer.Option(
            metavar="auto|all|N",
            help="How many Macs to spread it over; auto: as many as are fastest. Default: as said last.",
        ),
    ] = "",
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Say which model the cluster shall serve from now on. Works on any Mac of it."""
    from ..node.store.models import lasting_name

    client = AgentClient(_home(home), _HUB_S)
    answer = client.post("serve", model=lasting_name(model) if model else "", nodes=nodes)
    _print(answer, as_json, lambda a: f"{a['model']} shall be served; `mlxtp status` shows how far it is")


def unload(home: Home = None, as_json: AsJson = False) -> None:
    """Have the cluster serve no model any more. Works on any Mac of it."""
    _print(_agent(home).post("unload"), as_json, lambda _: "nothing shall be served")


def drain(
    within: Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="End then, whatever is open. Default: as long as it takes."),
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Stop mlxtp on this Mac once its requests are done: no new ones, and other Macs go on if they can."""
    cut = drain_agent(_home(home), within)
    _print({"ended": True, "cut": cut}, as_json, _drained)


def drain_agent(folder: Path, within: str | None) -> int:
    """Drain the agent of a home, and wait until it has ended. Returns how many requests were cut.

    Raises UserError when none runs there, ConfigError when `within` is no number of seconds.
    """
    if within is not None:
        parse_seconds(within, "--within")
    client = AgentClient(folder)
    progress = client.post("drain", within=within or "")
    with Console(stderr=True, highlight=False).status(_drain_line(progress)) as shown:
        while not progress["over"]:
            try:
                progress = client.get("progress")
            except UserError:  # it ended between two questions
                break
            shown.update(_drain_line(progress))
        shown.update("ending")
        wait_for_end(folder)
    return int(progress["open_requests"])


def token(home: Home = None, as_json: AsJson = False) -> None:
    """Print a join token: it lets one more Mac in, within 15 minutes, by `mlxtp node --join TOKEN` there."""
    answer = _agent(home).post("token")
    _print(answer, as_json, lambda a: str(a["token"]))


def page(
    open_it: Annotated[bool, typer.Option("--open", help="Open it in this user's browser.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Print where the page of this Mac's agent is, with the key by which it may load models.

    The key counts until the agent ends. Whoever has the address can do what the commands here can.
    """
    client = _agent(home)
    client.get("status")
    url = client.page
    if open_it and not webbrowser.open(url):
        raise UserError(f"no browser can be opened here; the page is at {url}")
    _print({"url": url}, as_json, lambda a: str(a["url"]))


def members(home: Home = None, as_json: AsJson = False) -> None:
    """List every Mac that belongs to the cluster, present or not."""
    _print(_agent(home).get("members"), as_json, _show_members)


def remove(
    node: Annotated[
        str,
        typer.Argument(
            help="Its name, or the beginning of its node id: see `mlxtp cluster members`.",
            autocompletion=completions.members,
        ),
    ],
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Take another Mac out of the cluster, here or away. It comes back only with a new join token."""
    if not node.strip():
        raise UserError("which member? Its name, or the beginning of its id: see `mlxtp cluster members`")
    answer = _agent(home).post("remove", node=node)
    _print(answer, as_json, lambda a: f"{a['removed']} is no member any more")


def leave(
    force: Annotated[
        bool,
        typer.Option("--force", help="Also if this Mac founded the cluster: nobody can join it afterwards."),
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Take this Mac out of its cluster. A running agent tells the others, and ends."""
    from ..cluster.identity import Store

    folder = _home(home)
    try:
        answer = AgentClient(folder).post("leave", force="yes" if force else "")
    except UserError as error:
        if error.code is not Code.NOT_READY or agent_runs(folder):
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
    model: Annotated[
        str,
        typer.Option(
            metavar="M",
            help="A model folder, its config.json, an id on the Hugging Face Hub, or a name that is known "
            "here, such as llama-3.3-70b-4bit; any other word lists them.",
            autocompletion=completions.planned,
        ),
    ],
    nodes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A TOML file of Macs you do not have. Default: those of the cluster."
        ),
    ] = None,
    spread: Annotated[
        str,
        typer.Option(
            metavar="auto|all|N", help="How many Macs to spread it over; auto: as many as are fastest."
        ),
    ] = "auto",
    backend: Annotated[
        str, typer.Option(metavar="auto|jaccl|ring", help="How ranks of several Macs talk: RDMA or TCP.")
    ] = "auto",
    max_context: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            help="Most tokens of prompt and answer.",
            show_default="8192, or the model's own if that is less",
        ),
    ] = 0,
    fast_fences: Annotated[
        bool, typer.Option("--fast-fences", help="As if `mlxtp node --fast-fences` ran on each.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show which Macs could serve a model, how fast, and why. Nothing is started."""
    from ..cluster.known import KNOWN
    from ..cluster.measurements import measured
    from ..cluster.placement import Options
    from ..node.store.models import find_config, is_hub_id
    from . import plan as planning

    if not model.strip():
        raise UserError("which model? A folder, an id on the Hub, or a known name: `mlxtp plan --help`")
    number = parse_nodes(spread, "--spread")
    wanted: str | int = int(number) if number.isdecimal() else number
    coordinator = ""
    results: tuple[FabricResult, ...] = ()
    if nodes is not None:
        found = planning.read_nodes_file(nodes)
    else:
        found, coordinator, results = _members_here(_home(home))
    options = Options(
        backend=backend,
        nodes=wanted,
        max_context=max_context,
        fast_fences=fast_fences,
        measured=measured(results, fast_fences=fast_fences),
    )
    known = model in KNOWN or not is_hub_id(model)
    shaped = model if known else find_config(model)
    made = planning.run(shaped, found, coordinator=coordinator, options=options, as_json=as_json)
    if made.chosen is None:
        raise typer.Exit(Exit.REFUSED)


def bench(
    fabric: Annotated[
        bool, typer.Option("--fabric", help="What sums and gathers over the group's links take, by size.")
    ] = False,
    key: Annotated[
        str,
        typer.Option(metavar="KEY", help="The API key, where the endpoint asks for one; also MLXTP_KEY."),
    ] = "",
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast the served model reads and writes, as a table to paste, while nobody else asks.

    With --fabric: what the links between its ranks take; plans count with it from then on.
    """
    if fabric:
        from . import bench as benching

        answer = AgentClient(_home(home), _BENCH_S).post("bench/fabric")
        _print(answer, as_json, benching.show)
        return
    from . import bench_speed as speed
    from .launch import find_served

    served = find_served(_home(home), key or os.environ.get("MLXTP_KEY", ""))
    with Console(stderr=True, highlight=False).status("") as shown:
        found = speed.measure(served, AgentClient(_home(home)), shown.update)
    _print(found, as_json, speed.show)


def _members_here(home: Path) -> tuple[tuple[Member, ...], str, tuple[FabricResult, ...]]:
    """The machines of the cluster, or this one alone when no agent runs; who leads; what was measured."""
    import asyncio

    from ..cluster import hardware
    from ..cluster.measurements import from_json
    from ..cluster.topology import Member

    try:
        told = AgentClient(home).get("plan")
    except UserError:
        machine = asyncio.run(hardware.probe())
        return (Member("this", "this Mac", machine),), "this", ()
    found = tuple(
        Member(node["node_id"], node["name"], _machine(node["machine"]), held_bytes=node["held_bytes"])
        for node in told["nodes"]
    )
    return found, str(told["coordinator"]), tuple(map(from_json, told["fabric"]))


def _machine(fields: Mapping[str, Any]) -> Machine:
    from ..wire.machine import Interface, Machine, Port

    interfaces = tuple(Interface(**each) for each in fields["interfaces"])
    ports = tuple(Port(**each) for each in fields["ports"])
    rest = {**fields, "interfaces": interfaces, "ports": ports, "notes": tuple(fields["notes"])}
    return Machine(**rest)


# --- printing ---------------------------------------------------------------------------------------


def _home(home: Path | None) -> Path:
    return home_folder(home).resolve()


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
    how = _where(answer) if model else ""
    kind = f", {escape(answer['kind'])}" if answer["kind"] and model else ""
    lines: list[Any] = [f"[bold {colour}]{state}[/]{model}{how}{kind}   epoch {answer['epoch']}"]
    if answer["reason"] and state != "ready":
        lines.append(_indented(answer["reason"]))
    if answer.get("problem"):
        lines.append(_indented(answer["problem"], "red"))
    if "members" in answer:
        lines.append(
            f"cluster {answer['cluster']}, coordinated by {escape(answer['coordinator'] or 'nobody yet')}"
        )
        wanted = answer["desired"]
        if wanted["model"]:
            spread = "" if wanted["nodes"] == "auto" else f", --nodes {wanted['nodes']}"
            lines.append(f"wanted: {escape(wanted['model'])}{spread}")
        if answer["world_size"] > 1 and answer["state"] == "ready":
            from . import bench as benching

            known = answer["fabric"]
            said = benching.summary(known) if known else "speed assumed; `mlxtp bench --fabric` measures it"
            lines.append(f"fabric: {said}")
        lines += _show_members(answer)
        for member in answer["members"]:
            lines += _about(member["name"], member["notes"], "yellow")
    return lines


def _where(answer: Mapping[str, Any]) -> str:
    size = answer["world_size"]
    if "members" in answer:
        return f" on {size} {'Mac' if size == 1 else 'Macs'}"
    return " on this Mac" if size == 1 else f", {size} ranks on this Mac"


def _show_members(answer: Mapping[str, Any]) -> list[Any]:
    """The table, and below it what keeps members from serving the model."""
    lines: list[Any] = [_members_table(answer)]
    for member in answer["members"]:
        lines += _about(member["name"], filter(None, [member["model_problem"]]), "red")
        lines += _about(member["name"], filter(None, [member.get("model_progress")]), "cyan")
    return lines


def _about(name: str, sentences: Iterable[str], colour: str) -> list[Any]:
    """Who it is about, and below each sentence as a paragraph of its own."""
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


def _drain_line(progress: Mapping[str, Any]) -> str:
    limit = "" if progress["left_s"] is None else f", {progress['left_s']:.0f} s left"
    return f"draining: open requests: {progress['open_requests']}{limit}"


def _drained(answer: Mapping[str, Any]) -> str:
    cut = f"; requests that were cut: {answer['cut']}" if answer["cut"] else ""
    return f"mlxtp has stopped on this Mac{cut}"


def _farewell(answer: Mapping[str, Any]) -> str:
    left = f"this Mac left cluster {answer['left']}"
    if answer["members"] is None:
        return f"{left}; its agent did not run, so run `mlxtp cluster remove` on another member too"
    return left

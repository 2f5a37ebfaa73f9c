"""The commands that tell a running agent something: serve, unload, drain, token, page, cluster."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..client import AgentClient, agent_runs, wait_for_end
from ..config import parse_nodes, parse_seconds
from ..errors import Code, UserError
from ..settings import BY_KEY
from . import shell_completion
from .options import AsJson, Home
from .printing import home_of, print_answer, typed
from .status import admissions_shown, members_shown, status

_HUB_S = 60.0
"""How long an agent may take to ask the Hub what a model is."""


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(serve)
    app.command()(unload)
    app.command()(status)
    app.command()(drain)
    app.command()(token)
    app.command()(page)
    cluster = typer.Typer(
        no_args_is_help=True, help="Who belongs to the cluster: list members, remove one, or leave."
    )
    cluster.command()(members)
    cluster.command()(remove)
    cluster.command()(leave)
    app.add_typer(cluster, name="cluster")


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="A model folder that every Mac has, a plain name for one that is in a --model-folder of "
            "each, or an id on the Hugging Face Hub (OWNER/NAME).",
            autocompletion=shell_completion.models,
        ),
    ],
    nodes: Annotated[
        str,
        typer.Option(
            metavar=BY_KEY["nodes"].metavar,
            help="How many Macs to spread it over; auto: as many as are fastest. Default: as said last.",
            autocompletion=shell_completion.words(BY_KEY["nodes"].metavar),
        ),
    ] = "",
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Say which model the cluster shall serve from now on. Works on any Mac of it."""
    from ..models.names import lasting_name

    if nodes:
        with typed():
            parse_nodes(nodes, "--nodes")
    client = AgentClient(home_of(home), _HUB_S)
    answer = client.post("serve", model=lasting_name(model) if model else "", nodes=nodes)
    print_answer(answer, as_json, _wished)


def unload(home: Home = None, as_json: AsJson = False) -> None:
    """Have the cluster serve no model any more. Works on any Mac of it."""
    print_answer(AgentClient(home_of(home)).post("unload"), as_json, lambda _: "nothing shall be served")


def drain(
    within: Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="End then, whatever is open. Default: as long as it takes."),
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Stop mlxtp on this Mac once its requests are done: no new ones, and other Macs go on if they can."""
    cut = drain_agent(home_of(home), within)
    print_answer({"ended": True, "cut": cut}, as_json, _drained)


def drain_agent(folder: Path, within: str | None) -> int:
    """Drain the agent of a home, and wait until it has ended. Returns how many requests were cut.

    Raises UserError when none runs there, ConfigError when `within` is no number of seconds.
    """
    if within is not None:
        with typed():
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
    answer = AgentClient(home_of(home)).post("token")
    print_answer(answer, as_json, lambda a: str(a["token"]))


def page(
    open_it: Annotated[bool, typer.Option("--open", help="Open it in this user's browser.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Print where the page of this Mac's agent is, with the key by which it may load models.

    The key counts until the agent ends. Whoever has the address can do what the commands here can.
    """
    client = AgentClient(home_of(home))
    client.get("status")
    url = client.page
    if open_it and not webbrowser.open(url):
        raise UserError(f"no browser can be opened here; the page is at {url}")
    print_answer({"url": url}, as_json, lambda a: str(a["url"]))


def members(home: Home = None, as_json: AsJson = False) -> None:
    """List every Mac that belongs to the cluster, present or not, and who let it in, from where and when."""
    answer = AgentClient(home_of(home)).get("members")
    print_answer(answer, as_json, lambda a: [*members_shown(a), *admissions_shown(a)])


def remove(
    node: Annotated[
        str,
        typer.Argument(
            help="Its name, or the beginning of its node id: see `mlxtp cluster members`.",
            autocompletion=shell_completion.members,
        ),
    ],
    with_admitted: Annotated[
        bool | None,
        typer.Option(
            "--with-admitted/--without-admitted",
            help="Remove also the Macs that it let in. Default: ask in a terminal, else name them.",
        ),
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Take another Mac out of the cluster, here or away. It comes back only with a new join token.

    Join tokens for which it asked are void from then on.
    """
    if not node.strip():
        raise UserError("which member? Its name, or the beginning of its id: see `mlxtp cluster members`")
    client = AgentClient(home_of(home))
    if with_admitted is None and not as_json and sys.stdin.isatty():
        found = client.post("let_in", node=node)
        if found["let_in"]:
            with_admitted = typer.confirm(f"{found['name']} let in {_names(found)}. Remove them too?")
    answer = client.post("remove", node=node, with_admitted="yes" if with_admitted else "")
    print_answer(answer, as_json, _removed)


def leave(
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also if this Mac founded a cluster of several: nobody can join it afterwards.",
        ),
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Take this Mac out of its cluster. A running agent tells the others, and ends."""
    from ..cluster import saved_state
    from ..identity.store import Store

    folder = home_of(home)
    try:
        answer = AgentClient(folder).post("leave", force="yes" if force else "")
    except UserError as error:
        if error.code is not Code.NOT_READY or agent_runs(folder):
            raise
        identity = Store(folder).load() if Store(folder).folder.exists() else None
        if identity is None or identity.membership is None:
            raise UserError(f"{folder} belongs to no cluster") from None
        alone = set(saved_state.load(folder)[0].beliefs.roster.members()) == {identity.node_id}
        if identity.authority is not None and not alone and not force:
            raise UserError(
                "this Mac founded its cluster and alone can let others in; `mlxtp cluster leave --force` "
                "leaves all the same"
            ) from None
        Store(folder).leave()
        answer = {"left": identity.cluster_id, "members": 0 if alone else None}
    print_answer(answer, as_json, _farewell)


def _names(answer: Mapping[str, Any]) -> str:
    return ", ".join(f"{each['name']} ({each['node_id'][:8]})" for each in answer["let_in"])


def _removed(answer: Mapping[str, Any]) -> list[str]:
    lines = [f"{answer['removed']} is no member any more"]
    if answer["let_in"] and answer["with_admitted"]:
        lines.append(f"nor are the Macs that it let in: {_names(answer)}")
    elif answer["let_in"]:
        lines.append(f"it let in {_names(answer)}, still members: `mlxtp cluster remove` takes them out")
    if answer["others"] and not answer["saved_by"]:
        lines.append("no other Mac has this on its disk yet; keep this one on until `mlxtp status` shows one")
    return [escape(line) for line in lines]


def _wished(answer: Mapping[str, Any]) -> str:
    looking = "`mlxtp status` shows how far it is"
    if not answer.get("coming"):
        return f"{answer['model']} shall be served; {looking}"
    until = answer["until_then"]
    return f"{answer['model']} is on its way, and served once it is here; until then {until} is. {looking}"


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

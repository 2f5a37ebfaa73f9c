"""Commands for a running agent: serve, unload, drain, token, page, cluster."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from .. import verbs
from ..client import AgentClient, agent_runs, wait_for_end
from ..errors import Code, UserError
from ..settings import BY_KEY
from . import options
from .options import AsJson, Home
from .printing import Console, home_of, print_answer, print_json, typed
from .status import admissions_shown, chosen, kept, members_shown

commands = typer.Typer(
    name="cluster", no_args_is_help=True, help="Members of the cluster: list them, remove one, or leave."
)
authority = typer.Typer(
    name="authority",
    no_args_is_help=True,
    help="The key that lets Macs in: the Macs that hold it. `mlxtp cluster members` lists them.",
)
commands.add_typer(authority)


@options.sends(verbs.Serve)
def serve(verb: verbs.Serve, home: Home = None, as_json: AsJson = False) -> None:
    """Serve a model next to the others, or change how it is served. Works on any member."""
    print_answer(AgentClient(home_of(home)).send(_lasting(verb)), as_json, _wished)


@options.sends(verbs.UnloadModel)
def unload(verb: verbs.UnloadModel, home: Home = None, as_json: AsJson = False) -> None:
    """Stop serving a model; others go on. Works on any member."""
    if verb.model and verb.everything:
        raise typer.BadParameter("name a model, or use --all")
    print_answer(AgentClient(home_of(home)).send(_lasting(verb)), as_json, _unloaded)


def _lasting(verb: verbs.Serve | verbs.UnloadModel) -> verbs.Serve | verbs.UnloadModel:
    from ..models.inspect import lasting_name

    return replace(verb, model=lasting_name(verb.model)) if verb.model else verb


@options.sends(verbs.StartDrain)
def drain(verb: verbs.StartDrain, home: Home = None, as_json: AsJson = False) -> None:
    """Stop mlxtp on this Mac once its requests are done.

    It accepts no new ones; other Macs go on if they can.
    """
    print_answer({"ended": True, "cut": drain_agent(home_of(home), verb)}, as_json, _drained)


def drain_agent(folder: Path, start: verbs.StartDrain) -> int:
    """Drain the agent and wait until it has ended. Return the number of requests that were cut off."""
    client = AgentClient(folder)
    progress = client.send(start)
    with Console(stderr=True, highlight=False).status(_drain_line(progress)) as shown:
        while not progress["over"]:
            try:
                progress = client.send(verbs.DrainProgress())
            except UserError:  # it ended between two requests
                break
            shown.update(_drain_line(progress))
        shown.update("ending")
        wait_for_end(folder)
    return int(progress["open_requests"])


def token(home: Home = None, as_json: AsJson = False) -> None:
    """Print a join token. It admits one more Mac within 15 minutes, with `mlxtp node --join TOKEN` there."""
    answer = AgentClient(home_of(home)).send(verbs.MakeToken())
    print_answer(answer, as_json, str(answer["token"]))


def page(
    open_it: Annotated[bool, typer.Option("--open", help="Open it in this user's browser.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Print the address of the agent's page, with a key that permits it to load models.

    The key is valid until the agent ends. Any user with the address can do what these commands can.
    """
    client = AgentClient(home_of(home))
    client.send(verbs.Status())
    url = client.page
    if open_it and not webbrowser.open(url):
        raise UserError(f"no browser can be opened here; the page is at {url}")
    print_answer({"url": url}, as_json, url)


@commands.command()
def members(home: Home = None, as_json: AsJson = False) -> None:
    """List every member of the cluster, present or not, and which Mac admitted it, from where and when."""
    answer = AgentClient(home_of(home)).send(verbs.ListMembers())
    print_answer(answer, as_json, lambda a: [*members_shown(a), *admissions_shown(a)])


@commands.command()
def export(
    backend: Annotated[
        str, options.like("backend", "How ranks communicate. Default: as a plan for all Macs.")
    ] = "auto",
    home: Home = None,
) -> None:
    """Print the hostfile of `mlx.launch` for the Macs that are here, to run any MLX program on them.

    Ranks, addresses and RDMA devices are as mlxtp would choose them. mlx.launch needs ssh to each Mac.
    """
    from ..placement.planner import PlacementOptions
    from .plan import members_here
    from .planning import hostfile, over_all

    with typed():
        BY_KEY["backend"].kind.parse(backend, "--backend")
    folder = home_of(home)
    agent = AgentClient(folder)
    there = {each["node_id"]: each["address"] for each in agent.send(verbs.ListMembers())["members"]}
    fast = bool(agent.send(verbs.AgentSettings())["settings"]["fast_fences"])
    found, coordinator, _, theirs = members_here(folder)
    networks = theirs["fabric_networks"]
    wanted = PlacementOptions(backend=backend, fast_fences=fast, fabric_networks=networks)
    print_json(hostfile(over_all(found, coordinator, wanted), there, fast_fences=fast))


@commands.command()
@options.sends(verbs.RemoveMember)
def remove(
    verb: verbs.RemoveMember,
    with_admitted: Annotated[
        bool | None,
        typer.Option(
            "--with-admitted/--without-admitted",
            help="Also remove the Macs that it admitted. Default: ask in a terminal, else list them.",
        ),
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Remove another Mac from the cluster, present or away. It can rejoin only with a new join token.

    Join tokens that it requested become void.
    """
    if not verb.node.strip():
        raise UserError("which member? Its name, or the beginning of its id: see `mlxtp cluster members`")
    client = AgentClient(home_of(home))
    if with_admitted is None and not as_json and sys.stdin.isatty():
        found = client.send(verbs.LetIn(verb.node))
        if found["let_in"]:
            with_admitted = typer.confirm(f"{found['name']} admitted {_names(found)}. Remove them too?")
    answer = client.send(replace(verb, with_admitted=bool(with_admitted)))
    print_answer(answer, as_json, _removed)


@commands.command()
@options.sends(verbs.LeaveCluster)
def leave(verb: verbs.LeaveCluster, home: Home = None, as_json: AsJson = False) -> None:
    """Remove this Mac from its cluster. A running agent informs the others, and ends."""
    from ..cluster import state_file
    from ..identity.store import Store

    folder = home_of(home)
    try:
        answer = AgentClient(folder).send(verb)
    except UserError as error:
        if error.code is not Code.NOT_READY or agent_runs(folder):
            raise
        identity = Store(folder).load() if Store(folder).folder.exists() else None
        if identity is None or identity.membership is None:
            raise UserError(f"{folder} belongs to no cluster") from None
        roster = state_file.load(folder)[0].beliefs.roster
        alone = set(roster.members()) == {identity.node_id}
        last = identity.authority is not None and not set(roster.holders()) - {identity.node_id}
        if last and not alone and not verb.force:
            raise UserError(
                "only this Mac holds its cluster's authority, so no other can let Macs in. Start `mlxtp "
                "node` and run `mlxtp cluster authority move NODE`, or `mlxtp cluster leave --force`"
            ) from None
        Store(folder).leave()
        answer = {"left": identity.cluster_id, "members": 0 if alone else None}
    print_answer(answer, as_json, _farewell)


@authority.command()
@options.sends(verbs.HandOver)
def add(verb: verbs.HandOver, home: Home = None, as_json: AsJson = False) -> None:
    """Hand the key to another member too, so that both Macs can let others in.

    Run it on a Mac that holds the key. It returns once the key is on the other Mac's disk.
    """
    _hand_over(verb, home, as_json)


@authority.command()
@options.sends(verbs.HandOver)
def move(verb: verbs.HandOver, home: Home = None, as_json: AsJson = False) -> None:
    """Hand the key to another member, and forget it here. Join tokens of this Mac end.

    Run it on a Mac that holds the key. If the other one holds it already, this Mac only forgets it.
    """
    _hand_over(replace(verb, move=True), home, as_json)


def _hand_over(verb: verbs.HandOver, home: Path | None, as_json: bool) -> None:
    if not verb.node.strip():
        raise UserError("to which member? Its name, or the beginning of its id: see `mlxtp cluster members`")
    client = AgentClient(home_of(home))
    name = client.send(replace(verb, sure=False))["name"]
    if not verb.sure:
        if as_json or not sys.stdin.isatty():
            raise UserError(f"{name} would be able to make and remove members; --yes confirms that")
        typer.confirm(f"{name} will be able to make and remove members. Hand over the key?", abort=True)
    print_answer(client.send(replace(verb, sure=True)), as_json, _handed_over)


def _handed_over(answer: Mapping[str, Any]) -> list[str]:
    lines = [f"{answer['name']} has the key on its disk; {' and '.join(answer['holders'])} can let Macs in"]
    if answer["moved"]:
        lines.append("this Mac has forgotten it; backups of this Mac still have it")
    return [escape(line) for line in lines]


def _names(answer: Mapping[str, Any]) -> str:
    return ", ".join(f"{each['name']} ({each['node_id'][:8]})" for each in answer["let_in"])


def _removed(answer: Mapping[str, Any]) -> list[str]:
    lines = [f"{answer['removed']} is no longer a member"]
    if answer["let_in"] and answer["with_admitted"]:
        lines.append(f"nor are the Macs that it admitted: {_names(answer)}")
    elif answer["let_in"]:
        lines.append(f"it admitted {_names(answer)}, still members: `mlxtp cluster remove` removes them")
    if held := " and ".join(answer["held_authority"]):
        lines.append(
            f"{held} held the cluster's authority and may still have its key: with that it can let Macs in, "
            "itself too. Unless you trust that Mac, found a new cluster"
        )
    if problem := answer.get("problem"):
        lines.append(
            f"{problem}. The removal is on the disk of {' and '.join(answer['saved_by'])}; free space here"
        )
    if answer["others"] and not answer["saved_by"]:
        lines.append("no other Mac has this on its disk yet; keep this one on until `mlxtp status` shows one")
    return [escape(line) for line in lines]


def _wished(answer: Mapping[str, Any]) -> str:
    looking = "`mlxtp status` shows the progress"
    if answer["downloads"] and not answer["coming"]:
        looking = f"it is downloaded first, and {looking}"
    if answer["coming"]:
        until = answer["until_then"]
        return f"{answer['model']} is downloading, and served once complete; until then {until} is. {looking}"
    said = {"added": "is added", "changed": "is changed", "kept": "is deployed already"}[answer["change"]]
    if answer["replaced"]:
        said += f" and replaces {' and '.join(answer['replaced'])}"
    return f"{answer['model']} {said}: {_as_deployed(answer)}; {looking}"


def _as_deployed(answer: Mapping[str, Any]) -> str:
    replicas, nodes, keep_s = answer["replicas"], answer["nodes"], answer["keep_s"]
    words = {0: "as many replicas as fit", 1: "1 replica"}.get(replicas, f"{replicas} replicas")
    if nodes != "auto":
        words += f", each over {'1 Mac' if nodes == '1' else f'{nodes} Macs'}"
    if answer["split"] != "auto":
        words += f", as a pipeline of {answer['split']} layers"
    elif answer["parallel"] != "auto":
        words += f", as {'a pipeline' if answer['parallel'] == 'pipeline' else 'tensor parallel'}"
    if answer["on"]:
        words += f", on {' and '.join(answer['on'])} only"
    words = ", ".join([words, *chosen(answer, "replicas", "nodes", "split", "parallel", "on", "keep_s")])
    return words if keep_s is None else f"{words}, {kept(keep_s)}"


def _unloaded(answer: Mapping[str, Any]) -> str:
    gone = f"{' and '.join(answer['unloaded'])} unloaded; " if answer["unloaded"] else ""
    if answer["cancelled"]:
        gone += f"{' and '.join(answer['cancelled'])} is not served once it has come; "
    return gone + (
        f"still deployed: {', '.join(answer['left'])}" if answer["left"] else "no model is deployed"
    )


def _drain_line(progress: Mapping[str, Any]) -> str:
    limit = "" if progress["left_s"] is None else f", {progress['left_s']:.0f} s left"
    return f"draining: open requests: {progress['open_requests']}{limit}"


def _drained(answer: Mapping[str, Any]) -> str:
    cut = f"; requests that were cut: {answer['cut']}" if answer["cut"] else ""
    return f"mlxtp has stopped on this Mac{cut}"


def _farewell(answer: Mapping[str, Any]) -> str:
    left = f"this Mac left cluster {answer['left']}"
    if answer["members"] is None:
        return f"{left}; its agent did not run, so also run `mlxtp cluster remove` on another member"
    return left

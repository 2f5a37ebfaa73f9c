"""The commands. Parsing and printing only."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from . import __version__, commands, demo
from .cluster.identity import Store
from .config import DEFAULT_CONTROL_PORT, DEFAULT_HTTP, EMBEDDED_MODEL, Settings, resolve_settings
from .errors import GroupError, MlxtpError
from .node.agent import Agent, running_agent, stopped_by_signal
from .node.epoch import State
from .terminal import Commands

INTERRUPTED = 130
TUNING = "Engine"
REMOVED = (
    "another member removed this Mac from its cluster. To bring it back, here: `mlxtp cluster leave`, then "
    "`mlxtp node --join TOKEN`, with a new token from `mlxtp token` on a member"
)

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Ranks = Annotated[int | None, typer.Option(help="Rank processes on this machine: 1, 2 or 4.")]
Model = Annotated[
    str | None,
    typer.Option(
        help=f"A model folder or an id on the Hugging Face Hub. Default: {EMBEDDED_MODEL}, embedded."
    ),
]
Http = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help=f"The endpoint. Default: {DEFAULT_HTTP}.")
]
Home = Annotated[
    Path | None, typer.Option(help="Folder of this node's state; also MLXTP_HOME. One node, one home.")
]


Agreement = Annotated[
    str | None,
    typer.Option(
        help="How ranks come to hold the same token: auto, broadcast or verify.", rich_help_panel=TUNING
    ),
]
MaxContext = Annotated[
    str | None,
    typer.Option(metavar="TOKENS", help="Most tokens of prompt and answer.", rich_help_panel=TUNING),
]
KvBits = Annotated[
    str | None,
    typer.Option(
        metavar="0|4|8", help="Quantize the KV cache; one request at a time.", rich_help_panel=TUNING
    ),
]
KvBytes = Annotated[
    str | None,
    typer.Option(metavar="AMOUNT", help="Memory for KV caches on each rank: 500MB.", rich_help_panel=TUNING),
]
DraftModel = Annotated[
    str | None,
    typer.Option(help="A small model with the same vocabulary, to propose tokens.", rich_help_panel=TUNING),
]
Speculation = Annotated[
    bool | None,
    typer.Option(
        "--speculation/--no-speculation", help="Check several likely tokens at once.", rich_help_panel=TUNING
    ),
]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache", help="Keep the caches of prompts.", rich_help_panel=TUNING
    ),
]
Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compiled/--no-compiled", help="Trace decode graphs once and replay them.", rich_help_panel=TUNING
    ),
]


commands.register(app)

CLUSTER = "Cluster"
Join = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="[TOKEN]",
        help="Join a cluster with a token from `mlxtp token`; without one, as the member this Mac is.",
        rich_help_panel=CLUSTER,
    ),
]
Alone = Annotated[
    bool | None,
    typer.Option("--alone", help="Keep to this Mac: no control port, no Bonjour.", rich_help_panel=CLUSTER),
]
Name = Annotated[
    str | None, typer.Option(help="What to call this Mac. Default: its host name.", rich_help_panel=CLUSTER)
]
Control = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS:PORT",
        help=f"Where other agents reach this one. Default: port {DEFAULT_CONTROL_PORT} of every address.",
        rich_help_panel=CLUSTER,
    ),
]
Interface = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Use only this IPv4 address of this Mac.", rich_help_panel=CLUSTER),
]
Peer = Annotated[
    list[str] | None,
    typer.Option("--peer", metavar="HOST:PORT", help="Where another agent is.", rich_help_panel=CLUSTER),
]
Bonjour = Annotated[
    bool | None,
    typer.Option("--discovery/--no-discovery", help="Look for others by Bonjour.", rich_help_panel=CLUSTER),
]
Nodes = Annotated[
    str | None,
    typer.Option(
        metavar="auto|all|N", help="How many Macs one model is spread over.", rich_help_panel=CLUSTER
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(metavar="auto|jaccl|ring", help="How ranks of several Macs talk.", rich_help_panel=CLUSTER),
]
FastFences = Annotated[
    bool | None,
    typer.Option(
        "--fast-fences/--no-fast-fences",
        help="MLX_METAL_FAST_SYNCH: faster, and can hang a GPU until the Mac is restarted.",
        rich_help_panel=CLUSTER,
    ),
]
Rdma = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODE=DEVICE",
        help="RDMA device of a node, by hand: studio=rdma_en5.",
        rich_help_panel=CLUSTER,
    ),
]


@app.command(context_settings={"ignore_unknown_options": False})
def node(
    join: Join = None,
    alone: Alone = None,
    name: Name = None,
    control: Control = None,
    interface: Interface = None,
    peer: Peer = None,
    discovery: Bonjour = None,
    nodes: Nodes = None,
    backend: Backend = None,
    fast_fences: FastFences = None,
    rdma: Rdma = None,
    ranks: Ranks = None,
    model: Model = None,
    http: Http = None,
    home: Home = None,
    agreement: Agreement = None,
    max_context: MaxContext = None,
    kv_bits: KvBits = None,
    kv_bytes: KvBytes = None,
    draft_model: DraftModel = None,
    speculation: Speculation = None,
    prefix_cache: PrefixCache = None,
    compiled: Compiled = None,
) -> None:
    """Run this Mac's agent: it finds the others, keeps ranks alive and serves until it is told to stop."""
    flags = dict(locals())
    del flags["join"]
    flags["peers"] = flags.pop("peer") or None
    settings = _settings(flags)
    several = settings.ranks > 1
    if several and join is not None:
        raise typer.BadParameter("in a cluster each Mac has one rank; leave --ranks away")
    if settings.alone and join is not None:
        raise typer.BadParameter("--alone keeps this Mac out of every cluster; leave it away to join one")
    settings = replace(settings, cluster=not (settings.alone or several), join=join)
    _log_to_terminal()
    _run(_node(settings))


@app.command(name="demo")
def demo_command(
    ranks: Ranks = None,
    model: Model = None,
    http: Http = None,
    home: Home = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Exit after the answer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print one JSON object.")] = False,
) -> None:
    """Start two ranks, ask one question, show every stage with its time, then serve until Ctrl-C."""
    if as_json and not once:
        raise typer.BadParameter("--json goes with --once")
    with demo.temporary_home() as folder:
        flags = {"ranks": ranks, "model": model, "http": http, "home": home}
        settings = _settings(flags, defaults={"ranks": demo.RANKS, "home": folder})
        logging.basicConfig(level=logging.WARNING, handlers=[_log_handler()], format="%(message)s")
        view = demo.View(demo.Screen(stderr=as_json, highlight=False), settings)
        outcome = _run(demo.run(settings, prompt, view, once=once), interrupted=INTERRUPTED if once else 0)
    if as_json and outcome is not None:
        print(json.dumps(outcome, ensure_ascii=False))


@app.command()
def version(as_json: commands.AsJson = False) -> None:
    """Print the version."""
    print(json.dumps({"version": __version__}) if as_json else __version__)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def every_command(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turns Macs into one model server: tensor-parallel MLX behind an OpenAI-compatible endpoint."""


async def _node(settings: Settings) -> None:
    log = logging.getLogger("mlxtp")
    async with running_agent(settings, lambda stage, s: log.info("%s after %.1f s", stage, s)) as agent:
        if agent.founded and agent.cluster is not None:
            log.info("another Mac joins with: mlxtp node --join %s", await agent.cluster.token())
        try:
            await _ready_or_over(agent)
        except MlxtpError as error:
            # The agent outlives its ranks, and goes on saying why there is no model. One that keeps to itself
            # and whose very first model cannot be loaded has nothing else to do.
            if agent.cluster is None and not isinstance(error, GroupError):
                raise
            log.error("%s; %s/health tells more", error.detail, agent.url)
        if agent.supervisor.state is State.READY and agent.cluster is None:
            group, model = agent.supervisor.group, next(iter(agent.supervisor.gateway.models()), None)
            size = group.world_size if group is not None else 0
            log.info("ready: %s, world size %d, at %s/v1", model.id if model else "-", size, agent.url)
        if agent.cluster is None:
            await asyncio.Event().wait()
        else:
            await asyncio.shield(agent.cluster.over)
        if Store(settings.home).load().membership is not None:
            log.error(REMOVED)
        log.info("this Mac belongs to no cluster any more; the agent ends")


async def _ready_or_over(agent: Agent) -> None:
    """Wait until the model answers, or this agent has no more to do. Raises what either raises."""
    ready = asyncio.ensure_future(agent.wait_ready())
    over = agent.cluster.over if agent.cluster is not None else asyncio.Future[None]()
    try:
        await asyncio.wait({ready, over}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
    if not over.done():
        ready.result()


def _settings(flags: Mapping[str, object], defaults: Mapping[str, object] | None = None) -> Settings:
    settings = resolve_settings(flags, defaults=defaults)
    return replace(settings, home=settings.home.resolve())


def _run(work: Coroutine[Any, Any, Any], interrupted: int = 0) -> Any:
    """Run to the end, or until a signal asks for it; either way everything is taken down in order."""
    try:
        outcome, by_signal = asyncio.run(stopped_by_signal(work))
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    if by_signal and interrupted:
        raise typer.Exit(interrupted)
    return outcome


def _log_handler() -> logging.Handler:
    return RichHandler(console=Console(stderr=True), show_path=False, rich_tracebacks=False)


def _log_to_terminal() -> None:
    handler = _log_handler() if sys.stderr.isatty() else logging.StreamHandler()
    plain = "%(message)s" if sys.stderr.isatty() else "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format=plain)
    logging.getLogger("mlxtp").setLevel(logging.INFO)


def main() -> None:
    """Entry of the `mlxtp` command."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without UTF-8
    app(args=_with_join_value(sys.argv[1:]))


def _with_join_value(arguments: list[str]) -> list[str]:
    """`--join` may stand alone; click wants each option to have a value always, or never."""
    given = []
    for argument, following in zip(arguments, [*arguments[1:], "-"], strict=False):
        given.append("--join=" if argument == "--join" and following.startswith("-") else argument)
    return given

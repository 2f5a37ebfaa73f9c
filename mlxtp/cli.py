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
from rich.markup import escape

from . import __version__, demo
from .config import DEFAULT_HTTP, EMBEDDED_MODEL, Settings, resolve_settings
from .errors import GroupError, MlxtpError
from .node.agent import running_agent, stopped_by_signal

INTERRUPTED = 130
TUNING = "Engine"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Turns Macs into one model server: tensor-parallel MLX behind an OpenAI-compatible endpoint.",
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


@app.command()
def node(
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
    """Run this machine's agent: it keeps the ranks alive and serves until it is told to stop."""
    settings = _settings(dict(locals()))
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
def version() -> None:
    """Print the version."""
    print(__version__)


async def _node(settings: Settings) -> None:
    log = logging.getLogger("mlxtp")
    async with running_agent(settings, lambda stage, s: log.info("%s after %.1f s", stage, s)) as agent:
        try:
            await agent.wait_ready()
        except GroupError as error:
            # The agent outlives its ranks: it goes on saying why there is no model.
            log.error("%s; %s/health tells more", error.detail, agent.url)
        else:
            log.info("ready: %s, world size %d, at %s/v1", settings.model, settings.ranks, agent.url)
        await asyncio.Event().wait()


def _settings(flags: Mapping[str, object], defaults: Mapping[str, object] | None = None) -> Settings:
    try:
        settings = resolve_settings(flags, defaults=defaults)
    except MlxtpError as error:
        _refuse(error)
    return replace(settings, home=settings.home.resolve())


def _run(work: Coroutine[Any, Any, Any], interrupted: int = 0) -> Any:
    """Run to the end, or until a signal asks for it; either way everything is taken down in order."""
    try:
        outcome, by_signal = asyncio.run(stopped_by_signal(work))
    except MlxtpError as error:
        _refuse(error)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    if by_signal and interrupted:
        raise typer.Exit(interrupted)
    return outcome


def _refuse(error: MlxtpError) -> Any:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]mlxtp:[/] {escape(error.detail)}")
    raise typer.Exit(1)


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
    app()

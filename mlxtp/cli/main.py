"""The entry point: `mlxtp node`, `demo` and `version`, and the list of all commands."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from ..config import Settings, resolve_join, resolve_settings
from ..errors import ConfigError, Exit, GroupError, MlxtpError
from ..imports import importing
from ..settings import unknown_variables
from . import (
    about,
    bench,
    cache,
    chat,
    cluster,
    keys,
    launch,
    models,
    options,
    plan,
    qualify,
    service,
    status,
)
from .about import version_facts
from .options import FLAGS, AsJson, Home, Join, NodeHome, takes
from .printing import Commands, TerminalLog, home_of, print_answer, print_json

if TYPE_CHECKING:
    from ..agent import Agent

REMOVED = (
    "another member removed this Mac from its cluster. To bring it back, here: `mlxtp cluster leave`, then "
    "`mlxtp node --join TOKEN`, with a new token from `mlxtp token` on a member"
)

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@takes(*FLAGS)
def node(join: Join = None, home: NodeHome = None, **flags: object) -> None:
    """Run mlxtp on this Mac: find the other Macs, and serve a model with them until Ctrl-C.

    On the first Mac `mlxtp node` founds a cluster, and prints the command for the next one.
    """
    if flags["log_file"] is not None:
        from ..logs import shorten_stderr

        shorten_stderr()
    try:
        settings = _settings({"home": home, **flags})
    except ConfigError as error:
        error.exit_status = Exit.MISTYPED  # launchd and systemd do not restart after this status
        raise
    join = resolve_join(join, _read_token)
    several = settings.ranks > 1
    if several and join is not None:
        raise typer.BadParameter("in a cluster each Mac has one rank; omit --ranks")
    if settings.alone and join is not None:
        raise typer.BadParameter("--alone keeps this Mac out of every cluster; omit it to join one")
    settings = replace(settings, cluster=not (settings.alone or several), join=join)
    _log(settings.log_format, settings.log_file)
    for warning in unknown_variables(tuple(os.environ)):
        logging.getLogger("mlxtp").warning("%s", warning)
    for folder in settings.model_folders:
        if not Path(folder).is_dir():
            logging.getLogger("mlxtp").warning("--model-folder %s: the folder does not exist", folder)
    try:
        _run(_node(settings))
    except MlxtpError as error:
        if settings.log_file:  # the reader of a log file does not see standard error
            logging.getLogger("mlxtp").error("%s", error.detail)
        raise


@takes("model", "http", "ranks")
def demo_command(
    home: NodeHome = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt for the model.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End after the reply.")] = False,
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            max=4,
            help="Run as many agents, a cluster of their own, with a replica of the model on each.",
        ),
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --once: print one JSON object, also for an error.")
    ] = False,
    **flags: object,
) -> None:
    """Try mlxtp on this machine alone: start, send one prompt, show timings, serve until Ctrl-C."""
    if as_json and not once:
        raise typer.BadParameter("--json goes with --once")
    with importing():
        from ..identity.private_files import temporary_folder
        from ..logs import PrintableLines
        from . import demo
    with temporary_folder("mlxtp-demo-") as folder:  # for a user who names no home
        ranks = demo.RANKS if replicas == 1 else 1
        defaults = {"ranks": ranks, "home": str(folder), "cache_disk": 0}
        settings = _settings({"home": home, **flags}, defaults=defaults)
        if replicas > 1 and settings.ranks > 1:
            raise typer.BadParameter("with --replicas each agent has one rank; omit --ranks")
        log = TerminalLog()
        log.setFormatter(PrintableLines("%(message)s"))
        logging.basicConfig(level=logging.WARNING, handlers=[log])
        view = demo.DemoView(demo.DemoConsole(stderr=as_json, highlight=False), settings)
        if sys.platform != "darwin":  # without a GPU, MLX would build kernels for longer than a demo takes
            os.environ["MLX_DISABLE_COMPILE"] = "1"
        outcome = _run(
            demo.run(settings, prompt, view, once=once, replicas=replicas),
            interrupted=Exit.INTERRUPTED if once else 0,
        )
    if as_json and outcome is not None:
        print_json(outcome)


def version(
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Also print packages, system and paths, as needed in a bug report."),
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Print the version."""
    told = version_facts(home_of(home)) if verbose else {}
    lines = [f"{name + ':':<20} {value}" for name, value in told.items()]
    print_answer({"version": __version__, **told}, as_json, "\n".join(lines) or __version__)


#: Every command, by its group in `mlxtp --help`.
_COMMANDS: Mapping[str, tuple[typer.Typer | Callable[..., Any], ...]] = {
    "Serve": (node, demo_command, cluster.serve, cluster.unload, status.status, cluster.drain),
    "Cluster": (cluster.token, cluster.commands),
    "Use": (chat.chat, launch.launch, cluster.page, keys.commands, bench.bench),
    "Models": (models.pull, models.list_, models.remove, models.verify, plan.plan),
    "This Mac": (
        about.doctor, qualify.qualify, cache.commands, about.commands, service.commands, service.logs,
        service.restart, options.completion, about.wire, version,
    ),
}  # fmt: skip


def _flowing(command: object) -> str:
    """Join the lines of each paragraph of a docstring; `--help` would keep its line breaks."""
    return "\n\n".join(" ".join(each.split()) for each in (inspect.getdoc(command) or "").split("\n\n"))


for panel, commands in _COMMANDS.items():
    for each in commands:
        if isinstance(each, typer.Typer):
            for info in each.registered_commands:
                info.help = _flowing(info.callback)
            app.add_typer(each, rich_help_panel=panel)
        else:
            name = each.__name__.removesuffix("_command").rstrip("_")
            app.command(name, help=_flowing(each), rich_help_panel=panel)(each)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def every_command(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turns Macs into one model server: tensor-parallel MLX behind an OpenAI-compatible endpoint."""
    if context.invoked_subcommand != node.__name__:  # its log has the warnings
        for warning in unknown_variables(tuple(os.environ)):
            print(f"mlxtp: {warning}", file=sys.stderr)


async def _node(settings: Settings) -> None:
    import asyncio
    import time

    from ..agent import drain_on_signal, running_agent
    from ..background import CLOSE_S, LEAVE_S, THREADS_S, end_within
    from ..logs import keep_audit

    keep_audit(settings.home)
    log = logging.getLogger("mlxtp")
    async with running_agent(settings, lambda stage, s: log.info("%s after %.1f s", stage, s)) as agent:
        drain_on_signal(agent.drain, settings.drain_s)
        serving = asyncio.ensure_future(_serve(agent, settings))
        drained = asyncio.ensure_future(agent.drain.over.wait())
        try:
            await asyncio.wait({serving, drained}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (serving, drained):
                task.cancel()
        if not drained.done():
            serving.result()
            return
        end_at = time.monotonic() + LEAVE_S
        agent.on_left = lambda: end_within(max(end_at - time.monotonic(), THREADS_S))
        end_within(CLOSE_S)
    end_within(THREADS_S)


async def _serve(agent: Agent, settings: Settings) -> None:
    """Run until the agent ends. Raises MlxtpError if it runs alone and cannot load its first model."""
    import asyncio

    from ..identity.store import Store

    log = logging.getLogger("mlxtp")
    if agent.founded:
        # More people read a log file than a terminal.
        token = "TOKEN, from `mlxtp token`" if settings.log_file else await agent.parts.tokens.token()
        log.info("another Mac joins with: mlxtp node --join %s", token)
    try:
        await agent.wait_ready()
    except MlxtpError as error:
        # A member's agent outlives its ranks, and reports why there is no model. An agent that runs alone
        # has nothing to do without its first model.
        if agent.parts.node.alone and not isinstance(error, GroupError):
            raise
        log.error("%s; %s/health tells more", error.detail, agent.url)
    await asyncio.shield(agent.over)
    if Store(settings.home).load().membership is not None:
        log.error(REMOVED)
    log.info("this Mac no longer belongs to a cluster; the agent ends")


def _read_token() -> str:
    if sys.stdin.isatty():
        print("join token: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def _settings(flags: Mapping[str, object], defaults: Mapping[str, object] | None = None) -> Settings:
    settings = resolve_settings(flags, defaults=defaults)
    log = str(Path(settings.log_file).absolute()) if settings.log_file else ""  # commands request its path
    return replace(settings, home=settings.home.resolve(), log_file=log)


def _run(work: Coroutine[Any, Any, Any], interrupted: int = 0) -> Any:
    with importing():
        import asyncio

        from ..agent import stopped_by_signal
    outcome, by_signal = asyncio.run(stopped_by_signal(work))
    if by_signal and interrupted:
        raise typer.Exit(interrupted)
    return outcome


def _log(log_format: str, log_file: str = "") -> None:
    """Log to a file, or to standard error. Raises ConfigError if the file cannot be written."""
    from ..logs import PrintableLines, RotatingLog, log_formatter

    handler: logging.Handler
    formatter = log_formatter(log_format)
    if log_file:
        handler = RotatingLog(log_file)
        if sys.stderr.isatty():
            print(f"mlxtp: the log goes to {handler.baseFilename}", file=sys.stderr)
    elif log_format == "text" and sys.stderr.isatty():
        handler, formatter = TerminalLog(), PrintableLines("%(message)s")
    else:
        handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(bool(log_file) or log_format == "json")
    logging.getLogger("mlxtp").setLevel(logging.INFO)


def main() -> None:
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without UTF-8
    try:
        try:
            app(args=_with_values(sys.argv[1:]))
        finally:
            sys.stdout.flush()  # when Python ends, it is too late to report an error
    except OSError as error:
        if (problem := _problem_of_stdout(error)) is None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if problem:
            print(f"mlxtp: standard output cannot be written: {problem}", file=sys.stderr)
        sys.exit(Exit.REFUSED)


def _open_streams() -> None:
    """Open /dev/null for streams that the shell has closed; else the next opened file takes their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - as long as we run
            setattr(sys, name, stream)


def _problem_of_stdout(error: OSError) -> str | None:
    """Return why standard output cannot be written, "" if its reader has left; None for another error."""
    try:
        print(flush=True)  # a write that failed once fails again
    except BrokenPipeError:
        return ""
    except OSError as again:
        return again.strerror or str(again)
    return "" if isinstance(error, BrokenPipeError) else None


def _with_values(arguments: list[str]) -> list[str]:
    """Give a bare --join an empty value: to click, an option takes a value always or never."""
    return [
        "--join=" if argument == "--join" and following.startswith("-") and following != "-" else argument
        for argument, following in zip(arguments, [*arguments[1:], "--"], strict=False)
    ]  # "-" is standard input

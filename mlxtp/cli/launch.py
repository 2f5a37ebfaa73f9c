"""`mlxtp launch`: starts another program with the settings to use this Mac's endpoint."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from ..config import home_folder
from ..errors import Code, UserError, why_not_written
from .printing import typed, when_started
from .programs import PROGRAMS, Program, Served, Setup, Variables

FOLDER = "launch"  # of a home: files for the programs


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(launch)


def launch(
    app_name: Annotated[
        str,
        typer.Argument(
            metavar="APP",
            help=f"The program: {', '.join(PROGRAMS)}.",
            autocompletion=lambda: list(PROGRAMS),
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments for the program, after --.")
    ] = None,
    print_only: Annotated[
        bool,
        typer.Option("--print", help="Print the settings as shell commands instead of starting the program."),
    ] = False,
    key: Annotated[
        str,
        typer.Option(metavar="KEY", help="The API key, where the endpoint requires one; also MLXTP_KEY."),
    ] = "",
    home: Annotated[
        Path | None,
        typer.Option(help="Home of the agent, if it was started with a --home; also MLXTP_HOME."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --print: print one JSON object, also for an error.")
    ] = False,
) -> None:
    """Start a coding agent, such as Claude Code, that uses the model served here.

    It gets variables and arguments, which are printed first. Its own files are not changed, and settings in
    them, such as `env` in ~/.claude/settings.json, still apply.
    """
    if as_json and not print_only:
        raise typer.BadParameter("--json goes with --print")
    if app_name not in PROGRAMS:
        with typed():
            raise UserError(f"{app_name} is unknown; known programs: {', '.join(PROGRAMS)}")
    chosen = PROGRAMS[app_name]
    path = "" if print_only else find_program(chosen)
    served = find_served(home_folder(home).resolve(), key or os.environ.get("MLXTP_KEY", ""))
    if served.context < chosen.least_context:
        typer.echo(
            f"mlxtp: {served.model} has a context of {served.context} tokens, of which {app_name} needs "
            f"{chosen.least_context} or more: it will probably fail",
            err=True,
        )
    setup = chosen.setup(served)
    for file, content in setup.files.items():
        _write(file, content)
    if as_json:
        files = [str(file) for file in setup.files]
        shown = {"variables": setup.variables, "arguments": setup.arguments, "files": files}
        typer.echo(json.dumps(shown, ensure_ascii=False))
        return
    if print_only:
        typer.echo("\n".join(as_shell(chosen, setup)))
        return
    typer.echo("\n".join(summary(app_name, served, setup)), err=True)
    os.execve(
        path, [chosen.command, *setup.arguments, *(arguments or ())], changed(os.environ, setup.variables)
    )


def find_served(home: Path, key: str) -> Served:
    """Return the model that the agent of this home serves to clients with the API key `key`.

    Raises UserError when no agent runs, no model is loaded, or the key is refused.
    """
    client, status = when_started(home)
    if not status["model"]:
        why = f": {status['reason']}" if status["reason"] else ""
        raise UserError(
            f"no model is loaded ({status['state']}{why}); `mlxtp serve MODEL` loads one, and `mlxtp status` "
            "shows the progress",
            Code.NOT_READY,
        )
    listed = {str(model["id"]): model for model in client.models(key)}
    model = listed.get(status["model"])  # other models may be listed that a request would load first
    if model is None:
        raise UserError("the model is being replaced; try again", Code.NOT_READY)
    from ..api.https_certificates import OWN_CERTIFICATE

    own = home / OWN_CERTIFICATE
    known = bool(client.certificate) and own.is_file() and own.read_text() == client.certificate
    return Served(
        client.url,
        str(model["id"]),
        int(model["context_length"]),
        key,
        str(own) if known else "",
        home / FOLDER,
        frozenset(model.get("supported_features", ())),
    )


def find_program(program: Program) -> str:
    """Return the program's path. Raises UserError when it is not installed."""
    for place in (program.command, *map(os.path.expanduser, program.elsewhere)):
        if found := shutil.which(place):
            return found
    raise UserError(
        f"{program.command} is not installed, or not on PATH; to install it, see {program.install}"
    )


def changed(environment: Mapping[str, str], variables: Variables) -> dict[str, str]:
    """Return the environment with these variables."""
    kept = {name: value for name, value in environment.items() if name not in variables}
    return kept | {name: value for name, value in variables.items() if value is not None}


def summary(app_name: str, served: Served, setup: Setup) -> Iterator[str]:
    """Yield lines for people: the model, and the settings for the program. Keys are not shown."""
    gone = [name for name, value in setup.variables.items() if value is None]
    kept = [name for name in setup.variables if name not in gone]
    yield f"mlxtp: {app_name} uses {served.model} ({served.context:,} tokens) at {served.url}"
    width = shutil.get_terminal_size().columns
    for title, names in (("set", kept), ("unset", gone)):
        yield from textwrap.wrap(
            f"  {title}: {' '.join(names)}" if names else "", width, subsequent_indent="    "
        )
    if setup.arguments:
        yield f"  arguments: {shlex.join(setup.arguments)}"
    for file in setup.files:
        yield f"  written: {file}"


def as_shell(program: Program, setup: Setup) -> Iterator[str]:
    """Yield lines for `eval` in sh, bash or zsh. Arguments become a function with the program's name."""
    for name, value in setup.variables.items():
        yield f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
    if setup.arguments:
        yield f'{program.command}() {{ command {program.command} {shlex.join(setup.arguments)} "$@"; }}'


def _write(file: Path, content: object) -> None:
    """Write the file as JSON. Raises UserError when it cannot be written."""
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(why_not_written(error, file.parent)) from None

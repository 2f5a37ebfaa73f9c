"""`mlxtp launch`: starts another program so that it speaks to the endpoint of this Mac."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..client import AgentClient
from ..config import home_folder
from ..errors import Code, UserError
from .printing import typed

NO_KEY = "none"
"""What is sent where nobody asks for a key: clients want to have one."""

Variables = Mapping[str, str | None]
"""Of an environment; None takes one away."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a client has to know of the endpoint. `url` has no path, `context` is in tokens."""

    url: str
    model: str
    context: int
    key: str = ""
    certificate: str = ""
    """The file of the certificate that a client has to trust, if it does not anyway."""


@dataclass(frozen=True, slots=True)
class Application:
    """A program that can be launched.

    `elsewhere`: where its installers put it without a word to PATH. `least_context`: with fewer tokens it is
    of no use.
    """

    program: str
    install: str
    variables: Callable[[Served], Variables]
    elsewhere: tuple[str, ...] = ()
    least_context: int = 0


def claude(served: Served) -> Variables:
    """Of Claude Code: https://code.claude.com/docs/en/env-vars and its pages on gateways and models."""
    model = served.model
    return {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key or NO_KEY,  # sent as `Authorization: Bearer`
        "ANTHROPIC_MODEL": model,
        # The names behind which it looks for larger and smaller models: here there is one.
        "ANTHROPIC_DEFAULT_OPUS_MODEL": model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,  # as older versions call the one before
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),  # it takes unknown models for 200,000
        # Updates, telemetry and reports are meant for others than this server.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # A line that changes with each request, at the top of the system prompt.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        # What would be sent here though it is meant for others, or would have it ask others.
        "ANTHROPIC_API_KEY": None,
        "CLAUDE_CODE_OAUTH_TOKEN": None,
        "CLAUDE_CODE_USE_BEDROCK": None,
        "CLAUDE_CODE_USE_VERTEX": None,
        "CLAUDE_CODE_USE_FOUNDRY": None,
        **({"NODE_EXTRA_CA_CERTS": served.certificate} if served.certificate else {}),
    }


APPLICATIONS: Mapping[str, Application] = {
    "claude": Application(
        "claude",
        "https://code.claude.com/docs/en/setup",
        claude,
        ("~/.local/bin/claude", "~/.claude/local/claude"),
        least_context=32_768,
    ),
}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(launch)


def launch(
    application: Annotated[
        str,
        typer.Argument(
            metavar="APP",
            help=f"Which program: {', '.join(APPLICATIONS)}.",
            autocompletion=lambda: list(APPLICATIONS),
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="What the program is given; behind --.")
    ] = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Start nothing: print the variables, as a shell reads them.")
    ] = False,
    key: Annotated[
        str,
        typer.Option(metavar="KEY", help="The API key, where the endpoint asks for one; also MLXTP_KEY."),
    ] = "",
    home: Annotated[
        Path | None,
        typer.Option(help="The endpoint of which agent, if it was started with a --home; also MLXTP_HOME."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --print: print one JSON object, also for an error.")
    ] = False,
) -> None:
    """Start a program, such as Claude Code, so that it uses the model that is served here.

    What it would be told by files of its own, such as `env` in ~/.claude/settings.json, still counts.
    """
    if as_json and not print_only:
        raise typer.BadParameter("--json goes with --print")
    if application not in APPLICATIONS:
        with typed():
            raise UserError(f"{application} is not known here; known are: {', '.join(APPLICATIONS)}")
    chosen = APPLICATIONS[application]
    served = find_served(home_folder(home).resolve(), key or os.environ.get("MLXTP_KEY", ""))
    if served.context < chosen.least_context:
        typer.echo(
            f"mlxtp: {served.model} has a context of {served.context} tokens, of which {application} needs "
            f"{chosen.least_context} or more: expect it to fail",
            err=True,
        )
    variables = chosen.variables(served)
    if as_json:
        typer.echo(json.dumps({"variables": variables}, ensure_ascii=False))
        return
    if print_only:
        typer.echo("\n".join(as_shell(variables)))
        return
    program = find_program(chosen)
    os.execve(program, [chosen.program, *(arguments or ())], changed(os.environ, variables))


def find_served(home: Path, key: str) -> Served:
    """What the agent of this home serves to whoever shows `key`.

    Raises UserError when no agent runs, no model is loaded, or the key is not taken.
    """
    client = AgentClient(home)
    status = client.get("status")
    if not status["model"]:
        why = f": {status['reason']}" if status["reason"] else ""
        raise UserError(
            f"no model is loaded ({status['state']}{why}); `mlxtp serve MODEL` loads one, and `mlxtp status` "
            "shows how far it is",
            Code.NOT_READY,
        )
    listed = {str(model["id"]): model for model in client.models(key)}
    model = listed.get(status["model"])  # others may be listed that would be loaded first
    if model is None:
        raise UserError("the model is just being replaced; try again in a moment", Code.NOT_READY)
    from ..node.http_tls import OWN_CERTIFICATE

    own = home / OWN_CERTIFICATE
    known = bool(client.certificate) and own.is_file() and own.read_text() == client.certificate
    return Served(client.url, str(model["id"]), int(model["context_length"]), key, str(own) if known else "")


def find_program(application: Application) -> str:
    """Its path. Raises UserError when it is not installed."""
    for place in (application.program, *map(os.path.expanduser, application.elsewhere)):
        if found := shutil.which(place):
            return found
    raise UserError(
        f"{application.program} is not installed, or not on PATH; how to install it: {application.install}"
    )


def changed(environment: Mapping[str, str], variables: Variables) -> dict[str, str]:
    """The environment with these variables."""
    kept = {name: value for name, value in environment.items() if name not in variables}
    return kept | {name: value for name, value in variables.items() if value is not None}


def as_shell(variables: Variables) -> Iterable[str]:
    """Lines for `eval` in sh, bash or zsh."""
    for name, value in variables.items():
        yield f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"

"""Options that commands share, and those of `mlxtp node` and `mlxtp demo`: the settings, and two more."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..settings import (
    BY_KEY,
    CLUSTER,
    GENERAL,
    SETTINGS,
    Setting,
)
from ..values import parse_switch
from .shell_completion import words

Home = Annotated[
    Path | None, typer.Option(help="Home of the agent, if it was started with a --home; also MLXTP_HOME.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, also for an error.")]
Within = Annotated[
    str | None,
    typer.Option(metavar="SECONDS", help="End after that time, even with open requests. Default: no limit."),
]
NodeHome = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the agent's state, such as the cluster's members, and for config.toml; also "
        "MLXTP_HOME. Only needed for several agents on one machine."
    ),
]
Join = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="[TOKEN]",
        help="Join a cluster with a token that `mlxtp token` prints on a member. Without a token: continue "
        "as the member this Mac already is, and never found a cluster. With -: read the token from standard "
        "input. Also MLXTP_JOIN.",
        rich_help_panel=CLUSTER,
    ),
]
FLAGS = tuple(setting.key for setting in SETTINGS if setting.option)


def takes(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command an option for each of these settings, None if not given."""

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                key,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[_type(BY_KEY[key]), _option(BY_KEY[key])],
            )
            for key in keys
        ]

        def with_flags(**given: Any) -> None:
            command(**{name: None if value == [] else value for name, value in given.items()})

        with_flags.__name__ = getattr(command, "__name__", "")
        with_flags.__doc__ = command.__doc__
        with_flags.__annotations__ = {}
        with_flags.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return with_flags

    return with_options


def _type(setting: Setting) -> Any:
    if setting.parse is parse_switch:
        return bool | None
    return list[str] | None if setting.repeatable else str | None


def _option(setting: Setting) -> Any:
    name = setting.option
    switch = setting.parse is parse_switch
    often = " May be repeated." if setting.repeatable else ""
    return typer.Option(
        f"{name}/--no-{name.removeprefix('--')}" if switch else name,
        metavar=setting.metavar or None,
        autocompletion=words(setting.metavar),
        help=f"{setting.help}{often} Default: {setting.default_words}.",
        rich_help_panel=None if setting.panel == GENERAL else setting.panel,
    )

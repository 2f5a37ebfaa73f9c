"""`mlxtp completion`: typer's completion script of a shell, and suggestions for values.

typer keeps those of them that begin like the word on the line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..client import AgentClient
from ..errors import UserError
from .printing import home_of, typed

SHELLS = ("bash", "zsh", "fish")
#: The variable with which a shell requests completions; see typer.
VARIABLE = "_MLXTP_COMPLETE"
_ASK_S = 1.0


def completion(
    shell: Annotated[
        str,
        typer.Argument(metavar="|".join(SHELLS), help="Which shell.", autocompletion=lambda: list(SHELLS)),
    ],
) -> None:
    """Print the script that completes commands, options, models and names. Nothing is installed.

    zsh: add `eval "$(mlxtp completion zsh)"` to ~/.zshrc, after compinit; bash: the same, with bash, to
    ~/.bashrc. fish: `mlxtp completion fish > ~/.config/fish/completions/mlxtp.fish`.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in SHELLS:
        with typed():
            raise UserError(f"{shell!r} is not one of {', '.join(SHELLS)}; `echo $SHELL` shows yours")
    typer.echo(get_completion_script(prog_name="mlxtp", complete_var=VARIABLE, shell=shell))


def words(metavar: str) -> Callable[[], list[str]] | None:
    """Return the literal words of a choice such as auto|all|N; None if it is not a choice."""
    choices = [each for each in metavar.split("|") if not each.isupper()] if "|" in metavar else []
    return (lambda: choices) if choices else None


def models() -> list[str]:
    """Return models on this disk, by the names that `mlxtp serve` accepts."""
    from ..models.inspect import stored_models

    return [each.id for each in stored_models()]


def hub_models(ctx: typer.Context) -> list[str]:
    """Return models of the Hub that are on this disk at least in part, in the agent's cache."""
    from ..models.hub_cache import cache_folder, repos_here

    try:
        folder = AgentClient(_home(ctx), _ASK_S).get("stored").get("folder")
    except UserError:
        folder = None
    return [each.name for each in repos_here(Path(folder or cache_folder())) if each.commits()]


def planned() -> list[str]:
    """Return the names that `mlxtp plan` knows, and models on this disk."""
    from ..placement.tables import KNOWN

    return [*models(), *KNOWN]


def keys(ctx: typer.Context) -> list[str]:
    """Return names of API keys."""
    from ..api.api_keys import KeyFile

    try:
        return [key.name for key in KeyFile(_home(ctx)).load()]
    except UserError:
        return []


def members(ctx: typer.Context) -> list[str]:
    """Return names of the cluster's members, from the running agent."""
    try:
        told = AgentClient(_home(ctx), _ASK_S).get("members")["members"]
    except UserError:
        return []
    return [str(member["name"]) for member in told]


def _home(ctx: typer.Context) -> Path:
    return home_of(ctx.params.get("home"))

"""`mlxtp completion`: the script by which a shell completes what is typed, and what it offers for a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..client import AgentClient
from ..config import home_folder
from ..errors import UserError
from .printing import typed

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_MLXTP_COMPLETE"
"""By which a shell asks; see typer."""
_ASK_S = 1.0


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(completion)


def completion(
    shell: Annotated[
        str,
        typer.Argument(metavar="|".join(SHELLS), help="Which shell.", autocompletion=lambda: list(SHELLS)),
    ],
) -> None:
    """Print what a shell needs to complete commands, options, models and names. It is installed nowhere.

    zsh: add `eval "$(mlxtp completion zsh)"` to ~/.zshrc, after compinit; bash: the same, with bash, to
    ~/.bashrc. fish: `mlxtp completion fish > ~/.config/fish/completions/mlxtp.fish`.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in SHELLS:
        with typed():
            raise UserError(
                f"{shell!r} is none of {', '.join(SHELLS)}; which shell it is, `echo $SHELL` says"
            )
    typer.echo(get_completion_script(prog_name="mlxtp", complete_var=VARIABLE, shell=shell))


def words(metavar: str) -> Callable[[str], list[str]] | None:
    """The words of a choice such as auto|all|N, without what stands for others; None where there is none."""
    choices = [each for each in metavar.split("|") if not each.isupper()] if "|" in metavar else []
    return (lambda incomplete: _beginning(incomplete, choices)) if choices else None


def models(incomplete: str) -> list[str]:
    """Models on this disk, by what `mlxtp serve` takes."""
    from ..models.inventory import stored_models

    return _beginning(incomplete, (each.id for each in stored_models()))


def hub_models(ctx: typer.Context, incomplete: str) -> list[str]:
    """Models of the Hub of which something is on this disk, where the agent has them."""
    from ..models.hub_cache import cache_folder, repos_here

    try:
        folder = AgentClient(_home(ctx), _ASK_S).get("stored").get("folder")
    except UserError:
        folder = None
    return _beginning(
        incomplete, (each.name for each in repos_here(Path(folder or cache_folder())) if each.commits())
    )


def planned(incomplete: str) -> list[str]:
    """What `mlxtp plan` knows by name, and models on this disk."""
    from ..placement.published_models import KNOWN

    return [*models(incomplete), *_beginning(incomplete, KNOWN)]


def keys(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of API keys."""
    from ..api.api_keys import KeyFile

    try:
        return _beginning(incomplete, (key.name for key in KeyFile(_home(ctx)).load()))
    except UserError:
        return []


def members(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the Macs of the cluster, if an agent runs that knows them."""
    try:
        told = AgentClient(_home(ctx), _ASK_S).get("members")["members"]
    except UserError:
        return []
    return _beginning(incomplete, (str(member["name"]) for member in told))


def _home(ctx: typer.Context) -> Path:
    return home_folder(ctx.params.get("home")).resolve()


def _beginning(incomplete: str, names: Any) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]

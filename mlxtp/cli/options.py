"""Options that commands share, including settings, and suggestions for shell completion."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..client import AgentClient
from ..config import resolve_settings, shown
from ..errors import UserError
from ..settings import BY_KEY, CLUSTER, GENERAL, SETTINGS, SWITCH, Setting
from ..verbs import AgentSettings, ListMembers, ModelsStored, Verb
from .printing import COMPLETION_VARIABLE, home_of, typed

Home = Annotated[
    Path | None, typer.Option(help="Home of the agent, if it was started with a --home; also MLXTP_HOME.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, also for an error.")]
NodeHome = Annotated[
    Path | None,
    typer.Option(
        help="Folder for config.toml and the agent's state; needed only for several agents on one machine. "
        "Also MLXTP_HOME."
    ),
]
Join = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="[TOKEN]",
        help="Join a cluster with a token that `mlxtp token` prints on a member; -: read it from standard "
        "input. Without a token: continue as the member this Mac is, and never found a cluster. Also "
        "MLXTP_JOIN.",
        rich_help_panel=CLUSTER,
    ),
]
FLAGS = tuple(setting.key for setting in SETTINGS if setting.option)


def takes(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command an option for each of these settings; None if not given."""
    options = [_parameter(key, _type(BY_KEY[key]), _option(BY_KEY[key]), None) for key in keys]

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        def with_flags(**given: Any) -> None:
            command(**{name: None if value == [] else value for name, value in given.items()})

        return _dressed(with_flags, command, [*_parameters(command), *options])

    return with_options


def sends(verb: type[Verb]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's parameter `verb` by the options of that verb."""
    offered = [each for each in fields(verb) if "flag" in each.metadata]

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        own = _parameters(command)
        at = [each.name for each in own].index("verb")

        def with_verb(**given: Any) -> None:
            made = verb(**{each.name: given.pop(each.name) for each in offered})
            with typed():
                made.parsed()
            command(verb=made, **given)

        return _dressed(with_verb, command, [*own[:at], *map(_of_field, offered), *own[at + 1 :]])

    return with_options


def _parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    found = inspect.signature(command, eval_str=True).parameters.values()
    return [each for each in found if each.kind is not each.VAR_KEYWORD]


def _parameter(name: str, kind: Any, option: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _dressed(
    function: Callable[..., None], command: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    function.__name__, function.__doc__ = command.__name__, command.__doc__
    function.__annotations__ = {}
    named = [each.replace(kind=each.KEYWORD_ONLY) for each in parameters]
    function.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return function


def _of_field(of: Field[Any]) -> inspect.Parameter:
    about = of.metadata
    suggested = {"model": model_names, "node": member_names, "on": member_names}.get(of.name)
    made: dict[str, Any] = {"help": about["description"], "metavar": about["metavar"]}
    made["autocompletion"] = suggested or words(about["metavar"] or "")
    default = inspect.Parameter.empty if of.default is MISSING else of.default
    if not about["flag"]:
        return _parameter(of.name, str, typer.Argument(**made), default)
    kind = bool if of.default is False else str | None
    return _parameter(of.name, kind, typer.Option(about["flag"], **made), default)


def like(key: str, description: str, **more: Any) -> Any:
    """Return an option that takes the same values as the setting `key`."""
    metavar = BY_KEY[key].kind.metavar
    return typer.Option(metavar=metavar, help=description, autocompletion=words(metavar), **more)


def _type(setting: Setting) -> Any:
    if setting.kind is SWITCH:
        return bool | None
    return list[str] | None if setting.repeatable else str | None


def _option(setting: Setting) -> Any:
    name = setting.option
    often = " May be repeated." if setting.repeatable else ""
    return typer.Option(
        f"{name}/--no-{name.removeprefix('--')}" if setting.kind is SWITCH else name,
        metavar=setting.kind.metavar or None,
        autocompletion=words(setting.kind.metavar),
        help=f"{setting.help}{often} Default: {setting.default_words}.",
        rich_help_panel=None if setting.panel == GENERAL else setting.panel,
    )


# --- facts of the agent, running or not ------------------------------------------------------------------


def setting_of(key: str, home: Path) -> Any:
    """Return the agent's value of a setting, in the format of the file. Raises ConfigError."""
    try:
        return AgentClient(home).send(AgentSettings())["settings"][key]
    except UserError:
        return shown(resolve_settings({"home": home}))[key]


def models_stored(home: Path, timeout_s: float | None = None) -> tuple[Path, list[Mapping[str, Any]]]:
    """Return the cache folder, and the models of other members, none if no agent replies."""
    from ..models.hub_cache import cache_folder

    try:
        told = AgentClient(home, timeout_s).send(ModelsStored())
    except UserError:
        return cache_folder(), []
    return Path(told["folder"]), list(told["elsewhere"])


# --- shell completion; typer keeps the suggestions that begin like the word on the line ------------------

SHELLS = ("bash", "zsh", "fish")
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
    typer.echo(get_completion_script(prog_name="mlxtp", complete_var=COMPLETION_VARIABLE, shell=shell))


def words(metavar: str) -> Callable[[], list[str]] | None:
    """Return the literal words of a choice such as auto|all|N; None if it is not a choice."""
    choices = [each for each in metavar.split("|") if not each.isupper()] if "|" in metavar else []
    return (lambda: choices) if choices else None


def model_names() -> list[str]:
    from ..models.inspect import stored_models

    return [each.id for each in stored_models()]


def hub_model_names(ctx: typer.Context) -> list[str]:
    """Return the Hub models that are in the agent's cache, at least in part."""
    from ..models.hub_cache import repos_here

    return [each.name for each in repos_here(models_stored(_home(ctx), _ASK_S)[0]) if each.commits()]


def key_names(ctx: typer.Context) -> list[str]:
    from ..api.api_keys import KeyFile

    try:
        return [key.name for key in KeyFile(_home(ctx)).load()]
    except UserError:
        return []


def member_names(ctx: typer.Context) -> list[str]:
    try:
        told = AgentClient(_home(ctx), _ASK_S).send(ListMembers())["members"]
    except UserError:
        return []
    return [str(member["name"]) for member in told]


def _home(ctx: typer.Context) -> Path:
    return home_of(ctx.params.get("home"))

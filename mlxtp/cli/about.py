"""`mlxtp version --verbose` and `mlxtp config`: facts for a bug report, and this Mac's settings."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .. import __version__
from ..client import AgentClient, agent_runs
from ..config import FILE, Settings, home_folder, resolve_settings, shown
from ..errors import UserError
from ..settings import JOIN, SETTINGS, Setting
from .options import AsJson
from .printing import print_answer, print_json

# --- version; imports nothing heavy ----------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def version_facts(home: Path) -> dict[str, str]:
    """Return the facts, most important first.

    Paths name the user's folders, and nothing else about the user.
    """
    return {
        "mlxtp": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": _system(),
        **{name: _installed(name) for name in _needed()},
        "installed in": str(Path(__file__).parent.parent),
        "home": str(home),
        "agent": "runs" if agent_runs(home) else "does not run",
    }


def _system() -> str:
    release = platform.mac_ver()[0]
    name = f"macOS {release}" if release else f"{platform.system()} {platform.release()}"
    return f"{name}, {platform.machine()}"


def _needed() -> list[str]:
    """Return the packages that pyproject.toml requires; none where mlxtp is not installed."""
    try:
        wanted = [each for each in requires("mlxtp") or () if "extra ==" not in each]
    except PackageNotFoundError:
        return []
    return list(dict.fromkeys(match[0] for each in wanted if (match := _NAME.match(each))))


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


# --- settings, and the place of each; reads only ---------------------------------------------------------

Home = Annotated[
    Path | None,
    typer.Option(help="Home of the settings, if not the user's own; also MLXTP_HOME."),
]
Values = Mapping[str, Any]
DEFAULT = "default"


commands = typer.Typer(
    name="config", no_args_is_help=True, help="Settings: their values, where each was set, and the file."
)


@commands.command()
def show(
    origin: Annotated[bool, typer.Option("--origin", help="Show where each was set.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Print the settings that `mlxtp node` would start with here, in the format of the file.

    Different settings of a running agent follow at the end. Join tokens are not shown.
    """
    settings = resolve_settings({"home": home})
    running = _running(settings)
    if as_json:
        print_json(_as_json(settings, running))
        return
    console = Console(highlight=False)
    for line in _lines(settings, running, origin=origin):
        console.print(Text(line, "dim" if line.startswith("#") else ""), soft_wrap=True)


@commands.command()
def path(home: Home = None, as_json: AsJson = False) -> None:
    """Print the path of the settings file. mlxtp does not create it."""
    file = home_folder(home).resolve() / FILE
    print_answer({"path": str(file), "exists": file.is_file()}, as_json, str(file))


def _running(settings: Settings) -> dict[str, tuple[Any, str]] | None:
    """Return the settings of this home's agent that differ, with their places; None without a reply."""
    try:
        told = AgentClient(settings.home.resolve()).get("settings")
    except UserError:
        return None
    here = shown(settings)
    return {
        key: (value, str(told["origins"].get(key, DEFAULT)))
        for key, value in told["settings"].items()
        if key in here and value != here[key]
    }


def _as_json(settings: Settings, running: Mapping[str, tuple[Any, str]] | None) -> Values:
    origins = dict(settings.origins)
    return {
        "home": str(settings.home.resolve()),
        "file": str(settings.home.resolve() / FILE),
        "settings": {
            key: {"value": value, "origin": origins.get(key, DEFAULT)}
            for key, value in shown(settings).items()
        },
        "not_shown": [JOIN] if os.environ.get(JOIN) else [],
        "agent": None
        if running is None
        else {key: {"value": value, "origin": where} for key, (value, where) in running.items()},
    }


def _lines(
    settings: Settings, running: Mapping[str, tuple[Any, str]] | None, *, origin: bool
) -> Iterator[str]:
    file = settings.home.resolve() / FILE
    yield f"# {file}{'' if file.is_file() else ', which does not exist'}"
    yield "# A line that begins with # is a default."
    origins, values = dict(settings.origins), shown(settings)
    panel = table = ""
    for setting in SETTINGS:
        if setting.panel != panel:
            panel = setting.panel
            yield ""
        if (before := setting.key.rpartition(".")[0]) != table:
            table = before
            yield f"[{table}]"
        where = origins.get(setting.key, "")
        said = f"   # {where or DEFAULT}" if origin else ""
        yield f"{'' if where else '# '}{_assignment(setting, values[setting.key])}{said}"
    if os.environ.get(JOIN):
        yield from ("", f"# {JOIN} is set; it is not shown")
    if running:
        yield from ("", "# The agent that runs here has instead:")
        for setting in SETTINGS:
            if setting.key in running:
                value, where = running[setting.key]
                yield f"#   {_assignment(setting, value, setting.key)}   ({where})"


def _assignment(setting: Setting, value: object, name: str = "") -> str:
    name = name or setting.key.rpartition(".")[2]
    if value is None:
        return f"{name}: {setting.default_words}"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{name} = {json.dumps(value, ensure_ascii=False)}"

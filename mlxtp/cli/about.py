"""`mlxtp version --verbose`, `config`, `doctor` and `wire`: this installation, and what is wrong here."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from .. import __version__
from ..client import AgentClient, agent_runs
from ..config import FILE, Settings, home_folder, resolve_settings, shown
from ..errors import Exit, UserError
from ..imports import importing, installed, metal_wheel
from ..settings import JOIN, SETTINGS, Setting
from ..verbs import AgentSettings, Diagnose
from .options import AsJson, Home
from .printing import Console, home_of, print_answer, print_json

# --- version; imports nothing heavy ----------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def version_facts(home: Path) -> dict[str, str]:
    """Return the facts, most important first. They reveal nothing of the user but paths of folders."""
    return {
        "mlxtp": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": _system(),
        **{name: installed(name) or "not installed" for name in _needed()},
        "mlx-metal made for": metal_wheel() or "not installed",
        "installed in": str(Path(__file__).parent.parent),
        "home": str(home),
        "agent": "runs" if agent_runs(home) else "does not run",
    }


def _system() -> str:
    release = platform.mac_ver()[0]
    name = f"macOS {release}" if release else f"{platform.system()} {platform.release()}"
    return f"{name}, {platform.machine()}"


def _needed() -> list[str]:
    """Return the packages that pyproject.toml requires; [] if mlxtp is not installed."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        wanted = [each for each in requires("mlxtp") or () if "extra ==" not in each]
    except PackageNotFoundError:
        return []
    return list(dict.fromkeys(match[0] for each in wanted if (match := _NAME.match(each))))


# --- settings, and the place of each; reads only ---------------------------------------------------------

SettingsHome = Annotated[
    Path | None, typer.Option(help="Home of the settings, if not the user's own; also MLXTP_HOME.")
]
DEFAULT = "default"


commands = typer.Typer(
    name="config", no_args_is_help=True, help="Settings: their values, where each was set, and the file."
)


@commands.command()
def show(
    origin: Annotated[bool, typer.Option("--origin", help="Show where each was set.")] = False,
    home: SettingsHome = None,
    as_json: AsJson = False,
) -> None:
    """Print the settings that `mlxtp node` would start with here, in the format of the file.

    Different settings of a running agent follow at the end. Join tokens are not shown.
    """
    settings = resolve_settings({"home": home})
    running = _running(settings)
    if as_json:
        home = settings.home.resolve()
        found = {
            "home": str(home),
            "file": str(home / FILE),
            "settings": _told(shown(settings), dict(settings.origins)),
        }
        print_json(found | {"not_shown": [JOIN] if os.environ.get(JOIN) else [], "agent": running})
        return
    console = Console(highlight=False)
    for line in _lines(settings, running, origin=origin):
        console.print(Text(line, "dim" if line.startswith("#") else ""), soft_wrap=True)


@commands.command()
def path(home: SettingsHome = None, as_json: AsJson = False) -> None:
    """Print the path of the settings file. mlxtp does not create it."""
    file = home_folder(home).resolve() / FILE
    print_answer({"path": str(file), "exists": file.is_file()}, as_json, str(file))


def _running(settings: Settings) -> dict[str, dict[str, Any]] | None:
    """Return the agent's settings that differ from `settings`, as `_told` does; None without a reply."""
    try:
        told = AgentClient(settings.home.resolve()).send(AgentSettings())
    except UserError:
        return None
    here = shown(settings)
    there = _told(told["settings"], told["origins"])
    return {key: each for key, each in there.items() if key in here and each["value"] != here[key]}


def _told(values: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {key: {"value": value, "origin": origins.get(key, DEFAULT)} for key, value in values.items()}


def _lines(
    settings: Settings, running: Mapping[str, Mapping[str, Any]] | None, *, origin: bool
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
                one = running[setting.key]
                yield f"#   {_assignment(setting, one['value'], setting.key)}   ({one['origin']})"


def _assignment(setting: Setting, value: object, name: str = "") -> str:
    name = name or setting.key.rpartition(".")[2]
    if value is None:
        return f"{name}: {setting.default_words}"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{name} = {json.dumps(value, ensure_ascii=False)}"


# --- doctor: the agent's report, or this command's own, or why a group failed -----------------------------


def doctor(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            help="With --postmortem: folders of a failure, from one Mac or several.",
            show_default="the newest",
        ),
    ] = None,
    postmortem: Annotated[
        bool,
        typer.Option(
            "--postmortem", help="Show why a group failed: its ranks' last steps, and the likely cause."
        ),
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Examine this machine, its network and the other members, and print problems with their remedies.

    A running agent does it, else this command. Nothing is changed. The exit status is 1 for an error, 0 for
    warnings.
    """
    if postmortem:
        _show_failures(folders, home_of(home), as_json=as_json)
        return
    if folders:
        raise UserError("folders are read with --postmortem: `mlxtp doctor --postmortem FOLDER ...`")
    report = _report(home)
    if as_json:
        print_json(report)
    else:
        _show(report)
    if report["level"] == "error":
        raise typer.Exit(Exit.REFUSED)


def _report(home: Path | None) -> Mapping[str, Any]:
    folder, problem = home_of(home), ""
    if agent_runs(folder):
        try:
            return AgentClient(folder).send(Diagnose())
        except UserError as error:
            problem = error.detail
    import asyncio

    from ..diagnostics.checkup import Checkup

    settings = resolve_settings({"home": folder})
    return asyncio.run(Checkup(settings, problem).report())


def _show(report: Mapping[str, Any]) -> None:
    from ..diagnostics import rows

    console = Console(highlight=False, soft_wrap=True)
    plain = not console.encoding.startswith("utf") or console.legacy_windows
    for line in rows.show(report, console.width, plain=plain):
        console.print(line)


def _show_failures(folders: list[Path] | None, home: Path, *, as_json: bool) -> None:
    from ..diagnostics import causes, failure_store

    found = failure_store.postmortems(folders or [failure_store.newest(home)])
    if as_json:
        print_json({"failures": [asdict(each) for each in found]})
        return
    console = Console(highlight=False)
    for each in found:
        for line in causes.show(each):
            console.print(line)


# --- the messages of this version -------------------------------------------------------------------------


def wire() -> None:
    """Print every message of agents and ranks, its fields, and the legal order of messages.

    It is Markdown, laid out when a terminal shows it.
    """
    with importing():
        from .. import agent  # noqa: F401 - it imports the modules of all messages
        from ..wire import reference
    text = reference.render()
    if sys.stdout.isatty():
        from rich.markdown import Markdown

        print_answer({}, as_json=False, show=Markdown(text))
    else:
        print_answer({}, as_json=False, show=text.rstrip())

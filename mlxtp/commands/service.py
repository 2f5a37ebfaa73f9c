"""`mlxtp service`, `mlxtp logs` and `mlxtp restart`: mlxtp as a service of launchd or systemd."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..client import agent_runs
from ..config import home_folder, resolve_settings
from ..errors import UserError
from ..service import here
from ..service.description import (
    PASSED_ON,
    Command,
    Manager,
    Owner,
    Remove,
    Service,
    State,
    Step,
    Write,
    describe,
    is_ours,
    log_of,
    unseen,
)
from ..service.shell import not_ours, wait_until
from .cluster import drain_agent
from .options import AsJson

STOPPED_S = 30.0
"""How long the manager may take to notice that an agent has ended."""
NONE = "no service is installed here; `mlxtp service install` installs one"
_JOIN_FIRST = (
    "--join: a token is a secret and works once, so it does not belong into a service. Join first, by `mlxtp "
    "node --join TOKEN` in a terminal, and end that by Ctrl-C; this Mac stays a member, also as a service"
)

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print what would be written and run; needs no sudo.")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")]
Lines = Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    service = typer.Typer(
        no_args_is_help=True,
        help="Have the system run mlxtp: from the start of the machine, and again after a failure.",
    )
    for command in (install, uninstall, start, stop, status, logs):
        service.command()(command)
    app.add_typer(service, name="service")
    app.command()(logs)
    app.command()(restart)


def install(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- OPTIONS OF NODE",
            help="As for `mlxtp node`, such as `-- --http 0.0.0.0:52415`. Better is config.toml, where they "
            "can be changed.",
            show_default=False,
        ),
    ] = None,
    user: Annotated[
        bool,
        typer.Option(
            "--user",
            help="In your login session, without sudo: a LaunchAgent, which macOS 15 and later keeps from "
            "the local network, or a systemd user unit. Default: a LaunchDaemon or a unit of the system, "
            "which runs as you, too.",
        ),
    ] = False,
    home: Annotated[
        Path | None, typer.Option(help="The agent's folder; also MLXTP_HOME. Default: as for `mlxtp node`.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Install the service and start it: from then on it runs whenever this machine does.

    Once more after an update, or with other options: it replaces what it wrote before.
    """
    arguments = ["--join" if each == "--join=" else each for each in arguments or ()]
    owner = here.owner()
    folder = here.home_of(owner, home)
    shell, other = (here.shell_of(owner, login=login) for login in (user, not user))
    path = shell.manager.search_path
    service = _described(context, owner, folder, arguments, path=path, login=user)
    if is_ours(other.installed):
        raise UserError(f"{other.manager.path} is installed, and one service is enough: uninstall it first")
    before, wanted = shell.installed, shell.manager.render(service)
    if before and not is_ours(before):
        raise not_ours(shell.manager.path)
    if dry_run:
        _show_steps(shell.manager.install(service, here.state_if_any(shell)))
        _doubt(shell.manager, service, owner)
        return
    here.allow(owner, _typed(user, home, arguments), login=user)
    state = shell.state()
    if state.pid is None and agent_runs(folder):
        raise UserError(
            f"an agent runs with home {folder} that is no service; stop it first: `mlxtp drain`, or Ctrl-C "
            "in its terminal"
        )
    if before == wanted and state.pid is not None:
        print(f"{shell.manager.path} is installed like this already, and runs as process {state.pid}")
        return
    shell.take(shell.manager.install(service, state))
    print(f"{shell.manager.kind} installed: {shell.manager.path}")
    _doubt(shell.manager, service, owner)
    _wait(here.Installed(shell, owner, user, wanted))


def uninstall(dry_run: DryRun = False) -> None:
    """Stop the service and remove it. The agent's folder stays: who it is, its settings and its logs."""
    if (found := here.find()) is None:
        for login in (False, True):
            shell = here.shell_of(here.owner(), login=login)
            if shell.installed:
                raise not_ours(shell.manager.path)
        print("no service is installed here")
        return
    if dry_run:
        _show_steps(found.manager.uninstall(here.state_if_any(found.shell)))
        return
    found.allow("service", "uninstall")
    found.shell.take(found.manager.uninstall(found.shell.state()))
    print(f"{found.manager.kind} removed; {found.home} stays")


def start(dry_run: DryRun = False) -> None:
    """Start the installed service."""
    found, state = _installed(dry_run)
    if dry_run:
        _show_steps(found.manager.start(state))
    elif state.pid is not None:
        print(f"it runs already, as process {state.pid}")
    else:
        found.allow("service", "start")
        found.shell.take(found.manager.start(state))
        _wait(found)


def stop(dry_run: DryRun = False) -> None:
    """Stop the service, until `mlxtp service start` or the next start of this machine.

    Open requests have as long as `drain` in config.toml says, 10 s by default; `mlxtp drain` gives them all
    the time they take.
    """
    found, state = _installed(dry_run)
    if dry_run:
        _show_steps(found.manager.stop(state))
        return
    if state.loaded:
        found.allow("service", "stop")
        found.shell.take(found.manager.stop(state))
    print("the service is stopped")


def status(as_json: AsJson = False) -> None:
    """Show the service: whether it is installed and runs, as whom, and how it ended if it failed."""
    if (found := here.find()) is None:
        answer: dict[str, Any] = {"installed": False}
    else:
        state = found.shell.state()
        answer = {
            "installed": True,
            "kind": found.manager.kind,
            "file": found.manager.path,
            "user": found.manager.owner(found.text) or found.owner.name,
            "home": str(found.home),
            "log": str(found.log),
            "pid": state.pid,
            "last": state.last,
            "agent": found.agent,
            "problem": found.problem,
        }
    print(json.dumps(answer, ensure_ascii=False) if as_json else "\n".join(_status_lines(answer)))


def logs(follow: Follow = False, lines: Lines = 50) -> None:
    """Show the service's log; without a service, that of an agent whose config.toml has a log_file."""
    found = here.find()
    log = found.log if found is not None else Path(resolve_settings({}).log_file)
    if log == Path():
        raise UserError(
            "no service is installed here, and config.toml has no log_file: an agent writes its log to "
            "standard error, which is the terminal that it runs in, or to the FILE of `mlxtp node --log-file`"
        )
    if found is not None and (aside := found.aside()):
        print(aside, file=sys.stderr, flush=True)
    if not follow and not log.exists():
        raise UserError(f"there is no log yet; it will be {log}")
    tail = ("tail", "-n", str(lines), *(("-F",) if follow else ()), str(log))  # -F goes on in the next file
    os.execvp(tail[0], tail)


def restart(
    within: Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="End then, whatever is open. Default: as long as it takes."),
    ] = None,
) -> None:
    """Stop the service once its requests are done, and start it again, such as with new settings."""
    if (found := here.find()) is None:
        raise UserError(
            "no service is installed here, so nothing would start it again. An agent in a terminal: `mlxtp "
            "drain`, then `mlxtp node`. To have a service: `mlxtp service install`"
        )
    if found.shell.state().pid is None:
        raise UserError("the service does not run; `mlxtp service start` starts it")
    found.allow("restart", *(("--within", within) if within else ()))
    drain_agent(found.home, within)
    wait_until(lambda: found.shell.state().pid is None, STOPPED_S)
    found.shell.take(found.manager.start(found.shell.state()))
    _wait(found)


def _installed(dry_run: bool) -> tuple[here.Installed, State]:
    if (found := here.find()) is None:
        raise UserError(NONE)
    return found, here.state_if_any(found.shell) if dry_run else found.shell.state()


def _described(
    context: typer.Context, owner: Owner, home: Path, arguments: Sequence[str], *, path: str, login: bool
) -> Service:
    """Raises UserError, or says how `node` is used, for arguments with which no agent would start."""
    commands = context.find_root()
    node = commands.command.get_command(commands, "node")  # type: ignore[attr-defined]  # it is a group
    given = node.make_context("mlxtp node", list(arguments)).params
    if given["join"]:
        raise UserError(_JOIN_FIRST)
    if given["home"] is not None:
        raise UserError("--home is an option of `mlxtp service install` itself: say it before `--`")
    if given["log_file"] is not None:
        raise UserError(f"--log-file: a service's log is {log_of(str(home))}, where `mlxtp logs` finds it")
    settings = resolve_settings({**_flags(given), "home": home}, environment={})
    return describe(
        owner,
        str(home),
        arguments,
        python=sys.executable,
        path=path,
        passed_on=_passed_on(),
        drain_s=settings.drain_s,
        login=login,
        version=__version__,
    )


def _flags(given: Mapping[str, Any]) -> dict[str, object]:
    """The options of `mlxtp node` as settings have them: without --join, None where one was not given."""
    return {
        name: value or None if isinstance(value, (list, tuple)) else value
        for name, value in given.items()
        if name != "join"
    }


def _passed_on() -> dict[str, str]:
    return {name: os.environ[name] for name in PASSED_ON if os.environ.get(name)}


def _typed(user: bool, home: Path | None, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command to install the same, as root would have to type it, whose variables are not ours."""
    variables = [f"{name}={value}" for name, value in _passed_on().items()]
    given = home or os.environ.get("MLXTP_HOME")
    return (
        *(("env", *variables) if variables else ()),
        *(sys.executable, "-m", "mlxtp", "service", "install"),
        *(("--user",) if user else ()),
        *(("--home", str(home_folder(given).resolve())) if given else ()),
        *(("--", *arguments) if arguments else ()),
    )


# --- printing ---------------------------------------------------------------------------------------


def _show_steps(steps: Sequence[Step]) -> None:
    for step in steps:
        match step:
            case Write():
                print(f"write {step.path}:\n\n{step.text}")
            case Remove():
                print(f"remove {step.path}")
            case Command():
                whom = f" as {step.user}" if step.user else ""
                until = f", again and again until it ends with {step.fine[0]}" if 0 in step.again else ""
                print(f"run{whom}: {shlex.join(step.argv)}{until}")


def _doubt(manager: Manager, service: Service, owner: Owner) -> None:
    others = sorted(
        name for name in os.environ if name.startswith("MLXTP_") and name not in ("MLXTP_HOME", "MLXTP_JOIN")
    )
    for sentence in filter(None, (*manager.doubts(service, owner), unseen(others))):
        print(f"mind: {sentence}", file=sys.stderr)


def _wait(found: here.Installed) -> None:
    state = found.wait()
    if found.agent:
        print(f"it runs as process {state.pid}; `mlxtp status` shows what it does, `mlxtp logs -f` its log")
    else:
        print(f"it runs as process {state.pid}, and does not answer yet; `mlxtp logs -f` shows how far it is")


def _status_lines(answer: Mapping[str, Any]) -> list[str]:
    if not answer["installed"]:
        return [NONE]
    running = f"runs as process {answer['pid']}" if answer["pid"] else "does not run"
    ended = f"; the last time it ended: {answer['last']}" if answer["last"] else ""
    rows = {
        "service": running + ended,
        "agent": answer["agent"] or "does not answer",
        "file": f"{answer['file']} ({answer['kind']})",
        **{name: answer[name] for name in ("user", "home", "log", "problem")},
    }
    return [f"{name:<8} {value}" for name, value in rows.items() if value]

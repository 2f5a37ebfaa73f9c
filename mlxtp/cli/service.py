"""`mlxtp service`, `mlxtp logs` and `mlxtp restart`: mlxtp as a service of launchd."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..client import agent_runs
from ..config import home_folder, resolve_settings
from ..errors import UserError
from ..service import installed
from ..service.installed import not_ours, wait_until
from ..service.launchd import (
    PASSED_ON,
    Launchd,
    Owner,
    Remove,
    Service,
    ServiceCommand,
    ServiceState,
    ServiceStep,
    Write,
    describe,
    is_ours,
    log_of,
    unseen,
    without_secret,
)
from ..settings import AUDIT_LOG
from ..verbs import StartDrain
from .cluster import drain_agent
from .options import AsJson, Home, sends, setting_of
from .printing import home_of, print_answer, print_json

STOPPED_S = 30.0  #: Seconds that launchd may take to notice that an agent has ended.
NONE = "no service is installed here; `mlxtp service install` installs one"
_JOIN_FIRST = (
    "--join: a token is a secret and works once, so it does not belong in a service. Join first, with `mlxtp "
    "node --join TOKEN` in a terminal, and end that with Ctrl-C; this Mac stays a member, also as a service"
)

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print what would be written and run; needs no sudo.")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Also print new lines.")]
LineCount = Annotated[
    int, typer.Option("--lines", "-n", min=0, metavar="N", help="How many of the last lines.")
]


commands = typer.Typer(
    name="service",
    no_args_is_help=True,
    help="Run mlxtp as a service of macOS: from the start of the machine, and again after a failure. On "
    "Linux, systemd does that by the unit in examples/mlxtp.service.",
)


@commands.command()
def install(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- OPTIONS OF NODE",
            help="As for `mlxtp node`, such as `-- --http 0.0.0.0:52415`. Prefer config.toml.",
            show_default=False,
        ),
    ] = None,
    user: Annotated[
        bool,
        typer.Option(
            "--user",
            help="In your login session, without sudo: a LaunchAgent, which macOS 15 and later keeps from "
            "the local network. Default: a LaunchDaemon, which runs as you, too.",
        ),
    ] = False,
    home: Annotated[
        Path | None, typer.Option(help="The agent's folder; also MLXTP_HOME. Default: as for `mlxtp node`.")
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Install the service and start it, now and whenever this machine starts.

    Run it again after an update, or with other options: it replaces what it wrote before.
    """
    _check_system()
    arguments = ["--join" if each == "--join=" else each for each in arguments or ()]
    owner = installed.owner()
    folder = installed.home_of(owner, home)
    shell, other = (installed.shell_of(owner, login=login) for login in (user, not user))
    service = _described(context, owner, folder, arguments, login=user)
    if is_ours(other.installed):
        raise UserError(f"{other.manager.path} is already installed as a service; uninstall it first")
    before, wanted = shell.installed, shell.manager.render(service)
    if before and not is_ours(before):
        raise not_ours(shell.manager.path)
    doubts = _doubts(shell.manager, service, owner)
    if dry_run:
        _print_steps(shell.manager.install(service, installed.state_if_any(shell)), doubts, as_json=as_json)
        return
    installed.allow(owner, _typed(user, home, arguments), login=user)
    state = shell.state()
    if state.pid is None and agent_runs(folder):
        raise UserError(
            f"an agent runs with home {folder} outside of a service; stop it first: `mlxtp drain`, or Ctrl-C "
            "in its terminal"
        )
    found = installed.Installed(shell, owner, user, wanted)
    about = {"kind": shell.manager.kind, "file": shell.manager.path, "home": str(folder), "mind": doubts}
    if before == wanted and state.pid is not None:
        answer = {**about, "changed": False, "pid": state.pid, "agent": found.agent}
        words = f"{shell.manager.path} is already installed like this, and runs as process {state.pid}"
        print_answer(answer, as_json, words)
        return
    shell.take(shell.manager.install(service, state))
    if not as_json:
        print(f"{shell.manager.kind} installed: {shell.manager.path}")
        _mind(doubts)
    _wait(found, {**about, "changed": True}, as_json=as_json)


@commands.command()
def uninstall(dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Stop the service and remove it. The agent's folder stays: its identity, settings and logs."""
    if (found := _found()) is None:
        for login in (False, True):
            shell = installed.shell_of(installed.owner(), login=login)
            if shell.installed:
                raise not_ours(shell.manager.path)
        print_answer({"removed": None, "home": None}, as_json, "no service is installed here")
        return
    if dry_run:
        _print_steps(found.shell.manager.uninstall(installed.state_if_any(found.shell)), (), as_json=as_json)
        return
    found.allow("service", "uninstall")
    found.shell.take(found.shell.manager.uninstall(found.shell.state()))
    words = f"{found.shell.manager.kind} removed; {found.home} stays"
    print_answer({"removed": found.shell.manager.path, "home": str(found.home)}, as_json, words)


@commands.command()
def start(dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Start the installed service."""
    found, state = _installed(dry_run)
    if dry_run:
        _print_steps(found.shell.manager.start(state), (), as_json=as_json)
    elif state.pid is not None:
        words = f"it already runs as process {state.pid}"
        print_answer({"changed": False, "pid": state.pid, "agent": found.agent}, as_json, words)
    else:
        found.allow("service", "start")
        found.shell.take(found.shell.manager.start(state))
        _wait(found, {"changed": True}, as_json=as_json)


@commands.command()
def stop(dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Stop the service until `mlxtp service start` or the next start of this machine.

    Open requests have the seconds of the setting `drain`, 10 by default; `mlxtp drain` waits for all.
    """
    found, state = _installed(dry_run)
    if dry_run:
        _print_steps(found.shell.manager.stop(state), (), as_json=as_json)
        return
    if state.loaded:
        found.allow("service", "stop")
        found.shell.take(found.shell.manager.stop(state))
    print_answer({"changed": state.loaded, "pid": None}, as_json, "the service is stopped")


@commands.command()
def status(as_json: AsJson = False) -> None:
    """Show the service: whether it is installed and runs, its user, and how it ended if it failed."""
    if (found := _found()) is None:
        answer: dict[str, Any] = {"installed": False}
    else:
        state = found.shell.state()
        answer = {
            "installed": True,
            "kind": found.shell.manager.kind,
            "file": found.shell.manager.path,
            "user": found.shell.manager.owner(found.text) or found.owner.name,
            "home": str(found.home),
            "log": str(found.log),
            "pid": state.pid,
            "last": state.last,
            "agent": found.agent,
            "problem": found.problem,
        }
    print_answer(answer, as_json, "\n".join(_status_lines(answer)))


@commands.command()
def logs(
    follow: Follow = False,
    lines: LineCount = 50,
    audit: Annotated[
        bool, typer.Option("--audit", help="Show who was let in or out, and what was loaded, by whom.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Show the service's log; without a service, or with --home, the log of the agent with that home."""
    if follow and as_json:
        raise typer.BadParameter("--json prints the last lines, and --follow runs without an end: choose one")
    found = _service_with(home)
    if audit:
        log, aside = (found.home if found is not None else home_of(home)) / AUDIT_LOG, ""
    else:
        log = found.log if found is not None else _log_of_agent(home_of(home))
        aside = found.aside() if found is not None else ""
    if not follow and not log.exists():
        raise UserError(f"there is no log yet; it will be {log}")
    tail = ("tail", "-n", str(lines), *(("-F",) if follow else ()), str(log))  # -F follows a rotated log
    if as_json:
        text = subprocess.run(tail, stdout=subprocess.PIPE, check=True).stdout.decode(errors="replace")
        print_json({"log": str(log), "lines": text.splitlines(), "aside": aside})
        return
    if aside:
        print(aside, file=sys.stderr, flush=True)
    os.execvp(tail[0], tail)


def _check_system() -> None:
    if not installed.ON_MAC:
        raise UserError(installed.ELSEWHERE)


def _found() -> installed.Installed | None:
    _check_system()
    return installed.find()


def _service_with(home: Path | None) -> installed.Installed | None:
    found = installed.find()
    if found is None or not (home or os.environ.get("MLXTP_HOME")):
        return found
    return found if found.home == home_of(home) else None


def _log_of_agent(home: Path) -> Path:
    """Return the log file of that home's agent, running or not. Raises UserError if it has none."""
    if not (log := setting_of("log_file", home)):
        raise UserError(
            f"no service with home {home} is installed here, and neither its config.toml nor its agent has a "
            "log_file: an agent writes its log to standard error, which is the terminal that it runs in, or "
            "to the FILE of `mlxtp node --log-file`"
        )
    return Path(log)


@sends(StartDrain)
def restart(verb: StartDrain, as_json: AsJson = False) -> None:
    """Stop the service once its requests are done, and start it again, for instance with new settings."""
    if (found := _found()) is None:
        raise UserError(
            "no service is installed here, so nothing would start it again. An agent in a terminal: `mlxtp "
            "drain`, then `mlxtp node`. To install a service: `mlxtp service install`"
        )
    if found.shell.state().pid is None:
        raise UserError("the service does not run; `mlxtp service start` starts it")
    found.allow("restart", *(("--within", verb.within) if verb.within else ()))
    cut = drain_agent(found.home, verb)
    wait_until(lambda: found.shell.state().pid is None, STOPPED_S)
    found.shell.take(found.shell.manager.start(found.shell.state()))
    _wait(found, {"cut": cut}, as_json=as_json)


def _installed(dry_run: bool) -> tuple[installed.Installed, ServiceState]:
    if (found := _found()) is None:
        raise UserError(NONE)
    return found, installed.state_if_any(found.shell) if dry_run else found.shell.state()


def _described(
    context: typer.Context, owner: Owner, home: Path, arguments: Sequence[str], *, login: bool
) -> Service:
    """Describe the service. For arguments that no agent accepts, raise UserError or print a usage."""
    commands = context.find_root()
    node = commands.command.get_command(commands, "node")  # type: ignore[attr-defined]  # it is a group
    given = node.make_context("mlxtp node", list(arguments)).params
    if given["join"]:
        raise UserError(_JOIN_FIRST)
    if given["home"] is not None:
        raise UserError("--home is an option of `mlxtp service install` itself: put it before `--`")
    if given["log_file"] is not None:
        raise UserError(f"--log-file: a service's log is {log_of(str(home))}, where `mlxtp logs` finds it")
    settings = resolve_settings({**given, "home": home}, environment={})
    return describe(
        owner,
        str(home),
        arguments,
        python=sys.executable,
        passed_on=_passed_on(),
        drain_s=settings.drain_s,
        login=login,
        version=__version__,
    )


def _passed_on() -> dict[str, str]:
    """Return the variables without passwords: every user can read the service's file and the processes."""
    return {name: without_secret(os.environ[name]) for name in PASSED_ON if os.environ.get(name)}


def _typed(user: bool, home: Path | None, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command for root to install the same service, because root has other variables."""
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


def _print_steps(steps: Sequence[ServiceStep], doubts: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        print_json({"steps": list(map(_step, steps)), "mind": list(doubts)})
        return
    for step in steps:
        match step:
            case Write():
                print(f"write {step.path}:\n\n{step.text}")
            case Remove():
                print(f"remove {step.path}")
            case ServiceCommand():
                whom = f" as {step.user}" if step.user else ""
                until = f", again and again until it ends with {step.fine[0]}" if 0 in step.again else ""
                print(f"run{whom}: {shlex.join(step.argv)}{until}")
    _mind(doubts)


def _step(step: ServiceStep) -> Mapping[str, Any]:
    what = {Write: "write", Remove: "remove", ServiceCommand: "run"}[type(step)]
    return {"do": what, **{name: value for name, value in asdict(step).items() if name != "within_s"}}


def _doubts(manager: Launchd, service: Service, owner: Owner) -> list[str]:
    others = sorted(
        name for name in os.environ if name.startswith("MLXTP_") and name not in ("MLXTP_HOME", "MLXTP_JOIN")
    )
    secrets = [
        f"{name} has a user or a password, which the service does not get: every user here can read its file"
        for name, value in _passed_on().items()
        if value != os.environ[name]
    ]
    return [*secrets, *filter(None, (*manager.doubts(service, owner), unseen(others)))]


def _mind(doubts: Sequence[str]) -> None:
    for sentence in doubts:
        print(f"mind: {sentence}", file=sys.stderr)


def _wait(found: installed.Installed, about: Mapping[str, Any], *, as_json: bool) -> None:
    state, agent = found.wait(), found.agent
    if agent:
        how = "; `mlxtp status` shows what it does, `mlxtp logs -f` its log"
    else:
        how = ", and does not reply yet; `mlxtp logs -f` shows the progress"
    answer = {**about, "pid": state.pid, "agent": agent}
    print_answer(answer, as_json, f"it runs as process {state.pid}{how}")


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

"""The service as text: its description, and the files and commands of launchd and systemd. Pure.

launchd is untested on a Mac so far. Its keys are as in launchd.plist(5), its commands as in launchctl(1), and
statuses and outputs as published by users.
"""

from __future__ import annotations

import math
import plistlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit
from xml.parsers.expat import ExpatError

from ..errors import MANY_FILES, Exit, UserError

# --- one agent as a service, and the steps that install or change it -------------------------------------


LABEL = "mlxtp.node"
#: Found in each file that mlxtp writes for launchd or systemd. mlxtp overwrites and removes no others.
MARK = "Written by mlxtp"
#: Seconds from one start to the next, at least, after a failure.
RESTART_S = 15
MIN_STOP_S = 60
#: Seconds that an agent may take to stop after its drain.
STOP_MARGIN_S = 50
#: Seconds that a command may take to stop the service: no drain takes longer.
DAY_S = 86_400.0
#: Variables that the service shares with the user who installs it: folder and source of models.
PASSED_ON = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT")


@dataclass(frozen=True, slots=True)
class Owner:
    """The user who owns the service. `home` is the user's own folder, not that of the agent."""

    name: str
    uid: int
    home: str


@dataclass(frozen=True, slots=True)
class Service:
    """One agent that the system starts.

    program      the interpreter's absolute path, and its arguments
    environment  all variables that mlxtp gives it
    user         the user it runs as; empty for the owner of its session
    log          the agent's own
    crash_log    its output before it has a log, where no journal keeps that
    stop_s       seconds it may take to stop, before it is killed
    """

    program: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    user: str
    log: str
    crash_log: str
    stop_s: int
    version: str

    @property
    def mark(self) -> str:
        """First line of the service's file, which names mlxtp as its author."""
        return f"{MARK} {self.version}: `mlxtp service install` writes it again, `uninstall` removes it"


def describe(
    owner: Owner,
    home: str,
    arguments: Sequence[str],
    *,
    python: str,
    path: str,
    passed_on: Mapping[str, str],
    drain_s: float,
    login: bool,
    version: str,
) -> Service:
    """Return the service of an agent with the folder `home` and further `arguments` of `mlxtp node`.

    `login`: in the owner's login session instead of from the start of the machine. `path` is its PATH,
    `passed_on` its share of the environment. Raises UserError for text that a service's file cannot hold.
    """
    log = log_of(home)
    service = Service(
        program=(python, "-m", "mlxtp", "node", "--home", home, "--log-file", log, *arguments),
        environment=(("HOME", owner.home), ("PATH", path), *sorted(passed_on.items())),
        user="" if login else owner.name,
        log=log,
        crash_log=crash_log(home),
        stop_s=max(MIN_STOP_S, math.ceil(drain_s) + STOP_MARGIN_S),
        version=version,
    )
    for text in (*service.program, *(value for _, value in service.environment)):
        if not text.isprintable():
            raise UserError(f"{text!r} has characters that cannot stand in the file of a service")
    return service


def log_of(home: str) -> str:
    """Return the log file of a service whose agent has that home."""
    return f"{home}/logs/agent.log"


def crash_log(home: str) -> str:
    """Return the file where launchd puts the agent's output that is not in the log."""
    return f"{home}/logs/before-the-log.txt"


def option(program: Sequence[str], name: str) -> str:
    """Return the value of an option in an installed program, or "" without one."""
    return next((value for given, value in pairwise(program) if given == name), "")


def is_ours(text: str) -> bool:
    """True if mlxtp wrote the file."""
    return MARK in text


def without_secret(value: str) -> str:
    """Return a variable's value without the user and password that a URL may have."""
    parts = urlsplit(value)
    if not parts.scheme or "@" not in parts.netloc:
        return value
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def unseen(names: Sequence[str]) -> str:
    """Return a warning about settings in variables, which the service will not have; "" without any."""
    if not names:
        return ""
    return (
        f"the service does not see {', '.join(names)} of this terminal; write those it needs into config.toml"
    )


# --- steps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """Write this text to that file, readable for all."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove that file, if it exists."""

    path: str


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """Run this, as `user` if root runs it. It must end with one of the statuses in `fine`.

    After a status in `again` it is repeated, for `within_s` in all.
    """

    argv: tuple[str, ...]
    user: str = ""
    fine: tuple[int, ...] = (0,)
    again: tuple[int, ...] = ()
    within_s: float = 60.0


ServiceStep = Write | Remove | ServiceCommand


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Status and output of a command. 127: it does not exist; 124: it took too long."""

    status: int
    output: str = ""


@dataclass(frozen=True, slots=True)
class ServiceState:
    """The manager's view of the service. `last` describes its last end, if that was a failure."""

    loaded: bool = False
    pid: int | None = None
    last: str = ""


def folders(service: Service) -> ServiceCommand:
    """Return the command that makes home and log folder, for their owner alone. It runs as the owner."""
    logs = service.log.rpartition("/")[0]
    home = logs.rpartition("/")[0]
    return ServiceCommand(("/bin/mkdir", "-p", "-m", "700", home, logs), user=service.user)


# --- launchd and systemd: the file of the service, the manager's commands, and their outputs -------------


# --- launchd --------------------------------------------------------------------------------------------


LAUNCHCTL = "/bin/launchctl"
NOT_FOUND = 113
_NO_SESSION = (112, 125)
_GONE = (3, NOT_FOUND)
_STOPPING = 36
#: Statuses of bootstrap for a label that launchd has not released yet.
_RACE = (5, 37)
_LET_GO_S = 10.0
#: Folders of a user's home that macOS opens to programs only with the user's consent.
PRIVATE_FOLDERS = ("Desktop", "Documents", "Downloads")
_COMMENT = "<!-- {} -->\n"


class Launchd:
    """A LaunchDaemon, or with `login` a LaunchAgent of its owner."""

    search_path = "/usr/bin:/bin:/usr/sbin:/sbin"
    journal = ""

    def __init__(self, owner: Owner, *, login: bool) -> None:
        self.kind = "LaunchAgent" if login else "LaunchDaemon"
        folder = f"{owner.home}/Library/LaunchAgents" if login else "/Library/LaunchDaemons"
        self.path = f"{folder}/{LABEL}.plist"
        self._domain = f"gui/{owner.uid}" if login else "system"
        self._target = f"{self._domain}/{LABEL}"

    def render(self, service: Service) -> str:
        """Return an XML property list, with its author in a comment."""
        keys: dict[str, Any] = {
            "Label": LABEL,
            "ProgramArguments": list(service.program),
            "EnvironmentVariables": dict(service.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_S,
            "ExitTimeOut": service.stop_s,
            "ProcessType": "Interactive",
            "SoftResourceLimits": {"NumberOfFiles": MANY_FILES},
            "HardResourceLimits": {"NumberOfFiles": MANY_FILES},
            "StandardOutPath": service.crash_log,
            "StandardErrorPath": service.crash_log,
        }
        if service.user:
            keys["UserName"] = service.user
        head, doctype, rest = plistlib.dumps(keys, sort_keys=False).decode().partition("<plist")
        return head + _COMMENT.format(service.mark) + doctype + rest

    def program(self, text: str) -> tuple[str, ...]:
        """Return ProgramArguments."""
        found = _keys(text).get("ProgramArguments", ())
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def owner(self, text: str) -> str:
        """Return UserName."""
        return str(_keys(text).get("UserName", ""))

    def ask(self) -> ServiceCommand:
        """Return the command that prints the service. It needs no root."""
        return ServiceCommand((LAUNCHCTL, "print", self._target), fine=(0, NOT_FOUND))

    def state(self, outcome: CommandResult) -> ServiceState:
        """Parse the output of `print`, which Apple does not document.

        Lines of the service itself have one tab.
        """
        if outcome.status == NOT_FOUND:
            return ServiceState()
        if outcome.status:
            raise UserError(self.explain(self.ask(), outcome) or f"launchctl print: {outcome.output}")
        found = dict(
            re.findall(r"^\t(pid|last exit code|last terminating signal) = (.+)$", outcome.output, re.M)
        )
        pid = found.get("pid", "")
        last = ""
        if signal := found.get("last terminating signal"):
            last = f"ended by signal {signal}"
        elif (code := found.get("last exit code", "0")) not in ("0", "(never exited)"):
            last = f"exit status {code}"
        return ServiceState(loaded=True, pid=int(pid) if pid.isdecimal() else None, last=last)

    def doubts(self, service: Service, owner: Owner) -> list[str]:
        """Return warnings about privacy: the local network, and folders."""
        said = []
        if not service.user:
            said.append(
                "macOS 15 and later keeps a LaunchAgent from the local network, mostly without asking: it "
                "does not find other Macs, nor reach them (errno 65). Allow it in System Settings > Privacy "
                "& Security > Local Network, or install it without --user"
            )
        private = tuple(f"{owner.home}/{folder}/" for folder in PRIVATE_FOLDERS)
        said += [
            f"{path} is in a folder that macOS keeps from services; move it elsewhere"
            for path in (service.program[0], service.log)
            if path.startswith(private)
        ]
        return said

    def install(self, service: Service, state: ServiceState) -> list[ServiceStep]:
        """Return the steps. A changed plist takes effect at the next bootstrap."""
        return [
            folders(service),
            *self.stop(state),
            Write(self.path, self.render(service)),
            *self.start(ServiceState()),
        ]

    def start(self, state: ServiceState) -> list[ServiceStep]:
        """Return the steps. Loading starts it, too; enabling undoes a `launchctl disable`."""
        if state.loaded:
            return [ServiceCommand((LAUNCHCTL, "kickstart", self._target))]
        return [
            ServiceCommand((LAUNCHCTL, "enable", self._target)),
            ServiceCommand(
                (LAUNCHCTL, "bootstrap", self._domain, self.path), again=_RACE, within_s=_LET_GO_S
            ),
        ]

    def stop(self, state: ServiceState) -> list[ServiceStep]:
        """Return the steps.

        `bootout` may return early: the service has ended when `print` no longer finds it.
        """
        if not state.loaded:
            return []
        return [
            ServiceCommand((LAUNCHCTL, "bootout", self._target), fine=(0, _STOPPING, *_GONE), within_s=DAY_S),
            ServiceCommand((LAUNCHCTL, "print", self._target), fine=(NOT_FOUND,), again=(0,), within_s=DAY_S),
        ]

    def uninstall(self, state: ServiceState) -> list[ServiceStep]:
        """Return the steps. launchd keeps only that the service is enabled."""
        return [*self.stop(state), Remove(self.path)]

    def explain(self, command: ServiceCommand, outcome: CommandResult) -> str:
        """Explain its status, which is an errno or one of launchd's own."""
        if outcome.status in _NO_SESSION and self.kind == "LaunchAgent":
            return (
                "there is no login session at this Mac's screen, and a LaunchAgent lives in one: log in "
                "there, or install it without --user"
            )
        if outcome.status == 119:
            return f"the service was switched off; `sudo launchctl enable {self._target}` enables it again"
        if outcome.status in (1, 150):
            return "launchd allows this to root only; run it with sudo"
        if outcome.status in _RACE and "bootstrap" in command.argv:
            return (
                f"launchd rejects {self.path}, for one of many reasons. It may be switched off in "
                "System Settings > General > Login Items & Extensions; `/usr/bin/log show --last 5m "
                "--predicate 'process == \"launchd\"'` shows more"
            )
        return ""


def _keys(text: str) -> dict[str, Any]:
    try:
        found = plistlib.loads(text.encode())
    except (plistlib.InvalidFileException, ExpatError, ValueError, TypeError, AttributeError, IndexError):
        return {}
    return found if isinstance(found, dict) else {}


# --- systemd --------------------------------------------------------------------------------------------


SYSTEMCTL = "/usr/bin/systemctl"
UNIT = "mlxtp.service"
_UNIT = """\
# {mark}
[Unit]
Description=mlxtp, a part of a model server
{network}
[Service]
Type=exec
{user}{environment}ExecStart={program}
Restart=on-failure
RestartSec={restart_s}
RestartPreventExitStatus={mistyped}
# Only the agent ends its ranks. It outlives a rank that the system kills for its memory.
KillMode=mixed
TimeoutStopSec={stop_s}
OOMPolicy=continue
LimitNOFILE={files}

[Install]
WantedBy={target}
"""
_NETWORK = "Wants=network-online.target\nAfter=network-online.target\n"


class Systemd:
    """A unit of the system, or with `login` of its owner's own manager."""

    search_path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

    def __init__(self, owner: Owner, *, login: bool) -> None:
        self.kind = "systemd user unit" if login else "systemd unit"
        folder = f"{owner.home}/.config/systemd/user" if login else "/etc/systemd/system"
        self.path = f"{folder}/{UNIT}"
        self.journal = f"journalctl {'--user ' if login else ''}-u {UNIT} -n 20"
        self._systemctl = (SYSTEMCTL, "--user") if login else (SYSTEMCTL,)

    def render(self, service: Service) -> str:
        """Return the unit, with its author in a comment.

        Raises UserError for a program that systemd does not start.
        """
        python, *arguments = service.program
        if found := re.search(r"[\"'\\]", python):
            raise UserError(f"systemd starts no program with {found[0]} in its path, as in {python}")
        environment = (f"Environment={_quoted(f'{name}={value}')}\n" for name, value in service.environment)
        return _UNIT.format(
            mark=service.mark,
            network=_NETWORK if service.user else "",
            user=f"User={service.user}\n" if service.user else "",
            environment="".join(environment),
            program=" ".join([_quoted(python), *(_variable_free(_quoted(each)) for each in arguments)]),
            restart_s=RESTART_S,
            mistyped=int(Exit.MISTYPED),  # wrong settings: another start would fail, too
            stop_s=service.stop_s,
            files=MANY_FILES,
            target="multi-user.target" if service.user else "default.target",
        )

    def program(self, text: str) -> tuple[str, ...]:
        """Return ExecStart."""
        line = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
        try:
            found = shlex.split(line[1]) if line else ()
        except ValueError:
            return ()
        words = [each.replace("%%", "%") for each in found]
        return (*words[:1], *(each.replace("$$", "$") for each in words[1:]))

    def owner(self, text: str) -> str:
        """Return User."""
        line = re.search(r"^User=(.*)$", text, re.MULTILINE)
        return line[1] if line else ""

    def ask(self) -> ServiceCommand:
        """Return the command that shows properties, one a line.

        It also succeeds for units that do not exist.
        """
        wanted = "LoadState,ActiveState,MainPID,Result,ExecMainStatus"
        return ServiceCommand((*self._systemctl, "show", UNIT, f"--property={wanted}"))

    def state(self, outcome: CommandResult) -> ServiceState:
        """Parse the properties. `loaded`: the unit is active, or about to be again."""
        if outcome.status:
            raise UserError(self.explain(self.ask(), outcome) or f"systemctl show: {outcome.output}")
        found = dict(re.findall(r"^(\w+)=(.*)$", outcome.output, re.MULTILINE))
        pid, result = found.get("MainPID", "0"), found.get("Result", "success")
        last = ""
        if result == "exit-code":
            last = f"exit status {found.get('ExecMainStatus', '?')}"
        elif result != "success":
            last = f"ended by {result}"
        active = found.get("ActiveState") not in (None, "inactive", "failed")
        return ServiceState(
            loaded=active, pid=int(pid) if pid.isdecimal() and pid != "0" else None, last=last
        )

    def doubts(self, service: Service, owner: Owner) -> list[str]:
        """Return warnings. A user's services last as long as the user's session."""
        if service.user:
            return []
        return [
            f"it ends when {owner.name} logs out, unless `sudo loginctl enable-linger {owner.name}` was run"
        ]

    def install(self, service: Service, state: ServiceState) -> list[ServiceStep]:
        """Return the steps. A changed unit takes effect at its next start."""
        return [
            folders(service),
            Write(self.path, self.render(service)),
            self._do("daemon-reload"),
            self._do("enable", UNIT),
            self._do("restart", UNIT),
        ]

    def start(self, state: ServiceState) -> list[ServiceStep]:
        """Return the steps. A unit that failed does not start before its failures are reset."""
        return [self._do("reset-failed", UNIT, fine=(0, 1)), self._do("start", UNIT)]

    def stop(self, state: ServiceState) -> list[ServiceStep]:
        """Return the step, which waits until the unit has ended."""
        return [self._do("stop", UNIT)]

    def uninstall(self, state: ServiceState) -> list[ServiceStep]:
        """Return the steps, which also remove its links and the record of its failures."""
        return [
            self._do("disable", "--now", UNIT),
            Remove(self.path),
            self._do("daemon-reload"),
            self._do("reset-failed", UNIT, fine=(0, 1)),
        ]

    def explain(self, command: ServiceCommand, outcome: CommandResult) -> str:
        """Explain its output: its status is 1 for nearly everything."""
        said = outcome.output
        if outcome.status == 127 or "not been booted with systemd" in said:
            return "systemd does not run on this machine; start `mlxtp node` with its own service manager"
        if "Failed to connect to bus" in said:
            return "this session has no systemd of its own: log in as that user, not by su, or omit --user"
        if "Access denied" in said or "authentication required" in said:
            return "systemd allows this to root only; run it with sudo"
        return ""

    def _do(self, *words: str, fine: tuple[int, ...] = (0,)) -> ServiceCommand:
        return ServiceCommand((*self._systemctl, *words), fine=fine, within_s=DAY_S)


#: Each has the same methods. `path` is that of the service's file, `search_path` its PATH. `journal`
#: shows the service's output outside its log; it is empty where the crash log has that.
Manager = Launchd | Systemd


def _variable_free(text: str) -> str:
    """Escape variables in an argument. In the program's own path `$` stands for itself."""
    return text.replace("$", "$$")


def _quoted(text: str) -> str:
    """Quote any text as one word of a unit file, where `%` begins a specifier."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'

"""The service as text: its description, its plist, and the commands of launchd. Pure.

launchd is untested on a Mac so far. Keys are from launchd.plist(5), commands from launchctl(1), statuses and
outputs from users' reports.
"""

from __future__ import annotations

import math
import plistlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit
from xml.parsers.expat import ExpatError

from ..errors import MANY_FILES, UserError

# --- one agent as a service, and the steps that install or change it -------------------------------------


LABEL = "mlxtp.node"
#: In each file that mlxtp writes for launchd. It overwrites and removes no others.
MARK = "Written by mlxtp"
#: Least seconds from one start to the next after a failure.
RESTART_S = 15
MIN_STOP_S = 60
#: Seconds for an agent to stop after its drain.
STOP_MARGIN_S = 50
#: Seconds for a command to stop the service. No drain takes longer.
DAY_S = 86_400.0
#: Variables that the service takes from the installing user: folder and source of models.
PASSED_ON = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT")


@dataclass(frozen=True, slots=True)
class Owner:
    name: str
    uid: int
    home: str  #: the user's home, not the agent's


@dataclass(frozen=True, slots=True)
class Service:
    program: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]  #: All variables that it gets.
    user: str  #: "" for the owner of its session.
    log: str
    crash_log: str  #: Its output before its log begins.
    stop_s: int  #: Seconds until it is killed.
    version: str

    @property
    def mark(self) -> str:
        return f"{MARK} {self.version}: `mlxtp service install` writes it again, `uninstall` removes it"


def describe(
    owner: Owner,
    home: str,
    arguments: Sequence[str],
    *,
    python: str,
    passed_on: Mapping[str, str],
    drain_s: float,
    login: bool,
    version: str,
) -> Service:
    """Describe the service of an agent with the folder `home` and more `arguments` of `mlxtp node`.

    `login`: it runs in the owner's session, not from the machine's start. `passed_on`: variables for it.
    Raises UserError for text that a service's file cannot hold.
    """
    log = log_of(home)
    service = Service(
        program=(python, "-m", "mlxtp", "node", "--home", home, "--log-file", log, *arguments),
        environment=(("HOME", owner.home), ("PATH", SEARCH_PATH), *sorted(passed_on.items())),
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
    return f"{home}/logs/agent.log"


def crash_log(home: str) -> str:
    return f"{home}/logs/before-the-log.txt"


def option(program: Sequence[str], name: str) -> str:
    return next((value for given, value in pairwise(program) if given == name), "")


def is_ours(text: str) -> bool:
    return MARK in text


def without_secret(value: str) -> str:
    parts = urlsplit(value)
    if not parts.scheme or "@" not in parts.netloc:
        return value
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def unseen(names: Sequence[str]) -> str:
    if not names:
        return ""
    return (
        f"the service does not see {', '.join(names)} of this terminal; write those it needs into config.toml"
    )


# --- steps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """Write this text to the file, readable by all."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Remove:
    path: str


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    argv: tuple[str, ...]
    user: str = ""  #: the user to run it as, if this process is root
    fine: tuple[int, ...] = (0,)  #: statuses of success
    again: tuple[int, ...] = ()  #: statuses that make it repeat
    within_s: float = 60.0  #: in total


ServiceStep = Write | Remove | ServiceCommand


@dataclass(frozen=True, slots=True)
class CommandResult:
    status: int  #: 127: the command does not exist; 124: it took too long
    output: str = ""


@dataclass(frozen=True, slots=True)
class ServiceState:
    loaded: bool = False
    pid: int | None = None
    last: str = ""  #: end of the last run, if that was a failure


def folders(service: Service) -> ServiceCommand:
    logs = service.log.rpartition("/")[0]
    home = logs.rpartition("/")[0]
    return ServiceCommand(("/bin/mkdir", "-p", "-m", "700", home, logs), user=service.user)


# --- launchd: the service's file, its commands, and their outputs ----------------------------------------


SEARCH_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"  #: PATH of the service.
LAUNCHCTL = "/bin/launchctl"
NOT_FOUND = 113
_NO_SESSION = (112, 125)
_GONE = (3, NOT_FOUND)
_STOPPING = 36
#: Statuses of bootstrap while launchd still holds the label.
_RACE = (5, 37)
_LET_GO_S = 10.0
#: Folders in a user's home that macOS opens to programs only with the user's consent.
PRIVATE_FOLDERS = ("Desktop", "Documents", "Downloads")
_COMMENT = "<!-- {} -->\n"


class Launchd:
    """A LaunchDaemon, or with `login` a LaunchAgent of its owner."""

    def __init__(self, owner: Owner, *, login: bool) -> None:
        self.kind = "LaunchAgent" if login else "LaunchDaemon"
        folder = f"{owner.home}/Library/LaunchAgents" if login else "/Library/LaunchDaemons"
        self.path = f"{folder}/{LABEL}.plist"
        self._domain = f"gui/{owner.uid}" if login else "system"
        self._target = f"{self._domain}/{LABEL}"

    def render(self, service: Service) -> str:
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
        found = _keys(text).get("ProgramArguments", ())
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def owner(self, text: str) -> str:
        return str(_keys(text).get("UserName", ""))

    def ask(self) -> ServiceCommand:
        return ServiceCommand((LAUNCHCTL, "print", self._target), fine=(0, NOT_FOUND))

    def state(self, outcome: CommandResult) -> ServiceState:
        """Parse the output of `print`, undocumented by Apple: lines about the service have one tab."""
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
        return [
            folders(service),
            *self.stop(state),
            Write(self.path, self.render(service)),
            *self.start(ServiceState()),
        ]

    def start(self, state: ServiceState) -> list[ServiceStep]:
        """Load the service, which starts it; enabling undoes a `launchctl disable`."""
        if state.loaded:
            return [ServiceCommand((LAUNCHCTL, "kickstart", self._target))]
        return [
            ServiceCommand((LAUNCHCTL, "enable", self._target)),
            ServiceCommand(
                (LAUNCHCTL, "bootstrap", self._domain, self.path), again=_RACE, within_s=_LET_GO_S
            ),
        ]

    def stop(self, state: ServiceState) -> list[ServiceStep]:
        """Stop the service. `bootout` may return early, so wait until `print` no longer finds it."""
        if not state.loaded:
            return []
        return [
            ServiceCommand((LAUNCHCTL, "bootout", self._target), fine=(0, _STOPPING, *_GONE), within_s=DAY_S),
            ServiceCommand((LAUNCHCTL, "print", self._target), fine=(NOT_FOUND,), again=(0,), within_s=DAY_S),
        ]

    def uninstall(self, state: ServiceState) -> list[ServiceStep]:
        return [*self.stop(state), Remove(self.path)]

    def explain(self, command: ServiceCommand, outcome: CommandResult) -> str:
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

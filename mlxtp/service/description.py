"""Description of the service, and the steps that install or change it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol
from urllib.parse import urlsplit

from ..errors import UserError

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


class Manager(Protocol):
    """launchd or systemd, as far as it is text: files, commands and their outputs."""

    #: The manager's term for such a service.
    kind: str
    #: Path of the service's file.
    path: str
    #: The PATH of a service.
    search_path: str
    #: The command that shows the service's output outside its log; empty where its crash log has that.
    journal: str

    def render(self, service: Service) -> str:
        """Return the text of the service's file."""

    def program(self, text: str) -> tuple[str, ...]:
        """Return the program and arguments in a file that `render` made; () if it is damaged."""

    def owner(self, text: str) -> str:
        """Return the user that the service of such a file runs as; empty where it names none."""

    def ask(self) -> ServiceCommand:
        """Return the command that queries the service. It changes nothing and needs no root."""

    def state(self, outcome: CommandResult) -> ServiceState:
        """Parse the output of `ask`. Raises UserError when the query failed."""

    def doubts(self, service: Service, owner: Owner) -> list[str]:
        """Return warnings about what may keep the service from doing its work."""

    def install(self, service: Service, state: ServiceState) -> list[ServiceStep]:
        """Return the steps from `state` to a service that runs as described, now and after each start of the
        machine.
        """

    def start(self, state: ServiceState) -> list[ServiceStep]:
        """Return the steps that start an installed service."""

    def stop(self, state: ServiceState) -> list[ServiceStep]:
        """Return the steps that stop it until its next start or that of the machine."""

    def uninstall(self, state: ServiceState) -> list[ServiceStep]:
        """Return the steps that stop it and remove everything but its home."""

    def explain(self, command: ServiceCommand, outcome: CommandResult) -> str:
        """Return why a command failed and what to do; "" if unknown."""


def folders(service: Service) -> ServiceCommand:
    """Return the command that makes home and log folder, for their owner alone. It runs as the owner."""
    logs = service.log.rpartition("/")[0]
    home = logs.rpartition("/")[0]
    return ServiceCommand(("/bin/mkdir", "-p", "-m", "700", home, logs), user=service.user)

"""What the service is, whoever runs it, and the steps by which it is installed or changed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol
from urllib.parse import urlsplit

from ..errors import UserError

LABEL = "mlxtp.node"
MARK = "Written by mlxtp"
"""Stands in each file that mlxtp writes for launchd or systemd; it overwrites and removes no others."""
RESTART_S = 15
"""After a failure, the earliest time from one start to the next."""
MIN_STOP_S = 60
STOP_MARGIN_S = 50
"""What an agent may take to stop after its drain."""
DAY_S = 86_400.0
"""How long a command that stops the service may take: no drain is longer."""
PASSED_ON = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT")
"""Variables that the service shares with whoever installs it: where models lie, and where they come from."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The user whose service it is. `home` is the user's own folder, not that of the agent."""

    name: str
    uid: int
    home: str


@dataclass(frozen=True, slots=True)
class Service:
    """One agent that the system starts.

    program      the interpreter's absolute path, and its arguments
    environment  all variables that it gets from us
    user         as whom it runs; empty for the user in whose session it runs
    log          the agent's own
    crash_log    what it says before it has a log, where nobody else keeps that
    stop_s       how long it may take to stop, before it is killed
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
        """The first words of its file, which say whose that is."""
        return f"{MARK} {self.version}: `mlxtp service install` writes it anew, `uninstall` removes it"


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
    """The service of an agent with the folder `home` and further `arguments` of `mlxtp node`.

    `login`: in the owner's login session instead of from the start of the machine. `path` is its PATH,
    `passed_on` what it gets of the environment. Raises UserError for what no file can hold.
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
    """Where the agent with that home writes its log, as a service."""
    return f"{home}/logs/agent.log"


def crash_log(home: str) -> str:
    """Where launchd puts what the agent writes elsewhere."""
    return f"{home}/logs/before-the-log.txt"


def option(program: Sequence[str], name: str) -> str:
    """The value of an option in an installed program; empty where it has none."""
    return next((value for given, value in pairwise(program) if given == name), "")


def is_ours(text: str) -> bool:
    """Whether mlxtp wrote the file."""
    return MARK in text


def without_secret(value: str) -> str:
    """A variable's value, without the user and password that a URL may have."""
    parts = urlsplit(value)
    if not parts.scheme or "@" not in parts.netloc:
        return value
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def unseen(names: Sequence[str]) -> str:
    """What to know of settings in variables, which the service will not have; empty without any."""
    if not names:
        return ""
    return (
        f"the service does not see {', '.join(names)} of this terminal; write into config.toml what it needs"
    )


# --- steps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """Have this text in that file, readable for all."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Have no such file."""

    path: str


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """Run this, as `user` if root runs it. It has to end with one of the statuses in `fine`.

    After one in `again` it is run again, for `within_s` in all.
    """

    argv: tuple[str, ...]
    user: str = ""
    fine: tuple[int, ...] = (0,)
    again: tuple[int, ...] = ()
    within_s: float = 60.0


ServiceStep = Write | Remove | ServiceCommand


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended, and what it wrote. 127: it is not there; 124: it took too long."""

    status: int
    output: str = ""


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What the manager knows of the service. `last` says how it ended the last time, if it failed."""

    loaded: bool = False
    pid: int | None = None
    last: str = ""


class Manager(Protocol):
    """launchd or systemd, as far as it is words: which file it wants, which commands, and what they say."""

    kind: str
    """What it calls such a service."""
    path: str
    """Of the file."""
    search_path: str
    """The PATH of a service."""
    journal: str
    """The command that shows what the service wrote beside its log; empty where its crash log has that."""

    def render(self, service: Service) -> str:
        """The file."""

    def program(self, text: str) -> tuple[str, ...]:
        """The program and arguments in a file that `render` made; () if it is damaged."""

    def owner(self, text: str) -> str:
        """The user as whom the service of such a file runs; empty where it does not say."""

    def ask(self) -> ServiceCommand:
        """The command that tells about the service; it changes nothing and needs no root."""

    def state(self, outcome: CommandResult) -> ServiceState:
        """What `ask` told. Raises UserError when it could not."""

    def doubts(self, service: Service, owner: Owner) -> list[str]:
        """What may keep it from doing what its owner expects, in sentences."""

    def install(self, service: Service, state: ServiceState) -> list[ServiceStep]:
        """From `state` to a service that runs as described, now and after each start of the machine."""

    def start(self, state: ServiceState) -> list[ServiceStep]:
        """An installed service that does not run."""

    def stop(self, state: ServiceState) -> list[ServiceStep]:
        """End it, until it is started or the machine is."""

    def uninstall(self, state: ServiceState) -> list[ServiceStep]:
        """Stop it, and leave nothing of it but its home."""

    def explain(self, command: ServiceCommand, outcome: CommandResult) -> str:
        """Why a command failed, and what to do; empty when that is not known."""


def folders(service: Service) -> ServiceCommand:
    """Home and log folder have to be there, for their owner alone; whoever runs it, the owner makes them."""
    logs = service.log.rpartition("/")[0]
    home = logs.rpartition("/")[0]
    return ServiceCommand(("/bin/mkdir", "-p", "-m", "700", home, logs), user=service.user)

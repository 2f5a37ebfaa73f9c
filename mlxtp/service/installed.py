"""The service of this machine: which one is installed, its owner, and its state."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..client import AgentClient
from ..config import default_home, home_folder
from ..errors import UserError
from .description import Manager, Owner, ServiceState, crash_log, is_ours, option
from .launchd import Launchd
from .shell import Shell, owner_here, run, wait_until
from .systemd import Systemd

#: Seconds from the start of a service to its agent's first reply, at most.
START_S = 30.0
LAST_WORDS = 5
_TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Installed:
    """A service whose file mlxtp wrote, with that text."""

    shell: Shell
    owner: Owner
    login: bool
    text: str

    @property
    def manager(self) -> Manager:
        """Manager of the service."""
        return self.shell.manager

    @property
    def program(self) -> tuple[str, ...]:
        """The interpreter and its arguments."""
        return self.manager.program(self.text)

    @property
    def home(self) -> Path:
        """The folder of its agent."""
        return Path(option(self.program, "--home"))

    @property
    def log(self) -> Path:
        """The agent's log file."""
        return Path(option(self.program, "--log-file"))

    @property
    def agent(self) -> str:
        """The state of its agent; empty when the agent does not reply."""
        try:
            return str(AgentClient(self.home).get("status")["state"])
        except UserError:
            return ""

    @property
    def problem(self) -> str:
        """Description of what keeps it from starting again; "" if nothing is known."""
        if not Path(self.program[0]).exists():
            return f"{self.program[0]} is gone: `mlxtp service install` again, with the present mlxtp"
        return ""

    def allow(self, *words: str) -> None:
        """Raise UserError, with the command to type, when this user cannot change it by `mlxtp WORDS`."""
        allow(self.owner, (sys.executable, "-m", "mlxtp", *words), login=self.login)

    def wait(self) -> ServiceState:
        """Wait until its agent replies, or for `START_S`.

        Raises UserError with its last output when it ended.
        """
        state = ServiceState()

        def settled() -> bool:
            nonlocal state
            state = self.shell.state()
            return bool(self.agent) if state.pid is not None else bool(state.last)

        wait_until(settled, START_S)
        if state.pid is None:
            words = "\n".join(filter(None, (self.aside(), *tail(self.log))))
            raise UserError(
                f"it was started, and does not run: {state.last or 'the reason is not known'}\n{words}"
            )
        return state

    def aside(self) -> str:
        """Return its output before it had a log, or the command that shows it; "" if the log is newer."""
        if self.manager.journal:
            running = state_if_any(self.shell).pid is not None
            return "" if running else f"its output before it had a log: `{self.manager.journal}`"
        path = Path(crash_log(str(self.home)))
        if not tail(path) or _modified(path) < _modified(self.log):
            return ""
        return "\n".join((f"its output before it had a log ({path}):", *tail(path)))


def manager_of(owner: Owner, *, login: bool) -> Manager:
    """Return launchd on a Mac, systemd on Linux. Raises UserError elsewhere."""
    if sys.platform == "darwin":
        return Launchd(owner, login=login)
    if sys.platform == "linux":
        return Systemd(owner, login=login)
    raise UserError(f"mlxtp supports services on macOS and Linux, not on {sys.platform}")


def manager_elsewhere(owner: Owner, system: str, *, login: bool) -> Manager:
    """Return the manager of another system, for its texts only. Raises UserError for an unknown one."""
    managers: dict[str, type[Launchd | Systemd]] = {"macos": Launchd, "linux": Systemd}
    if system not in managers:
        raise UserError(f"--system: {system!r} is not one of {', '.join(managers)}")
    return managers[system](owner, login=login)


def shell_of(owner: Owner, *, login: bool) -> Shell:
    """Return the shell for the service of the system, or with `login` for that of the owner's session."""
    return Shell(manager_of(owner, login=login), run)


def owner() -> Owner:
    """Return the user who typed the command, also behind sudo."""
    return owner_here(os.environ, os.geteuid())


def find() -> Installed | None:
    """Return the installed service, or None. Raises UserError when its file is damaged."""
    whose = owner()
    for login in (False, True):
        shell = shell_of(whose, login=login)
        if is_ours(text := shell.installed):
            found = Installed(shell, whose, login, text)
            if not (option(found.program, "--home") and option(found.program, "--log-file")):
                raise UserError(f"{shell.manager.path} is damaged; `mlxtp service install` writes it again")
            return found
    return None


def home_of(whose: Owner, given: Path | None) -> Path:
    """Return the agent's folder: that of its owner's other commands, also when root installs it for them."""
    if given is not None or os.environ.get("MLXTP_HOME"):
        return home_folder(given).resolve()
    usual, here = default_home(), Path.home()
    if whose.uid == os.getuid():
        return usual.resolve()
    return Path(whose.home) / usual.relative_to(here) if usual.is_relative_to(here) else usual


def allow(whose: Owner, command: Sequence[str], *, login: bool) -> None:
    """Raise UserError when this user cannot change such a service.

    If root could, the error has the command.
    """
    root = os.geteuid() == 0
    if not login and not root:
        raise UserError(
            f"this needs root, because it is a service of the system. Type:\nsudo {shlex.join(command)}"
        )
    if login and root and whose.uid != 0:
        raise UserError(f"{whose.name}'s own session has that service: run it without sudo")


def state_if_any(shell: Shell) -> ServiceState:
    """Return the manager's view of the service, for display only; an empty one where the query fails."""
    try:
        return shell.state()
    except UserError:
        return ServiceState()


def tail(path: Path) -> list[str]:
    """Return its last lines; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-LAST_WORDS:]
    except OSError:
        return []


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0

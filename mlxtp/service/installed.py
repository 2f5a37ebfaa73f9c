"""The service of this machine: its owner, its state, and the execution of its steps."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..client import AgentClient
from ..config import default_home, home_folder
from ..errors import UserError, in_words, why_not_written
from ..verbs import Status
from .launchd import (
    CommandResult,
    Launchd,
    Owner,
    Remove,
    ServiceCommand,
    ServiceState,
    ServiceStep,
    Write,
    crash_log,
    is_ours,
    option,
)

# --- steps ----------------------------------------------------------------------------------------------


RunCommand = Callable[[ServiceCommand], CommandResult]
NOT_THERE, TOO_LONG = 127, 124
LOOK_S = 0.2


def run(command: ServiceCommand) -> CommandResult:
    os_user = command.user if command.user and os.geteuid() == 0 else None
    try:
        done = subprocess.run(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            user=os_user,
            group=pwd.getpwnam(os_user).pw_gid if os_user else None,
            extra_groups=[] if os_user else None,
            env={**os.environ, "LC_ALL": "C"},
            timeout=command.within_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CommandResult(TOO_LONG, f"it did not end within {command.within_s:g} s")
    except OSError as error:
        return CommandResult(NOT_THERE, error.strerror or str(error))
    return CommandResult(done.returncode, done.stdout.decode(errors="replace").rstrip())


class Shell:
    """Executor of the steps. `run` is its only access to system commands."""

    def __init__(self, manager: Launchd, run: RunCommand) -> None:
        self.manager = manager
        self._run = run

    @property
    def installed(self) -> str:
        """Text of the service's file, also of other programs; "" without a file."""
        try:
            return Path(self.manager.path).read_text(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            raise UserError(f"{self.manager.path} cannot be read: {error.strerror}") from None

    def state(self) -> ServiceState:
        return self.manager.state(self._run(self.manager.ask()))

    def take(self, steps: Iterable[ServiceStep]) -> None:
        """Run the steps in order. Raises UserError at the first failure; the rest is not done."""
        for step in steps:
            match step:
                case Write():
                    _write(step)
                case Remove():
                    with in_words(UserError, f"{step.path} cannot be removed"):
                        Path(step.path).unlink(missing_ok=True)
                case ServiceCommand():
                    self._command(step)

    def _command(self, command: ServiceCommand) -> None:
        until = time.monotonic() + command.within_s
        outcome = self._run(command)
        while outcome.status in command.again and (left := until - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left))  # launchd does not notify when it has released a service
            outcome = self._run(replace(command, within_s=max(left, LOOK_S)))
        if outcome.status in command.fine:
            return
        said = f": {outcome.output}" if outcome.output else ""
        why = self.manager.explain(command, outcome)
        raise UserError(
            f"`{' '.join(command.argv)}` ended with {outcome.status}{said}" + (f"\n{why}" if why else "")
        )


def wait_until(is_so: Callable[[], bool], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not (done := is_so()) and time.monotonic() < until:
        time.sleep(LOOK_S)  # the other program sends no notification
    return done


def owner_here(environment: Mapping[str, str], uid: int) -> Owner:
    try:
        behind = environment.get("SUDO_USER", "") if uid == 0 else ""
        found = pwd.getpwnam(behind) if behind else pwd.getpwuid(uid)
    except KeyError:
        raise UserError(f"this machine has no user {environment.get('SUDO_USER') or uid}") from None
    return Owner(found.pw_name, found.pw_uid, found.pw_dir)


def _write(step: Write) -> None:
    """Write the file whole or not at all. Raises UserError, also if mlxtp did not write the old one."""
    path = Path(step.path)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not is_ours(path.read_text(errors="replace"))):
            raise not_ours(step.path)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".mlxtp-", delete=False) as file:
            temporary = file.name
            file.write(step.text)
            os.fchmod(file.fileno(), 0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise UserError(why_not_written(error, path.parent)) from None


def not_ours(path: str) -> UserError:
    return UserError(
        f"{path} was not written by mlxtp, so mlxtp does not change it; move it away, then try again"
    )


# --- the installed service ------------------------------------------------------------------------------


ON_MAC = sys.platform == "darwin"
ELSEWHERE = (
    "mlxtp installs itself as a service on macOS only; on Linux, systemd runs it by the unit in "
    "examples/mlxtp.service, whose first lines say how"
)
#: Most seconds from the start of a service to its agent's first reply.
START_S = 30.0
LAST_WORDS = 5
_TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Installed:
    shell: Shell
    owner: Owner
    login: bool
    text: str

    @property
    def program(self) -> tuple[str, ...]:
        return self.shell.manager.program(self.text)

    @property
    def home(self) -> Path:
        return Path(option(self.program, "--home"))

    @property
    def log(self) -> Path:
        return Path(option(self.program, "--log-file"))

    @property
    def agent(self) -> str:
        try:
            return str(AgentClient(self.home).send(Status())["state"])
        except UserError:
            return ""

    @property
    def problem(self) -> str:
        if not Path(self.program[0]).exists():
            return f"{self.program[0]} is gone: `mlxtp service install` again, with the present mlxtp"
        return ""

    def allow(self, *words: str) -> None:
        allow(self.owner, (sys.executable, "-m", "mlxtp", *words), login=self.login)

    def wait(self) -> ServiceState:
        """Wait until its agent replies, or for `START_S`. Raises UserError if it ended."""
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
        """Return the output before its log began; "" if the log is newer."""
        path = Path(crash_log(str(self.home)))
        if not tail(path) or _modified(path) < _modified(self.log):
            return ""
        return "\n".join((f"its output before it had a log ({path}):", *tail(path)))


def shell_of(owner: Owner, *, login: bool) -> Shell:
    return Shell(Launchd(owner, login=login), run)


def owner() -> Owner:
    return owner_here(os.environ, os.geteuid())


def find() -> Installed | None:
    """Return the installed service, or None. Raises UserError if its file is damaged."""
    if not ON_MAC:
        return None
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
    """Return the agent's folder as the owner's other commands see it, even if root installs it."""
    if given is not None or os.environ.get("MLXTP_HOME"):
        return home_folder(given).resolve()
    usual, here = default_home(), Path.home()
    if whose.uid == os.getuid():
        return usual.resolve()
    return Path(whose.home) / usual.relative_to(here) if usual.is_relative_to(here) else usual


def allow(whose: Owner, command: Sequence[str], *, login: bool) -> None:
    """Raise UserError if this user cannot change such a service, with the command if root could."""
    root = os.geteuid() == 0
    if not login and not root:
        raise UserError(
            f"this needs root, because it is a service of the system. Type:\nsudo {shlex.join(command)}"
        )
    if login and root and whose.uid != 0:
        raise UserError(f"{whose.name}'s own session has that service: run it without sudo")


def state_if_any(shell: Shell) -> ServiceState:
    try:
        return shell.state()
    except UserError:
        return ServiceState()


def tail(path: Path) -> list[str]:
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

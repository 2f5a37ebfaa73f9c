"""Execution of steps: runs commands, writes and removes files, and finds the user."""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ..errors import UserError, why_not_written
from .description import (
    CommandResult,
    Manager,
    Owner,
    Remove,
    ServiceCommand,
    ServiceState,
    ServiceStep,
    Write,
    is_ours,
)

RunCommand = Callable[[ServiceCommand], CommandResult]
NOT_THERE, TOO_LONG = 127, 124
LOOK_S = 0.2


def run(command: ServiceCommand) -> CommandResult:
    """Run it once, to its end, without standard input."""
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
    """Executor of the steps for one manager. `run` is its only access to the system's commands."""

    def __init__(self, manager: Manager, run: RunCommand) -> None:
        self.manager = manager
        self._run = run

    @property
    def installed(self) -> str:
        """Text of the service's file by any author; empty without a file. Raises UserError."""
        try:
            return Path(self.manager.path).read_text(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            raise UserError(f"{self.manager.path} cannot be read: {error.strerror}") from None

    def state(self) -> ServiceState:
        """Query the manager. Raises UserError when the query fails."""
        return self.manager.state(self._run(self.manager.ask()))

    def take(self, steps: Iterable[ServiceStep]) -> None:
        """Run one step after the other. Raises UserError at the first that fails; the rest is not done."""
        for step in steps:
            match step:
                case Write():
                    _write(step)
                case Remove():
                    _remove(step)
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
    """Poll until it is so or the time is over. Returns whether it became so."""
    until = time.monotonic() + within_s
    while not (done := is_so()) and time.monotonic() < until:
        time.sleep(LOOK_S)  # the state of another program, which sends no notification
    return done


def owner_here(environment: Mapping[str, str], uid: int) -> Owner:
    """Return the owner of the service: the user who typed the command, also behind sudo.

    Raises UserError for a user that does not exist.
    """
    try:
        behind = environment.get("SUDO_USER", "") if uid == 0 else ""
        found = pwd.getpwnam(behind) if behind else pwd.getpwuid(uid)
    except KeyError:
        raise UserError(f"this machine has no user {environment.get('SUDO_USER') or uid}") from None
    return Owner(found.pw_name, found.pw_uid, found.pw_dir)


def _write(step: Write) -> None:
    """Write the file whole or not at all. Raises UserError, also for a file that mlxtp did not write."""
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


def _remove(step: Remove) -> None:
    path = Path(step.path)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be removed: {error.strerror}") from None


def not_ours(path: str) -> UserError:
    """Return the error about a file of another author, which is not changed."""
    return UserError(
        f"{path} was not written by mlxtp, so mlxtp does not change it; move it away, then try again"
    )

"""launchd: the plist of the service, the commands of launchctl, and their outputs. Pure.

Untested on a Mac so far. Keys are as in launchd.plist(5), commands as in launchctl(1), and statuses and
outputs as published by users.
"""

from __future__ import annotations

import plistlib
import re
from typing import Any
from xml.parsers.expat import ExpatError

from ..errors import UserError
from .description import (
    DAY_S,
    LABEL,
    RESTART_S,
    CommandResult,
    Owner,
    Remove,
    Service,
    ServiceCommand,
    ServiceState,
    ServiceStep,
    Write,
    folders,
)

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
                "System Settings > General > Login Items & Extensions; `log show --last 5m --predicate "
                "'process == \"launchd\"'` shows more"
            )
        return ""


def _keys(text: str) -> dict[str, Any]:
    try:
        found = plistlib.loads(text.encode())
    except (plistlib.InvalidFileException, ExpatError, ValueError, TypeError, AttributeError, IndexError):
        return {}
    return found if isinstance(found, dict) else {}

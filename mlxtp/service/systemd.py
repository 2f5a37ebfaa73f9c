"""systemd: the unit of the service, the commands of systemctl, and their outputs. Pure."""

from __future__ import annotations

import re
import shlex

from ..errors import Exit, UserError
from .description import (
    DAY_S,
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


def _variable_free(text: str) -> str:
    """Escape variables in an argument. In the program's own path `$` stands for itself."""
    return text.replace("$", "$$")


def _quoted(text: str) -> str:
    """Quote any text as one word of a unit file, where `%` begins a specifier."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'

"""Input of launchd and systemd, and the reading of their replies."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.errors import UserError
from mlxtp.service.managers import CommandResult, Launchd, Owner, ServiceState, Systemd, describe, is_ours

from .examples import examples, service

ME = Owner("me", 501, "/Users/me")
DAEMON, AGENT = Launchd(ME, login=False), Launchd(ME, login=True)
UNIT, USER_UNIT = Systemd(ME, login=False), Systemd(ME, login=True)
SUPPORT = "/Users/me/Library/Application Support/mlxtp"


def test_the_plist_key_by_key() -> None:
    text = DAEMON.render(service(Launchd, "/Users/me", login=False))
    assert plistlib.loads(text.encode()) == {
        "Label": "mlxtp.node",
        "ProgramArguments": [
            "/Users/me/mlxtp/.venv/bin/python", "-m", "mlxtp", "node", "--home", SUPPORT,
            "--log-file", f"{SUPPORT}/logs/agent.log", "--http", "0.0.0.0:52415",
        ],
        "EnvironmentVariables": {"HOME": "/Users/me", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 15,
        "ExitTimeOut": 60,
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": 4096},
        "HardResourceLimits": {"NumberOfFiles": 4096},
        "StandardOutPath": f"{SUPPORT}/logs/before-the-log.txt",
        "StandardErrorPath": f"{SUPPORT}/logs/before-the-log.txt",
        "UserName": "me",
    }  # fmt: skip
    assert is_ours(text)
    assert DAEMON.path == "/Library/LaunchDaemons/mlxtp.node.plist"


def test_an_agent_of_a_session_names_no_user() -> None:
    daemon = plistlib.loads(DAEMON.render(service(Launchd, "/Users/me", login=False)).encode())
    agent = plistlib.loads(AGENT.render(service(Launchd, "/Users/me", login=True)).encode())
    assert daemon == {**agent, "UserName": "me"}
    assert AGENT.path == "/Users/me/Library/LaunchAgents/mlxtp.node.plist"


def test_a_long_drain_has_its_time_before_the_system_kills() -> None:
    args = {"python": "/p", "path": "/bin", "passed_on": {}, "login": False, "version": "1"}
    assert describe(ME, "/h", [], drain_s=600.5, **args).stop_s == 651  # type: ignore[arg-type]
    assert describe(ME, "/h", [], drain_s=0, **args).stop_s == 60  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text().filter(str.isprintable), max_size=4))
def test_any_words_come_back_from_either_file(words: list[str]) -> None:
    made = replace(service(Launchd, "/Users/me", login=False), program=("/a b/%py$", *words))
    for manager in (DAEMON, UNIT):
        assert manager.program(manager.render(made)) == made.program


def test_what_no_file_can_hold_is_refused() -> None:
    with pytest.raises(UserError, match=r"'a\\nb' has characters"):
        describe(
            ME, "/h", ["a\nb"], python="/p", path="/bin", passed_on={}, drain_s=1, login=False, version="1"
        )


@pytest.mark.parametrize(
    "text", ["", "Written by mlxtp", "<plist", 'ExecStart="', "<plist version='1.0'><array/></plist>"]
)
def test_a_damaged_file_has_no_program(text: str) -> None:
    assert DAEMON.program(text) == UNIT.program(text) == ()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze to ask")
@pytest.mark.parametrize("login", [False, True])
def test_systemd_itself_takes_the_unit(tmp_path: Path, login: bool) -> None:
    """It says nothing, and finds a program whose path has what means something to it; and it does judge."""
    python = tmp_path / "a %h $HOME b" / "python"
    python.parent.mkdir()
    python.symlink_to("/bin/true")
    made = service(Systemd, "/home/me", login=login)
    made = replace(made, program=(str(python), *made.program[1:]), user="" if login else "root")
    file = tmp_path / "mlxtp.service"

    def verdict(text: str) -> tuple[int, str]:
        file.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "--no-pager", "--user" if login else "--system", "verify", str(file)],
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    text = (USER_UNIT if login else UNIT).render(made)
    assert verdict(text) == (0, "")
    assert "bogus" in verdict(text.replace("KillMode=mixed", "KillMode=bogus"))[1]
    assert verdict(text.replace("%%", "%"))[0] != 0
    with pytest.raises(UserError, match="starts no program with ' in its path"):
        UNIT.render(replace(made, program=("/it's/python",)))


def test_the_examples_are_what_would_be_written() -> None:
    assert all(path.read_text() == text for path, text in examples().items()), (
        "`python -m tests.service.examples` writes them again"
    )


# --- answers of launchctl. Written from what people published; none is recorded here, on a Mac -----------

RUNNING = """\
system/mlxtp.node = {
	active count = 1
	path = /Library/LaunchDaemons/mlxtp.node.plist
	type = LaunchDaemon
	state = running

	program = /Users/me/mlxtp/.venv/bin/python
	arguments = {
		/Users/me/mlxtp/.venv/bin/python
		pid = 1
	}

	domain = system
	minimum runtime = 15
	exit timeout = 60
	runs = 2
	pid = 1486
	immediate reason = semaphore
	last exit code = 1

	resource coalition = {
		ID = 1114
		state = active
	}
}"""


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (CommandResult(0, RUNNING), ServiceState(True, 1486, "exit status 1")),
        (
            CommandResult(0, RUNNING.replace("last exit code = 1", "last exit code = (never exited)")),
            ServiceState(True, 1486),
        ),
        (
            CommandResult(0, RUNNING.replace("\tpid = 1486\n", "").replace("= running", "= spawn scheduled")),
            ServiceState(True, None, "exit status 1"),
        ),
        (
            CommandResult(0, "\tstate = not running\n\tlast exit code = 78: EX_CONFIG\n"),
            ServiceState(True, None, "exit status 78: EX_CONFIG"),
        ),
        (
            CommandResult(0, "\tstate = not running\n\tlast terminating signal = Killed: 9\n"),
            ServiceState(True, None, "ended by signal Killed: 9"),
        ),
        (CommandResult(0, "\tstate = not running\n\tlast exit code = 0\n"), ServiceState(True)),
        (
            CommandResult(113, 'Bad request.\nCould not find service "mlxtp.node" in domain for system'),
            ServiceState(),
        ),
    ],
)
def test_what_launchctl_prints(outcome: CommandResult, state: ServiceState) -> None:
    assert DAEMON.state(outcome) == state


def test_a_session_that_is_not_there_is_said() -> None:
    answer = CommandResult(125, "Could not print domain: 125: Domain does not support specified action")
    with pytest.raises(UserError, match="no login session at this Mac's screen"):
        AGENT.state(answer)
    with pytest.raises(UserError, match="launchctl print: what"):
        DAEMON.state(CommandResult(9, "what"))


# --- answers of systemctl, written by hand in the form that systemd 252 gives them ----------------------


@pytest.mark.parametrize(
    ("properties", "state"),
    [
        ("active 77 success 0", ServiceState(True, 77)),
        ("activating 0 exit-code 1", ServiceState(True, None, "exit status 1")),
        ("failed 0 exit-code 2", ServiceState(False, None, "exit status 2")),
        ("failed 0 oom-kill 9", ServiceState(False, None, "ended by oom-kill")),
        ("inactive 0 success 0", ServiceState()),
    ],
)
def test_what_systemctl_shows(properties: str, state: ServiceState) -> None:
    names = ("ActiveState", "MainPID", "Result", "ExecMainStatus")
    lines = [f"{name}={value}" for name, value in zip(names, properties.split(), strict=True)]
    assert UNIT.state(CommandResult(0, "\n".join(lines))) == state


def test_a_machine_without_systemd_is_said() -> None:
    said = "System has not been booted with systemd as init system (PID 1). Can't operate."
    with pytest.raises(UserError, match="systemd does not run on this machine"):
        UNIT.state(CommandResult(1, said))

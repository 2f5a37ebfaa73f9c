"""Input of launchd and the reading of its replies; the unit for systemd."""

from __future__ import annotations

import configparser
import os
import plistlib
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtp.errors import MANY_FILES, Exit, UserError
from mlxtp.service.launchd import MIN_STOP_S, CommandResult, Launchd, ServiceState, describe, is_ours

from .examples import ME, ROOT, examples, service

DAEMON, AGENT = Launchd(ME, login=False), Launchd(ME, login=True)
UNIT = ROOT / "examples/mlxtp.service"
SUPPORT = "/Users/me/Library/Application Support/mlxtp"


def test_the_plist_key_by_key() -> None:
    text = DAEMON.render(service(login=False))
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
    daemon = plistlib.loads(DAEMON.render(service(login=False)).encode())
    agent = plistlib.loads(AGENT.render(service(login=True)).encode())
    assert daemon == {**agent, "UserName": "me"}
    assert AGENT.path == "/Users/me/Library/LaunchAgents/mlxtp.node.plist"


def test_a_long_drain_has_its_time_before_the_system_kills() -> None:
    args = {"python": "/p", "passed_on": {}, "login": False, "version": "1"}
    assert describe(ME, "/h", [], drain_s=600.5, **args).stop_s == 651  # type: ignore[arg-type]
    assert describe(ME, "/h", [], drain_s=0, **args).stop_s == 60  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text().filter(str.isprintable), max_size=4))
def test_any_words_come_back_from_the_file(words: list[str]) -> None:
    made = replace(service(login=False), program=("/a b/%py$", *words))
    assert DAEMON.program(DAEMON.render(made)) == made.program


def test_what_no_file_can_hold_is_refused() -> None:
    with pytest.raises(UserError, match=r"'a\\nb' has characters"):
        describe(ME, "/h", ["a\nb"], python="/p", passed_on={}, drain_s=1, login=False, version="1")


@pytest.mark.parametrize("text", ["", "Written by mlxtp", "<plist", "<plist version='1.0'><array/></plist>"])
def test_a_damaged_file_has_no_program(text: str) -> None:
    assert DAEMON.program(text) == ()


def test_the_unit_for_linux_runs_an_agent_as_the_plist_does() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    found = unit["Service"]
    python, *program = found["ExecStart"].split()
    assert (Path(python).name, program) == ("python", ["-m", "mlxtp", "node"])
    assert int(found["RestartPreventExitStatus"]) == Exit.MISTYPED
    assert int(found["LimitNOFILE"]) == MANY_FILES
    assert int(found["TimeoutStopSec"]) >= MIN_STOP_S


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze to ask")
def test_systemd_itself_takes_the_unit(tmp_path: Path) -> None:
    """It says nothing; and it does judge."""
    file = tmp_path / "mlxtp.service"
    text = (
        UNIT.read_text().replace("/home/me/mlxtp/.venv/bin/python", "/bin/true").replace("=me\n", "=root\n")
    )

    def verdict(text: str) -> tuple[int, str]:
        file.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "--no-pager", "--system", "verify", str(file)],
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    assert verdict(text) == (0, "")
    assert "bogus" in verdict(text.replace("KillMode=mixed", "KillMode=bogus"))[1]


def test_the_examples_are_what_would_be_written() -> None:
    assert all(path.read_text() == text for path, text in examples().items()), (
        "`python -m tests.service.examples` writes them again"
    )


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

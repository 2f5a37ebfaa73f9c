"""`mlxtp service`, `mlxtp logs` and `mlxtp restart` as a user types them. launchd only answers."""

from __future__ import annotations

import fcntl
import json
import os
import plistlib
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mlxtp.admin.handlers import announced
from mlxtp.cli.main import app
from mlxtp.client import agent_runs
from mlxtp.config import default_home, resolve_settings, told
from mlxtp.errors import UserError
from mlxtp.service import installed as here
from mlxtp.service.installed import Shell, owner_here, run
from mlxtp.service.launchd import CommandResult, Launchd, Owner, Remove, ServiceCommand, Write
from mlxtp.settings import AUDIT_LOG
from mlxtp.verbs import StartDrain, Verb

from ..api.test_admin import KEY
from ..cli.test_cluster import Agent, answering
from ..live_cluster import WAIT_S

pytestmark = pytest.mark.slow

NOT_FOUND = CommandResult(113, 'Bad request.\nCould not find service "mlxtp.node" in domain for system')


class FakeLaunchd:
    """Answers as launchctl does by what people published: written from that, not recorded on a Mac.

    `lingering`: how often a service that was booted out is still found. `asked` has what changes something.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.plist: Path | None = None
        self.pid: int | None = None
        self.last = "(never exited)"
        self.lingering = 0
        self.dies = self.refuses = False

    def __call__(self, command: ServiceCommand) -> CommandResult:
        program, verb, *rest = command.argv
        if program != "/bin/launchctl":
            return run(command)
        if verb != "print":
            self.asked.append(" ".join((verb, *rest)))
        answer: CommandResult = getattr(self, f"_{verb}")(*rest)
        return answer

    def _print(self, _target: str) -> CommandResult:
        if self.plist is None:
            if not self.lingering:
                return NOT_FOUND
            self.lingering -= 1
        pid = f"\tpid = {self.pid}\n" if self.pid else ""
        return CommandResult(0, f"system/mlxtp.node = {{\n{pid}\tlast exit code = {self.last}\n}}")

    def _enable(self, _target: str) -> CommandResult:
        return CommandResult(0)

    def _bootstrap(self, _domain: str, path: str) -> CommandResult:
        if self.plist or self.lingering or self.refuses:
            self.lingering = max(0, self.lingering - 1)
            return CommandResult(5, "Bootstrap failed: 5: Input/output error")
        self.plist = Path(path)
        return self._kickstart("")

    def _kickstart(self, _target: str) -> CommandResult:
        self.pid, self.last = (None, "1") if self.dies else (4711, self.last)
        return CommandResult(0)

    def _bootout(self, _target: str) -> CommandResult:
        self.plist = self.pid = None
        if self.lingering:
            return CommandResult(36, "Boot-out failed: 36: Operation now in progress")
        return CommandResult(0)


class Mac:
    """A Mac whose folders are in `tmp_path`, and who types there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launchd = FakeLaunchd()
        self.folder = root / "LaunchDaemons"
        self.home = root / "home"
        name = pwd.getpwuid(os.getuid()).pw_name
        self.owner = Owner(name, os.getuid(), str(root))
        self.uid = 0
        monkeypatch.setattr(here, "run", self.launchd)
        monkeypatch.setattr(here, "Launchd", self._manager)
        monkeypatch.setattr(here, "ON_MAC", True)
        monkeypatch.setattr(here, "owner", lambda: self.owner)
        monkeypatch.setattr(here, "START_S", 1.0)
        monkeypatch.setattr(os, "geteuid", lambda: self.uid)
        monkeypatch.delenv("SUDO_USER", raising=False)
        monkeypatch.setenv("MLXTP_HOME", str(self.home))

    def _manager(self, owner: Owner, *, login: bool) -> Launchd:
        made = Launchd(owner, login=login)
        if not login:
            made.path = str(self.folder / "mlxtp.node.plist")
        return made

    @property
    def plist(self) -> Path:
        return self.folder / "mlxtp.node.plist"

    def types(self, *words: str) -> Result:
        self.launchd.asked.clear()
        return CliRunner().invoke(app, list(words), prog_name="mlxtp")


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mac:
    return Mac(tmp_path, monkeypatch)


@pytest.fixture
def agent(mac: Mac) -> Iterator[Agent]:
    """One that answers for the service's home."""
    mac.home.mkdir()
    with answering() as found, announced(mac.home, found.url, KEY, ""):
        yield found


def refusal(result: Result) -> str:
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())


def test_installed_once_and_again_and_removed(mac: Mac, agent: Agent) -> None:
    done = mac.types("service", "install", "--", "--http", "127.0.0.1:52416")
    assert done.exit_code == 0, done.output
    assert "it runs as process 4711" in done.output
    assert mac.launchd.asked == ["enable system/mlxtp.node", f"bootstrap system {mac.plist}"]
    assert plistlib.loads(mac.plist.read_bytes())["ProgramArguments"][-2:] == ["--http", "127.0.0.1:52416"]
    assert mac.plist.stat().st_mode & 0o777 == 0o644
    assert (mac.home / "logs").stat().st_mode & 0o777 == 0o700
    again = mac.types("service", "install", "--", "--http", "127.0.0.1:52416")
    assert "like this, and runs as process 4711" in again.output
    assert mac.launchd.asked == []
    mac.launchd.lingering = 2
    other = mac.types("service", "install")
    assert other.exit_code == 0, other.output
    assert [each.split()[0] for each in mac.launchd.asked] == ["bootout", "enable", "bootstrap"]
    gone = mac.types("service", "uninstall")
    assert gone.exit_code == 0, gone.output
    assert not mac.plist.exists()
    assert mac.launchd.plist is None
    assert mac.home.exists()
    assert mac.types("service", "uninstall").exit_code == 0


def test_a_dry_run_shows_all_and_does_nothing(mac: Mac) -> None:
    mac.uid = 501
    shown = mac.types("service", "install", "--dry-run", "--", "--name", "studio")
    assert shown.exit_code == 0, shown.output
    plist = shown.output[shown.output.index("<?xml") : shown.output.index("</plist>") + len("</plist>\n")]
    shell = here.shell_of(mac.owner, login=False)
    assert shell.manager.program(plist)[-2:] == ("--name", "studio")
    for line in ("/bin/mkdir", f"write {mac.plist}", "launchctl enable", "launchctl bootstrap system"):
        assert line in shown.output
    assert mac.launchd.asked == []
    assert not mac.folder.exists()
    assert not mac.home.exists()


def test_what_a_service_command_says_to_programs(mac: Mac, agent: Agent) -> None:
    def told(*words: str) -> dict[str, Any]:
        return dict(json.loads(mac.types(*words, "--json").stdout))

    steps = told("service", "install", "--dry-run")["steps"]
    assert [step["path"] for step in steps if step["do"] == "write"] == [str(mac.plist)]
    assert plistlib.loads(next(step["text"] for step in steps if step["do"] == "write").encode())
    assert {"/bin/launchctl"} == {step["argv"][0] for step in steps[1:] if step["do"] == "run"}
    assert list(steps[-1]) == ["do", "argv", "user", "fine", "again"]
    installed = told("service", "install")
    assert (installed["changed"], installed["pid"], installed["agent"]) == (True, 4711, "ready")
    assert not told("service", "install")["changed"]
    assert not told("service", "start")["changed"]
    log = mac.home / "logs" / "agent.log"
    log.write_text("one\ntwo\nthree\n")
    assert told("logs", "-n", "2") == {"log": str(log), "lines": ["two", "three"], "aside": ""}
    audited = mac.home / AUDIT_LOG
    audited.write_text("{}\n")
    assert told("logs", "--audit") == {"log": str(audited), "lines": ["{}"], "aside": ""}
    assert told("service", "stop") == {"changed": True, "pid": None}
    assert told("service", "uninstall") == {"removed": str(mac.plist), "home": str(mac.home)}
    assert told("service", "uninstall")["removed"] is None


def test_a_password_stands_in_no_file_that_all_can_read(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://me:secret@hub.example:8080/path")
    shown = mac.types("service", "install", "--dry-run")
    assert "https://hub.example:8080/path" in shown.stdout
    assert "secret" not in shown.output
    assert "mind: HF_ENDPOINT has a user or a password, which the service does not get" in shown.stderr


def test_the_log_of_an_agent_is_where_that_says(
    mac: Mac, agent: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "mine.log"
    log.write_text("one\n")
    monkeypatch.delenv("MLXTP_HOME")
    started = resolve_settings({"home": mac.home, "log_file": str(log)}, {})
    monkeypatch.setitem(agent.admin.answers, "settings", told(started))
    answer = json.loads(mac.types("logs", "--home", str(mac.home), "--json").stdout)
    assert (answer["log"], answer["lines"]) == (str(log), ["one"])


def test_the_home_of_a_service_is_that_of_other_commands(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLXTP_HOME")
    monkeypatch.setenv("HOME", "/elsewhere")
    assert here.home_of(mac.owner, None) == default_home()


def test_without_root_the_command_is_said(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    mac.uid = 501
    monkeypatch.setenv("HF_HOME", "/Volumes/models")
    said = refusal(mac.types("service", "install", "--", "--name", "my studio"))
    assert said.endswith(
        f"sudo env HF_HOME=/Volumes/models {sys.executable} -m mlxtp service install --home {mac.home} "
        "-- --name 'my studio'"
    )
    assert not mac.folder.exists()


def test_what_others_wrote_is_left_alone(mac: Mac) -> None:
    mac.folder.mkdir()
    mac.plist.write_text("<plist/>")
    for words in (("install",), ("install", "--dry-run"), ("uninstall",)):
        assert "was not written by mlxtp" in refusal(mac.types("service", *words))
    assert mac.plist.read_text() == "<plist/>"
    assert mac.launchd.asked == []
    with pytest.raises(UserError, match="was not written by mlxtp"):
        here.shell_of(mac.owner, login=False).take([Write(str(mac.plist), "x")])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--join", "ABCDEF"), "a token is a secret"),
        (("--join", "-"), "a token is a secret"),
        (("--http", "nowhere"), "--http: 'nowhere' is not HOST:PORT"),
        (("--home", "/x"), "put it before `--`"),
        (("--log-file", "/x"), "where `mlxtp logs` finds it"),
        (("--bogus",), "No such option: --bogus"),
    ],
)
def test_what_does_not_belong_into_a_service(mac: Mac, words: Sequence[str], said: str) -> None:
    result = mac.types("service", "install", "--", *words)
    assert said in " ".join(result.output.split())
    assert "ABCDEF" not in result.output
    assert result.exit_code
    assert not mac.folder.exists()


def test_a_start_that_fails_shows_its_last_words(mac: Mac) -> None:
    mac.launchd.dies = True
    (mac.home / "logs").mkdir(parents=True)
    (mac.home / "logs/before-the-log.txt").write_text("mlxtp: http in config.toml: 'x' is not HOST:PORT\n")
    said = refusal(mac.types("service", "install"))
    assert "it was started, and does not run: exit status 1" in said
    assert "'x' is not HOST:PORT" in said
    status = mac.types("service", "status")
    assert "does not run; the last time it ended: exit status 1" in status.output


def test_launchds_refusal_is_explained(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtp.service.launchd._LET_GO_S", 0.3)
    mac.launchd.refuses = True
    said = refusal(mac.types("service", "install"))
    assert "ended with 5: Bootstrap failed: 5: Input/output error" in said
    assert "Login Items & Extensions" in said


def test_stopped_and_started(mac: Mac, agent: Agent) -> None:
    assert "no service is installed here" in refusal(mac.types("service", "stop"))
    mac.types("service", "install")
    mac.uid = 501
    assert f"sudo {sys.executable} -m mlxtp service stop" in refusal(mac.types("service", "stop"))
    mac.uid = 0
    for _ in range(2):
        assert "the service is stopped" in mac.types("service", "stop").output
    shown = json.loads(mac.types("service", "status", "--json").output)
    assert (shown["installed"], shown["pid"], shown["home"]) == (True, None, str(mac.home))
    assert "it runs as process 4711" in mac.types("service", "start").output
    assert "it already runs as process 4711" in mac.types("service", "start").output
    assert "runs as process 4711" in mac.types("service", "status").output


def test_a_restart_drains_first(mac: Mac, agent: Agent) -> None:
    assert "nothing would start it again" in refusal(mac.types("restart"))
    mac.types("service", "install")
    mac.launchd.pid = None
    assert "`mlxtp service start` starts it" in refusal(mac.types("restart"))
    mac.launchd.pid = 4710

    asked = agent.admin.carry_out

    async def carry_out(verb: Verb) -> object:
        if isinstance(verb, StartDrain):
            mac.launchd.pid = None  # as an agent that ends with status 0
        return await asked(verb)

    agent.admin.carry_out = carry_out  # type: ignore[method-assign]
    done = mac.types("restart", "--within", "5")
    assert done.exit_code == 0, done.output
    assert ("drain", "5") in agent.admin.asked
    assert mac.launchd.asked == ["kickstart system/mlxtp.node"]
    assert "it runs as process 4711" in done.output


def test_one_service_is_enough(mac: Mac, agent: Agent) -> None:
    mac.types("service", "install")
    mac.uid = mac.owner.uid
    assert "is already installed as a service" in refusal(mac.types("service", "install", "--user"))


def test_an_agent_in_a_terminal_keeps_its_home(mac: Mac, tmp_path: Path) -> None:
    mac.home.mkdir()
    with (mac.home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "stop it first: `mlxtp drain`" in refusal(mac.types("service", "install"))
    assert not mac.folder.exists()


@pytest.mark.parametrize("words", [("service", "install"), ("service", "status"), ("restart",)])
def test_elsewhere_the_unit_is_named(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> None:
    monkeypatch.setattr(here, "ON_MAC", False)
    said = refusal(CliRunner().invoke(app, list(words), prog_name="mlxtp"))
    assert "on Linux, systemd runs it by the unit in examples/mlxtp.service" in said


def test_who_owns_a_service() -> None:
    root = pwd.getpwuid(0)
    other = next(each for each in pwd.getpwall() if each.pw_uid)
    assert owner_here({"SUDO_USER": other.pw_name}, 0) == Owner(other.pw_name, other.pw_uid, other.pw_dir)
    assert owner_here({"SUDO_USER": other.pw_name}, 0).uid != root.pw_uid
    assert owner_here({}, 0).name == root.pw_name
    assert owner_here({"SUDO_USER": root.pw_name}, other.pw_uid).name == other.pw_name
    with pytest.raises(UserError, match="no user nobody-here"):
        owner_here({"SUDO_USER": "nobody-here"}, 0)


def test_root_installs_into_the_home_of_who_typed_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MLXTP_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    usual = here.home_of(Owner("me", 1000, str(Path.home())), None)
    assert here.home_of(Owner("me", 1000, "/home/me"), None) == Path("/home/me") / usual.relative_to(
        Path.home()
    )


def test_commands_are_run() -> None:
    done = run(ServiceCommand(("/bin/sh", "-c", "echo out; echo err >&2; read x || echo closed; exit 3")))
    assert done == CommandResult(3, "out\nerr\nclosed")
    assert run(ServiceCommand(("/no/such/program",))).status == 127
    assert run(ServiceCommand(("/bin/sleep", "60"), within_s=0.1)).status == 124


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_makes_folders_as_their_owner(tmp_path: Path) -> None:
    other = next(each for each in pwd.getpwall() if each.pw_uid and each.pw_gid)
    done = run(ServiceCommand(("/bin/sh", "-c", "id -un; id -g; id -G"), user=other.pw_name))
    assert done.output.split() == [other.pw_name, str(other.pw_gid), str(other.pw_gid)]


def test_files_are_written_whole_and_removed(tmp_path: Path) -> None:
    shell = Shell(Launchd(Owner("me", 1, "/home/me"), login=False), run)
    file = tmp_path / "new" / "unit"
    for text in ("# Written by mlxtp 1", "# Written by mlxtp 2"):
        shell.take([Write(str(file), text)])
        assert file.read_text() == text
    assert [each.name for each in file.parent.iterdir()] == ["unit"]
    shell.take([Remove(str(file)), Remove(str(file))])
    assert not file.exists()
    with pytest.raises(UserError, match="nothing can be written in"):
        shell.take([Write("/proc/nowhere/unit", "x")])
    with pytest.raises(UserError, match="`/bin/false` ended with 1"):
        shell.take([ServiceCommand(("/bin/false",)), Write(str(file), "never")])
    assert not file.exists()


SETTINGS = """
http = "127.0.0.1:0"
control = "127.0.0.1:0"
discovery = false
"""
RANK_SAYS = """
import sys
if "mlxtp.engine.worker" in sys.orig_argv:
    print("a rank says", file=sys.stderr)
"""


def started(program: Sequence[str], environment: dict[str, str], stderr: Path) -> subprocess.Popen[bytes]:
    with stderr.open("ab") as err:
        return subprocess.Popen(
            program, env=environment, stdin=subprocess.DEVNULL, stdout=err, stderr=err, cwd="/"
        )


def test_the_agent_under_a_service(mac: Mac, tmp_path: Path) -> None:
    """As it would be run: it logs to its file alone, ends in order, and says when it never can start."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/config.toml").write_text(SETTINGS)
    text = mac.types("service", "install", "--dry-run").output
    plist = plistlib.loads(text[text.index("<?xml") : text.index("</plist>") + len("</plist>")].encode())
    program, environment = plist["ProgramArguments"], plist["EnvironmentVariables"]
    (tmp_path / "sitecustomize.py").write_text(RANK_SAYS)
    environment["PYTHONPATH"] = str(tmp_path)
    aside, log = tmp_path / "aside", Path(plist["StandardOutPath"]).with_name("agent.log")
    agent = started(program, environment, aside)
    try:
        assert eventually(lambda: log.exists() and "WARNING a rank says" in log.read_text())
        assert eventually((mac.home / "agent.json").exists)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(WAIT_S) == 0
    finally:
        agent.kill()
        agent.wait(WAIT_S)
    assert aside.read_text() == ""
    assert "another Mac joins with: mlxtp node --join TOKEN, from `mlxtp token`" in log.read_text()
    assert not agent_runs(mac.home)
    aside.write_bytes(b"x" * (1024**2 + 1))  # of starts that failed before
    (tmp_path / "home/config.toml").write_text('http = "nowhere"\n')
    assert started(program, environment, aside).wait(WAIT_S) == 2
    assert aside.stat().st_size < 1000
    assert "is not HOST:PORT" in aside.read_text()


def test_its_log_is_followed_into_the_next_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "config.toml").write_text(f'log_file = "{log}"\n')
    environment = {**os.environ, "MLXTP_HOME": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "mlxtp", "logs", "-n", "2"]
    missing = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert "there is no log yet" in missing.stderr
    log.write_text("one\ntwo\nthree\n")
    with subprocess.Popen([*command, "-f"], env=environment, stdout=subprocess.PIPE, text=True) as following:
        try:
            assert [following.stdout.readline() for _ in range(2)] == ["two\n", "three\n"]
            log.rename(tmp_path / "log.1")
            log.write_text("four\n")
            assert following.stdout.readline() == "four\n"
        finally:
            following.kill()


def eventually(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + WAIT_S
    while not (done := is_so()) and time.monotonic() < until:
        time.sleep(0.05)
    return done


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, who gives files to another user")
@pytest.mark.parametrize("program", [("-m", "mlxtp"), ("-c", "from mlxtp.__main__ import main; main()")])
def test_sudo_leaves_no_file_of_root_in_the_users_folders(tmp_path: Path, program: Sequence[str]) -> None:
    """The second program is what pip makes of the entry point."""
    user = pwd.getpwnam("nobody")
    left_out = shutil.ignore_patterns("__pycache__", "tiny", "page")
    shutil.copytree(Path(here.__file__).parents[1], tmp_path / "mlxtp", ignore=left_out)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, user.pw_uid, user.pw_gid)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    sudo = {"SUDO_UID": str(user.pw_uid), "SUDO_USER": user.pw_name, "HOME": str(tmp_path)}
    command = [sys.executable, *program, "config", "path", "--home", str(tmp_path / "home")]
    environment = {**kept, **sudo, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "home") in done.stdout
    assert [path for path in tmp_path.rglob("*") if path.stat().st_uid == 0] == []

"""Ends of a command that cannot go on: in words, as JSON, or by Ctrl-C before it has begun."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.main import get_command
from typer.testing import CliRunner

import mlxtp as mlxtp_package
from mlxtp.cli.main import app
from mlxtp.cli.printing import TerminalLog
from mlxtp.placement.planner import DEFAULT_CONTEXT
from mlxtp.service import installed

from ..live_cluster import START_S

pytestmark = pytest.mark.slow

HOME_COMMANDS = ("status", "serve tiny", "unload", "token", "cluster members", "cluster remove x")


def mlxtp(words: str, home: Path | None = None) -> Result:
    where = [] if home is None else ["--home", str(home)]
    left = {"MLX_DISABLE_COMPILE": None}  # a demo sets it, in this process
    return CliRunner(env=left).invoke(app, [*words.split(), *where])


@pytest.mark.parametrize(
    ("words", "status", "code", "message"),
    [
        *((words, 1, "not_ready", "no mlxtp node runs with home") for words in HOME_COMMANDS),
        ("cluster leave", 1, "config_invalid", "belongs to no cluster"),
        ("plan no-such-model", 1, "model_not_found", "no-such-model is neither a model folder"),
        ("plan tiny --spread 9", 2, "config_invalid", "--spread: '9' is not auto, all"),
        ("demo --once --ranks 5", 1, "config_invalid", "--ranks: one machine runs 1 to 4 ranks, not 5"),
        ("demo --once --model /no/such", 1, "model_not_found", "neither a folder nor an id on the Hub"),
        ("key create a/b", 2, "config_invalid", "'a/b'"),
        ("chat --temperature 9 hi", 2, "config_invalid", "should be less than or equal to 2"),
        ("chat --max-tokens 0 hi", 2, "config_invalid", "should be greater than or equal to 1"),
        ("demo", 2, "config_invalid", "--json goes with --once"),
        ("serve", 2, "config_invalid", "Missing argument"),
        ("status --verbose", 2, "config_invalid", "No such option: --verbose"),
        ("cluster expel", 2, "config_invalid", "No such command 'expel'"),
        ("stauts", 2, "config_invalid", "Did you mean 'status'"),
    ],
)
def test_with_json_an_error_is_json_where_the_answer_would_stand(
    tmp_path: Path, words: str, status: int, code: str, message: str
) -> None:
    home = tmp_path / "home"
    refused = mlxtp(f"{words} --json", home)
    assert refused.exit_code == status
    assert isinstance(refused.exception, SystemExit), refused.exception
    (line,) = refused.stdout.splitlines()
    error = json.loads(line)["error"]
    assert error.keys() == {"code", "message"}
    assert error["code"] == code
    assert message in error["message"]
    if not words.startswith("demo"):  # which shows its stages there
        assert refused.stderr == ""

    in_words = mlxtp(words if words != "demo" else "demo --json", home)
    assert in_words.exit_code == status


@pytest.mark.parametrize(
    "words", ["config show", "status", "chat hi", "service install --dry-run", "plan ~nosuch/x"]
)
def test_the_home_of_a_user_who_is_none(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "ON_MAC", True)
    refused = mlxtp(words, None if words.startswith("plan") else Path("~nosuch/x"))
    assert (refused.exit_code, type(refused.exception)) == (1, SystemExit)
    assert "'~nosuch/x': this machine has no user ~nosuch" in refused.stderr


def test_without_json_an_error_is_words_on_stderr(tmp_path: Path) -> None:
    refused = mlxtp("status", tmp_path)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith("mlxtp: no mlxtp node runs with home")


def shell(line: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command as a shell starts it; `mlxtp` is the command."""
    command = f'mlxtp() {{ {sys.executable} -m mlxtp "$@"; }}; {line}'
    environment = {**os.environ, "MLXTP_HOME": str(home), **variables}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env=environment, capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip


def test_standard_output_that_is_closed_full_or_left(tmp_path: Path) -> None:
    closed = shell("mlxtp config path >&-", tmp_path)
    assert (closed.returncode, closed.stderr) == (0, "")
    full = shell("mlxtp config path >/dev/full", tmp_path)
    assert (full.returncode, full.stderr) == (
        1, "mlxtp: standard output cannot be written: No space left on device\n",
    )  # fmt: skip
    left = shell("mlxtp status --json | (exec <&-; sleep 1)", tmp_path)
    assert (left.returncode, left.stderr) == (1, "")


def test_a_file_that_the_system_refuses_is_named(tmp_path: Path) -> None:
    refused = shell("mlxtp list --json", tmp_path, HF_HUB_CACHE=f"/{'x' * 300}")
    assert (refused.returncode, refused.stderr) == (1, "")
    assert "xxx: File name too long" in json.loads(refused.stdout)["error"]["message"]


def every_command(command: Any, words: str = "") -> Iterator[tuple[str, Any]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from every_command(below, f"{words} {name}".strip())


COMMANDS = dict(every_command(get_command(app)))


@cache
def help_of(words: str) -> Result:
    """Return what `--help` says of a command, which takes 50 ms to write."""
    return mlxtp(f"{words} --help")


@pytest.mark.parametrize("words", COMMANDS)
def test_help_explains_every_word_that_can_be_typed(words: str) -> None:
    shown = help_of(words)
    assert shown.exit_code == 0
    assert COMMANDS[words].help
    for parameter in COMMANDS[words].params:
        assert parameter.help, parameter.name
        assert parameter.help.endswith(".") or parameter.help.startswith("Show"), parameter.name


@pytest.mark.parametrize("words", COMMANDS)
def test_help_leaves_the_line_breaks_to_the_terminal(words: str) -> None:
    assert not any("\n" in each for each in COMMANDS[words].help.split("\n\n"))


@pytest.mark.parametrize("words", COMMANDS)
def test_help_has_a_short_name_everywhere(words: str) -> None:
    shown = mlxtp(f"{words} -h")
    assert (shown.exit_code, shown.stdout) == (0, help_of(words).stdout)


def test_help_lists_the_commands_in_the_order_in_which_they_are_needed() -> None:
    names = [words for words in COMMANDS if words and " " not in words]
    assert names[:5] == ["node", "demo", "serve", "unload", "status"]


def test_help_groups_the_commands() -> None:
    lines = help_of("").stdout.splitlines()
    panels = [line.split()[1] for line in lines if line.startswith("╭─")]
    assert panels == ["Options", "Serve", "Cluster", "Use", "Models", "This"]


def test_what_a_plan_counts_with_is_in_its_help() -> None:
    assert str(DEFAULT_CONTEXT) in help_of("plan").stdout


IMPORTED = """
import atexit, sys
heavy = {"asyncio", "cryptography", "huggingface_hub", "msgpack", "psutil", "starlette", "transformers",
    "uvicorn", "zeroconf"}
loaded = lambda: heavy & {name.partition(".")[0] for name in sys.modules}
atexit.register(lambda: print(*sorted(loaded()), file=sys.stderr))
sys.argv = ["mlxtp", *sys.argv[1:]]
from mlxtp.__main__ import main
main()
"""


@pytest.mark.parametrize("words", ["version", "status --json", "config show"])
def test_a_small_command_imports_no_agent(tmp_path: Path, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *words.split()],
        env={**os.environ, "MLXTP_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert (done.stderr, bool(done.stdout)) == ("\n", True)


def test_the_version_in_three_ways() -> None:
    version = mlxtp("version").stdout.strip()
    assert version[:1].isdigit()
    assert mlxtp("--version").stdout.strip() == version
    assert json.loads(mlxtp("version --json").stdout) == {"version": version}


def test_what_a_report_says_of_what_is_installed(tmp_path: Path) -> None:
    words = mlxtp("version --verbose", tmp_path).stdout
    told = json.loads(mlxtp("version --verbose --json", tmp_path).stdout)
    assert told["mlx"] == importlib.metadata.version("mlx")
    assert told["home"] == str(tmp_path)
    assert told["agent"] == "does not run"
    assert told["installed in"] == str(Path(mlxtp_package.__file__).parent)
    for name, value in told.items():
        assert value in words, name


START = "from mlxtp.__main__ import main; main()"
INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("interrupted", flush=True)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
sys.argv = ["mlxtp", *{words!r}.split()]
{start}
"""


def interrupted(
    module: str, start: str = START, before: str = "", words: str = "version"
) -> subprocess.CompletedProcess[str]:
    """A command with Ctrl-C pressed just as it begins to import `module`; the status is the shell's."""
    code = before + INTERRUPTED_IMPORT.format(module=module, start=start, words=words)
    return subprocess.run(
        ["/bin/sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


@pytest.mark.parametrize("module", ["mlxtp.cli.main", "typer", "mlxtp.cli.cluster"])
@pytest.mark.parametrize(
    "start", [START, "import runpy; runpy.run_module('mlxtp', run_name='__main__', alter_sys=True)"]
)
def test_ctrl_c_before_a_command_has_begun_is_quiet(module: str, start: str) -> None:
    done = interrupted(module, start)
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted\n", "")


@pytest.mark.parametrize("words", ["demo --once", "node --alone --http 127.0.0.1:0"])
def test_ctrl_c_while_the_agent_is_imported_is_quiet(tmp_path: Path, words: str) -> None:
    done = interrupted("mlxtp.groups.lifecycle", words=f"{words} --home {tmp_path / 'home'}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted\n", "")
    assert not (tmp_path / "home").exists()


def test_ctrl_c_is_not_for_who_runs_in_the_background() -> None:
    """A shell without job control has those ignore it."""
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    done = interrupted("typer", before=ignoring)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_while_a_command_runs_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtp.cli.status.AgentClient", lambda _: signal.raise_signal(signal.SIGINT))
    for words in ("status", "status --json"):
        done = mlxtp(words)
        assert (done.exit_code, done.stdout, done.stderr) == (130, "", "")


def test_the_installed_command_starts_there_too() -> None:
    """Its first import is the only part of the package that Ctrl-C may not meet."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"mlxtp": "mlxtp.__main__:main"}


def test_a_long_line_of_the_log_is_one_line_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy from a narrow terminal is the whole command."""
    monkeypatch.setenv("COLUMNS", "40")
    log = logging.Logger("mlxtp.test")
    log.addHandler(TerminalLog())
    join = f"another Mac joins with: mlxtp node --join {'x' * 72}"
    log.info(join)
    log.warning("[bold]%s", "two")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"\[[^]]+\] INFO     {join}", first)
    assert re.fullmatch(r"(\[[^]]+\]| +) WARNING  \[bold\]two", second)

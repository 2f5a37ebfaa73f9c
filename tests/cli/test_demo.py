"""Words of the demo when its question gets no answer."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mlxtp.cli import demo
from mlxtp.client import AgentClient
from mlxtp.config import Settings
from mlxtp.errors import Code, GroupError
from mlxtp.verbs import Status

from ..live_cluster import WAIT_S, Cluster, until
from .test_cluster import stranger

pytestmark = [pytest.mark.slow, pytest.mark.fault]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["-m"], "\n  mlxtp status \\\n"), (["{}/.venv/bin/mlxtp"], "\n  .venv/bin/mlxtp status")],
)
def test_who_serves_says_where_other_commands_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    """A checkout names the command by its path."""
    shown = io.StringIO()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr("sys.argv", [each.format(tmp_path) for each in arguments])
    settings = Settings(tmp_path / "a home", "127.0.0.1", 0, 2, "tiny")
    demo.DemoView(demo.DemoConsole(file=shown, width=60), settings).serving("http://127.0.0.1:52415")
    assert said in shown.getvalue()
    assert f"--home '{tmp_path}/a home'" in shown.getvalue()


def test_what_is_to_be_pasted_breaks_nowhere_at_80_columns(tmp_path: Path, one_rank: Cluster) -> None:
    """And does what it promises."""
    shown = io.StringIO()
    settings = Settings(
        Path("/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T/mlxtp-demo-ab12cd34"), "", 0, 2, "tiny"
    )
    demo.DemoView(demo.DemoConsole(file=shown, width=80), settings).serving(one_rank.url)
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    begins = next(number for number, line in enumerate(lines) if "curl" in line)
    curl = "\n".join(lines[begins : lines.index("", begins)])
    done = subprocess.run(["/bin/sh", "-c", curl], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert "Hello, 2 Macs!" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def demo_process(home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mlxtp", "demo", "--ranks", "1", "--http", "127.0.0.1:0", "--home", str(home)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def assert_silent_at_ctrl_c(demo_: subprocess.Popen[str]) -> None:
    os.killpg(demo_.pid, signal.SIGINT)  # as a terminal does
    said, problems = demo_.communicate(timeout=WAIT_S)
    assert problems == ""
    assert "WARNING" not in said
    assert demo_.returncode == 0


def test_ctrl_c_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    demo_ = demo_process(tmp_path)
    until((tmp_path / "agent.json").is_file, "the agent")
    client = AgentClient(tmp_path)
    until(lambda: client.send(Status())["model"], "the model")
    question = {"messages": [{"role": "user", "content": "Count from 1 to 60."}], "max_tokens": 4000}
    with contextlib.closing(client.ask(question)) as pieces:
        assert any(piece.text for piece in pieces)
        assert_silent_at_ctrl_c(demo_)


@pytest.mark.parametrize("process", [1, 2], ids=["the rank", "its spare"])
@pytest.mark.chaos
def test_ctrl_c_while_a_process_is_starting(tmp_path: Path, process: int) -> None:
    demo_ = demo_process(tmp_path)
    started: set[int] = set()

    def begun() -> bool:
        """Return whether the process runs. Imports that look for a library start short-lived others."""
        for child in psutil.Process(demo_.pid).children():
            with contextlib.suppress(psutil.Error):
                if "mlxtp.engine.worker" in child.cmdline():
                    started.add(child.pid)
        return len(started) >= process

    until(begun, "the process to be started", every_s=0.005)
    time.sleep(0.1)  # it is just importing then
    assert_silent_at_ctrl_c(demo_)


@pytest.mark.parametrize(
    "answer",
    [b"", b"nonsense\r\n\r\n", HEAD + b"\r\n", HEAD + b'Content-Length: 99\r\n\r\ndata: {"choices": []}\n'],
)
def test_an_answer_that_breaks_off(answer: bytes) -> None:
    with stranger(answer) as url, pytest.raises(GroupError, match="the answer broke off"):
        demo.ask(url, "hello", lambda _: None)
    with pytest.raises(GroupError, match=r"the answer broke off: .*refused") as broken:
        demo.ask(url, "hello", lambda _: None)  # the endpoint is gone by now
    assert broken.value.code is Code.LINK_LOST


def test_the_reader_of_the_output_may_leave() -> None:
    """The answer is not at fault."""
    chunk = b'data: {"choices": [{"delta": {"content": "x"}}]}\n'

    def leave(_: str) -> None:
        raise BrokenPipeError

    with stranger(HEAD + b"\r\n" + chunk) as url, pytest.raises(BrokenPipeError):
        demo.ask(url, "hello", leave)


COMPILER = """#!/bin/sh
echo "$@" >>"{calls}"
[ "$1" = --version ]
"""


@pytest.mark.group
@pytest.mark.skipif(sys.platform == "darwin", reason="Metal computes there, without this compiler")
def test_the_demo_compiles_nothing(tmp_path: Path) -> None:
    """So its first run after a boot is as quick as later ones."""
    calls = tmp_path / "calls"
    calls.touch()
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "g++"
    compiler.write_text(COMPILER.format(calls=calls))
    compiler.chmod(0o755)
    environment = os.environ | {"PATH": f"{compiler.parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "mlxtp", "demo", "--once", "--http", "127.0.0.1:0"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert "FALCON-MERCURY-7749" in done.stdout, done.stderr
    assert [call for call in calls.read_text().splitlines() if call != "--version"] == []

"""An agent whose event loop stands still ends, with the place in its log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from mlxtp import background
from mlxtp.background import watched_loop

from .live_cluster import WAIT_S

pytestmark = pytest.mark.slow


def test_nothing_watches_when_it_is_over() -> None:
    async def over() -> None:
        before = set(psutil.Process().children())
        with watched_loop():
            (watcher,) = set(psutil.Process().children()) - before
        assert not watcher.is_running()

    asyncio.run(over())


STUCK = """
import asyncio, logging, sys, threading
from mlxtp import background
background.TURN_S, background.REPORT_S = 0.05, 2.0
logging.basicConfig()
async def main():
    with background.watched_loop({watched}):
        def here_it_stands():
            {hold}threading.Event().wait()
        here_it_stands()
asyncio.run(main())
"""


def run(hold: str = "", watched: str = "", first: str = "") -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", first + STUCK.format(hold=hold, watched=watched)]
    return subprocess.run(program, capture_output=True, text=True, timeout=WAIT_S, check=False)


HOLDS = {
    "waits": "",
    "waits for the log": "logging.getLogger().handlers[0].acquire(); ",
    "holds the interpreter's lock": "import ctypes; ctypes.PyDLL(None).pause(); ",
    "holds it in another thread": (
        "import ctypes; threading.Thread(target=ctypes.PyDLL(None).sleep, args=(999,)).start(); "
    ),
    "matches a pattern": "import re; re.match('(a*)*b', 'a' * 99); ",
}


@pytest.mark.parametrize("name", HOLDS)
def test_it_says_where_it_stood(name: str) -> None:
    done = run(HOLDS[name])
    assert done.returncode == -signal.SIGKILL
    assert "the event loop stood still for 1.5 s, so this agent ends" in done.stderr
    assert "in here_it_stands" in done.stderr


def test_it_says_so_where_no_disk_has_room() -> None:
    done = run(first="import tempfile; tempfile.tempdir = '/nowhere'")
    assert "in here_it_stands" in done.stderr


def test_a_signal_of_another_process_stops_nothing() -> None:
    """Its stacks would fill a pipe that nobody reads; nor do they count as periods without a sign."""
    many = "[os.kill(os.getpid(), signal.SIGUSR1) for _ in range(300)]; sys.exit()"
    program = STUCK.format(hold="", watched="").replace("here_it_stands()\nasyncio", many + "\nasyncio")
    program = [sys.executable, "-c", "import os, signal" + program]
    assert subprocess.run(program, timeout=WAIT_S, check=False).returncode == 0


def test_stacks_without_end_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: None)
    reading, writing = os.pipe()

    def write() -> None:
        with contextlib.suppress(BrokenPipeError):
            for _ in range(64):
                os.write(writing, b"x\n" * (1 << 16))
        os.close(writing)

    asked = threading.Thread(target=write)
    asked.start()
    lines = background._stacks_of(0, reading, 1.0)
    os.close(reading)
    asked.join()
    assert (1 << 19) <= len(lines) < (1 << 20)


def test_it_says_so_in_the_agent_s_log(tmp_path: Path) -> None:
    done = run(watched=f"'json', {str(tmp_path / 'log')!r}")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert {line["level"] for line in lines} == {"critical"}
    assert any('", line ' in line["message"] and "here_it_stands" in line["message"] for line in lines)


def test_it_ends_also_when_nobody_reads_the_log() -> None:
    program = [sys.executable, "-c", STUCK.format(hold="sys.stderr.write('x' * 65536); ", watched="")]
    with subprocess.Popen(program, stderr=subprocess.PIPE) as process:  # whose pipe is full now
        assert process.wait(WAIT_S) == -signal.SIGKILL


def test_a_process_that_was_stopped_goes_on() -> None:
    """Its watcher goes on, and sees that it is stopped."""
    program = STUCK.replace(
        "here_it_stands()\nasyncio", "await asyncio.to_thread(sys.stdin.readline)\nasyncio"
    )
    program = program.format(hold="", watched="").replace(
        "background.REPORT_S = 0.05, 2.0", "background.TURNS = 0.05, 10"
    )
    program = program.replace("    with back", "    print('up', flush=True)\n    with back")
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            threading.Event().wait(1.0)  # longer than it may stand still
            process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(WAIT_S) == 0


def test_an_agent_is_watched(tmp_path: Path) -> None:
    program = ["-m", "tests.agents.changed_node", "stuck=8", "node", "--alone", "--home", str(tmp_path)]
    command = [sys.executable, *program, "--http", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "the event loop stood still" in done.stderr
    assert "in stand_still" in done.stderr


def test_an_agent_ends_though_its_threads_work_for_ever(tmp_path: Path) -> None:
    """Those of the loop, and those of a queue: Python waits for both."""
    program = ["-m", "tests.agents.changed_node", "busy=1", "node", "--alone", "--home", str(tmp_path)]
    command = [sys.executable, *program, "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while "busy" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(WAIT_S) == 0
        assert time.monotonic() - began < 15
        assert "threads still work 1.5 s after the end was due" in process.stderr.read()


def test_goodbyes_that_hang_end_too_and_so_does_a_tokenizer_at_work() -> None:
    program = (
        "import subprocess, sys, time; from mlxtp.background import end_within; end_within(2.0); "
        "command = [sys.executable, '-c', 'import time; time.sleep(99)', 'mlxtp.text.renderer']; "
        "subprocess.Popen(command); time.sleep(99)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False)  # until both let go
    assert done.returncode == 0

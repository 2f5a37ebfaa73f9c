"""An agent whose event loop stands still ends, with the place in its log."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlxtp import background
from mlxtp.background import watched_loop
from mlxtp.errors import WEDGED_STATUS

from .live_cluster import WAIT_S

pytestmark = pytest.mark.slow


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set instead of ending this process."""
    found = threading.Event()
    monkeypatch.setattr(background, "TURN_S", 0.001)
    monkeypatch.setattr(background, "end_process", found.set)
    return found


def test_a_loop_that_stands_still_is_the_end(ended: threading.Event) -> None:
    async def stuck() -> None:
        with watched_loop():
            await asyncio.sleep(0)
            assert ended.wait(WAIT_S)

    asyncio.run(stuck())


def test_a_loop_that_waits_is_not(ended: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives more signs than the thread has turns, and the thread has many."""
    turns = 0
    event = threading.Event

    class Counting(event):  # type: ignore[misc,valid-type]
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal turns
            turns += 1
            return bool(super().wait(timeout))

    async def idle() -> None:
        with watched_loop():
            while turns < 5 * background.TURNS:  # noqa: ASYNC110 - a thread counts them
                await asyncio.sleep(0)

    monkeypatch.setattr(threading, "Event", Counting)
    asyncio.run(idle())
    assert not ended.is_set()


def test_nothing_watches_when_it_is_over(ended: threading.Event) -> None:
    async def over() -> None:
        before = set(threading.enumerate())
        with watched_loop():
            (thread,) = set(threading.enumerate()) - before
        thread.join(WAIT_S)
        assert not thread.is_alive()

    asyncio.run(over())
    assert not ended.is_set()


def test_a_watcher_keeps_the_period_that_it_began_with(
    ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent of another test may run in this process, and must not be ended by the short periods here."""

    async def story() -> None:
        monkeypatch.setattr(background, "TURN_S", 0.3)
        with watched_loop():
            await asyncio.sleep(0)
            monkeypatch.setattr(background, "TURN_S", 0.0001)
            assert not ended.wait(1.0)  # the loop stands still meanwhile, which is short for that watcher

    asyncio.run(story())


STUCK = """
import asyncio, logging, sys, threading
from mlxtp import background
background.TURN_S = background.REPORT_S = 0.03
logging.basicConfig()
async def main():
    with background.watched_loop():
        def here_it_stands():
            {hold}threading.Event().wait()
        here_it_stands()
asyncio.run(main())
"""


def run(hold: str = "") -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", STUCK.format(hold=hold)]
    return subprocess.run(program, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_it_says_where_it_stood() -> None:
    done = run()
    assert done.returncode == WEDGED_STATUS
    assert "the event loop stood still for 0.9 s, so this agent ends" in done.stderr
    assert "in here_it_stands" in done.stderr


def test_it_ends_also_when_the_log_is_what_it_waits_for() -> None:
    done = run("logging.getLogger().handlers[0].acquire(); ")
    assert (done.returncode, done.stderr) == (WEDGED_STATUS, "")


def test_a_process_that_was_stopped_goes_on() -> None:
    """Stopped, neither the loop nor the thread has a turn, as in a Mac's sleep, with any clock."""
    program = STUCK.replace(
        "here_it_stands()\nasyncio", "await asyncio.to_thread(sys.stdin.readline)\nasyncio"
    )
    program = program.format(hold="").replace(
        "TURN_S = background.REPORT_S = 0.03", "TURNS, background.TURN_S = 10, 0.05"
    )
    program = program.replace("    with back", "    print('up', flush=True)\n    with back")
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
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
    assert done.returncode == WEDGED_STATUS, done.stderr
    assert "the event loop stood still" in done.stderr
    assert "in stand_still" in done.stderr

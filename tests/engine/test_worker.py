"""Ends of a rank process, which gives its memory back if its main thread still comes back."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from mlxtp.engine import worker
from mlxtp.engine.telemetry import LEAST_PATIENCE_S, RankTelemetry, Recorder
from mlxtp.errors import TERMINATED_STATUS, WEDGED_STATUS, Code, exit_status
from mlxtp.wire.rank_process import PATIENCE_S

from ..live_cluster import WAIT_S

pytestmark = pytest.mark.slow

RANK = """
import ctypes, os, signal, sys, threading, time, types
from mlxtp.engine import telemetry, worker
from mlxtp.errors import Code, GroupError

LOST = GroupError("lost rank 1", Code.RANK_LOST)
def desync():
    return GroupError("rank 1 reports another digest", Code.DESYNC)

class Memory:
    hangs_in = ""
    bootstrap = types.SimpleNamespace(backend="ring")

    def finish(self):
        self.do("finish")

    def give_back(self):
        self.do("give back")

    def do(self, what):
        print(what, flush=True)
        if what == self.hangs_in:
            wedged()

class Weights:
    def __del__(self):
        print("no frame holds them", flush=True)

def hurried():
    telemetry.LEAST_PATIENCE_S = worker.FREE_S = 0.1

def wedged():
    hurried()
    mutex = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    try:
        os.write(1, b"here\\n")
        libc.pthread_mutex_lock(mutex)  # for ever, through any signal
    except worker.Terminated:  # just before
        libc.pthread_mutex_lock(mutex)

def idle(process):
    process.status.enter("idle")
    os.write(1, b"here\\n")
    process.mail.wait()

def elsewhere(work):
    threading.Thread(target=work, daemon=True).start()

def run(process, *_):
    process.memory = Memory()
    weights = Weights()
    {story}

worker.run = run
telemetry.LEAST_PATIENCE_S = worker.LEAST_PATIENCE_S = 60.0
worker.main(sys.argv[1:])
"""

FREED = ["no frame holds them", "finish", "give back"]
GIVEN_BACK = ["no frame holds them", "give back"]


def ended(story: str, *, sigterm: bool = False) -> tuple[int, list[str]]:
    """Run a rank whose main thread does `story`; returns its exit status and what became of its memory."""
    ours, theirs = socket.socketpair()
    arguments = ["--rank", "0", "--epoch", "1", "--folder", ".", "--pipe-fd", str(theirs.fileno())]
    with ours, theirs:
        program = RANK.replace("{story}", story.replace("\n", "\n    "))
        how: Any = {"stdout": subprocess.PIPE, "text": True, "pass_fds": [theirs.fileno()]}
        with subprocess.Popen([sys.executable, "-c", program, *arguments], **how) as process:
            try:
                assert process.stdout is not None
                if sigterm:
                    assert process.stdout.readline() == "here\n"
                    process.send_signal(signal.SIGTERM)
                done = process.stdout.read().splitlines()
                return process.wait(WAIT_S), [each for each in done if each != "here"]
            finally:
                process.kill()


def test_an_end_in_order_gives_memory_back() -> None:
    assert ended("return") == (0, FREED)
    assert ended("raise desync()") == (exit_status(Code.DESYNC), FREED)


def test_sigterm_gives_memory_back_where_the_main_thread_hears_it() -> None:
    assert ended("idle(process)", sigterm=True) == (TERMINATED_STATUS, FREED)
    assert ended("wedged()", sigterm=True) == (WEDGED_STATUS, [])


def test_sigterm_between_the_end_of_its_loop_and_the_agents_shutdown_ends_a_rank() -> None:
    """It was sent while the loop read rank 0's Shutdown, so that the signal stands behind it."""
    story = "process.status.enter('idle')\nprocess.obeying = True\nos.kill(os.getpid(), signal.SIGTERM)"
    assert ended(f"{story}\nworker._await_shutdown(process.mail)") == (TERMINATED_STATUS, FREED)


@pytest.mark.parametrize(
    ("error", "code"),
    [("RuntimeError('[ring] a peer was lost')", Code.FORWARD_FAILED), ("MemoryError", Code.OUT_OF_MEMORY)],
)
def test_after_a_forward_that_failed_no_other_is_waited_for(error: str, code: Code) -> None:
    assert ended(f"raise {error}") == (exit_status(code), GIVEN_BACK)


@pytest.mark.parametrize("place", ["finish", "give back"])
def test_giving_memory_back_is_bounded(place: str) -> None:
    status, done = ended(f"Memory.hangs_in = '{place}'\nhurried()\nraise desync()")
    assert (status, done[-1]) == (exit_status(Code.DESYNC), place)


def test_a_failure_that_another_thread_finds_gives_memory_back_of_an_idle_rank() -> None:
    story = "elsewhere(lambda: (process.abort(LOST), process._over()))\nidle(process)"
    assert ended(story) == (exit_status(Code.RANK_LOST), GIVEN_BACK)


def test_a_rank_in_a_dead_collective_ends_at_once() -> None:
    """Its main thread cannot come back, so the patience that it has is not used up."""
    story = "process.status.in_flight = 1\nprocess.status.patience_s = lambda: 1e6"
    story += "\nelsewhere(lambda: (process.abort(LOST), process._over()))\nwedged()"
    assert ended(story) == (exit_status(Code.RANK_LOST), [])


def test_a_rank_whose_peer_reports_waits_for_its_own_forward_and_then_ends() -> None:
    """The peer is still there, so the forward that both run comes to its end."""
    story = "process.status.in_flight = 1\nelsewhere(lambda: process.abort(desync()))\nidle(process)"
    assert ended(story) == (exit_status(Code.DESYNC), FREED)


OBEYS = """
process.obeying = True
process.status.enter("{phase}")
process.mail.post(0, "frame")
os.kill(os.getpid(), signal.SIGTERM)
process.mail.post(0, "late frame")
while True:
    print(process.mail.take(0), flush=True)
"""


@pytest.mark.parametrize("phase", ["prefill", "decode", "idle", "loading"])
def test_frames_from_before_sigterm_are_run_first_and_a_load_ends_at_once(phase: str) -> None:
    """Rank 0 runs them, too, and in another process's collective no rank can be told to stop."""
    done = FREED if phase == "loading" else ["frame", *FREED]
    assert ended(OBEYS.format(phase=phase)) == (TERMINATED_STATUS, done)


@pytest.mark.parametrize("finishes", [True, False])
def test_a_peer_that_ended_after_its_forwards_leaves_time_to_end_this_rank_s(finishes: bool) -> None:
    story = f"process.status.in_flight = 1\nprocess.report(desync())\nprocess._finishes = {finishes}"
    story += f"\nelsewhere(process._over)\ntime.sleep({0.3 if finishes else WAIT_S})\nraise desync()"
    assert ended(story) == (exit_status(Code.DESYNC), FREED if finishes else [])


def test_a_rank_that_waits_for_jaccls_side_channel_has_time_to_leave_it_when_another_rank_is_lost() -> None:
    story = "process.status.enter('forming')\nprocess.report(desync())"
    story += "\nelsewhere(process._over)\ntime.sleep(0.3)\nraise desync()"
    assert ended(story) == (exit_status(Code.DESYNC), GIVEN_BACK)


def of(phase: str, *, stood_s: float = 0.0, weights: int = 1, step_s: float = 0.0) -> float:
    """The patience for a rank in `phase` since `stood_s`."""
    status = RankTelemetry()
    status.stats.weight_bytes, status.expected_us = weights, int(step_s * 1e6)
    status.phase = phase  # type: ignore[assignment]
    status._since -= stood_s
    return status.patience_s()


def test_a_main_thread_has_ten_seconds_or_four_forwards_to_come_back_and_little_if_it_holds_nothing() -> None:
    assert of("idle", stood_s=1000) == PATIENCE_S
    assert of("prefill") == pytest.approx(PATIENCE_S, abs=1)
    assert of("prefill", step_s=8) == pytest.approx(32, abs=1)
    assert of("loading", weights=0) == pytest.approx(PATIENCE_S, abs=1)
    assert of("decode", stood_s=10) == of("loading", stood_s=60) == LEAST_PATIENCE_S
    assert of("starting", weights=0) == of("forming", weights=0) == LEAST_PATIENCE_S


def test_a_sigterm_that_comes_just_before_a_wait_ends_it(tmp_path: Path) -> None:
    """Its handler has run by then, as far as the lock below the wait knows."""
    process = worker.RankProcessLinks(0, 1, tmp_path, cast("Any", None), RankTelemetry(Recorder()))
    process._leaving.set()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        process.end_when_wedged()
        signal.raise_signal(signal.SIGTERM)
        assert process.mail.wait(WAIT_S)
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)

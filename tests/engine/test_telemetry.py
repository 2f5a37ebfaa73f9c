"""A rank's recorder, whose memory outlives its process, and its report of the forward that runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest

from mlxtp.diagnostics.failure_store import read_recording, recording_file
from mlxtp.engine.telemetry import PROMPT, STEP, Phase, RankTelemetry, Recorder
from mlxtp.wire.rank_stats import RankStats
from mlxtp.wire.recording import MAX_WORDS_BYTES, STEPS, Recording, decode

from ..live_cluster import WAIT_S

RANK = """
import os, signal, sys, time
from pathlib import Path
from mlxtp.engine.telemetry import STEP, Recorder

def on_sigterm(*_):
    sys.exit(143)

signal.signal(signal.SIGTERM, on_sigterm)
recorder = Recorder.at(Path(sys.argv[1]))
recorder.catch_crashes()
recorder.entered("decode")
place = recorder.started(7, STEP, 2, time.monotonic())
recorder.queued(place, 3, 27)

def standing_here():
    print("here", flush=True)
    while True:
        signal.pause()

standing_here()
"""


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Callable[[], Recording]]:
    """What is recorded in the file of that name."""
    memory = recording_file(tmp_path / "recording")

    def read() -> Recording:
        found = decode(read_recording(memory))
        assert found is not None
        return found

    yield read
    os.close(memory)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGSEGV, -11), (signal.SIGABRT, -6)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_a_rank_did_last_is_there_however_it_ends(
    tmp_path: Path, recording: Callable[[], Recording], number: int, status: int
) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path / "recording")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            process.send_signal(number)
            assert process.wait(WAIT_S) == status
        finally:
            process.kill()
    (step,) = recording().steps
    assert (step.seq, step.kind, step.rows, step.forwards, step.collectives) == (7, "step", 2, 3, 27)
    assert 0 < step.started_us <= step.queued_us
    assert step.finished_us == 0
    stack = "standing_here" in recording().crash
    assert stack is (number != signal.SIGKILL), recording().crash


def test_a_recorder_remembers_the_newest_steps(tmp_path: Path, recording: Callable[[], Recording]) -> None:
    recorder = Recorder.at(tmp_path / "recording")
    for seq in range(1, STEPS + 11):
        place = recorder.started(seq, STEP if seq > 1 else PROMPT, 1, monotonic())
        recorder.queued(place, seq, 9 * seq)
        recorder.finished(place, monotonic(), 2**32 - seq, seq)
    assert [step.seq for step in recording().steps] == list(range(11, STEPS + 11))
    newest = recording().steps[-1]
    assert (newest.digest, newest.fed, newest.forwards) == (2**32 - STEPS - 10, STEPS + 10, STEPS + 10)
    assert newest.started_us <= newest.queued_us <= newest.finished_us


def test_last_words_that_are_too_long_are_cut(tmp_path: Path, recording: Callable[[], Recording]) -> None:
    Recorder.at(tmp_path / "recording").last_words("internal", "ä" * MAX_WORDS_BYTES)
    assert (recording().code, recording().detail) == ("internal", "ä" * (MAX_WORDS_BYTES // 2))


def ran(status: RankTelemetry, phase: Phase, tokens: int, began: float, ended: float) -> None:
    status.launched(phase, tokens, began)
    status.settled(ended)


def expected(status: RankTelemetry, phase: Phase, tokens: int, began: float) -> int:
    status.launched(phase, tokens, began)
    return status.expected_us


def test_more_that_end_than_began_is_no_error_and_nothing_is_expected_of_the_first_forward() -> None:
    status = RankTelemetry()
    status.settled(5.0)
    assert status.in_flight == 0
    assert expected(status, "decode", 1, 5.0) == 0
    assert (status.phase, status.in_flight) == ("decode", 1)


def test_a_step_should_take_what_steps_took() -> None:
    status = RankTelemetry()
    for number in range(200):
        ran(status, "decode", 8, number, number + 0.5)
    assert expected(status, "decode", 1, 300.0) == pytest.approx(500_000, rel=0.01)


def test_a_chunk_should_take_what_its_tokens_took() -> None:
    status = RankTelemetry()
    ran(status, "decode", 1, 0.0, 9.0)
    ran(status, "prefill", 10, 10.0, 10.2)
    assert expected(status, "prefill", 500, 20.0) == pytest.approx(10_000_000)


def test_more_rows_may_take_as_many_times_as_long() -> None:
    """A limit allows 20 times what is expected: one fifth of it is enough for 64 rows one after the other."""
    status = RankTelemetry()
    for number in range(100):
        ran(status, "decode", 1, number, number + 0.5)
    assert 20 * expected(status, "decode", 64, 200.0) >= 3 * 64 * 500_000
    status.settled(201.0)
    for number in range(100):  # it is a GPU
        ran(status, "decode", 64, 300 + number, 300.6 + number)
    assert expected(status, "decode", 64, 500.0) == pytest.approx(600_000, rel=0.01)


@pytest.mark.parametrize(("phase", "tokens"), [("prefill", 8), ("decode", 1)])
def test_what_compiled_kernels_is_soon_forgotten(phase: Phase, tokens: int) -> None:
    status = RankTelemetry()
    ran(status, phase, tokens, 0.0, 20.0)
    for number in range(20):
        ran(status, phase, tokens, 100 + number, 100.1 + number)
    assert expected(status, phase, tokens, 200.0) < 150_000


def test_one_that_was_slow_by_chance_counts_for_little() -> None:
    status = RankTelemetry()
    for number in range(100):
        ran(status, "decode", 1, 10 * number, 10 * number + 0.01)
    ran(status, "decode", 1, 5000.0, 5001.0)
    assert 10_000 < expected(status, "decode", 1, 6000.0) < 100_000


def test_a_step_that_waits_behind_a_chunk_is_not_what_runs() -> None:
    status = RankTelemetry()
    status.launched("prefill", 512, 1.0)
    status.launched("decode", 1, 1.1)
    assert (status.phase, status.in_flight) == ("prefill", 2)
    status.settled(9.0)
    assert (status.phase, status.in_flight) == ("decode", 1)
    status.settled(9.5)
    own = expected(status, "decode", 1, 10.0)
    assert own == pytest.approx(500_000), "the time behind the chunk is not its own"


def test_a_phase_that_begins_while_a_pong_is_made_took_no_negative_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader thread makes it beside the main thread. A rank that sent such a time ended."""
    status = RankTelemetry()

    def now() -> float:
        status._since = 1e6
        return 2e5

    status._since = 1e5
    monkeypatch.setattr("mlxtp.engine.telemetry.time.monotonic", now)
    assert status.pong().phase_s == 1e5


def test_a_rank_without_its_model_keeps_what_counts_in_the_epoch() -> None:
    status = RankTelemetry()
    status.model, status.drafts.mtp = "tiny", True
    status.stats = RankStats(forwards=9, collectives=8, emitted=7, weight_bytes=6, reused=5, collective_us=4)
    status.unloaded()
    assert (status.model, status.drafts.mtp) == ("", False)
    assert status.stats == RankStats(forwards=9, collectives=8, emitted=7, collective_us=4)

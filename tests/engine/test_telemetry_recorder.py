"""A rank's recorder, and what is in its memory when its process is gone, however it was ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from mlxtp.diagnostics.failure_store import read_recording, recording_file
from mlxtp.engine.telemetry import PROMPT, STEP, Recorder
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


def recorded(path: Path, number: int) -> tuple[Recording, int]:
    """Return the recording and the exit status of a process that a signal ended in the midst of a step."""
    memory = recording_file(path)
    try:
        process = subprocess.Popen([sys.executable, "-c", RANK, str(path)], stdout=subprocess.PIPE, text=True)
        with process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "here\n"
                process.send_signal(number)
                status = process.wait(WAIT_S)
            finally:
                process.kill()
        recording = decode(read_recording(memory))
    finally:
        os.close(memory)
    assert recording is not None
    return recording, status


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGSEGV, -11), (signal.SIGABRT, -6)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_a_rank_did_last_is_there_however_it_ends(tmp_path: Path, number: int, status: int) -> None:
    recording, ended = recorded(tmp_path / "recording", number)
    assert ended == status
    (step,) = recording.steps
    assert (step.seq, step.kind, step.rows, step.forwards, step.collectives) == (7, "step", 2, 3, 27)
    assert 0 < step.started_us <= step.queued_us
    assert step.finished_us == 0
    stack = "standing_here" in recording.crash
    assert stack is (number != signal.SIGKILL), recording.crash


def test_a_recorder_remembers_the_newest_steps(tmp_path: Path) -> None:
    memory = recording_file(tmp_path / "recording")
    try:
        recorder = Recorder.at(tmp_path / "recording")
        for seq in range(1, STEPS + 11):
            place = recorder.started(seq, STEP if seq > 1 else PROMPT, 1, monotonic())
            recorder.queued(place, seq, 9 * seq)
            recorder.finished(place, monotonic(), 2**32 - seq, seq)
        recording = decode(read_recording(memory))
    finally:
        os.close(memory)
    assert recording is not None
    assert [step.seq for step in recording.steps] == list(range(11, STEPS + 11))
    newest = recording.steps[-1]
    assert (newest.digest, newest.fed, newest.forwards) == (2**32 - STEPS - 10, STEPS + 10, STEPS + 10)
    assert newest.started_us <= newest.queued_us <= newest.finished_us


def test_last_words_that_are_too_long_are_cut(tmp_path: Path) -> None:
    memory = recording_file(tmp_path / "recording")
    try:
        Recorder.at(tmp_path / "recording").last_words("internal", "ä" * MAX_WORDS_BYTES)
        recording = decode(read_recording(memory))
    finally:
        os.close(memory)
    assert recording is not None
    assert recording.code == "internal"
    assert recording.detail == "ä" * (MAX_WORDS_BYTES // 2)


def test_a_recorder_without_a_file() -> None:
    """Without a file it takes everything, and crashes are lost."""
    recorder = Recorder()
    recorder.catch_crashes()
    recorder.entered("idle")
    place = recorder.started(1, STEP, 1, monotonic())
    recorder.finished(place, monotonic(), 1, 1)
    assert recorder.started(2, STEP, 1, monotonic()) != place

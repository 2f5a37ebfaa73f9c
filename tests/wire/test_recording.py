"""A recording as its bytes stand when a rank is gone, at any time."""

from __future__ import annotations

import struct

import pytest

from mlxtp.wire.recording import (
    BEGAN,
    GAVE_BACK_AT,
    HEADER_BYTES,
    KINDS,
    MAGIC,
    MAX_CRASH_BYTES,
    PHASE,
    PHASE_AT,
    PHASES,
    RECORDING_BYTES,
    SLOT,
    STEPS,
    WORDS,
    WORDS_AT,
    Step,
    decode,
    gave_back,
)

ORIGIN = 1000.0
STEP = KINDS.index("step")


def memory(*slots: tuple[int, tuple[float | int, ...]], phase: str = "idle", crash: bytes = b"") -> bytearray:
    """A recording that began at ORIGIN, with slots at their places."""
    data = bytearray(RECORDING_BYTES)
    BEGAN.pack_into(data, 0, MAGIC, 5e8, ORIGIN)
    PHASE.pack_into(data, PHASE_AT, ORIGIN + 0.5, PHASES.index(phase))
    for place, slot in slots:
        SLOT.pack_into(data, HEADER_BYTES + place * SLOT.size, *slot)
    return data + crash


def slot(
    seq: int, started: float, queued: float = 0.0, finished: float = 0.0, rows: int = 1
) -> tuple[float | int, ...]:
    """Of a step that was the `seq`th forward."""
    return (ORIGIN + started, seq, rows << 8 | STEP, queued and ORIGIN + queued, seq, 9 * seq,
            finished and ORIGIN + finished, 7 << 32 | seq)  # fmt: skip


def test_a_step_from_its_start_to_its_end() -> None:
    recording = decode(bytes(memory((0, slot(5, 1.0, 1.25, 1.5, rows=3)))))
    assert (recording.began, recording.began_monotonic) == (5e8, ORIGIN)
    assert recording.steps == (Step(5, "step", 3, 1_000_000, 1_250_000, 1_500_000, 5, 45, 5, 7),)


def test_steps_are_in_order_wherever_the_oldest_stands() -> None:
    turned = [((n - 1) % STEPS, slot(n, n / 8, n / 8, n / 8)) for n in range(4, STEPS + 4)]
    recording = decode(bytes(memory(*turned)))
    assert [step.seq for step in recording.steps] == list(range(4, STEPS + 4))
    assert all(step.queued_us == step.finished_us == step.started_us for step in recording.steps)


@pytest.mark.parametrize(
    ("queued", "finished", "expected"),
    [(0.0, 0.0, (0, 0)), (1.25, 0.0, (1_250_000, 0)), (0.25, 0.5, (0, 0)), (1.25, 0.5, (1_250_000, 0))],
    ids=["begun", "queued", "begun, after an old one", "queued, after an old one"],
)
def test_a_step_that_did_not_come_to_an_end(
    queued: float, finished: float, expected: tuple[int, int]
) -> None:
    """The earlier step in this slot leaves nothing that counts as its own."""
    recording = decode(bytes(memory((0, slot(5, 1.0, queued, finished)))))
    (step,) = recording.steps
    assert (step.queued_us, step.finished_us) == expected
    assert (step.digest, step.fed) == (0, 0)
    assert (step.forwards, step.collectives) == ((5, 45) if step.queued_us else (0, 0))


def test_a_slot_that_was_half_written_is_left_out() -> None:
    """Its time is new and its number old: the process was killed in between."""
    slots = (slot(3, 2.0), slot(600, 1.0), slot(601, 1.5), slot(601, 1.75))
    recording = decode(bytes(memory(*enumerate(slots))))
    assert [step.seq for step in recording.steps] == [600, 601]


@pytest.mark.parametrize(("kind", "phase"), [("step", "decode"), ("prompt", "prefill")])
def test_the_phase_is_that_of_the_newest_step(kind: str, phase: str) -> None:
    one = list(slot(5, 0.5))
    one[2] = 1 << 8 | KINDS.index(kind)
    recording = decode(bytes(memory((0, tuple(one)))))
    assert (recording.phase, recording.phase_since_us) == (phase, 500_000)


def test_the_phase_that_was_entered_after_the_newest_step() -> None:
    recording = decode(bytes(memory((0, slot(5, 0.25)), phase="loading")))
    assert (recording.phase, recording.phase_since_us) == ("loading", 500_000)


def test_last_words_and_a_stack() -> None:
    data = memory(crash=b"File x, line 1\n" + b"\xff")
    what, why = b"rank_lost\xff", "höchst".encode() + b"\xff"
    WORDS.pack_into(data, WORDS_AT, ORIGIN + 2, len(what), len(why))
    data[WORDS_AT + WORDS.size : WORDS_AT + WORDS.size + len(what) + len(why)] = what + why
    recording = decode(bytes(data))
    assert (recording.code, recording.detail) == ("rank_lost\ufffd", "höchst\ufffd")
    assert recording.crash == "File x, line 1\n\ufffd"


def test_a_long_stack_is_cut() -> None:
    recording = decode(bytes(memory(crash=b"x" * (MAX_CRASH_BYTES + 9))))
    assert len(recording.crash) == MAX_CRASH_BYTES


@pytest.mark.parametrize(
    "data", [b"", bytes(RECORDING_BYTES), bytes(memory())[:-1]], ids=["nothing", "never begun", "cut off"]
)
def test_no_recording(data: bytes) -> None:
    assert decode(data) is None


@pytest.mark.parametrize("time", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_a_time_that_is_none_is_left_out(time: float) -> None:
    steps = (0, slot(5, 1.0)), (1, slot(6, time)), (2, slot(7, 3.0, time)), (3, slot(8, 4.0, 5.0, time))
    recording = decode(bytes(memory(*steps)))
    assert [step.seq for step in recording.steps] == [5, 7, 8]
    assert [(step.queued_us, step.finished_us) for step in recording.steps[1:]] == [(0, 0), (5_000_000, 0)]
    data = memory(*steps)
    BEGAN.pack_into(data, 0, MAGIC, time, ORIGIN)
    assert decode(bytes(data)) is None


def test_garbage_is_shown_as_well_as_it_can_be() -> None:
    one = list(slot(5, -2.0, -1.0))
    one[2] = 1 << 8 | len(KINDS)
    data = memory((0, tuple(one)))
    struct.pack_into("=HH", data, WORDS_AT + 8, 0xFFFF, 0xFFFF)
    data[PHASE_AT + 8] = len(PHASES)
    recording = decode(bytes(data))
    assert (recording.phase, recording.steps[0].kind, recording.steps[0].started_us) == ("", "", 0)
    assert len(recording.code) < HEADER_BYTES


def test_whether_a_rank_gave_its_devices_back() -> None:
    assert [gave_back(bytes(GAVE_BACK_AT) + each) for each in (b"\1\1", b"\0\1", b"")] == [True, False, False]

"""A rank's report of the forward that runs: its phase, since when, and how long it should take."""

from __future__ import annotations

import pytest

from mlxtp.engine.telemetry import RankTelemetry
from mlxtp.wire.rank_stats import RankStats


def ran(status: RankTelemetry, phase: str, tokens: int, began: float, ended: float) -> None:
    status.launched(phase, tokens, began)  # type: ignore[arg-type]
    status.settled(ended)


def test_nothing_is_expected_of_the_first_forward() -> None:
    status = RankTelemetry()
    status.launched("decode", 1, 5.0)
    assert (status.phase, status.in_flight, status.expected_us) == ("decode", 1, 0)


def test_more_that_end_than_began_is_no_error_of_this_account() -> None:
    status = RankTelemetry()
    status.settled(5.0)
    assert status.in_flight == 0


def test_a_step_should_take_what_steps_took() -> None:
    status = RankTelemetry()
    for number in range(200):
        ran(status, "decode", 8, number, number + 0.5)
    status.launched("decode", 1, 300.0)
    assert status.expected_us == pytest.approx(500_000, rel=0.01)


def test_a_chunk_should_take_what_its_tokens_took() -> None:
    status = RankTelemetry()
    ran(status, "decode", 1, 0.0, 9.0)
    ran(status, "prefill", 10, 10.0, 10.2)
    status.launched("prefill", 500, 20.0)
    assert status.expected_us == pytest.approx(10_000_000)


def test_more_rows_may_take_as_many_times_as_long() -> None:
    """A limit allows 20 times what is expected: one fifth of it is enough for 64 rows one after the other."""
    status = RankTelemetry()
    for number in range(100):
        ran(status, "decode", 1, number, number + 0.5)
    status.launched("decode", 64, 200.0)
    assert 20 * status.expected_us >= 3 * 64 * 500_000
    status.settled(201.0)
    for number in range(100):  # it is a GPU
        ran(status, "decode", 64, 300 + number, 300.6 + number)
    status.launched("decode", 64, 500.0)
    assert status.expected_us == pytest.approx(600_000, rel=0.01)


@pytest.mark.parametrize(("phase", "tokens"), [("prefill", 8), ("decode", 1)])
def test_what_compiled_kernels_is_soon_forgotten(phase: str, tokens: int) -> None:
    status = RankTelemetry()
    ran(status, phase, tokens, 0.0, 20.0)
    for number in range(20):
        ran(status, phase, tokens, 100 + number, 100.1 + number)
    status.launched(phase, tokens, 200.0)  # type: ignore[arg-type]
    assert status.expected_us < 150_000


def test_one_that_was_slow_by_chance_counts_for_little() -> None:
    status = RankTelemetry()
    for number in range(100):
        ran(status, "decode", 1, 10 * number, 10 * number + 0.01)
    ran(status, "decode", 1, 5000.0, 5001.0)
    status.launched("decode", 1, 6000.0)
    assert 10_000 < status.expected_us < 100_000


def test_a_step_that_waits_behind_a_chunk_is_not_what_runs() -> None:
    status = RankTelemetry()
    status.launched("prefill", 512, 1.0)
    status.launched("decode", 1, 1.1)
    assert (status.phase, status.in_flight) == ("prefill", 2)
    status.settled(9.0)
    assert (status.phase, status.in_flight) == ("decode", 1)
    status.settled(9.5)
    status.launched("decode", 1, 10.0)
    assert status.expected_us == pytest.approx(500_000), "the time behind the chunk is not its own"


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

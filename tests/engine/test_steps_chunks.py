"""The size of a prompt's chunks beside rows that decode."""

from __future__ import annotations

from typing import Any

import pytest

from mlxtp.engine.scheduler import Scheduler
from mlxtp.engine.steps import LEAST, MOST, Chunks, Policy, chunk_sizes, within
from mlxtp.wire.messages import Forward, Generate

from .simulation import next_frame

QUARTER = {"chunk_s": 0.25}


def chunks(**policy: Any) -> Chunks:
    return Chunks(Policy(frozenset(), **{**QUARTER, **policy}))


@pytest.mark.parametrize(
    ("wanted", "gpu", "expected"),
    [
        (2048, True, (2048, 256, 0.25)),
        (2048, False, (512, 256, 0.25)),
        (100, False, (100, 100, 0.25)),
        (4096, True, (4096, 4096, 0.0)),
        (4096, False, (4096, 4096, 0.0)),
    ],
)
def test_chunks_are_large_where_a_gpu_reads_weights_once_for_all_of_them(
    wanted: int, gpu: bool, expected: tuple[int, int, float]
) -> None:
    assert chunk_sizes(wanted, gpu=gpu) == expected


def test_before_any_chunk_was_timed_the_size_is_fixed() -> None:
    assert chunks().beside == 256
    assert chunks(prefill_chunk=100).beside == 100


@pytest.mark.parametrize(
    ("token_s", "size"),
    [(1e-6, MOST), (1e-4, MOST), (2.4e-4, 1024), (2.6e-4, 512), (1e-3, 128), (4e-3, LEAST), (1.0, LEAST)],
)
def test_a_chunk_is_the_largest_power_of_two_that_takes_a_quarter_of_a_second(
    token_s: float, size: int
) -> None:
    measured = chunks()
    measured.took(512, 512 * token_s)
    assert measured.beside == size


def test_a_chunk_is_no_larger_than_one_without_others() -> None:
    measured = chunks(prefill_chunk=100)
    measured.took(100, 1e-3)
    assert measured.beside == 100


def test_short_prompts_are_no_measure() -> None:
    measured = chunks()
    measured.took(LEAST - 1, 9.0)
    assert measured.beside == 256
    measured.took(LEAST, 9.0)
    assert measured.beside == LEAST


@pytest.mark.parametrize(
    ("scores", "offset", "limit", "size"),
    [(1 << 20, 0, 1024, 1024), (1 << 20, 1, 1024, 512), (1 << 18, 0, 513, 512), (1, 0, 2048, LEAST)],
)
def test_a_chunk_is_halved_to_a_power_of_two_until_its_scores_fit(
    scores: int, offset: int, limit: int, size: int
) -> None:
    assert within(scores, offset, limit) == size


def test_the_newest_chunks_count_most() -> None:
    measured = chunks()
    measured.took(256, 60.0)  # it compiled kernels
    for _ in range(16):
        measured.took(256, 0.128)
    assert measured.beside == 256


def test_without_a_target_nothing_is_adapted() -> None:
    fixed = chunks(chunk_s=0.0, chunk_beside=4096, prefill_chunk=4096)
    fixed.took(4096, 9.0)
    assert fixed.beside == 4096


def lengths(**policy: Any) -> list[int]:
    """Chunks of a long prompt, the first of which has no decoding row beside it; each token takes 2 ms."""
    scheduler = Scheduler(Policy(frozenset(), prefill_chunk=512, drafts="off", **QUARTER, **policy))
    scheduler.add(Generate(1, tuple(range(600)), 999))
    scheduler.add(Generate(2, (1, 2, 3), 999))
    found = []
    for _ in range(12):
        frame = next_frame(scheduler)
        assert isinstance(frame, Forward)
        if frame.prompts:
            found.append(len(frame.tokens))
            scheduler.record(() if frame.unfinished else (5,), None, 0.002 * len(frame.tokens))
        else:
            scheduler.record((5,) * len(frame.rows), None, 0.01)
    return found


def test_a_long_prompt_beside_a_stream_goes_in_chunks_of_measured_size() -> None:
    assert lengths() == [512, 3, 64, 24]


def test_where_time_must_not_decide_the_size_stays_as_it_is() -> None:
    assert lengths(timed=False, chunk_beside=32) == [512, 3, 32, 32, 24]

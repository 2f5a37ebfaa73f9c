"""A group that idles proves itself now and then: no client notices, unless a rank computes something else."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest

from mlxtp.errors import Code

from ..live_cluster import SLOWNESS
from .answers import LONG, SHORT
from .harness import FAULT_LIMITS, NOTICED_S, FaultyCluster, assert_recovered, assert_sound, before

pytestmark = pytest.mark.chaos

CANARY_S = 0.3


@pytest.fixture(scope="module")
def idler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    limits = dataclasses.replace(FAULT_LIMITS, canary_s=CANARY_S)
    with FaultyCluster(tmp_path_factory.mktemp("canary"), limits=limits) as cluster:
        yield cluster
    assert cluster.all_pids() == set()


def test_an_idle_group_proves_itself_and_goes_on(idler: FaultyCluster) -> None:
    was = before(idler)
    for rank in (0, 1):
        idler.order("record", rank)
        idler.wait_note("proof", count=3)
        counted = idler.idle()
        assert len(set(counted.forwards)) == len(set(counted.collectives)) == 1
        assert idler.content(LONG, max_tokens=400) == idler.right(LONG)
    idler.wait_note("proof", count=1 + len(idler.book.notes("proof")))
    assert idler.epoch == was.epoch
    assert_sound(idler, was)


def test_requests_that_come_while_it_proves_itself(idler: FaultyCluster) -> None:
    """The proof is held up shortly: a request meanwhile waits for that time alone."""
    expected = idler.right(SHORT)
    was = before(idler)
    idler.order("hold", 1, on="proof", seconds=0.5)
    idler.wait_note("held")
    with idler.asking(SHORT) as first, idler.asking(SHORT) as second:
        assert [(a.text, a.error) for a in (first(), second())] == [(expected, None)] * 2
    assert idler.epoch == was.epoch
    assert_sound(idler, was)


def test_a_rank_that_computes_something_else_while_idle_ends_the_epoch(idler: FaultyCluster) -> None:
    """It is found without a request."""
    was = before(idler)
    idler.order("prove_otherwise", 1)
    assert_recovered(idler, was, {Code.PROOF_FAILED}, "canary")


def test_a_rank_that_crashes_in_the_first_sum_after_idling(idler: FaultyCluster) -> None:
    """MLX's JACCL is known to. The group starts again and the report gives the phase, from which a cable's
    fault can be told."""
    was = before(idler)
    idler.order("crash", 1, on="proof")
    end = assert_recovered(idler, was, {Code.RANK_LOST}, "SIGSEGV after idling", likely="crash")
    assert re.search(r"rank 1 was ended by signal 11 in phase (idle|proving)", end.error.detail)


def test_a_rank_that_stands_still_in_a_proof_ends_the_epoch(idler: FaultyCluster) -> None:
    was = before(idler)
    idler.tighten(proof_s=1.0 * SLOWNESS)
    idler.order("hold", 1, on="proof", seconds=60 * SLOWNESS)
    assert_recovered(idler, was, {Code.RANK_STALLED}, "stuck in a proof", within_s=2.0 * SLOWNESS + NOTICED_S)

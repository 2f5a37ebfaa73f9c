"""One cluster for all tests that break it: each pays for one recovery instead of two starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxtp.node.epoch import State

from .harness import FaultyCluster

ROOT = Path(__file__).parents[2]

FOR_CHAOS = frozenset((
    "test_agent.py::test_told_to_stop_while_it_ends_an_epoch",
    "test_caches.py::test_a_cache_of_which_rank_1_has_kept_less",
    "test_caches.py::test_a_cache_that_rank_1_is_told_to_drop_and_has_not",
    "test_deaths.py::test_killed_on_the_way_up[load-1]",
    "test_deaths.py::test_killed_while_idle[1]",
    "test_frames.py::test_a_prompt_before_the_model_is_loaded",
    "test_frames.py::test_rank_0_refuses[other epoch-codes3]",
    "test_frames.py::test_rank_0_refuses[truncated-codes1]",
    "test_frames.py::test_rank_0_refuses[unknown type-codes2]",
    "test_frames.py::test_rank_1_refuses[truncated-codes3]",
    "test_mutations.py::test_a_model_that_comes_later_with_a_changed_weight_ends_the_epoch",
    "test_mutations.py::test_one_step_too_many_on_all_ranks[at its end token]",
    "test_mutations.py::test_rank_1_has_its_rows_in_another_order[rows]",
    "test_mutations.py::test_rank_1_reports_a_wrong_number[forwards]",
    "test_replies.py::test_a_reply_on_the_way_up[SanityDone-garbage-codes0]",
    "test_replies.py::test_an_ack_is_garbage",
    "test_replies.py::test_rank_0_raises_after_the_frame_went_out[in prefill]",
    "test_replies.py::test_the_last_ack_never_comes",
    "test_strangers.py::test_a_stranger_at_the_ring_port[garbage]",
))  # fmt: skip
"""Slow cases that only `make chaos` runs, because a sibling of each shows the same on every change."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before pytest leaves out what is marked."""
    for item in items:
        if item.nodeid.removeprefix("tests/chaos/") in FOR_CHAOS:
            item.add_marker(pytest.mark.chaos)


@pytest.fixture(scope="session", autouse=True)
def _ranks_find_the_faults() -> Iterator[None]:
    """`-m tests.chaos.worker` works from any folder."""
    patch = pytest.MonkeyPatch()
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    yield
    patch.undo()


class _Shelf:
    """The cluster in use. One that a failed test has left broken is replaced."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self.cluster: FaultyCluster | None = None

    def sound_cluster(self) -> FaultyCluster:
        if self.cluster is not None and self.cluster.supervisor.state is not State.READY:
            self.close()
        if self.cluster is None:
            self.cluster = FaultyCluster(self._factory.mktemp("faulty"))
        # The supervisor gives up after five failures in two minutes, which is what these tests are made of.
        self.cluster.supervisor._policy.failures.clear()
        return self.cluster

    def close(self) -> None:
        cluster, self.cluster = self.cluster, None
        if cluster is not None:
            cluster.close()
            assert cluster.everybody() == set()


@pytest.fixture(scope="session")
def _shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Shelf]:
    shelf = _Shelf(tmp_path_factory)
    yield shelf
    shelf.close()


@pytest.fixture
def cluster(_shelf: _Shelf) -> FaultyCluster:
    """Ready, without orders."""
    sound = _shelf.sound_cluster()
    sound.book.clear()
    return sound

"""One cluster for all tests that break it: each pays for one recovery instead of two starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxtp.node.epoch import State

from .harness import FaultyCluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _ranks_find_the_faults() -> Iterator[None]:
    """`-m tests.faults.worker` works from any folder."""
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

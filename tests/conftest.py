"""Settings of all tests, and clusters that live as long as the session, started when a test asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from .cluster import Cluster

# A busy machine is no counterexample.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks on the ring. Whoever breaks it must not share it."""
    with Cluster(tmp_path_factory.mktemp("two-ranks"), ranks=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One rank alone."""
    with Cluster(tmp_path_factory.mktemp("one-rank"), ranks=1) as cluster:
        yield cluster

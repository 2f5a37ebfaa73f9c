"""Settings of all tests, and clusters that live as long as the session, started when a test asks for one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from .cluster import Cluster

# A busy machine is no counterexample.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


# A shell without job control has what it starts in the background ignore Ctrl-C, and so all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
OF_GROUPS = (TESTS / "agents", TESTS / "chaos")
"""Where every test is one with a real group."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before pytest leaves out what is marked."""
    for item in items:
        shared = "two_ranks" in getattr(item, "fixturenames", ())
        if shared or any(folder in item.path.parents for folder in OF_GROUPS):
            item.add_marker(pytest.mark.group)


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

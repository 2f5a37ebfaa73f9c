"""Settings of all tests, and clusters that live as long as the session, started when a test asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from .cluster import Cluster

# A busy machine is no counterexample.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


MACS = ("agents", "clustering", "node", "test_hosts.py")
"""Whole agents, their links, and network namespaces: they mostly wait."""
RANKS = ("chaos", "engine", "test_benchmarks.py", "test_cli.py", "test_commands.py", "test_demo.py")
"""Real groups: one at a time, for each takes more than one core."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Which tests may run beside which others, where two processes share them."""
    here = Path(__file__).parent
    parts = item.path.relative_to(here).parts if here in item.path.parents else ("",)
    fixtures = getattr(item, "fixturenames", ())
    if parts[0] in MACS:
        group = "macs"
    elif parts[0] in RANKS or "two_ranks" in fixtures or "one_rank" in fixtures:
        group = "ranks"
    else:
        group = "/".join(parts)
    item.add_marker(pytest.mark.xdist_group(group))


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

"""One cluster for all tests that break it: each pays for one recovery instead of two starts.

Options of `make chaos`: `--rounds N`, `--json FILE`. At the end stands a table of what was found.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from mlxtp.api.app import create_app
from mlxtp.groups.health import ServingState

from . import findings
from .harness import KEEP_ALIVE_S, FaultyCluster

ROOT = Path(__file__).parents[2]

ROUNDS = 3
"""The number of seeds of a story with a random moment, unless an option changes it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--rounds", type=int, default=ROUNDS, help="seeds for each story with a random moment")
    group.addoption("--json", type=Path, help="a file for every fault, and for the sums")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Stories with a random moment take a seed."""
    if "seed" in metafunc.fixturenames:
        rounds = metafunc.config.getoption("rounds", ROUNDS)
        first, *more = range(max(rounds, 1))
        metafunc.parametrize("seed", [first, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in more)])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not findings.FOUND or config.getoption("rounds", None) is None:  # `make test` has no need of it
        return
    terminalreporter.ensure_newline()
    Console(file=terminalreporter._tw._file, width=120).print(findings.table(findings.FOUND))
    if file := config.getoption("json", None):
        failed = len(terminalreporter.stats.get("failed", ()))
        body = {"failed_tests": failed, **findings.report(findings.FOUND)}
        file.write_text(json.dumps(body, indent=1) + "\n")


@pytest.fixture(scope="session", autouse=True)
def _ranks_find_the_faults() -> Iterator[None]:
    """`-m tests.chaos.worker` works from any folder. Streams here say soon that they are alive."""
    patch = pytest.MonkeyPatch()
    hasty = functools.partial(create_app, keep_alive_s=KEEP_ALIVE_S)
    patch.setattr("mlxtp.agent.create_app", hasty)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    yield
    patch.undo()


class _Shelf:
    """The cluster in use. One that a failed test has left broken is replaced."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self.cluster: FaultyCluster | None = None

    def sound_cluster(self, split: str) -> FaultyCluster:
        """A cluster that serves: two ranks that divide each layer, or for a `split` so many stages."""
        if (old := self.cluster) is not None and (
            old.supervisor.status.state is not ServingState.READY or old.settings.split != split
        ):
            self.close()
        if self.cluster is None:
            kind = {"parallel": "pipeline", "ranks": split.count(",") + 1} if split != "auto" else {}
            self.cluster = FaultyCluster(self._factory.mktemp("faulty"), split=split, **kind)
        # The supervisor gives up after five failures in two minutes, which is what these tests are made of.
        self.cluster.supervisor._policy.failures.clear()
        return self.cluster

    def close(self) -> None:
        cluster, self.cluster = self.cluster, None
        if cluster is not None:
            cluster.close()
            assert cluster.all_pids() == set()


@pytest.fixture(scope="session")
def _shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Shelf]:
    shelf = _Shelf(tmp_path_factory)
    yield shelf
    shelf.close()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, _shelf: _Shelf) -> FaultyCluster:
    """Ready, without orders. A test may give the split of a pipeline as its parameter."""
    sound = _shelf.sound_cluster(getattr(request, "param", "auto"))
    sound.book.clear()
    sound.later.clear()
    return sound

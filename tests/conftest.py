"""Settings of all tests, and clusters that live as long as the session, started when a test asks for one."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import cast

import certifi
import pytest
from hypothesis import HealthCheck, settings

from mlxtp.config import embedded_model_path
from mlxtp.models.inspect import ModelSource
from mlxtp.text import tokenizer
from mlxtp.text.renderer import SandboxedRenderer
from mlxtp.text.tokenizer import Text

from . import live_cluster
from .hub import Hub, put, running_hub
from .live_cluster import Cluster
from .rings import SLOW, WHOLE, in_whole, is_slow, lies_outside
from .wire.members import Member, founder, member_of

# A busy machine is no counterexample.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


# A shell without job control has what it starts in the background ignore Ctrl-C, and so all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
OF_GROUPS = (TESTS / "agents", TESTS / "chaos")
"""Folders in which every test has a real group."""
RINGS = {"whole": WHOLE, "slow": SLOW}
OF_FAULTS = tuple(TESTS / name for name in ("agents", "chaos", "clients", "page", "soak"))
"""Folders that `make chaos` runs as a whole."""
SLOW_FIXTURES = frozenset({"browser", "one_rank", "running", "keep_alive_running", "roomy_running"})
"""Processes, and servers that answer HTTP."""


@cache
def _lies_in(path: Path, folders: tuple[Path, ...]) -> bool:
    return not set(folders).isdisjoint(path.parents)


@cache
def _has_groups(path: Path) -> bool:
    """True for a file of tests that may have a real group, by its folder or its words."""
    return _lies_in(path, OF_GROUPS) or any(word in path.read_text() for word in ("two_ranks", "mark.group"))


def pytest_configure(config: pytest.Config) -> None:
    live_cluster.without_groups = "not group" in config.getoption("markexpr")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out folders and files of which a ring runs nothing: reading their tests takes seconds."""
    marks = config.getoption("markexpr")
    if collection_path in OF_GROUPS and "not group" in marks:
        return True
    name = collection_path.relative_to(TESTS).as_posix() if collection_path.is_relative_to(TESTS) else ""
    if any(f"not {mark}" in marks and lies_outside(name, rows) for mark, rows in RINGS.items()):
        return True
    if not collection_path.match("test_*.py"):
        return None
    if "group" in marks and "not group" not in marks and not _has_groups(collection_path):
        return True
    only_chaos = "\npytestmark = pytest.mark.chaos\n" in collection_path.read_text()
    return True if "not chaos" in marks and only_chaos else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, and have later ones pass by what modules and tests hold."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, on a loop of its own and with a limit of time."""
    story = pyfuncitem.obj
    if not inspect.iscoroutinefunction(story):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(story).parameters}

    async def run() -> None:
        async with asyncio.timeout(live_cluster.WAIT_S):
            await story(**given)

    asyncio.run(run())
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folders and fixtures, before pytest leaves out what is marked."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "two_ranks" in fixtures or _lies_in(item.path, OF_GROUPS):
            item.add_marker(pytest.mark.group)
        elif not SLOW_FIXTURES.isdisjoint(fixtures):
            item.add_marker(pytest.mark.slow)
        name = item.nodeid.removeprefix("tests/")
        if in_whole(name):
            item.add_marker(pytest.mark.whole)
        if is_slow(name):
            item.add_marker(pytest.mark.slow)
        if _lies_in(item.path, OF_FAULTS):
            item.add_marker(pytest.mark.fault)
        if item.get_closest_marker("group") and not _has_groups(item.path):
            raise pytest.UsageError(f"{item.nodeid} has a group: its file must name two_ranks or mark.group")


@pytest.fixture(scope="module", autouse=True)
def _collections_pass_by_what_stays() -> None:
    """Have collections visit only what a file's own tests make: `scenes.run` collects after every story."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _tokenizer_processes_are_shared() -> Iterator[None]:
    """Agents in this process share the tokenizer process of a model folder, which takes a second to start."""

    class Shared(SandboxedRenderer):
        def close(self) -> None:
            """Stay for the next agent."""

    @lru_cache(maxsize=8)
    def shared(path: Path, _files: frozenset[tuple[str, int]]) -> SandboxedRenderer:
        return Shared(path)

    def start(path: Path) -> SandboxedRenderer:
        files = path.iterdir() if path.is_dir() else ()
        return shared(path, frozenset((file.name, file.stat().st_mtime_ns) for file in files))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "SandboxedRenderer", start)
        yield
    shared.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def _clients_read_one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An HTTP client reads all authorities of certifi otherwise, which takes 25 ms of processor time."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    file = tmp_path_factory.mktemp("authorities") / "one.pem"
    file.write_text(first + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(file))
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks on the ring. A test that breaks it must not share it."""
    with Cluster(tmp_path_factory.mktemp("two-ranks"), ranks=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One rank alone."""
    with Cluster(tmp_path_factory.mktemp("one-rank"), ranks=1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Member:
    """The Mac that founded the cluster of `member`."""
    return founder(tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="session")
def member(first: Member, tmp_path_factory: pytest.TempPathFactory) -> Member:
    return member_of(first, tmp_path_factory.mktemp("member"))


@pytest.fixture(scope="session")
def weights() -> ModelSource:
    """The embedded model without its tokenizer, which takes a second to open."""
    return ModelSource("tiny", embedded_model_path(), cast(Text, None))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub whose client does not wait long before it tries again, and has a cache of its own."""
    monkeypatch.setattr("time.sleep", lambda s: threading.Event().wait(min(s, 0.05)))
    with running_hub() as running:
        put(running.url, tmp_path / "cache", monkeypatch)
        yield running


@pytest.fixture(scope="session")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two ranks of a pipeline. A test that breaks it must not share it."""
    home = tmp_path_factory.mktemp("two-stages")
    with Cluster(home, ranks=2, parallel="pipeline", split="1,3") as cluster:
        yield cluster


def pytest_sessionfinish() -> None:
    """Keep what `make coverage` counted in this process: xdist kills a worker that takes 10 s to end."""
    if (coverage := sys.modules.get("coverage")) and (running := coverage.Coverage.current()):
        running.save()

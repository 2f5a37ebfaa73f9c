"""KV caches on disk, on two real ranks: what comes back when ranks are gone, and that no answer changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random

import pytest

from mlxtp.api.backend import Request as Wanted
from mlxtp.api.backend import Sampling
from mlxtp.engine.disk_index import BLOCK, SPILL_FROM
from mlxtp.models.disk_cache import folder_in

from ..live_cluster import Cluster, until
from ..reference import expected
from .families import FAMILIES
from .small_models import write_model

pytestmark = pytest.mark.group

KINDS = ["llama", "gpt_oss", "qwen3_5"]
LONG = SPILL_FROM + 300
DRAWN = Sampling(temperature=2.0, seed=7)
Start = Callable[[], AbstractContextManager[Cluster]]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, long = request.param, {"max_position_embeddings": 8192}
    changes = FAMILIES.get(family, {}) | long
    if "text_config" in changes:
        changes["text_config"] = changes["text_config"] | long
    return write_model(tmp_path_factory.mktemp("models") / family, model_type=family, **changes)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "agent"


@pytest.fixture
def start(folder: Path, home: Path) -> Start:
    """Start an agent with two ranks. Each start has other processes, and the same disk."""

    @contextmanager
    def started() -> Iterator[Cluster]:
        with Cluster(home, ranks=2, model=folder, cache_disk=1 << 30) as cluster:
            yield cluster

    return started


def new_tokens(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(6, 512) for _ in range(count))


def ask(cluster: Cluster, wanted: Wanted, folder: Path) -> int:
    """Return the number of cached tokens. Fails unless the answer is the right one."""
    (outcome,) = cluster.ask_all([wanted])
    assert outcome.tokens == expected(wanted, folder).tokens
    return outcome.whole().cached


def blocks(home: Path) -> list[Path]:
    return [path for path in folder_in(home).glob("*/*-*") if not path.name.startswith(".")]


def on_disk(home: Path, count: int) -> None:
    until(lambda: len(blocks(home)) >= count, f"{count} blocks on disk")


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_a_conversation_goes_on_after_a_restart(start: Start, folder: Path, sampling: Sampling) -> None:
    random = Random(1)
    prompt = new_tokens(random, LONG)
    wanted = Wanted(prompt, 40, sampling, places=(LONG - 45, LONG - 5))
    with start() as cluster:
        assert ask(cluster, wanted, folder) == 0
    said = expected(wanted, folder).tokens
    turn = (*prompt, *said, *new_tokens(random, 50))
    with start() as cluster:
        held = LONG + len(said)
        assert ask(cluster, Wanted(turn, 20, sampling), folder) >= held - BLOCK
        for rank in cluster.health()["ranks"]:
            assert rank["fetched"] == 1

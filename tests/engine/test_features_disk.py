"""KV caches on disk, on two real ranks: what comes back when ranks are gone, and that no answer changes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from mlxtp.api.backend import Request as Wanted
from mlxtp.api.backend import Sampling
from mlxtp.engine.disk_index import BLOCK, SPILL_FROM
from mlxtp.models import disk_cache
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
    return written(request.param, tmp_path_factory.mktemp("models"))


def written(family: str, models: Path) -> Path:
    """Make a model of a family, for long prompts."""
    long = {"max_position_embeddings": 8192}
    changes = FAMILIES.get(family, {}) | long
    if "text_config" in changes:
        changes["text_config"] = changes["text_config"] | long
    return write_model(models / family, model_type=family, **changes)


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


def blocks(home: Path, rank: int | None = None) -> list[Path]:
    """Return the files of blocks, of one rank or all, by their tokens."""
    found = []
    for about in folder_in(home).glob("*/about.json"):
        if rank in (None, json.loads(about.read_text())["rank"]):
            found += [path for path in about.parent.glob("*-*") if not path.name.startswith(".")]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def on_disk(home: Path, count: int) -> None:
    until(lambda: len(blocks(home)) >= count, f"{count} blocks on disk")


@pytest.mark.parametrize("sampling", [pytest.param(Sampling(), marks=pytest.mark.chaos), DRAWN])
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
        cluster.idle()  # each rank has reported since
        for rank in cluster.health()["ranks"]:
            assert rank["fetched"] == 1


# --- files that are not as they were left ----------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("llama", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def cluster(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("shared") / "agent"
    with Cluster(home, ranks=2, model=plain, cache_disk=1 << 30) as cluster:
        yield cluster


def clear_memory(cluster: Cluster) -> None:
    async def clear() -> None:
        await cluster.supervisor.kv.clear()

    cluster.call(clear())


def on_disk_alone(cluster: Cluster, wanted: Wanted, folder: Path) -> None:
    """Have a prompt's blocks on disk, and none of others, and nothing in memory."""
    disk_cache.clear(folder_in(cluster.home), agent_runs=True)
    clear_memory(cluster)
    ask(cluster, wanted, folder)
    on_disk(cluster.home, 2 * (LONG // BLOCK))
    cluster.idle()
    clear_memory(cluster)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def remove(file: Path) -> None:
    file.unlink()


def exchange(file: Path) -> None:
    """Have the block before this one under this one's name."""
    before = blocks(file.parents[2], None)
    (other,) = [path for path in before if path.parent == file.parent and f"-{2 * BLOCK}-" in path.name]
    file.write_bytes(other.read_bytes())


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("damage", [flip, truncate, remove, exchange])
def test_a_block_that_one_rank_lacks_is_a_miss_on_both(
    cluster: Cluster, plain: Path, damage: Callable[[Path], None], rank: int
) -> None:
    wanted = Wanted(new_tokens(Random(rank), LONG), 20, DRAWN)
    on_disk_alone(cluster, wanted, plain)
    bad = blocks(cluster.home, rank)[2]
    damage(bad)
    assert ask(cluster, wanted, plain) == 2 * BLOCK
    on_disk(cluster.home, 2 * (LONG // BLOCK))
    cluster.idle()
    clear_memory(cluster)
    assert ask(cluster, wanted, plain) == LONG - LONG % BLOCK, "it is written again, on both"
    assert cluster.epoch == 1


def test_files_of_the_future_are_used(cluster: Cluster, plain: Path) -> None:
    wanted = Wanted(new_tokens(Random(3), LONG), 20, DRAWN)
    on_disk_alone(cluster, wanted, plain)
    for path in blocks(cluster.home):
        os.utime(path, (2 * time.time(), 2 * time.time()))
    assert ask(cluster, wanted, plain) == LONG - LONG % BLOCK


def test_another_key_finds_nothing(cluster: Cluster, plain: Path) -> None:
    wanted = Wanted(new_tokens(Random(4), LONG), 20, DRAWN, sharer="key a")
    on_disk_alone(cluster, wanted, plain)
    assert ask(cluster, replace(wanted, sharer="key b"), plain) == 0
    assert ask(cluster, replace(wanted, sharer=""), plain) == 0
    clear_memory(cluster)
    assert ask(cluster, wanted, plain) == LONG - LONG % BLOCK


def test_blocks_that_are_cleared_while_it_serves_are_a_miss(cluster: Cluster, plain: Path) -> None:
    wanted = Wanted(new_tokens(Random(5), LONG), 20, DRAWN)
    on_disk_alone(cluster, wanted, plain)
    disk_cache.clear(folder_in(cluster.home), agent_runs=True)
    assert ask(cluster, wanted, plain) == 0
    clear_memory(cluster)
    on_disk(cluster.home, 2 * (LONG // BLOCK))
    assert ask(cluster, wanted, plain) == LONG - LONG % BLOCK

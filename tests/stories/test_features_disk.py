"""KV caches on disk, on two real ranks: what comes back when ranks are gone, and that no answer changes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import mlx.core as mx
import pytest

from mlxtp.api.backend import Sampling
from mlxtp.engine.disk_index import SPILL_FROM
from mlxtp.models import disk_cache
from mlxtp.models.disk_cache import folder_in
from mlxtp.wire.messages import BLOCK, Generate

from ..engine.families import FAMILIES, asked_for
from ..engine.small_models import write_model
from ..live_cluster import Cluster, until
from ..reference import expected, model_of

pytestmark = [pytest.mark.group, pytest.mark.fault]

KINDS = ["llama", "gpt_oss", "qwen3_5", "deepseek_v32"]
FAMILY_CASES = [
    pytest.param(kind, marks=() if kind in ("llama", "qwen3_5") else pytest.mark.chaos) for kind in KINDS
]
LONG = SPILL_FROM + 300
DRAWN = Sampling(temperature=2.0, seed=7)


def written(family: str, models: Path) -> Path:
    """Make a model of a family, for long prompts, that heeds all of them."""
    long = {"max_position_embeddings": 8192}
    changes = FAMILIES.get(family, {}) | long
    if family == "gpt_oss":
        changes["num_hidden_layers"] = 4  # two of each kind, so that one is not taken for the other
    if "text_config" in changes:
        changes["text_config"] = changes["text_config"] | long
    return write_model(models / family, model_type=family, attentive=True, **changes)


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of the families that tests of this run name, and `llama`."""
    models = tmp_path_factory.mktemp("models")
    return {family: written(family, models) for family in {"llama"} | asked_for(request, "family")}


@pytest.fixture(scope="module")
def talks(folders: dict[str, Path]) -> dict[str, list[Generate]]:
    """Conversations with each model. Where there are two, they have one length, and are told apart."""
    random, places = Random(1), (LONG - 45, LONG - 5)
    return {
        family: [
            Generate(0, new_tokens(random, LONG), 20, sampling, places=places, ignore_eos=True)
            for sampling in ((DRAWN, Sampling()) if family in ("llama", "gpt_oss") else (DRAWN,))
        ]
        for family in folders
    }


@pytest.fixture(scope="module")
def cluster(
    folders: dict[str, Path], talks: dict[str, list[Generate]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two ranks on whose disk are the conversations that others had before."""
    home = tmp_path_factory.mktemp("shared") / "agent"
    with Cluster(home, ranks=2, model=folders["llama"], cache_disk=1 << 30) as before:
        for family, folder in folders.items():
            before.load(folder)
            assert [ask(before, wanted, folder) for wanted in talks[family]] == [0] * len(talks[family])
    with Cluster(home, ranks=2, model=folders["llama"], cache_disk=1 << 30) as cluster:
        yield cluster


def new_tokens(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(6, 512) for _ in range(count))


def ask(cluster: Cluster, wanted: Generate, folder: Path, sharer: str = "") -> int:
    """Return the number of cached tokens. Fails unless the answer is the right one."""
    (outcome,) = cluster.ask_all([wanted], sharer=sharer)
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


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_attentive_models_heed_what_is_far_back(folders: dict[str, Path], family: str) -> None:
    model, _ = model_of(folders[family])
    random = Random(9)
    near = new_tokens(random, 300)
    answers = [model(mx.array([[*new_tokens(random, BLOCK), *near]]))[0, -60:] for _ in range(2)]
    one, other = (mx.argmax(answer, axis=-1) for answer in answers)
    assert mx.mean(one != other).item() > 0.3


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_conversations_go_on_after_a_restart(
    cluster: Cluster, folders: dict[str, Path], talks: dict[str, list[Generate]], family: str
) -> None:
    random, folder = Random(2), folders[family]
    cluster.load(folder)
    for number, wanted in enumerate(talks[family], 1):
        said = expected(wanted, folder).tokens
        turn = (*wanted.tokens, *said, *new_tokens(random, 50))
        assert ask(cluster, replace(wanted, tokens=turn, max_tokens=20), folder) >= LONG + len(said) - BLOCK
        cluster.idle()  # each rank has reported since
        assert [rank["fetched"] for rank in cluster.health()["ranks"]] == [number, number]
    if family in ("llama", "deepseek_v32"):  # parts of what was fetched are in their places, too
        part = (*talks[family][0].tokens[:600], *new_tokens(random, 50))
        assert ask(cluster, Generate(0, part, 20), folder) == 600


@pytest.fixture(scope="module")
def plain(cluster: Cluster, folders: dict[str, Path]) -> Path:
    """Return the folder of the model that is loaded."""
    cluster.load(folders["llama"])
    return folders["llama"]


def clear_memory(cluster: Cluster) -> None:
    async def clear() -> None:
        await cluster.supervisor.kv.clear()

    cluster.call(clear())


def on_disk_alone(cluster: Cluster, wanted: Generate, folder: Path, sharer: str = "") -> None:
    """Have a prompt's blocks on disk, and none of others, and nothing in memory."""
    disk_cache.clear(folder_in(cluster.home), agent_runs=True)
    clear_memory(cluster)
    ask(cluster, wanted, folder, sharer)
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
@pytest.mark.parametrize(
    "damage",
    [flip, *(pytest.param(damage, marks=pytest.mark.chaos) for damage in (truncate, remove, exchange))],
)
def test_a_block_that_one_rank_lacks_is_a_miss_on_both(
    cluster: Cluster, plain: Path, damage: Callable[[Path], None], rank: int
) -> None:
    wanted = Generate(0, new_tokens(Random(rank), LONG), 20, DRAWN)
    on_disk_alone(cluster, wanted, plain)
    bad = blocks(cluster.home, rank)[2]
    damage(bad)
    assert ask(cluster, wanted, plain) == 2 * BLOCK
    on_disk(cluster.home, 2 * (LONG // BLOCK))
    cluster.idle()
    clear_memory(cluster)
    assert ask(cluster, wanted, plain) == LONG - LONG % BLOCK, "it is written again, on both"
    assert cluster.epoch == 1


@pytest.mark.chaos
def test_files_of_the_future_are_used(cluster: Cluster, plain: Path) -> None:
    wanted = Generate(0, new_tokens(Random(3), LONG), 20, DRAWN)
    on_disk_alone(cluster, wanted, plain)
    for path in blocks(cluster.home):
        os.utime(path, (2 * time.time(), 2 * time.time()))
    assert ask(cluster, wanted, plain) == LONG - LONG % BLOCK


def test_another_key_finds_nothing(cluster: Cluster, plain: Path) -> None:
    wanted = Generate(0, new_tokens(Random(4), LONG), 20, DRAWN)
    on_disk_alone(cluster, wanted, plain, "key a")
    assert ask(cluster, wanted, plain, "key b") == 0
    assert ask(cluster, wanted, plain) == 0
    clear_memory(cluster)
    assert ask(cluster, wanted, plain, "key a") == LONG - LONG % BLOCK


def test_blocks_that_are_cleared_while_it_serves_are_a_miss(cluster: Cluster, plain: Path) -> None:
    wanted = Generate(0, new_tokens(Random(5), LONG), 20, DRAWN)
    on_disk_alone(cluster, wanted, plain)
    disk_cache.clear(folder_in(cluster.home), agent_runs=True)
    assert ask(cluster, wanted, plain) == 0
    clear_memory(cluster)
    on_disk(cluster.home, 2 * (LONG // BLOCK))
    assert ask(cluster, wanted, plain) == LONG - LONG % BLOCK

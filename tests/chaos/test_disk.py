"""KV caches on disk while ranks and agents die, hang, and find other files than they left.

Every answer is compared with the right one, token by token. Later turns find what they must find.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlxtp.api.backend import Sampling
from mlxtp.errors import MlxtpError
from mlxtp.models.disk_cache import folder_in
from mlxtp.wire.messages import BLOCK, Generate

from ..engine.small_models import change_config, write_model
from ..live_cluster import SLOWNESS, WAIT_S, Cluster, Request, until
from ..reference import expected, model_of
from ..stories.test_features_disk import DRAWN, LONG, ask, clear_memory, new_tokens, on_disk, written
from .harness import FAULT_LIMITS, kill
from .orders import Order, OrderBook

chaos = pytest.mark.chaos
pytestmark = pytest.mark.group

KEPT = LONG - LONG % BLOCK  # tokens of a prompt that blocks hold


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("llama", tmp_path_factory.mktemp("models"))


class Home:
    """An agent's home, whose agents come and go, and orders for its ranks."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.path = folder / "home"
        self.model = model
        (folder / "orders").mkdir()
        self.book = OrderBook(folder / "orders")

    def start(self, **settings: Any) -> Cluster:
        worker = (sys.executable, "-m", "tests.chaos.worker", str(self.book.folder))
        usual = {"ranks": 2, "model": self.model, "cache_disk": 1 << 30, "prefill_chunk": 256}
        return Cluster(self.path, worker=worker, limits=FAULT_LIMITS, **{**usual, **settings})

    def files(self, rank: int, ranks: int = 2) -> list[Path]:
        """Return the blocks of one rank, in order of their tokens."""
        found = []
        for about in folder_in(self.path).glob("*/about.json"):
            told = json.loads(about.read_text())
            if (told["rank"], told["ranks"]) == (rank, ranks):
                found += [path for path in about.parent.glob("*-*") if not path.name.startswith(".")]
        return sorted(found, key=lambda path: int(path.name.split("-")[1]))


@pytest.fixture
def home(tmp_path: Path, model: Path) -> Home:
    return Home(tmp_path, model)


def said(wanted: Generate, model: Path) -> tuple[int, ...]:
    return expected(wanted, model).tokens


def fetched_tokens(cluster: Cluster) -> list[int]:
    cluster.idle()  # reports of all ranks are new
    return [rank["fetched_tokens"] for rank in cluster.health()["ranks"]]


@chaos
@pytest.mark.parametrize(("place", "rank"), [("write", 1), ("read", 0), ("read", 1), ("count", 0)])
def test_killed_in_the_middle_of_a_block(home: Home, model: Path, place: str, rank: int) -> None:
    wanted = Generate(0, new_tokens(Random(1), LONG), 20, DRAWN)
    with home.start() as cluster:
        if place == "read":
            ask(cluster, wanted, model)
            on_disk(home.path, 2 * KEPT // BLOCK)
            clear_memory(cluster)
        first = cluster.epoch
        home.book.give(Order("disk", rank, first, at=2, on=place))
        ask(cluster, wanted, model)
        until(lambda: cluster.epoch > first, "another epoch")
        cluster.wait_ready()
        ask(cluster, wanted, model)
    with home.start() as cluster:
        assert ask(cluster, Generate(0, (*wanted.tokens, *said(wanted, model), 9), 20), model) >= KEPT
        assert len(set(fetched_tokens(cluster))) == 1


@chaos
def test_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    model = written(("llama", "gpt_oss", "qwen3_5")[seed % 3], tmp_path)
    random, home = Random(seed), Home(tmp_path, model)
    talks = [new_tokens(random, random.randrange(1100, 2500)) for _ in range(3)]
    with home.start() as cluster:
        for _ in range(4):
            wanted = [Generate(0, talk, 30, random.choice((Sampling(), DRAWN))) for talk in talks]
            was, victim, after_s = cluster.epoch, random.choice(cluster.pids()), random.uniform(0.0, 1.0)
            killer = threading.Timer(after_s, kill, (victim,))
            killer.start()
            talks = answered(cluster, wanted, model)
            killer.join()
            until(lambda was=was: cluster.epoch > was, "another epoch")
            cluster.wait_ready()
            cluster.supervisor._policy.failures.clear()
        talks = answered(cluster, [Generate(0, talk, 5) for talk in talks], model)
    with home.start() as cluster:
        for talk in talks:
            assert ask(cluster, Generate(0, talk, 5), model) >= 1024


def answered(cluster: Cluster, wanted: Sequence[Generate], model: Path) -> list[tuple[int, ...]]:
    """Return the conversations with their answers, which are the right ones, and one token more."""
    outcomes = cluster.ask_all(wanted)
    for each, outcome in zip(wanted, outcomes, strict=True):
        outcome.whole()
        assert outcome.tokens == said(each, model)
    return [(*each.tokens, *outcome.tokens, 9) for each, outcome in zip(wanted, outcomes, strict=True)]


def begun(home: Home, cluster: Cluster, wanted: Generate) -> Request:
    """Return a request with its first tokens, whose answer does not end before its blocks are on disk."""
    home.book.give(Order("hold", 1, cluster.epoch, times=0, on="decode", seconds=0.1))
    request = cluster.ask(wanted)
    request.take(10)
    return request


@pytest.mark.parametrize("rank", [pytest.param(0, marks=chaos), 1])
def test_ranks_that_come_back_with_other_contents_agree(home: Home, model: Path, rank: int) -> None:
    wanted = Generate(0, new_tokens(Random(3), 2100), 120, DRAWN, ignore_eos=True)
    with home.start() as cluster:
        request = begun(home, cluster, wanted)
        on_disk(home.path, 2 * (2100 // BLOCK))
        for file in home.files(rank)[5:]:
            file.unlink()
        home.files(1 - rank)[6].unlink()
        kill(cluster.pids()[1])
        tokens, _ = request.finish()
        assert tokens == said(wanted, model)
        # What rank 0 has to offer is known at once; of the others only when they have read.
        assert fetched_tokens(cluster) == [1280, 1280]
        clear_memory(cluster)
        assert ask(cluster, wanted, model) >= 1280


def filled(home: Home, model: Path, *seeds: int, **settings: Any) -> list[Generate]:
    """Have prompts on disk, and return their requests."""
    wanted = [Generate(0, new_tokens(Random(seed), LONG), 20, DRAWN) for seed in seeds]
    with home.start(**settings) as cluster:
        for each in wanted:
            ask(cluster, each, model)
    return wanted


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=chaos)])
def test_a_disk_that_hangs_delays_one_request(home: Home, model: Path, rank: int) -> None:
    first, second = filled(home, model, 4, 5)
    with home.start() as cluster:
        hang_s = 10.0 * SLOWNESS
        home.book.give(
            Order("hasty", 0, 0, seconds=3.0 * SLOWNESS), Order("disk", rank, 0, on="read", seconds=hang_s)
        )
        at = time.monotonic()
        assert ask(cluster, first, model) == 0
        until(lambda: home.book.notes("held"), "a disk that hangs")
        assert 3.0 * SLOWNESS <= time.monotonic() - at < hang_s
        at = time.monotonic()
        assert ask(cluster, second, model) == 0
        assert time.monotonic() - at < 3.0 * SLOWNESS, "the disk is not asked while it hangs"
        clear_memory(cluster)
        until(lambda: ask(cluster, second, model) >= KEPT or clear_memory(cluster), "the disk again")
        assert cluster.epoch == 1


@chaos
@pytest.mark.parametrize(("place", "rank"), [("write", 1), ("count", 0)])
def test_a_disk_that_hangs_when_it_writes_delays_nothing(
    home: Home, model: Path, place: str, rank: int
) -> None:
    """Where it hangs while it counts, it keeps the lock from all other ranks."""
    random = Random(7)
    wanted = [Generate(0, new_tokens(random, LONG), 60, DRAWN, ignore_eos=True) for _ in range(5)]
    for each in wanted:
        said(each, model)  # computed before the clock runs
    with home.start() as cluster:
        answered(cluster, wanted[:1], model)
        on_disk(home.path, 2 * KEPT // BLOCK)
        home.book.give(Order("disk", rank, 0, on=place, seconds=20 * WAIT_S))
        request = cluster.ask(wanted[1])
        request.take(1)
        until(lambda: home.book.notes("held"), "a disk that hangs")
        at = time.monotonic()
        request.take(60)
        for each in wanted[2:]:  # more blocks than wait for a disk
            answered(cluster, [each], model)
        turns = answered(cluster, wanted[:2], model)
        assert time.monotonic() - at < 20 * SLOWNESS
        assert tuple(request.tokens) == said(wanted[1], model)
        assert cluster.epoch == 1
        at = time.monotonic()
    assert time.monotonic() - at < 10 * SLOWNESS
    home.book.clear()
    with home.start() as cluster:
        assert ask(cluster, Generate(0, turns[0], 20), model) >= KEPT
        answered(cluster, [Generate(0, turn, 20) for turn in turns], model)


@chaos
def test_a_rank_is_stopped_while_it_fetches(home: Home, model: Path) -> None:
    (wanted,) = filled(home, model, 4)
    with home.start() as cluster:
        home.book.give(Order("disk", 1, cluster.epoch, on="read", seconds=30.0 * SLOWNESS))
        request = cluster.ask(wanted)
        until(lambda: home.book.notes("held"), "a fetch")
        kill(cluster.pids()[1], signal.SIGSTOP)
        tokens, _ = request.finish()
        assert tokens == said(wanted, model)
        assert cluster.epoch == 2
        assert fetched_tokens(cluster) == [KEPT, KEPT]


@chaos
@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_goes_and_comes_back_while_a_rank_fetches(home: Home, model: Path, rank: int) -> None:
    first, second = filled(home, model, 4, 5)
    with home.start() as cluster:
        home.book.give(Order("disk", rank, 0, on="read", seconds=2.0))
        request = cluster.ask(first)
        until(lambda: home.book.notes("held"), "a fetch")
        cluster.unload()
        with pytest.raises(MlxtpError):
            request.finish()
        cluster.load("tiny")
        cluster.load(model)
        assert ask(cluster, second, model) == KEPT
        assert ask(cluster, first, model) == KEPT
        assert cluster.epoch == 1


@chaos
def test_blocks_of_another_number_of_ranks_are_let_alone(home: Home, model: Path) -> None:
    (wanted,) = filled(home, model, 4)
    for ranks, cached in ((1, 0), (2, KEPT), (1, KEPT)):
        with home.start(ranks=ranks) as cluster:
            assert ask(cluster, wanted, model) == cached


@chaos
def test_blocks_of_other_weights_in_the_same_folder_are_let_alone(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", attentive=True, max_position_embeddings=8192)
    home = Home(tmp_path, folder)
    (wanted,) = filled(home, folder, 4)
    for change in (
        lambda: write_model(folder, attentive=True, max_position_embeddings=8192, seed=1),
        lambda: change_config(folder, rope_theta=20000.0),
    ):
        change()
        model_of.cache_clear()
        expected.cache_clear()
        with home.start() as cluster:
            assert ask(cluster, wanted, folder) == 0
    write_model(folder, attentive=True, max_position_embeddings=8192)
    model_of.cache_clear()
    expected.cache_clear()
    with home.start() as cluster:
        assert ask(cluster, wanted, folder) == KEPT


@chaos
def test_blocks_of_other_kv_bits_are_let_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path / "wide", attentive=True, max_position_embeddings=8192, head_dim=64)
    home = Home(tmp_path, model)
    (wanted,) = filled(home, model, 4)
    with home.start(kv_bits=8, cache_disk=0) as cluster:
        (right,) = cluster.ask_all([wanted])
    for cached in (0, KEPT):
        with home.start(kv_bits=8) as cluster:
            (outcome,) = cluster.ask_all([wanted])
            assert (outcome.tokens, outcome.whole().cached) == (right.tokens, cached)
    with home.start() as cluster:
        assert ask(cluster, wanted, model) == KEPT


@pytest.fixture
def small_disk(home: Home) -> Iterator[Path]:
    """Mount a disk of a few blocks."""
    folder = folder_in(home.path)
    folder.mkdir(parents=True)
    what = ("-t", "tmpfs", "-o", "size=400k,mode=700", "none")
    if subprocess.run(["mount", *what, folder], check=False).returncode:
        pytest.skip("root alone can mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


@chaos
def test_a_full_disk_ends_the_writing_alone(
    home: Home, model: Path, small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = [Generate(0, new_tokens(Random(seed), LONG), 20, DRAWN) for seed in range(3)]
    with home.start() as cluster:
        answered(cluster, wanted, model)
        # Rank 1 may be full first. Once rank 0 is, no rank gets further blocks.
        until(lambda: not cluster.health()["ranks"][0]["disk_room_bytes"], "rank 0 is full")
        clear_memory(cluster)
        answered(cluster, wanted, model)
        cluster.idle()
        full = sum(not each["disk_room_bytes"] for each in cluster.health()["ranks"])
    line = "KV caches are no longer kept on disk"
    assert capfd.readouterr().err.count(line) == full, "one line a rank"
    assert not list(small_disk.glob("*/.[!.]*"))
    with home.start() as cluster:
        talks = answered(cluster, wanted, model)
        assert fetched_tokens(cluster)[0] > 0, "what is there is used"
        answered(cluster, [Generate(0, talk, 20) for talk in talks], model)

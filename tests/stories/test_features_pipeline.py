"""Requests of any kind over the stages of a pipeline, wrong messages between stages, and wrong choices."""

from __future__ import annotations

import random as randomness
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from mlxtp.api.backend import Sampling, Shaping
from mlxtp.errors import Code, GroupError
from mlxtp.wire.messages import Generate

from ..engine.families import FAMILIES, OTHERS
from ..engine.small_models import remember, write_model
from ..live_cluster import Cluster
from ..reference import expected
from .test_features_ledger import assert_found, crowd

pytestmark = [pytest.mark.group, pytest.mark.fault]

SPLIT = "1,2,1"
KINDS = ("llama", "gpt_oss")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        kind: write_model(
            root / kind,
            model_type=kind,
            attentive=True,
            **{"num_hidden_layers": 4, "max_position_embeddings": 2048, **FAMILIES[kind]},
        )
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def three(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("three")
    with Cluster(home, ranks=3, parallel="pipeline", split=SPLIT, model=folders["llama"]) as cluster:
        yield cluster


def some(random: Random, count: int) -> list[Generate]:
    """Requests of unlike lengths, of which some begin like others."""
    stem = tuple(random.choices(range(6, 500), k=300))
    return [
        Generate(
            0,
            (
                *stem[: random.choice((0, 40, 300))],
                *random.choices(range(6, 500), k=random.choice((3, 30, 200))),
            ),
            random.choice((3, 20, 60)),
            Sampling(temperature=random.choice((0.0, 0.0, 2.0)), seed=random.randrange(99)),
            Shaping(presence_penalty=1.0) if random.random() < 0.2 else Shaping(),
            random.choice((-1, -1, 2)),
            ignore_eos=True,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", ["gpt_oss", pytest.param("llama", marks=pytest.mark.chaos)])
def test_many_at_once_say_what_one_rank_says(three: Cluster, folders: dict[str, Path], kind: str) -> None:
    epoch = three.epoch
    three.load(folders[kind])
    wanted = some(Random(5), 7)
    before = three.idle()
    outcomes = three.ask_all(wanted)
    again = three.ask_all(wanted)
    work = three.idle() - before
    right = [expected(each, folders[kind]) for each in wanted]
    assert [outcome.tokens for outcome in outcomes] == [each.tokens for each in right]
    assert [outcome.tokens for outcome in again] == [each.tokens for each in right]
    assert sum(outcome.whole().cached for outcome in again) > 500
    assert three.epoch == epoch
    assert work.forwards[0] == work.forwards[1] == work.forwards[2] > 0
    assert work.collectives == work.forwards, "one message for each border and forward"
    three.load(folders["llama"])


@pytest.mark.parametrize(
    "kind", ["recurrent_gemma", *(pytest.param(each, marks=pytest.mark.chaos) for each in ("gpt2", "mamba"))]
)
def test_other_kinds_of_layers_say_what_one_rank_says(
    three: Cluster, folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """States beside windows, positions that only the first stage adds, and states alone."""
    config = {"num_hidden_layers": 4, "max_position_embeddings": 2048, **OTHERS[kind]}
    if kind == "gpt2":
        config |= {"n_positions": 2048, "n_ctx": 2048}
    folder = remember(write_model(tmp_path / kind, model_type=kind, attentive=True, **config))
    epoch, wanted = three.epoch, some(Random(6), 5)
    three.load(folder)
    right = [expected(each, folder).tokens for each in wanted]
    assert [outcome.tokens for outcome in three.ask_all(wanted)] == right
    assert [outcome.tokens for outcome in three.ask_all(wanted)] == right
    assert three.epoch == epoch
    three.load(folders["llama"])


def test_random_schedules_leave_all_ledgers_equal(three: Cluster, folders: dict[str, Path]) -> None:
    seed = randomness.randrange(2**32)
    print(f"seed {seed}")
    epoch, before = three.epoch, three.idle()
    three.call(crowd(three, Random(seed), 60), 240)
    work = three.idle() - before
    assert three.epoch == epoch
    assert work.forwards[0] == work.forwards[1] == work.forwards[2] > 0
    probe = Generate(0, (7, 8, 9), 20, Sampling(9.0, seed=3))
    assert three.ask_all([probe])[0].tokens == expected(probe, folders["llama"]).tokens


@pytest.mark.chaos
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_comes_back_from_the_disks_of_all_stages(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    wanted = Generate(
        0, tuple(Random(4).choices(range(6, 500), k=1500)), 8, Sampling(2.0, seed=3), ignore_eos=True
    )
    right = expected(wanted, folders[kind]).tokens
    settings = {"parallel": "pipeline", "model": folders[kind], "cache_disk": 1 << 30}
    cached = []
    for split in ("3,1", "3,1", "2,2"):
        with Cluster(tmp_path / "home", split=split, **settings) as cluster:
            (outcome,) = cluster.ask_all([wanted])
            assert outcome.tokens == right
            cached.append(outcome.whole().cached)
    assert cached[0] == 0
    assert cached[1] > 1000
    assert cached[2] == 0, "blocks of another split"


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
def erring(
    orders: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    worker = (sys.executable, "-m", "tests.engine.engine_member", str(orders))
    home, model = tmp_path_factory.mktemp("erring"), folders["llama"]
    with Cluster(home, ranks=3, parallel="pipeline", split=SPLIT, worker=worker, model=model) as cluster:
        yield cluster


ENDLESS = [
    Generate(0, (7, 8, 9, seed), 40, Sampling(9.0, seed=seed), ignore_eos=True) for seed in (10, 11, 12)
]


@pytest.mark.parametrize(
    "fault",
    [
        "no message",
        *(pytest.param(fault, marks=pytest.mark.chaos) for fault in ("two messages", "messages exchanged")),
    ],
)
def test_a_message_that_is_not_the_forwards_own_is_found_before_a_token_leaves(
    erring: Cluster, orders: Path, folders: dict[str, Path], fault: str
) -> None:
    assert_found(erring, folders["llama"], orders / fault, *ENDLESS, begun=2)


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["another choice", "a choice skipped"])
def test_tokens_that_rank_0_did_not_choose_are_found_before_one_leaves(
    folders: dict[str, Path], tmp_path: Path, fault: str
) -> None:
    settings = {"parallel": "pipeline", "split": "3,1", "speculation": "off"}  # drafts come with their frame
    worker = (sys.executable, "-m", "tests.engine.engine_member", str(tmp_path))
    with Cluster(tmp_path / "home", worker=worker, model=folders["llama"], **settings) as cluster:
        assert_found(cluster, folders["llama"], tmp_path / fault, *ENDLESS, begun=2)


@pytest.mark.chaos
def test_a_late_message_only_takes_time(erring: Cluster, orders: Path, folders: dict[str, Path]) -> None:
    wanted = Generate(0, (7, 8, 9), 4, ignore_eos=True)
    epoch = erring.epoch
    (orders / "a late message").touch()
    try:
        (outcome,) = erring.ask_all([wanted])
    finally:
        (orders / "a late message").unlink()
    assert outcome.tokens == expected(wanted, folders["llama"]).tokens
    assert erring.epoch == epoch


def test_a_stage_without_memory_refuses_the_load_and_the_next_one_works(
    erring: Cluster, orders: Path, folders: dict[str, Path]
) -> None:
    ranks = erring.supervisor.status.ranks
    epoch = erring.epoch
    erring.unload()
    (orders / "no memory").touch()
    with pytest.raises(GroupError) as refused:
        erring.call(ranks.load(str(folders["llama"]), ()))
    (orders / "no memory").unlink()
    assert refused.value.code is Code.OUT_OF_MEMORY
    assert refused.value.detail.startswith("rank 1: llama: reading layers 1 to 2 of 4 (0.00 GB) failed: ")
    assert "rank 0" not in refused.value.detail
    heard = [(pong.model, pong.stats) for pong in erring._hear_from_all()]
    assert {
        (model, rank.weight_bytes, rank.memory_bytes - rank.pool_bytes < 1000) for model, rank in heard
    } == {("", 0, True)}
    erring.load(folders["llama"])
    wanted = Generate(0, (7, 8, 9), 20, ignore_eos=True)
    assert erring.ask_all([wanted])[0].tokens == expected(wanted, folders["llama"]).tokens
    assert erring.epoch == epoch


@pytest.mark.chaos
def test_messages_of_one_shape_carry_long_prompts_and_steps(folders: dict[str, Path], tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()
    (orders / "one shape").touch()
    worker = (sys.executable, "-m", "tests.engine.engine_member", str(orders))
    wanted = [*some(Random(7), 4), Generate(0, tuple(range(6, 480)), 20, ignore_eos=True)]
    with Cluster(
        tmp_path / "home", parallel="pipeline", split="3,1", worker=worker, model=folders["llama"]
    ) as cluster:
        outcomes = cluster.ask_all(wanted)
        assert cluster.epoch == 1
    assert [each.tokens for each in outcomes] == [expected(each, folders["llama"]).tokens for each in wanted]

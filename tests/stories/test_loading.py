"""Loading on a real group: all ranks have the model or none has, and the group outlives a refusal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import pytest

from mlxtp.errors import Code, MlxtpError, ModelError
from mlxtp.groups.health import ServingState
from mlxtp.model_files import MTP_FILE
from mlxtp.wire.messages import Loaded, LoadShard, Unload

from ..engine.mtp_heads import add_head
from ..engine.small_models import change_weights, split_weights, write_model
from ..live_cluster import Cluster, until
from ..reference import TINY, answer, endless_prompt, prompt_ids, reference

pytestmark = [pytest.mark.group, pytest.mark.fault]

ANSWER = "FALCON-MERCURY-7749"
QUESTION = f"Repeat exactly: {ANSWER}"
EMPTY_BYTES = 100_000
"""The most that a rank without a model may hold."""


class Group:
    """Two ranks that can be sent to different folders."""

    def __init__(self, folder: Path, signposts: Path) -> None:
        self._signposts = signposts
        worker = (
            sys.executable,
            str(Path(__file__).parents[1] / "engine" / "misled_worker.py"),
            str(signposts),
        )
        self.cluster = Cluster(folder, ranks=2, worker=worker)

    def mislead(self, **folders: Path) -> None:
        """`rank_1=folder`: that rank loads this folder from now on. The others load what they are told."""
        for post in self._signposts.iterdir():
            post.unlink()
        for rank, folder in folders.items():
            (self._signposts / rank.replace("_", "-")).write_text(str(folder))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with pytest.MonkeyPatch.context() as patch:
        # A script finds the package that it was written beside.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        group = Group(tmp_path_factory.mktemp("loading"), tmp_path_factory.mktemp("signposts"))
        with group.cluster:
            yield group


@pytest.fixture
def group(shared: Group) -> Iterator[Group]:
    """A group that serves the embedded model, and must do so again when a test is over, in the same epoch."""
    shared.mislead()
    if shared.cluster.supervisor.status.state is not ServingState.READY:
        shared.cluster.load("tiny")
    yield shared
    shared.mislead()
    assert shared.cluster.epoch == 1


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without one of its tensors."""
    folder = write_model(tmp_path_factory.mktemp("models") / "lacking")
    change_weights(folder, model__layers__1__mlp__up_proj__weight=None)
    return folder


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is whole, but does not divide by two."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    return write_model(tmp_path_factory.mktemp("models") / "odd", **heads)


def refusal(group: Group, model: Path, draft: str | Path = "") -> ModelError:
    with pytest.raises(ModelError) as refused:
        group.cluster.load(model, draft)
    return refused.value


def assert_nothing_is_loaded(cluster: Cluster) -> None:
    assert cluster.supervisor.status.state is ServingState.IDLE
    assert cluster.health()["model"] is None

    def empty() -> bool:
        ranks = cluster.supervisor.status.ranks
        return all(
            (pong.model, pong.stats.weight_bytes, pong.stats.kv_bytes) == ("", 0, 0)
            and pong.stats.memory_bytes - pong.stats.pool_bytes < EMPTY_BYTES
            for pong in ranks.watch.pongs.values()
        )

    until(empty, "every rank without a model")


def assert_the_group_works(group: Group) -> None:
    group.mislead()
    group.cluster.load("tiny")
    assert group.cluster.content(QUESTION) == ANSWER


def test_each_rank_loads_from_the_folder_of_its_own_mac(group: Group, small: Path, lacking: Path) -> None:
    cluster = group.cluster
    ranks = cluster.supervisor.status.ranks
    elsewhere = small.with_name("elsewhere")
    shutil.copytree(small, elsewhere)

    def load(*paths: Path) -> Loaded:
        command = LoadShard("/nowhere", 512, (), paths=tuple(map(str, paths)))
        return cluster.call(ranks._ask(command, Loaded, None))

    cluster.unload()
    assert load(small, elsewhere).vocabulary == 512
    cluster.call(ranks.do(Unload()))
    for paths, words in (((small, lacking), "rank 1: lacking: "), ((lacking, small), "rank 0: lacking: ")):
        with pytest.raises(ModelError, match=words) as refused:
            load(*paths)
        assert refused.value.detail.count("lacking: ") == 1


def test_a_head_that_is_damaged_on_one_rank_is_used_by_none(
    group: Group, small: Path, tmp_path: Path
) -> None:
    cluster = group.cluster
    whole = add_head(shutil.copytree(small, tmp_path / "whole"), (7, 8, 9), length=9)
    broken = shutil.copytree(whole, tmp_path / "broken")
    head = {name: mx.full(weight.shape, mx.nan) for name, weight in mx.load(str(whole / MTP_FILE)).items()}
    mx.save_safetensors(str(broken / MTP_FILE), head)
    group.mislead(rank_1=broken)
    assert "rank 1: its copy of the model lacks a usable MTP head" in refusal(group, whole).detail
    cluster.load(broken)
    ranks = cluster.supervisor.status.ranks
    until(lambda: all(pong.model for pong in ranks.watch.pongs.values()), "ranks with a model")
    assert not any(pong.stats.mtp for pong in ranks.watch.pongs.values())


@dataclass(frozen=True)
class Refusal:
    """What is to be loaded, which ranks find another folder, and what is said of it, once."""

    words: tuple[str, ...]
    model: str = "small"
    misled: Mapping[str, str] = field(default_factory=dict)
    draft: str = ""
    code: Code = Code.MODEL_INVALID
    once: str = ""
    never: str = "\0"


LACKS = "lacking cannot be loaded: "
OTHERS = {
    "NaN on one rank's part": Refusal(
        ("broken cannot be loaded: rank 1: 1 tensor holds NaN", "model.layers.0.mlp.up_proj.weight"), "broken"
    ),
    "rank 0 lacks it": Refusal(
        (" cannot be loaded: rank 0: lacking: ",), misled={"rank_0": "lacking"}, never="rank 1:"
    ),
    "two reasons, the leader's first": Refusal(
        (
            " cannot be loaded: rank 0: this model does not divide among 2 ranks: 3 attention heads do not "
            "divide by 2",
            "; rank 1: ",
            "no config.json",
        ),
        misled={"rank_0": "odd", "rank_1": "empty"},
        code=Code.MODEL_NOT_DIVISIBLE,
    ),
    "a file that only one rank lacks": Refusal(
        ("whole cannot be loaded: rank 1: ", "lacks 1 of 3 weight files: model-00003-of-00003.safetensors"),
        "whole",
        {"rank_1": "torn"},
    ),
    "a draft with another vocabulary": Refusal(
        ("draft model other-words: its vocabulary has 256 tokens, the model's has 512",),
        "tiny",
        draft="other-words",
    ),
    "a draft without weights": Refusal(
        ("no-weights",), "tiny", draft="no-weights", code=Code.MODEL_NOT_FOUND
    ),
}


@pytest.fixture
def models(small: Path, lacking: Path, odd: Path, tmp_path: Path) -> Callable[[str], Path]:
    """The folder of a model, made where it is first named."""

    def model(name: str) -> Path:
        if (path := {"small": small, "lacking": lacking, "odd": odd, "tiny": TINY}.get(name)) is not None:
            return path
        if name == "empty":
            return tmp_path
        folder = write_model(tmp_path / name, **({"vocab_size": 256} if name == "other-words" else {}))
        if name == "torn":
            split_weights(folder, parts=3)[2].unlink()
        elif name == "no-weights":
            (folder / "model.safetensors").unlink()
        elif name == "broken":
            weight = mx.random.normal((128, 64))
            weight[127, 0] = mx.nan
            change_weights(folder, model__layers__0__mlp__up_proj__weight=weight)
        return folder

    return model


@pytest.mark.parametrize(
    "refused",
    [
        pytest.param(
            Refusal((LACKS,), "lacking", once="up_proj.weight", never="rank"), id="no rank can load it"
        ),
        pytest.param(
            Refusal((" cannot be loaded: rank 1: lacking: ",), misled={"rank_1": "lacking"}, never="rank 0:"),
            id="rank 1 lacks it",
        ),
        *(pytest.param(each, id=name, marks=pytest.mark.chaos) for name, each in OTHERS.items()),
    ],
)
def test_a_model_that_any_rank_refuses_is_let_go_by_all_and_the_group_works(
    group: Group, models: Callable[[str], Path], refused: Refusal
) -> None:
    group.mislead(**{rank: models(name) for rank, name in refused.misled.items()})
    error = refusal(group, models(refused.model), models(refused.draft) if refused.draft else "")
    assert error.code is refused.code
    at = 0
    for words in refused.words:  # in their order
        at = error.detail.index(words, at)
    assert refused.never not in error.detail
    assert not refused.once or error.detail.count(refused.once) == 1
    assert_nothing_is_loaded(group.cluster)
    assert_the_group_works(group)


def test_one_model_after_another_in_one_epoch(group: Group, small: Path) -> None:
    cluster = group.cluster
    pids = cluster.pids()
    prompt = prompt_ids(QUESTION)
    for folder in (small, TINY, small, TINY):
        cluster.load(folder)
        expected = answer(prompt, 12, folder)
        tokens, end = cluster.complete(prompt, 12)
        assert (tokens, end.reason) == (expected.tokens, expected.reason)
        assert cluster.health()["model"] == folder.name
    assert reference(prompt, 12, small) != reference(prompt, 12, TINY)
    assert cluster.pids() == pids


def test_unloading_leaves_nothing_and_loading_brings_it_back(group: Group) -> None:
    cluster = group.cluster
    cluster.unload()
    assert_nothing_is_loaded(cluster)
    cluster.load("tiny")
    assert cluster.content(QUESTION) == ANSWER


def test_requests_on_a_model_that_is_taken_away_end_with_an_error(group: Group, small: Path) -> None:
    cluster = group.cluster
    requests = [cluster.start(endless_prompt(), 3000) for _ in range(3)]
    for request in requests:
        request.take(2)
    cluster.load(small)
    for request in requests:
        with pytest.raises(MlxtpError) as gone:
            request.finish()
        assert gone.value.code is Code.SHUTTING_DOWN
        assert request.end is None
    prompt = prompt_ids(QUESTION)
    assert cluster.complete(prompt, 12)[0] == reference(prompt, 12, small)
    cluster.load("tiny")
    assert cluster.content(QUESTION) == ANSWER


def test_a_draft_model_that_is_nowhere_is_refused_before_anything_is_let_go(
    group: Group, tmp_path: Path
) -> None:
    error = refusal(group, TINY, tmp_path / "nowhere")
    assert error.code is Code.MODEL_NOT_FOUND
    assert "nowhere is neither a folder nor an id on the Hub" in error.detail
    assert group.cluster.supervisor.status.state is ServingState.READY
    assert group.cluster.content(QUESTION) == ANSWER


def test_an_agent_whose_model_does_not_divide_says_so_and_does_not_try_again(
    odd: Path, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path / "home", ranks=2, parallel="tensor", model=odd, wait=False)
    try:
        with pytest.raises(ModelError, match="3 attention heads do not divide by 2"):
            cluster.wait_ready()
        assert cluster.epoch == 0, "no rank was started"
        assert cluster.supervisor.status.state is ServingState.IDLE
        health = cluster.health()
        assert health["ready"] is False
        assert "3 attention heads do not divide by 2" in health["reason"]
        refused = cluster.post(QUESTION)
        assert refused.status_code == 503
        assert "3 attention heads" in refused.text
    finally:
        cluster.close()

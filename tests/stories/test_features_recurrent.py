"""Text of models with recurrent states and drafts on real ranks, against one process without drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxtp.api.backend import Shaping
from mlxtp.wire.messages import Generate

from ..engine.families import FOUR, OWN, PIPELINE
from ..engine.mtp_heads import add_head
from ..engine.small_models import change_weights, remember, write_model
from ..live_cluster import Cluster
from ..reference import expected
from .test_features_choice import assert_right, copying, prompt
from .test_features_mtp import LONG

pytestmark = [pytest.mark.group, pytest.mark.fault]

SETTINGS: Mapping[str, dict[str, Any]] = {
    "two ranks": {},
    "pipeline": {"parallel": "pipeline", "split": "2,2"},
    "lockstep": {"run_ahead": 0, "compiled": False, "agreement": "broadcast"},
    "six layers": {"parallel": "pipeline", "split": "3,3"},
    "a stage without states": {"parallel": "pipeline", "split": "1,3"},
}
PLACES = (
    ("nemotron_h", "two ranks"),
    ("nemotron_h", "six layers"),
    ("nemotron_h", "lockstep"),
    *(("qwen3_next", how) for how in ("two ranks", "pipeline", "lockstep")),
    ("granitemoehybrid", "a stage without states"),
    *((family, "pipeline") for family in ("lfm2", "kimi_linear", "falcon_h1")),
)
"""Families and settings, the first in every run of tests."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(place, marks=[pytest.mark.chaos] if at else []) for at, place in enumerate(PLACES)],
    ids="-".join,
)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def folder(place: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, _ = place
    fields = {**PIPELINE, **OWN}[family]
    path = tmp_path_factory.mktemp("models") / "small"
    fields = {**FOUR, **fields, "eos_token_id": [511], "max_position_embeddings": 2048}
    remember(write_model(path, model_type=family, **fields))
    if family == "nemotron_h":  # else it never says the same again
        table = mx.load(str(path / "model.safetensors"))["backbone.embeddings.weight"]
        change_weights(path, lm_head__weight=table, backbone__embeddings__weight=1.5 * table)
    return path


@pytest.fixture(scope="module")
def cluster(
    place: tuple[str, str], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    _, how = place
    with Cluster(tmp_path_factory.mktemp("home"), model=folder, **SETTINGS[how]) as cluster:
        yield cluster


def misleading(wanted: Generate) -> Generate:
    """Return a request whose prompt has some tokens otherwise than the model says them."""
    return replace(wanted, tokens=tuple(99 if at % 9 == 8 else each for at, each in enumerate(wanted.tokens)))


def test_drafts_of_a_lookup_change_no_token(cluster: Cluster, folder: Path) -> None:
    """Alone and beside each other, greedy and drawn; those of the second turn begin with a kept cache."""
    wanted = [*copying(folder), *copying(folder, temperature=0.5)[:2], *map(misleading, copying(folder)[:3])]
    for at_once in (1, 6):
        outcomes = cluster.ask_all(wanted, at_once)
        assert_right(outcomes, wanted, folder)
        ends = [outcome.whole() for outcome in outcomes]
        assert sum(end.accepted for end in ends) > 20
        assert sum(end.drafted - end.accepted for end in ends) > 3, "some were wrong"


@pytest.mark.chaos
def test_forced_tokens_change_nothing_and_save_forwards(cluster: Cluster, folder: Path) -> None:
    """Alone, and beside rows that draft."""
    shaping = Shaping(grammar_kind="regex", grammar="hello there, [a-z]{2} and good evening to the [a-z]{2}!")
    guided = [Generate(0, prompt(seed), 60, shaping=shaping) for seed in (1, 2)]
    wanted = [*guided, *copying(folder)[:3]]
    right = [expected(each, folder).tokens for each in wanted]
    before = cluster.idle()
    assert cluster.ask_all(guided[:1], 1)[0].tokens == right[0]
    assert (cluster.idle() - before).forwards[0] < len(right[0]) - 10
    assert [outcome.tokens for outcome in cluster.ask_all(wanted, 5)] == right


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {**PIPELINE["qwen3_5"], "eos_token_id": [511]}
    path = tmp_path_factory.mktemp("models") / "headed"
    remember(write_model(path, model_type="qwen3_5", attentive=True, **fields))
    return add_head(path, *(each.tokens for each in LONG[:3]))


@pytest.mark.parametrize(
    "how", ["two ranks", *(pytest.param(name, marks=pytest.mark.chaos) for name in ("pipeline", "lockstep"))]
)
def test_drafts_of_a_head_change_no_token(headed: Path, tmp_path: Path, how: str) -> None:
    """Rows whose drafts are right now and then, and hardly ever; the second turn begins with kept caches."""
    with Cluster(tmp_path, model=headed, **SETTINGS[how]) as cluster:
        for wanted, at_once in ((LONG[:3], 1), (LONG, 8)):
            outcomes = cluster.ask_all(wanted, at_once)
            assert_right(outcomes, wanted, headed)
            ends = [outcome.whole() for outcome in outcomes]
            assert sum(end.accepted for end in ends[:3]) > 30, "the head was fitted to these"
        assert sum(end.drafted - end.accepted for end in ends) > 10, "some were wrong"


def test_a_conversation_goes_on_behind_drafts(cluster: Cluster, folder: Path) -> None:
    """The cache that an answer leaves, drafts in flight or not, is that of its tokens."""
    (first, *_) = copying(folder)
    prompt = first.tokens
    for _ in range(3):
        wanted = Generate(0, prompt, 40, ignore_eos=True)
        (outcome,) = cluster.ask_all([wanted], 1)
        assert_right([outcome], [wanted], folder)
        prompt = (*prompt, *expected(wanted, folder).tokens, 77, 78, 79)
    assert outcome.whole().cached > len(prompt) - 60

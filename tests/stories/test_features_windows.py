"""Text of models with windows of tokens and drafts on real ranks, against one process without drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mlx_lm.utils import load_model

from mlxtp.api.backend import Sampling, Shaping
from mlxtp.engine.loader import kv_sizes
from mlxtp.wire.messages import Generate

from ..engine.families import FOUR, GEMMA, OWN, PIPELINE, QWEN_MOE
from ..engine.families import WINDOWS as SOME
from ..engine.small_models import write_model
from ..live_cluster import Cluster
from ..reference import expected
from .test_features_choice import assert_right

pytestmark = [pytest.mark.group, pytest.mark.fault]

WINDOW = 60
"""With the widest step this is a ring of 128 slots, to within four. The texts below are longer."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "two ranks": {"ranks": 2},
    "pipeline": {"parallel": "pipeline", "split": "2,2"},
    "stages of one kind": {"ranks": 4, "parallel": "pipeline", "split": "1,1,1,1"},
    "lockstep": {"ranks": 2, "run_ahead": 0, "compiled": False, "agreement": "broadcast"},
    "alone": {"ranks": 1},
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {**GEMMA, **FOUR},
    "gemma4_text": {**PIPELINE["gemma4_text"], "tie_word_embeddings": False},
    "exaone4": OWN["exaone4"],
    "exaone_moe": {
        **QWEN_MOE,
        **FOUR,
        "num_shared_experts": 1,
        "layer_types": SOME,
        "is_moe_layer": [False, True, False, True],
    },
    "cohere2": OWN["cohere2"],
    "olmo3": OWN["olmo3"],
    "llama": {**FOUR, "layer_types": SOME},
    "windows alone": {
        **PIPELINE["gemma4_text"],
        "model_type": "gemma4_text",
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention"] * 4,
    },
}
OTHERS = [
    *[(name, "two ranks") for name in MODELS if name != "gpt_oss"],
    *[("gpt_oss", how) for how in SETTINGS if how != "two ranks"],
    *[("windows alone", how) for how in ("pipeline", "alone")],
]
DRAWN = Sampling(temperature=0.7, seed=3)


def write(folder: Path, name: str, **how: Any) -> Path:
    fields = {"model_type": name, **MODELS[name], "sliding_window": WINDOW, "eos_token_id": [511]}
    return write_model(folder, attentive=True, max_position_embeddings=2048, **{**fields, **how})


@pytest.fixture(
    scope="module",
    params=[("gpt_oss", "two ranks"), *[pytest.param(each, marks=pytest.mark.chaos) for each in OTHERS]],
    ids="-".join,
)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Path]]:
    """A model, and a rounded one that drafts for it: some drafts are right, and more are wrong."""
    (name, how), root = request.param, tmp_path_factory.mktemp("models")
    folder, draft = write(root / "small", name), write(root / "draft", name, quantize=32, bits=6)
    with Cluster(root / "home", model=folder, draft_model=str(draft), **SETTINGS[how]) as cluster:
        yield cluster, folder


def some(*lengths: int, **how: Any) -> list[Generate]:
    return [
        Generate(0, tuple(Random(length).choices(range(6, 500), k=length)), 110, ignore_eos=True, **how)
        for length in lengths
    ]


def test_drafts_change_no_token(cluster: tuple[Cluster, Path]) -> None:
    """Of rows of unlike lengths, beside each other."""
    ranks, folder = cluster
    wanted = [*some(30, 128), *some(160, sampling=DRAWN)]
    outcomes = ranks.ask_all(wanted)
    assert_right(outcomes, wanted, folder)
    ends = [outcome.whole() for outcome in outcomes]
    assert sum(end.accepted for end in ends) > 20
    assert sum(end.drafted - end.accepted for end in ends) > 20, "some were wrong"


def test_a_conversation_goes_on_behind_drafts(cluster: tuple[Cluster, Path]) -> None:
    """The cache that an answer leaves, drafts in flight or not, is that of its tokens."""
    ranks, folder = cluster
    (wanted,) = some(100)
    for _ in range(3):
        (outcome,) = ranks.ask_all([wanted], 1)
        assert_right([outcome], [wanted], folder)
        said = expected(wanted, folder).tokens
        wanted = Generate(0, (*wanted.tokens, *said, 77, 78, 79), 40, ignore_eos=True)
    assert outcome.whole().cached > len(wanted.tokens) - 90


@pytest.mark.chaos
def test_forced_tokens_change_no_token(cluster: tuple[Cluster, Path]) -> None:
    """Many at a time, between texts that are free and drafted."""
    ranks, folder = cluster
    letters = "the cat sat on the mat and saw the other cat that sat on the same mat as before"
    grammar = Shaping(grammar_kind="regex", grammar=f"[a-z]{{5}}{letters}[a-z]{{9}}{letters}[a-z]{{9}}")
    wanted = [*some(90, 160, shaping=grammar), *some(33)]
    for at_once in (1, 3):
        outcomes = ranks.ask_all(wanted, at_once)
        assert_right(outcomes, wanted, folder)


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["gpt_oss", "windows alone"])
def test_rows_that_make_way_come_back(tmp_path: Path, name: str) -> None:
    """Of four rows two or three fit, the others begin again behind what they have said."""
    folder = write(tmp_path / "small", name)
    per_token, per_row = kv_sizes(load_model(folder)[0])
    room = (3 * per_row + 600 * per_token) // 2
    with Cluster(tmp_path / "home", ranks=2, model=folder, kv_bytes=room) as ranks:
        wanted = some(20, 90, 130, 170)
        assert_right(ranks.ask_all(wanted, 4), wanted, folder)

"""Families that mlxtp divides itself: two ranks against mlx-lm alone on the same weights.

Prompts of unlike lengths come in several chunks and then decode in one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxtp.api.backend import Sampling
from mlxtp.engine.families import DIVIDE
from mlxtp.model_config import VLM_FAMILIES
from mlxtp.wire.messages import Generate

from ..engine.bare_groups import Group, run_group
from ..engine.families import OWN, VARIANTS
from ..engine.own_family_member import LENGTHS, STEPS, chunks, fed, prompt
from ..engine.small_models import write_model
from ..engine.test_families import assert_as_counted
from ..live_cluster import Cluster
from ..reference import expected

pytestmark = pytest.mark.fault

MODELS: Mapping[str, Mapping[str, Any]] = {
    **{family: {"model_type": family, **config} for family, config in OWN.items()},
    **VARIANTS,
}
EACH_TIME = (
    *("gemma3_text", "gemma4_text-4bit", "llama4", "nemotron_h-4bit", "olmo2", "qwen3_next"),
    *("qwen3_next-4bit", "gemma4_text-shared"),
)
"""One of each kind: windows, experts, chunks of attention, Mamba, norms over all heads, linear attention."""
FORMS: Mapping[str, Mapping[str, Any]] = {
    "4bit": {"quantize": 32, "attentive": True},
    "bf16": {"quantize": 32, "bits": 8, "dtype": mx.bfloat16},
}
OTHERS = tuple({*MODELS, *(f"{name}-{form}" for name in MODELS for form in FORMS)} - {*EACH_TIME})
FOUR = ("gemma3_text", "gemma4_text-few", "olmo2", "olmo3", "qwen3_next", "nemotron_h", "mixtral")
"""On four ranks, two of which have the same KV head."""
LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}


def write(root: Path, names: Iterable[str], **changes: Any) -> list[str]:
    for seed, name in enumerate(names):
        model, _, form = name.rpartition("-") if name.endswith(tuple(FORMS)) else (name, "", "")
        how = FORMS.get(form, {"attentive": True})
        write_model(root / name, seed=seed, **{"vocab_size": 509, **MODELS[model], **how, **changes})
    return list(names)


def group_of(root: Path, ranks: int, names: Iterable[str], **changes: Any) -> Group:
    return run_group(root, ranks, write(root, names, **changes), member="tests.engine.own_family_member")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Group:
    return group_of(tmp_path_factory.mktemp("two"), 2, EACH_TIME)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Group:
    return group_of(tmp_path_factory.mktemp("others"), 2, sorted(OTHERS))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Group:
    root = tmp_path_factory.mktemp("four")
    return group_of(root, 4, FOUR, n_groups=4, **LINEAR)


def alone(folder: Path) -> dict[str, np.ndarray]:
    """mlx-lm's own logits of the same forwards, each row by itself."""
    model, config = load_model(folder)
    found: dict[str, mx.array] = {}
    size = config["vocab_size"]
    rows = []
    for row in range(len(LENGTHS)):
        cache = make_prompt_cache(model)
        for number, chunk in enumerate(chunks(prompt(row, size))):
            found[f"prompt-{row}-{number}"] = model(mx.array([chunk]), cache=cache)[0]
        rows.append([model(mx.array([[fed(step, size)[row]]]), cache=cache)[0, 0] for step in range(STEPS)])
    found |= {f"step-{step}": mx.stack([row[step] for row in rows]) for step in range(STEPS)}
    return {name: np.array(array.astype(mx.float32)) for name, array in found.items()}


def assert_like_alone(group: Group, name: str) -> None:
    """Logits that rounding alone parts, the same bits on all ranks, and no two forwards of equal results.

    Each rank reads its own rows of a file and holds what it would cut from the whole.
    """
    assert all(facts[name]["same"] for facts in group.facts)
    expected = alone(group.folder / name)
    assert len({array[..., :8].tobytes() for array in expected.values()}) == len(expected)
    for what, logits in expected.items():
        got = group.arrays[0][f"{name}/{what}"]
        error = (got - logits) / logits.std()
        assert np.sqrt((error**2).mean()) < (0.1 if name.endswith("bf16") else 1e-4), (name, what)
        for arrays in group.arrays[1:]:
            np.testing.assert_array_equal(arrays[f"{name}/{what}"], got)


@pytest.mark.group
@pytest.mark.parametrize("name", EACH_TIME)
def test_two_ranks_compute_what_one_process_does(two: Group, name: str) -> None:
    assert_like_alone(two, name)


@pytest.mark.group
@pytest.mark.chaos
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_two_ranks_compute_what_one_process_does_in_other_families(others: Group, name: str) -> None:
    assert_like_alone(others, name)


@pytest.mark.group
@pytest.mark.chaos
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_with_two_kv_heads_compute_what_one_process_does(four: Group, name: str) -> None:
    assert_like_alone(four, name)


@pytest.mark.group
def test_a_rank_holds_half_of_what_is_divided(two: Group) -> None:
    for name in EACH_TIME:
        stored = mx.load(str(two.folder / name / "model.safetensors"))
        whole = sum(array.nbytes for array in stored.values())
        shares = {facts[name]["weight_bytes"] for facts in two.facts}
        assert len(shares) == 1
        assert whole / 2 <= shares.pop() < 0.62 * whole, name


@pytest.mark.group
def test_no_rank_takes_more_memory_than_plans_count_on(two: Group) -> None:
    assert_as_counted(two)


@pytest.mark.group
@pytest.mark.chaos
def test_no_rank_takes_more_memory_than_plans_count_on_in_other_families(others: Group, four: Group) -> None:
    assert_as_counted(others)
    assert_as_counted(four)


@pytest.mark.group
@pytest.mark.chaos
def test_two_ranks_of_an_agent_answer_as_one_does(tmp_path: Path) -> None:
    """Requests of unlike lengths at once, greedy and drawn, in the batches and graphs of real ranks."""
    names = sorted(OWN)
    folders = [
        write_model(tmp_path / name, seed=seed, attentive=True, **MODELS[name])
        for seed, name in enumerate(names)
    ]
    random = Random(1)
    with Cluster(tmp_path / "home", ranks=2, model=folders[0]) as cluster:
        for folder in folders:
            cluster.load(folder)
            prompts = [tuple(random.randrange(6, 500) for _ in range(length)) for length in (150, 40, 9)]
            drawn = Sampling(temperature=1.5, seed=11)  # no draw of which is on the border of two tokens
            wanted = [Generate(0, each, 24, sampling) for each in prompts for sampling in (Sampling(), drawn)]
            outcomes = cluster.ask_all(wanted)
            assert [one.tokens for one in outcomes] == [expected(one, folder).tokens for one in wanted], (
                folder
            )


def test_every_family_of_the_table_is_tried() -> None:
    assert DIVIDE.keys() - VLM_FAMILIES == OWN.keys()

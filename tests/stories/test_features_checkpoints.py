"""Caches that cannot be cut, on two real ranks: what later turns compute, and that no answer changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from mlxtp.api.backend import Sampling
from mlxtp.wire.messages import Generate

from ..engine.families import FAMILIES, OWN
from ..engine.small_models import write_model
from ..live_cluster import Cluster
from ..reference import expected, random_text
from .test_features_disk import DRAWN, ask, new_tokens

pytestmark = [pytest.mark.group, pytest.mark.fault]

KINDS = [
    "qwen3_5",  # recurrent states beside plain caches
    *[
        pytest.param(family, marks=pytest.mark.chaos)
        for family in (
            "gpt_oss",  # windows beside plain ones
            *("exaone_moe", "iquestloopcoder", "longcat_flash_ngram", "deepseek_v32"),
            *("gemma3", "gemma4_text", "llama4", "nemotron_h", "olmo3", "qwen3_next"),
        )
    ],
]
NEAR = 64  # tokens that a turn may compute again
ROOM = 500  # tokens of all KV caches, where there is little


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = write_model(tmp_path_factory.mktemp("models") / "first")
    with Cluster(tmp_path_factory.mktemp("ranks"), ranks=2, model=folder) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=KINDS)
def folder(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    family = request.param
    config = {**FAMILIES, **OWN}[family]
    folder = write_model(tmp_path_factory.mktemp("models") / family, model_type=family, **config)
    cluster.load(folder)
    return folder


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(Sampling(), id="greedy", marks=pytest.mark.chaos), pytest.param(DRAWN, id="drawn")],
)
def test_a_turn_computes_little_more_than_what_is_new(
    cluster: Cluster, folder: Path, sampling: Sampling
) -> None:
    random = Random(1 + (sampling == DRAWN))
    prompt, held = new_tokens(random, 100), 0
    for turn in range(3):
        wanted = Generate(0, prompt, 40, sampling, places=(len(prompt) - 45, len(prompt) - 5))
        cached = ask(cluster, wanted, folder)
        assert cached >= held - NEAR
        assert cached > 0 or not turn
        said = expected(wanted, folder).tokens
        held = len(prompt) + len(said)
        prompt = (*prompt, *said, *new_tokens(random, 50))


def test_an_answer_that_comes_back_otherwise_costs_the_answer_alone(cluster: Cluster, folder: Path) -> None:
    random = Random(3)
    prompt = new_tokens(random, 150)
    for changed in range(3):
        wanted = Generate(0, prompt, 8 + changed, places=(90, 145))
        assert ask(cluster, wanted, folder) >= (145 if changed else 0)
    assert ask(cluster, Generate(0, (*prompt[:145], *new_tokens(random, 60)), 8), folder) >= 145
    assert ask(cluster, Generate(0, (*prompt[:95], *new_tokens(random, 60)), 8), folder) >= 90
    assert ask(cluster, Generate(0, prompt, 8, DRAWN, places=(90, 145)), folder) >= 145


def test_conversations_over_http_share_their_system_prompt_and_turns_their_beginning(
    cluster: Cluster, folder: Path
) -> None:
    def cached(*messages: dict[str, str]) -> tuple[int, int, str]:
        body = cluster.chat("", messages=list(messages), max_tokens=30)
        usage = body["usage"]
        text = body["choices"][0]["message"]["content"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"], text

    system = {"role": "system", "content": f"Be brief. {random_text(Random(7), 120)}"}
    first = {"role": "user", "content": "What is it?"}
    before, length, said = cached(system, first)
    assert before == 0
    assert length > 90
    other, again, _ = cached(system, {"role": "user", "content": "Who are you, then?"})
    assert other >= length - NEAR / 2
    assert other < again
    turn = {"role": "user", "content": "And now?"}
    following, total, _ = cached(system, first, {"role": "assistant", "content": said}, turn)
    assert following >= length - NEAR / 2
    assert following < total


def test_little_room_changes_no_answer(cluster: Cluster, folder: Path) -> None:
    """Copies go, sequences are preempted, and others are cancelled meanwhile."""
    random = Random(6)
    stem = new_tokens(random, 80)
    prompts = [(*stem, *new_tokens(random, 40)) for _ in range(5)]
    loaded = cluster.supervisor.kv.loaded
    cluster.load(folder, kv_bytes=ROOM * loaded.kv_bytes // loaded.kv_room)
    wanted = [
        Generate(0, prompt, 24, DRAWN if i % 2 else Sampling(), places=(80, 115), ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    cancelled = cluster.start((*stem, *new_tokens(random, 60)), 90, places=(80,), ignore_eos=True)
    cancelled.take(1)
    outcomes = cluster.ask_all(wanted)
    cancelled.close()
    assert [outcome.tokens for outcome in outcomes] == [expected(each, folder).tokens for each in wanted]
    cluster.load(folder)

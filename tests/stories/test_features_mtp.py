"""Text with drafts of the model's own MTP head, on real ranks, against one process without drafts.

Its proposals are right about as often as wrong, so that steps of all outcomes are among them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxtp.api.backend import Sampling, Shaping
from mlxtp.wire.messages import Generate

from ..engine.mtp_heads import add_head
from ..engine.small_models import change_weights, write_model
from ..live_cluster import Cluster
from ..reference import expected, text
from .test_features_choice import GREEDY, SAMPLED, SCORED, SHAPED, assert_right, prompt
from .test_features_ledger import assert_found

pytestmark = [pytest.mark.group, pytest.mark.fault]

SETTINGS = {
    "two ranks": {},
    "pipeline": {"parallel": "pipeline", "split": "1,1"},
    "alone": {"ranks": 1},
    "lockstep": {"run_ahead": 0, "compiled": False, "agreement": "broadcast"},
}
ANY = "start: <[6-511]>{100}"
LESS = "start: <[6-511]>{35} <[6-299]>{3} <[6-511]>{100}"  # another token at place 35
DRAFTING: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"sampling": Sampling(temperature=0.05, seed=8)},
    {"shaping": Shaping(bias_tokens=(77,), bias_values=(-1.0,))},
    {"shaping": Shaping(presence_penalty=0.05, min_tokens=9)},
    {"shaping": Shaping(bad_tokens=(214, 177, 63), bad_lengths=(3,))},
    {"shaping": Shaping(grammar_kind="lark", grammar=ANY), "logprobs": 0},
    {"shaping": Shaping(grammar_kind="lark", grammar=LESS)},
]
"""Changes of a request about whose answer the head is often right."""
LONG = [Generate(0, prompt(seed, 1 + 7 * seed), 60, ignore_eos=True) for seed in range(8)]


def model(folder: Path) -> Path:
    write_model(folder, attentive=True, tie_word_embeddings=False)
    head = mx.load(str(folder / "model.safetensors"))["lm_head.weight"]
    change_weights(folder, lm_head__weight=head / 3)  # logits at which penalties matter
    return add_head(folder, *(each.tokens for each in LONG[:3]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(
    scope="module",
    params=[
        "two ranks",
        *(pytest.param(name, marks=pytest.mark.chaos) for name in ("pipeline", "alone", "lockstep")),
    ],
)
def cluster(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("home"), model=folder, **SETTINGS[request.param]) as cluster:
        yield cluster


def assert_drafted(cluster: Cluster, folder: Path, at_once: int) -> None:
    before = cluster.idle()
    outcomes = cluster.ask_all(LONG, at_once)
    assert_right(outcomes, LONG, folder)
    ends = [outcome.whole() for outcome in outcomes]
    accepted = [end.accepted for end in ends]
    assert min(accepted[:3]) > 10, "the head was fitted to these"
    assert max(accepted[3:]) < 10
    assert max(end.drafted for end in ends[3:]) < 20, "what is wrong is soon left alone"
    if at_once == 1:
        work = cluster.idle() - before
        assert work.forwards[0] <= sum(end.generated for end in ends) - sum(accepted) + 2 * len(ends)


def test_greedy_text_is_that_without_drafts(cluster: Cluster, folder: Path) -> None:
    assert_drafted(cluster, folder, 1)


def test_eight_rows_of_mixed_acceptance_are_as_alone(cluster: Cluster, folder: Path) -> None:
    assert_drafted(cluster, folder, 8)


def test_drawn_shaped_and_scored_rows_are_as_without_drafts(cluster: Cluster, folder: Path) -> None:
    mixed = [*GREEDY[:3], *SAMPLED[::3], *SHAPED[::3], *SCORED, *LONG[:2]]
    drafting = [replace(LONG[2], **how) for how in DRAFTING]
    outcomes = cluster.ask_all([*drafting, *mixed], 6)
    assert_right(outcomes, [*drafting, *mixed], folder)
    assert min(outcome.whole().accepted for outcome in outcomes[: len(drafting)]) > 3


def test_a_stop_string_ends_the_text_before_it_within_a_step_or_in_two(
    cluster: Cluster, folder: Path
) -> None:
    """The end of each token with the beginning of the next one, which come in one step or in two."""
    tokens = expected(LONG[2], folder).tokens
    words = [text(folder).decoded([token]) for token in tokens]
    pairs = pairwise(words[5:])
    stops = [one[-1] + other[0] for one, other in pairs if (one + other).isascii()]
    fields = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "prompt": LONG[2].tokens}

    def complete(*stop: str) -> dict[str, Any]:
        answer: dict[str, Any] = cluster.client.post("/v1/completions", json={**fields, "stop": stop}).json()
        return answer

    whole = complete()
    assert 10 < whole["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] < 30
    said = whole["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        for stop, answer in zip(stops, pool.map(complete, stops), strict=True):
            assert answer["choices"][0]["text"] == said[: said.index(stop)]
            assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_kill_in_mid_answer_changes_no_token(cluster: Cluster, folder: Path) -> None:
    running = [cluster.ask(wanted) for wanted in LONG[:3]]
    for each in running:
        each.take(9)
    os.kill(cluster.pids()[-1], signal.SIGKILL)
    for each, wanted in zip(running, LONG, strict=False):
        assert each.finish()[0] == expected(wanted, folder).tokens


@pytest.mark.chaos
def test_another_proposal_of_rank_1_is_found_before_a_token_leaves(folder: Path, tmp_path: Path) -> None:
    (orders := tmp_path / "orders").mkdir()
    worker = (sys.executable, "-m", "tests.engine.engine_member", str(orders))
    with Cluster(tmp_path / "home", worker=worker, model=folder) as cluster:
        assert_found(cluster, folder, orders / "another proposal", LONG[0])

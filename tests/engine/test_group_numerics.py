"""Two ranks against one process on the same weights: the same words, and logits that rounding alone parts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtp.engine.group import CollectiveCounter, LoneGroup, Proof, check_proof, form
from mlxtp.errors import Code, GroupError

from ..live_cluster import SLOWNESS, WAIT_S
from ..reference import TINY
from .bare_groups import Group, free_hosts, run_group
from .group_member import STEPS, forwards
from .members import Notes
from .small_models import write_model
from .tables import refused

pytestmark = pytest.mark.group

MODELS: Mapping[str, Mapping[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "quantized": {"quantize": 32},
    "qwen3": {"model_type": "qwen3"},
}
FAMILIES = [TINY.name, *MODELS]
DIGEST = 4_000_000_000


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Group:
    root = tmp_path_factory.mktemp("numerics")
    for name, changes in MODELS.items():
        write_model(root / name, **changes)
    return run_group(root, 2, [TINY, *MODELS], "tests.engine.group_member")


def alone(outcome: Group, family: str) -> Notes:
    folder = TINY if family == TINY.name else outcome.folder / family
    return forwards(folder, LoneGroup(), CollectiveCounter())


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_say_what_one_says_and_hold_the_same_bits(outcome: Group, family: str) -> None:
    facts, logits = alone(outcome, family)
    for found in outcome.facts:
        assert found[family]["tokens"] == facts["tokens"]
        assert facts["weight_bytes"] / 2 < found[family]["weight_bytes"] < facts["weight_bytes"]
    for step in range(1 + STEPS):
        one, other = (arrays[f"{family}/{step}"] for arrays in outcome.arrays)
        np.testing.assert_allclose(one, logits[str(step)], rtol=0, atol=1e-3)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_takes_two_collectives_a_layer_and_three_for_its_tokens(
    outcome: Group, family: str
) -> None:
    """One embeds, one gathers the logits, one agrees."""
    for facts in outcome.facts:
        expected = 2 * facts[family]["layers"] + 3
        assert facts[family]["collectives"] == [expected] * (1 + STEPS)


def test_the_group_is_proved_by_value(outcome: Group) -> None:
    assert [(f["rank"], f["size"]) for f in outcome.facts] == [(0, 2), (1, 2)]
    for facts in outcome.facts:
        assert facts["proof"] == {"total": 2, "ranks": [0, 1], "digests": [DIGEST, DIGEST]}
        assert facts["proof_collectives"] == 2


def test_a_stranger_is_found_by_its_digest(outcome: Group) -> None:
    for facts in outcome.facts:
        proof = facts["proof_of_strangers"]
        assert proof["digests"] == [100, 101]
        with refused(GroupError, Code.PROOF_FAILED, r"ranks \[1\] do not know"):
            check_proof(Proof(proof["total"], tuple(proof["ranks"]), tuple(proof["digests"])), 2, 100)


@pytest.mark.parametrize("rows", [1, 3, 64, 100])
def test_what_rank_0_chose_is_what_every_rank_feeds(outcome: Group, rows: int) -> None:
    for facts in outcome.facts:
        assert facts["agreed"][str(rows)] == list(range(rows))


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (Proof(3, (0, 1), (7, 7)), "total: expected 2, computed 3"),
        (Proof(2, (1, 0), (7, 7)), r"ranks: expected \(0, 1\), computed \(1, 0\)"),
        (Proof(2, (0, 0), (7, 7)), r"ranks: expected \(0, 1\), computed \(0, 0\)"),
        (Proof(2, (0, 1), (8, 7)), r"ranks \[0\] do not know this epoch's key"),
        (Proof(2, (0, 1), (8, 9)), r"ranks \[0, 1\] do not know this epoch's key"),
    ],
)
def test_a_wrong_proof_is_refused(proof: Proof, words: str) -> None:
    with refused(GroupError, Code.PROOF_FAILED, words):
        check_proof(proof, 2, 7)


def test_a_right_proof_is_accepted() -> None:
    check_proof(Proof(2, (0, 1), (7, 7)), 2, 7)
    check_proof(LoneGroup().prove(7), 1, 7)


def test_one_alone_needs_no_backend_and_two_do(tmp_path: Path) -> None:
    assert isinstance(form("none", 0, 1, (), folder=tmp_path, deadline_s=1.0), LoneGroup)
    with refused(GroupError, Code.FORM_FAILED, "need a backend"):
        form("none", 0, 2, (), folder=tmp_path, deadline_s=1.0)


def test_a_rank_whose_peer_never_comes_ends_at_its_deadline(tmp_path: Path) -> None:
    """MLX holds the GIL while it waits, for ever if need be; only the alarm can end it."""
    script = f"""
from pathlib import Path
from mlxtp.engine.group import form
print("forming", flush=True)
form("ring", 0, 2, {tuple(free_hosts(2).split(","))!r}, folder=Path({str(tmp_path)!r}), deadline_s=1.0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=WAIT_S + 30 * SLOWNESS, check=False
    )
    assert done.stdout == b"forming\n"
    assert done.returncode == -14


WAITS = """
import sys, time
from pathlib import Path
import mlx.core as mx
from mlxtp.engine.group import form
rank = int(sys.argv[1])
group = form("ring", rank, 2, tuple(sys.argv[2].split(",")), folder=Path(sys.argv[3]), deadline_s=60.0)
mx.eval(group.total(mx.ones((64,))))
time.sleep(rank)
before = time.process_time()
mx.eval(group.total(mx.ones((64,))))
print(time.process_time() - before)
"""


@pytest.mark.skipif(mx.metal.is_available(), reason="on a GPU the threads of MLX's ring may spin")
def test_a_rank_that_waits_for_another_leaves_it_the_processor(tmp_path: Path) -> None:
    hosts = free_hosts(2)
    members = [
        subprocess.Popen(
            [sys.executable, "-c", WAITS, str(rank), hosts, str(tmp_path)], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    took_s = [float(member.communicate(timeout=WAIT_S)[0]) for member in members]
    assert took_s[0] < 0.2, "rank 0 waits for a second"

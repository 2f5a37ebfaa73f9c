"""KV caches that are not on every rank what rank 0 believes: who starts from one never gets a wrong answer.

Everything that production has on is on here: speculation, prefix cache, several kinds of sampling.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mlxtp.errors import Code

from ..reference import prompt_ids, random_text, reference, spoken
from .answers import LONG, SHORT
from .harness import FaultyCluster, assert_honest, assert_recovered, assert_sound, before, kill
from .test_deaths import LOST

TOKEN_BYTES = 2048
"""Of the embedded model's KV cache, on one of two ranks: 4 layers of keys and values, 2 heads of 32
float32."""

chaos = pytest.mark.chaos


@pytest.fixture(scope="module")
def whole_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    """Room for about a thousand tokens: after a few requests, kept caches must go."""
    folder = tmp_path_factory.mktemp("whole")
    with FaultyCluster(
        folder, speculation="auto", prefix_cache=True, prefill_chunk=512, kv_bytes=1024 * TOKEN_BYTES
    ) as cluster:
        yield cluster
    assert cluster.all_pids() == set()


@pytest.fixture
def whole(whole_cluster: FaultyCluster) -> FaultyCluster:
    whole_cluster.wait_ready()
    whole_cluster.supervisor._policy.failures.clear()
    whole_cluster.book.clear()
    return whole_cluster


def fresh(seed: int) -> tuple[str, str]:
    """A new prompt, and its right answer."""
    prompt = f"Repeat exactly: {random_text(random.Random(seed), 20)}"
    return prompt, spoken(reference(prompt_ids(prompt), 400))


def cached(cluster: FaultyCluster, prompt: str) -> tuple[str, int]:
    body = cluster.chat(prompt, max_tokens=400)
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_second_time_starts_from_what_was_kept(whole: FaultyCluster) -> None:
    """The faults below rely on it."""
    prompt, expected = fresh(1)
    assert cached(whole, prompt) == (expected, 0)
    text, tokens = cached(whole, prompt)
    assert text == expected
    assert tokens >= 16


@pytest.mark.parametrize("more", [-(1 << 20), pytest.param(-24, marks=chaos)], ids=["none", "less"])
def test_a_cache_that_rank_1_has_not_kept(whole: FaultyCluster, more: int) -> None:
    """A request that starts from it finds nothing there, or too little."""
    prompt, expected = fresh(-more)
    was = before(whole)
    whole.order("keep_otherwise", 1, how=str(more))
    assert_honest(whole.read(prompt), expected)
    whole.wait_note("fault")
    at = time.time()
    answers = ((whole.read(prompt), expected),)
    assert whole.ends(was.epoch), "a cache that is not there went unnoticed"
    codes = {Code.DESYNC} if more == -24 else {Code.FORWARD_FAILED, Code.DESYNC}
    assert_recovered(whole, was, codes, f"a cache of {more} tokens on rank 1", since=at, answers=answers)


@chaos
def test_a_cache_that_rank_1_is_told_to_drop_and_has_not(whole: FaultyCluster) -> None:
    """Rank 0 names a cache that is not there: that rank is not what it was thought to be."""
    was = before(whole)
    whole.order("keep_otherwise", 1, how=str(-(1 << 20)))
    answers = []
    for seed in range(40, 80):
        prompt, expected = fresh(seed)
        at = time.time()
        answer = whole.read(prompt)
        if answer.status == 200:  # else the fault came before it, and no group was there to take it
            answers.append((answer, expected))
        if whole.ends(was.epoch):
            break
    else:
        pytest.fail("nothing was ever dropped")
    case, codes = "an Evict of a cache that rank 1 has not kept", {Code.FORWARD_FAILED, Code.DESYNC}
    assert_recovered(whole, was, codes, case, since=at, answers=tuple(answers))


@chaos
def test_caches_that_rank_1_keeps_for_itself_are_never_used(whole: FaultyCluster) -> None:
    """No uid is given twice, so they cost memory and nothing else."""
    was = before(whole)
    whole.order("evict_otherwise", 1, times=0)
    for number in (*range(100, 112), 100, 101, 110, 111):
        prompt, expected = fresh(number)
        assert cached(whole, prompt)[0] == expected
    whole.wait_note("fault")
    assert whole.epoch == was.epoch
    assert_sound(whole, was)


MIXTURE: tuple[tuple[str, dict[str, Any]], ...] = (
    (LONG, {}),
    (LONG, {"temperature": 0.8, "seed": 3}),
    (SHORT, {"logit_bias": {"511": -1.0}}),
    (SHORT, {"response_format": {"type": "regex", "pattern": "[A-Z]{3,9}(-[A-Z0-9]{2,9}){1,3}"}}),
)


@chaos
def test_killed_at_any_time_with_everything_on(whole: FaultyCluster, seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    expected = [whole.right(prompt, **fields) for prompt, fields in MIXTURE]
    was = before(whole)
    rank = rng.randrange(2)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(whole.asking(prompt, **fields)) for prompt, fields in MIXTURE]
        whole.wait_asked(4, since=was)
        time.sleep(rng.uniform(0.0, 0.2))
        at = kill(was.pids[rank])
        answers = tuple((client(), text) for client, text in zip(clients, expected, strict=True))
    case = f"kill -9 of rank {rank} at any time, everything on"
    assert_recovered(whole, was, LOST, case, since=at, seed=seed, answers=answers)

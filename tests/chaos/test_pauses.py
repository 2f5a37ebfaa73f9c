"""A rank's failure is a pause: requests outlive their group, and what they get is what they would have got.

With an error end only those that the contract names: a request that kills, and who waits too long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlxtp.errors import Code

from ..reference import prompt_ids
from .answers import COUNT, KINDS, LONG, Answer, Fields
from .harness import FaultyCluster, assert_honest, assert_recovered, assert_recovered_each_time, before
from .orders import Order
from .test_deaths import LOST

pytestmark = pytest.mark.chaos

POISON = "Repeat exactly: ACONITE-42"


def ask_all(cluster: FaultyCluster, kinds: Sequence[Fields]) -> list[Answer]:
    """All of them at once; the answers of each. A client that comes during a pause comes again."""

    def ask(fields: Fields) -> list[Answer]:
        for _ in range(200):
            answers = cluster.read_all(**{"prompt": LONG, "max_tokens": 100, **fields})
            if not any(answer.status == 503 and answer.retry_after for answer in answers):
                break
            time.sleep(0.1)
        return answers

    with ThreadPoolExecutor(len(kinds)) as clients:
        return [answer for answers in clients.map(ask, kinds) for answer in answers]


_without_a_fault: list[Answer] = []


@pytest.mark.parametrize("rank", [1, 0])
def test_killed_at_a_random_token(cluster: FaultyCluster, rank: int, seed: int) -> None:
    """Eleven requests, of which none is like another."""
    at = random.Random(seed).randrange(1, 80)
    print(f"seed {seed}: rank {rank} dies in step {at}")
    kinds = list(KINDS.values())
    if not _without_a_fault:
        _without_a_fault.extend(ask_all(cluster, kinds))
    was = before(cluster)
    cluster.order("die", rank, on="decode", at=at)
    replies = ask_all(cluster, kinds)
    pairs = list(zip(replies, _without_a_fault, strict=True))
    answers = tuple((answer, expected.text) for answer, expected in pairs)
    assert_recovered(cluster, was, LOST, f"rank {rank} dies in a random step", seed=seed, answers=answers)
    for answer, expected in pairs:
        assert (answer.finish, answer.tokens) == (expected.finish, expected.tokens)
        assert [token for token, _ in answer.scores] == [token for token, _ in expected.scores]
        # The next group reads in one go what this one had generated token by token.
        assert [p for _, p in answer.scores] == pytest.approx([p for _, p in expected.scores], abs=1e-3)


def test_several_failures_during_one_answer(cluster: FaultyCluster, seed: int) -> None:
    """Each time it got on a little, so that it does not pass for their cause.

    Empty chunks fill each pause: a client that counts events must not take the stream for dead.
    """
    rng = random.Random(seed)
    expected = cluster.right(COUNT)
    was = before(cluster)
    steps = [rng.randrange(20, 45) for _ in range(3)]
    print(f"seed {seed}: after {steps} steps")
    orders = [Order("die", rng.randrange(2), was.epoch, on="decode", at=at) for at in steps]
    cluster.book.give(orders[0])
    cluster.later.extend(orders[1:])
    answer = cluster.read(COUNT)
    counted = assert_recovered_each_time(
        cluster, was, "3 failures during one answer", seed=seed, answers=((answer, expected),)
    )
    assert counted == 3
    for epoch in range(was.epoch, cluster.epoch):
        (end,) = cluster.ends(epoch)
        assert any(end.at < at < cluster.ready_at(epoch + 1) for at in answer.idle)


def test_a_request_that_kills_does_not_take_others_along(cluster: FaultyCluster) -> None:
    """It may be any of four: they are told apart without ending one that is innocent."""
    expected = cluster.right(LONG)
    was = before(cluster)
    cluster.order("poison", 0, epoch=0, times=0, how=" ".join(map(str, prompt_ids(POISON))))
    with cluster.asking(LONG) as a, cluster.asking(LONG) as b, cluster.asking(LONG) as c:
        cluster.wait_asked(3, since=was)
        poisonous = cluster.read(POISON)
        innocent = [client() for client in (a, b, c)]
    assert poisonous.code == Code.REQUEST_FATAL
    assert_honest(poisonous, "")
    failures = assert_recovered_each_time(
        cluster, was, "a request that kills", answers=tuple((answer, expected) for answer in innocent)
    )
    assert 2 <= failures <= 4

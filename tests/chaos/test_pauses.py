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

from ..live_cluster import SLOWNESS, until
from ..reference import prompt_ids
from .answers import COUNT, KINDS, LONG, Answer, Fields
from .harness import (
    NOTICED_S,
    FaultyCluster,
    assert_honest,
    assert_recovered,
    assert_recovered_each_time,
    assert_sound,
    before,
    kill,
)
from .orders import Order
from .test_deaths import HELD_S, LOST

pytestmark = pytest.mark.chaos

POISON = "Repeat exactly: ACONITE-42"


def ask_all(cluster: FaultyCluster, kinds: Sequence[Fields]) -> list[list[Answer]]:
    """All of them at once; the answers of each. A client that comes during a pause comes again."""

    def ask(fields: Fields) -> list[Answer]:
        for _ in range(200):
            answers = cluster.read_all(**{"prompt": LONG, "max_tokens": 100, **fields})
            if not any(answer.status == 503 and answer.retry_after for answer in answers):
                break
            time.sleep(0.1)
        return answers

    with ThreadPoolExecutor(len(kinds)) as clients:
        return list(clients.map(ask, kinds))


_without_a_fault: list[list[Answer]] = []


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
    pairs = [
        pair
        for reply, expected in zip(replies, _without_a_fault, strict=True)
        for pair in zip(reply, expected, strict=True)
    ]
    assert_recovered(
        cluster,
        was,
        LOST,
        f"rank {rank} dies in a random step",
        seed=seed,
        answers=tuple((answer, expected.text) for answer, expected in pairs),
    )
    for answer, expected in pairs:
        assert (answer.finish, answer.tokens) == (expected.finish, expected.tokens)
        assert [token for token, _ in answer.scores] == [token for token, _ in expected.scores]
        # The next group reads in one go what this one had generated token by token.
        assert [p for _, p in answer.scores] == pytest.approx([p for _, p in expected.scores], abs=1e-3)


@pytest.mark.parametrize("failures", [2, 3])
def test_several_failures_during_one_answer(cluster: FaultyCluster, failures: int, seed: int) -> None:
    """Each time it got on a little, so that it does not pass for their cause.

    Empty chunks fill each pause: a client that counts events must not take the stream for dead.
    """
    rng = random.Random(seed)
    expected = cluster.right(COUNT)
    was = before(cluster)
    steps = [rng.randrange(20, 45) for _ in range(failures)]
    print(f"seed {seed}: after {steps} steps")
    orders = [Order("die", rng.randrange(2), was.epoch, on="decode", at=at) for at in steps]
    cluster.book.give(orders[0])
    cluster.later.extend(orders[1:])
    answer = cluster.read(COUNT)
    counted = assert_recovered_each_time(
        cluster, was, f"{failures} failures during one answer", seed=seed, answers=((answer, expected),)
    )
    assert counted == failures
    for epoch in range(was.epoch, cluster.epoch):
        (end,) = cluster.ends(epoch)
        assert any(end.at < at < cluster.ready_at(epoch + 1) for at in answer.idle)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_request_that_kills_does_not_take_others_along(cluster: FaultyCluster, rank: int) -> None:
    """It may be any of four: they are told apart without ending one that is innocent."""
    expected = cluster.right(LONG)
    was = before(cluster)
    cluster.order("poison", rank, epoch=0, times=0, how=" ".join(map(str, prompt_ids(POISON))))
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


def test_no_request_waits_for_ever_for_another_group(
    cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next group stands still on its way up; the client is told, and what it has got was right."""
    limit_s = 2.0 * SLOWNESS
    served = cluster.supervisor.gateway.deployments.named(cluster.supervisor.deployment)
    monkeypatch.setattr(served, "recovery_s", limit_s)
    monkeypatch.setattr(served, "load_s", 0.0)  # else the limit grows with the time of a load
    expected = cluster.right(LONG)
    was = before(cluster)
    cluster.book.give(
        Order("die", 1, was.epoch, on="decode", at=30),
        Order("hold", 1, was.epoch + 1, on="load", seconds=HELD_S),
    )
    answer = cluster.read(LONG)
    end = cluster.wait_end(was.epoch, 0)
    assert answer.code == Code.RANK_LOST
    assert "no group resumed this request" in str(answer.error)
    assert_honest(answer, expected)
    assert answer.text
    waited_s = answer.ended_at - end.at
    assert limit_s - 0.1 <= waited_s <= limit_s + NOTICED_S
    assert cluster.supervisor.gateway.open_requests == 0
    cluster.wait_note("held")
    kill(until(lambda: cluster.rank_processes(2), "two ranks")[1].pid)
    cluster.wait_ready()
    assert_sound(cluster, was)

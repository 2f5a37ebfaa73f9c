"""Requests of any kind in any order: all ranks have done the same, and a rank that has not is found."""

from __future__ import annotations

import asyncio
import contextlib
import random as randomness
from pathlib import Path
from random import Random

import pytest

from mlxtp.api.backend import Sampling, Shaping
from mlxtp.errors import Code, MlxtpError
from mlxtp.groups.health import ServingState
from mlxtp.wire.messages import Generate

from ..live_cluster import SLOWNESS, WAIT_S, Cluster, until
from ..reference import expected

pytestmark = [pytest.mark.group, pytest.mark.fault]

AT_ONCE = 40
GRAMMARS = (
    ("regex", "[a-z]{1,4}"),
    ("json_schema", '{"enum":[1,2,"three"]}'),
    *(("regex", wrong) for wrong in ("[a-z", "(a", "a{2,1}")),
)


def some_request(random: Random) -> Generate:
    """Short or long, cut or not, with some of what a request may ask for, or nothing; a few cannot be."""
    stem = tuple(range(10, 10 + random.randrange(60)))
    prompt = (
        *(stem if random.random() < 0.4 else ()),
        *random.choices(range(6, 512), k=random.randint(1, 8)),
    )
    if random.random() < 0.08:
        prompt = tuple(random.choices(range(6, 512), k=150))
    sampling = Sampling()
    if random.random() < 0.4:
        sampling = Sampling(
            temperature=random.choice((0.5, 5.0, 20.0)),
            top_k=random.choice((0, 0, 5)),
            top_p=random.choice((1.0, 0.8)),
            seed=random.randrange(1000),
        )
    shaping = Shaping()
    if random.random() < 0.15:
        shaping = Shaping(presence_penalty=2.0, bias_tokens=(9,), bias_values=(1.0,), min_tokens=1)
    elif random.random() < 0.08:
        kind, text = random.choice(GRAMMARS)
        shaping = Shaping(grammar_kind=kind, grammar=text)
    max_tokens = random.choice((1, 1, 2, 3, 5, 8, 14)) if random.random() < 0.95 else 100_000
    logprobs = random.choice((-1, -1, -1, -1, 0, 3))
    return Generate(0, prompt, max_tokens, sampling, shaping, logprobs, ignore_eos=random.random() < 0.3)


async def one_client(cluster: Cluster, random: Random) -> str:
    """One request, read to its end or left at some moment; how it went."""
    patience = random.choice(("none", "some", "a moment", "all", "all", "all"))
    answer_ = cluster.supervisor.gateway.generate(some_request(random))
    tokens = 0
    try:
        if patience == "none":
            return "left at once"
        if patience == "a moment":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.random() * 0.05 * SLOWNESS):
                    async for _ in answer_:
                        pass
            return "left after a moment"
        async for event in answer_:
            tokens += len(getattr(event, "tokens", ()))
            if patience == "some" and tokens >= 2:
                return "left after some tokens"
    except MlxtpError as error:
        return error.code
    finally:
        await answer_.aclose()
    return "read to its end"


async def crowd(cluster: Cluster, random: Random, count: int) -> dict[str, int]:
    """`count` clients, some at once, now and then none; a reader looks at the metrics meanwhile."""
    left = count
    ways: dict[str, int] = {}
    while left:
        clients = [one_client(cluster, random) for _ in range(min(left, random.randint(1, AT_ONCE)))]
        left -= len(clients)
        if random.random() < 0.5:
            cluster.supervisor.gateway.health()
        for way in await asyncio.gather(*clients):
            ways[way] = ways.get(way, 0) + 1
        if random.random() < 0.1:
            await asyncio.sleep(0.002)  # the batch is empty
    return ways


@pytest.mark.parametrize("schedules", [200, pytest.param(1000, marks=pytest.mark.chaos)])
def test_random_schedules_leave_all_ledgers_equal(two_ranks: Cluster, folder: Path, schedules: int) -> None:
    seed = randomness.randrange(2**32)
    print(f"seed {seed}")
    epoch = two_ranks.epoch
    two_ranks.load(folder)
    try:
        before = two_ranks.idle()
        ways = two_ranks.call(crowd(two_ranks, Random(seed), schedules), 4 * WAIT_S)
        print(ways)
        work = two_ranks.idle() - before
        probe = [
            some_request(Random(1)),
            Generate(0, (7, 8, 9), 20),
            Generate(0, (7, 8, 9), 20, Sampling(9.0, seed=3)),
        ]
        outcomes = two_ranks.ask_all(probe)
    finally:
        two_ranks.load("tiny")
    assert sum(ways.values()) == schedules
    assert set(ways) == {
        "left at once",
        "left after a moment",
        "left after some tokens",
        "read to its end",
        Code.BAD_REQUEST,
        Code.CONTEXT_OVERFLOW,
    }
    assert two_ranks.epoch == epoch
    assert work.forwards[0] == work.forwards[1] > 0
    assert work.collectives[0] == work.collectives[1] > 0
    assert two_ranks.health()["open_requests"] == 0
    assert [outcome.tokens for outcome in outcomes] == [expected(each, folder).tokens for each in probe]


def assert_found(cluster: Cluster, folder: Path, order: Path, *wanted: Generate, begun: int = 0) -> None:
    """Have a rank err, at once or after `begun` tokens: the epoch ends, and all answers are right."""
    right = [expected(each, folder).tokens for each in wanted]
    epoch = cluster.epoch
    if not begun:
        order.touch()
    requests = [cluster.ask(each) for each in wanted]
    if begun:
        for request in requests:
            request.take(begun)
        order.touch()
    try:
        until(lambda: cluster.supervisor.status.state is not ServingState.READY, "it was found")
    finally:
        order.unlink(missing_ok=True)
    assert cluster.supervisor.status.reason.code is Code.DESYNC
    assert [request.finish()[0] for request in requests] == right
    assert cluster.epoch == epoch + 1

"""Ranks that are killed, stopped, or stand still, at every point of their life."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mlxtp.api import generation
from mlxtp.errors import Code
from mlxtp.groups.health import ServingState

from ..groups.scenes import sees
from ..live_cluster import SLOWNESS, until
from .answers import LONG, SHORT
from .findings import found
from .harness import (
    SILENCE_S,
    FaultyCluster,
    alive,
    assert_honest,
    assert_legal,
    assert_recovered,
    before,
    kill,
)
from .orders import Order

chaos = pytest.mark.chaos

HELD_S = 60 * SLOWNESS
"""Seconds for which a rank is held at the point where it must die: longer than any test waits."""

STAGES = "1,2,1"
"""Layers of the ranks of a pipeline."""

LOST = {Code.RANK_LOST}
KILLED = "killed from outside"


@chaos
def test_killed_while_idle(cluster: FaultyCluster) -> None:
    """The reason is shown until the next group serves; a request waits for that."""
    was = before(cluster)
    at = kill(was.pids[0])
    body = until(lambda: (b := cluster.health())["state"] == "restarting" and b, "restarting")
    assert "rank 0 was ended by signal 9" in body["reason"]
    assert cluster.post(SHORT).status_code == 200
    assert_recovered(cluster, was, LOST, "kill -9 of rank 0, idle", since=at, likely=KILLED)
    assert cluster.postmortem(was.epoch).cause.rank == 0


@chaos
def test_killed_while_a_prompt_is_written(cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request was let in by the group that is gone, and waits as one that comes later does."""
    expected, was, encode = cluster.right(SHORT), before(cluster), generation.encoded
    at: list[float] = []

    async def encoded(*args: Any, **how: Any) -> Any:
        if not at:
            at.append(kill(was.pids[1]))
            await sees(lambda: not cluster.supervisor.gateway.models())
        return await encode(*args, **how)

    monkeypatch.setattr(generation, "encoded", encoded)
    answers = ((cluster.read(SHORT), expected),)
    assert_recovered(cluster, was, LOST, "kill -9 while a prompt is written", since=at[0], answers=answers)


@pytest.mark.parametrize(
    ("cluster", "phase", "rank"),
    [
        ("auto", "prefill", 1),
        *(pytest.param("auto", *case, marks=chaos) for case in (("decode", 1), ("prefill", 0))),
        *(
            pytest.param(STAGES, *case, marks=chaos)
            for case in (("prefill", 1), ("decode", 0), ("decode", 2))
        ),
    ],
    indirect=["cluster"],
)
def test_killed_while_working(cluster: FaultyCluster, phase: str, rank: int) -> None:
    """In the third chunk of a prompt, or at the 20th token; two clients wait."""
    expected = {LONG: cluster.right(LONG), SHORT: cluster.right(SHORT)}
    was = before(cluster)
    cluster.order("hold", rank, on=phase, at=3 if phase == "prefill" else 20, seconds=HELD_S)
    with cluster.asking(LONG) as first, cluster.asking(SHORT) as second:
        cluster.wait_note("held")
        cluster.wait_asked(2, since=was)
        at = kill(was.pids[rank])
        answers = ((first(), expected[LONG]), (second(), expected[SHORT]))
    case = f"kill -9 of rank {rank} in {phase}"
    assert_recovered(cluster, was, LOST, case, since=at, answers=answers, likely=KILLED)
    found = cluster.postmortem(was.epoch)
    assert found.cause.rank == rank
    assert all(record.steps for record in found.ranks), "a rank that is killed leaves its steps"
    assert not any(record.deaf for record in found.ranks), "a rank that lives on ends by itself"
    assert found.difference is None


@pytest.mark.parametrize(
    ("place", "victim"),
    [("form", 1), *(pytest.param(*case, marks=chaos) for case in (("form", 0), ("load", 0)))],
)
def test_killed_on_the_way_up(cluster: FaultyCluster, place: str, victim: int) -> None:
    """The victim is held before it forms the group or reads the weights; the other is in the midst of it."""
    was = before(cluster)
    cluster.order("hold", victim, epoch=was.epoch + 1, on=place, seconds=HELD_S)
    kill(was.pids[0])
    cluster.wait_note("held")
    pids = [process.pid for process in until(lambda: cluster.rank_processes(2), "two ranks")]
    at = kill(pids[victim])
    case = f"kill -9 of rank {victim}, {place}"
    end = assert_recovered(cluster, was, LOST, case, since=at, epochs=2, likely=KILLED)
    assert f"rank {victim} was ended by signal 9" in end.error.detail
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize(
    ("cluster", "rank"),
    [
        ("auto", 1),
        pytest.param("auto", 0, marks=chaos),
        pytest.param(STAGES, 2, marks=chaos),
    ],
    indirect=["cluster"],
)
def test_stopped_for_ever(cluster: FaultyCluster, rank: int) -> None:
    """SIGSTOP: nothing closes; the heartbeat stays away. Two clients wait."""
    expected = cluster.right(LONG)
    was = before(cluster)
    cluster.order("hold", 1, on="decode", at=1, times=0, seconds=0.03)
    with cluster.asking(LONG) as first, cluster.asking(LONG) as second:
        until(lambda: len(cluster.book.notes("held")) > 10, "ten tokens")
        at = kill(was.pids[rank], signal.SIGSTOP)
        answers = ((first(), expected), (second(), expected))
    case = f"SIGSTOP of rank {rank} of {len(was.pids)}"
    how = {"since": at, "answers": answers, "likely": "wedged", "within_s": SILENCE_S}
    end = assert_recovered(cluster, was, LOST, case, **how)
    assert cluster.postmortem(was.epoch).cause.rank == rank
    assert f"rank {rank} has been silent" in end.error.detail


@chaos
def test_a_loop_that_holds_the_gil(cluster: FaultyCluster) -> None:
    """No thread of that rank runs: silence, and only SIGKILL ends it."""
    expected = cluster.right(LONG)
    was = before(cluster)
    cluster.order("hold", 1, on="decode", at=20, seconds=HELD_S, how="gil")
    answers, how = ((cluster.read(LONG), expected),), {"likely": "wedged", "within_s": SILENCE_S}
    assert_recovered(cluster, was, LOST, "rank 1 holds the GIL", answers=answers, **how)
    assert cluster.postmortem(was.epoch).cause.rank == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGSEGV, marks=chaos)])
def test_ended_from_outside(cluster: FaultyCluster, number: signal.Signals) -> None:
    was = before(cluster)
    at = kill(was.pids[1], number)
    case = f"{number.name} of rank 1"
    likely = "" if number is signal.SIGTERM else "crash"
    assert_recovered(cluster, was, LOST, case, since=at, likely=likely)
    found = cluster.postmortem(was.epoch)
    if number is signal.SIGTERM:
        # The agent may hear of the end from rank 0 first. It asks rank 1 to end, too, and cannot tell.
        assert (found.cause.kind, found.cause.rank) in ((KILLED, 1), ("peer lost", None))
    else:
        assert found.cause.rank == 1
    assert "File " in found.ranks[1].crash, "where its main thread was"


@chaos
def test_ranks_that_disagree_give_their_memory_back(cluster: FaultyCluster) -> None:
    """With a forward in flight on both: it comes to its end first."""
    expected = cluster.right(LONG)
    was = before(cluster)
    cluster.order("lie", 1, on="Ack", how="digest", at=20)
    answer = cluster.read(LONG)
    ends = {note["rank"]: note for note in cluster.wait_note("given back", 2)}
    assert ends.keys() == {0, 1}
    assert ends[0]["launched"] == ends[1]["launched"]
    assert max(end["active"] for end in ends.values()) < 1000, "bytes; the weights are megabytes"
    assert_recovered(cluster, was, {Code.DESYNC}, "ranks disagree", answers=((answer, expected),))


@chaos
def test_five_failed_epochs_are_the_last(tmp_path: Path) -> None:
    """Who waits for the next group is told, and then every client, for as long as they ask."""
    with FaultyCluster(tmp_path) as cluster:
        expected, was, began = cluster.right(LONG), before(cluster), time.monotonic()
        dies = Order("die", 1, was.epoch, on="decode", at=30)
        cluster.book.give(dies, Order("exit", 0, epoch=0, on="start"))
        answer = cluster.read(LONG)
        assert cluster.wait_state(ServingState.FAILED) is ServingState.FAILED
        assert time.monotonic() - began >= 0.5 + 1 + 2 + 4, "it waited longer each time"
        assert answer.code == Code.RANK_LOST
        assert "exited with status 7" in str(answer.error)
        assert_honest(answer, expected)
        assert answer.text
        health = cluster.client.get("/health")
        body = health.json()
        assert (health.status_code, body["state"], body["open_requests"]) == (503, "failed", 0)
        assert (body["epoch"], body["ready"]) == (was.epoch + 4, False)
        assert body["reason"] == "rank 0 exited with status 7"
        refused = cluster.read(SHORT)
        assert (refused.status, refused.code) == (503, Code.NOT_READY)
        assert "exited with status 7" in str(refused.error)
        assert cluster.all_pids() == set()
        assert assert_legal(cluster)[-1] is ServingState.FAILED
        found("five failures in a row", code="rank_lost", tokens_checked=answer.tokens)
